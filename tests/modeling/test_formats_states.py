"""The states that watch tokens: channels, markers of several tokens, the box's end."""

import copy
import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from modeling_ospruner.formats_ospruner import (
    BoundaryState,
    BoxState,
    MarkerState,
    ReasoningFormat,
    TokenFormat,
    kind_of,
)
from ospruner.formats import HARMONY, follow

from ..chats import chat_ids
from .made_formats import made_format, made_marker
from .test_formats_generate import TEXTUAL

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


@given(st.lists(st.text(alphabet="{}\\ab", min_size=1, max_size=4), max_size=12))
@settings(max_examples=150, deadline=None)
def test_box_closes_in_the_same_place_however_the_text_is_cut(tokens: list[str]) -> None:
    """Tokens hold any run of characters; the reference counts braces over the joined text."""
    box = BoxState(tokens)
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


CUT = ["<", "/", ">", "a", "</", "ab", "a>", "/ab>", "b", "\n\n", "", "<</ab>\n"]


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def naive(pieces: list[str], literal: str) -> tuple[int, int, str] | None:
    """The marker's first token, the one after its last, and the text after it, by a search."""
    for end in range(1, len(pieces) + 1):
        text = "".join(pieces[:end])
        at = text.find(literal)
        if at >= 0:
            first = max(i for i in range(end) if len("".join(pieces[:i])) <= at and pieces[i])
            return first, end, text[at + len(literal) :]
    return None


@given(st.lists(st.sampled_from(range(len(CUT))), max_size=14), st.sampled_from(["</ab>", "aba"]))
@settings(max_examples=400, deadline=None)
def test_the_matcher_against_a_naive_search(ids: list[int], literal: str) -> None:
    state = MarkerState(made_marker(literal, CUT))
    found = None
    for i, token in enumerate(ids):
        if state.push(token):
            found = i + 1 - state.tokens, i + 1, state.overhang
            break
    assert found == naive([CUT[i] for i in ids], literal)


def check_real(tokenizer: PreTrainedTokenizerBase) -> None:
    """What a real tokenizer makes of markers that it has no tokens for."""
    fmt = TokenFormat.compile(TEXTUAL, tokenizer)
    assert (fmt.think_end_id, fmt.think_end_ids, fmt.reentry_ids) == (-1, (), ())
    for text, thinking in [
        ("One.\n\nTwo</reason>\n\nIt", "One.\n\nTwo"),
        ("One.\n\nTwo</reason>\nIt", "One.\n\nTwo"),
        ("One.\n\nTwo</reason>It", "One.\n\nTwo"),
        ("One.\n\n</reason>", "One.\n\n"),
        ("One </reason>:", "One"),
        ("One < </reason </reason>", "One < </reason"),
    ]:
        ids = token_ids(tokenizer, text)
        state = follow(fmt, [], ids)
        assert state.ended, text
        assert tokenizer.decode(ids[: state.thinking_tokens]) == thinking
        after = str(tokenizer.decode(ids[state.thinking_tokens :]))
        assert after.lstrip(" ").startswith("</reason>")
        # What the marker's last token holds beyond it, is written already.
        written = str(state.overhang)
        left = "\n\n".removeprefix(written) if written.strip("\n") == "" else "\n\n"
        assert tokenizer.decode(fmt.forced_suffix("forced", state)) == left + "\\boxed{"
        assert fmt.step_ends(ids[: state.thinking_tokens])[-1] == state.thinking_tokens
        assert fmt.thinking_span(ids, 0) == (0, state.thinking_tokens, True)
    # What opens the thinking is no visible text, so that no step ends with it.
    opened = token_ids(tokenizer, "<reason>\n\nOne.\n\nTwo")
    assert [tokenizer.decode(opened[:end]) for end in fmt.step_ends(opened)] == [
        "<reason>\n\nOne.\n\n",
        "<reason>\n\nOne.\n\nTwo",
    ]
    chinese = ReasoningFormat("zh", "", "最终答案：", "最终答案：\n", "\\boxed{")
    fmt = TokenFormat.compile(chinese, tokenizer)
    ids = token_ids(tokenizer, "好🙂。\n\n最终答案：5")
    spelled = [i for one in "好最终答案：" for i in token_ids(tokenizer, one)]
    for row, kept in ((ids, "好🙂。\n\n"), (spelled, "好")):
        state = follow(fmt, [], row)
        assert state.ended
        assert tokenizer.decode(row[: state.thinking_tokens]) == kept


@pytest.mark.parametrize("name", ["real_r1", "real_harmony"])
def test_with_a_real_tokenizer(name: str, request: pytest.FixtureRequest) -> None:
    check_real(request.getfixturevalue(name)[0])


def test_a_marker_of_turns_is_one_token(
    real_r1: tuple[PreTrainedTokenizerBase, TokenFormat],
) -> None:
    with pytest.raises(ValueError, match="turn of several messages it must be one token"):
        TokenFormat.compile(HARMONY, real_r1[0])


@pytest.fixture
def tokenizer(tiny_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    changed = copy.deepcopy(tiny_tokenizer)
    changed.chat_template = str(changed.chat_template).replace("<think>", "<reason>")
    return changed


def prompt_of(tokenizer: PreTrainedTokenizerBase, more: str = "") -> list[int]:
    return chat_ids(tokenizer, "<reason>2 + 3?</reason>", more)


def test_where_a_prompt_s_thinking_begins(tokenizer: PreTrainedTokenizerFast) -> None:
    fmt = TokenFormat.compile(TEXTUAL, tokenizer)
    prompt = prompt_of(tokenizer)
    assert fmt.thinking_span(prompt) == (len(prompt), len(prompt), False)
    more = prompt_of(tokenizer, "First.\n\nSo")
    assert fmt.thinking_span(more) == (len(prompt), len(more), False)
    over = prompt_of(tokenizer, "First.</reason>\n\nIt is")
    span = fmt.thinking_span(over)
    assert span.closed
    assert tokenizer.decode(over[span.start : span.end]) == "First."
    raw = token_ids(tokenizer, "Some text <reason>\nFirst")
    assert str(tokenizer.decode(raw[fmt.thinking_span(raw).start :])).strip() == "First"
    assert fmt.thinking_span(token_ids(tokenizer, "First</reason>\n\nIt")).closed
