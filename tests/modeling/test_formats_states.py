"""Properties of the states that watch tokens: channels, prefilled thinking, the box's end."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from modeling_ospruner.formats_ospruner import BoundaryState, BoxState, kind_of
from ospruner.formats import HARMONY

from .made_formats import boundaries, made_format

MARKERS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
TEXTS = ("assistant", "analysis", "final", "commentary", " to=x", "a", " ", "\n", ".\n\n", "}\n\nb")
PIECES = (*MARKERS, *TEXTS)
IDS = {piece: i for i, piece in enumerate(PIECES)}
BODY = st.lists(st.sampled_from(["a", " ", "\n", ".\n\n", "}\n\nb", "analysis"]), max_size=8)


def ids_of(*pieces: str) -> list[int]:
    return [IDS[piece] for piece in pieces]


CLOSING = ids_of("<|end|>", "<|start|>", "assistant", "<|channel|>", "final", "<|message|>")
FORMAT = made_format(
    bytes(0 if piece in MARKERS else kind_of(piece) for piece in PIECES),
    HARMONY,
    think_end_id=IDS["<|end|>"],
    closing_ids=tuple(CLOSING),
    added_ids=frozenset(range(len(MARKERS))),
    think_start_ids=tuple(ids_of("<|channel|>", "analysis", "<|message|>")),
)


@dataclasses.dataclass
class Message:
    """One message of the model, written out by hand for the reference."""

    channel: str
    role_recipient: bool
    header_recipient: bool
    body: list[str]

    def ids(self) -> list[int]:
        role = [" to=x"] if self.role_recipient else []
        header = ["<|channel|>", self.channel, *([" to=x"] if self.header_recipient else [])]
        return ids_of(*role, *header, "<|message|>", *self.body)

    @property
    def thinks(self) -> bool:
        return self.channel == "analysis" and not (self.role_recipient or self.header_recipient)

    @property
    def answers(self) -> bool:
        return self.channel == "final" and not self.role_recipient


MESSAGES = st.lists(
    st.builds(
        Message,
        st.sampled_from(["analysis", "commentary", "final"]),
        st.booleans(),
        st.booleans(),
        BODY,
    ),
    min_size=1,
    max_size=4,
)


@given(MESSAGES)
@settings(max_examples=150, deadline=None)
def test_only_analysis_has_steps_and_ends_the_thinking(messages: list[Message]) -> None:
    """The reference reads the messages as they were made, and looks for steps body by body."""
    stream: list[int] = []
    wanted: list[bool] = []
    ended_after: int | None = None
    thinking_tokens = 0
    for message in messages:
        ids = message.ids()
        head = len(ids) - len(message.body)
        if ended_after is None and message.thinks:
            body = BoundaryState(made_format(FORMAT.kinds))  # without channels: the plain rule
            wanted += [False] * head + [body.push(i) for i in ids[head:]]
        else:
            wanted += [False] * len(ids)
        if ended_after is None and message.answers:
            ended_after, thinking_tokens = (
                len(stream) + head,
                len(stream) + int(message.role_recipient),
            )
        stream += ids
        if ended_after is None and message.thinks:
            ended_after, thinking_tokens = len(stream) + 1, len(stream)
        between = ids_of("<|end|>", "<|start|>", "assistant")
        stream += between
        wanted += [False] * len(between)
    state = FORMAT.boundary_state()
    found, ended_at = [], None
    for place, token in enumerate(stream, start=1):
        found.append(state.push(token))
        if state.ended and ended_at is None:
            ended_at = place
    assert found == wanted
    assert ended_at == ended_after
    if state.ended:
        assert state.thinking_tokens == thinking_tokens
        by_end_marker = stream[ended_at - 1] == FORMAT.think_end_id if ended_at else False
        assert state.closing_written == (1 if by_end_marker else len(CLOSING))


@given(MESSAGES, st.integers(0, 40))
@settings(max_examples=150, deadline=None)
def test_a_prefilled_thinking_goes_on(messages: list[Message], cut: int) -> None:
    """Streaming after any prefix gives what the whole gives: a state is all that is kept."""
    stream = [i for message in messages for i in (*message.ids(), *CLOSING[:3])]
    cut = min(cut, len(stream))
    state = FORMAT.boundary_state(stream[:cut])
    assert [state.push(i) for i in stream[cut:]] == boundaries(FORMAT, stream)[cut:]


@given(st.lists(st.text(alphabet="{}\\ab", min_size=1, max_size=4), max_size=12))
@settings(max_examples=150, deadline=None)
def test_box_closes_in_the_same_place_however_the_text_is_cut(tokens: list[str]) -> None:
    """Tokens hold any run of characters; the reference counts braces over the joined text."""
    texts = {i: text for i, text in enumerate(tokens) if set(text) & set("{}\\")}
    box = BoxState(texts)
    closed = next((i for i in range(len(tokens)) if box.push(i)), None)
    depth, place, escaped = 1, None, False
    for index, character in ((i, c) for i, text in enumerate(tokens) for c in text):
        if escaped or character == "\\":
            escaped = not escaped
        elif character in "{}":
            depth += 1 if character == "{" else -1
        if depth == 0:
            place = index
            break
    assert closed == place
