"""What watches tokens: step ends, channels, cut markers, boxes; what is refused as a format."""

import gzip
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from modeling_ospruner.formats_ospruner import (
    BoxState,
    Marker,
    MarkerState,
    ReasoningFormat,
    TokenFormat,
    kind_of,
)
from ospruner.formats import DEEPSEEK_R1, HARMONY, PLAIN, QWEN3, follow

from ..chats import chat_ids
from .test_formats_generate import TEXTUAL

Compiled = tuple[PreTrainedTokenizerBase, TokenFormat]
PIECES = ["a", " ", "\n", "\n\n", ".\n", ".\n\n", "\n\n\n", "}\n\n//", "\n\n//", " \n", "<think>"]


def made_format(kinds: bytes, form: ReasoningFormat = DEEPSEEK_R1, **fields: Any) -> TokenFormat:
    """A format of nothing but the kinds of its tokens, and what is given."""
    empty: dict[str, Any] = dict.fromkeys(("closing_ids", "box_prefix_ids", "eos_ids"), ())
    empty |= {"think_end_id": -1, "added_ids": frozenset(), "texts": ()}
    return TokenFormat(format=form, kinds=kinds, **(empty | fields))


def boundaries(fmt: TokenFormat, ids: Sequence[int]) -> list[int]:
    """The places of the thinking tokens that end a step."""
    state = fmt.boundary_state()
    return [place for place, token in enumerate(ids) if state.push(token)]


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def reference_boundaries(pieces: list[str], most: int) -> list[int]:
    """The rule as it is written down, over texts: slow and plain."""
    out: list[int] = []
    since = previous = ""  # text since the last boundary, and of the last token
    length = 0
    for place, piece in enumerate(pieces):
        shown = "" if piece == "<think>" else piece
        broken = "\n\n" in shown or (shown == "\n" and previous.endswith("\n"))
        head, _, rest = shown.rpartition("\n\n") if "\n\n" in shown else (shown, "", "")
        length += 1
        if (broken and (since + head).strip()) or length == most:
            out.append(place)
            since, length = rest, 0
        else:
            since += shown
        previous = shown
    return out


@given(st.lists(st.sampled_from(PIECES), max_size=30), st.sampled_from([0, 1, 2, 5]))
@settings(max_examples=500, deadline=None)
def test_step_ends_follow_the_rule(pieces: list[str], most: int) -> None:
    kinds = bytes(0 if piece == "<think>" else kind_of(piece) for piece in PIECES)
    fmt = made_format(kinds, replace(DEEPSEEK_R1, step_tokens=most))
    ids, wanted = [PIECES.index(piece) for piece in pieces], reference_boundaries(pieces, most)
    assert boundaries(fmt, ids) == wanted
    # The natural end is one more step, unless it is a boundary itself.
    assert fmt.step_ends(ids) == sorted({*(place + 1 for place in wanted), len(ids)} - {0})


def test_formats_as_dictionaries() -> None:
    more: dict[str, Any] = {"wind_down": "So:", "template_args": '{"a": true}', "step_tokens": 64}
    further = replace(QWEN3, **more)
    assert further.to_dict() == QWEN3.to_dict() | more
    assert ReasoningFormat.from_dict(further.to_dict()) == further


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"closing": "oops"}, "closing must begin with think_end"),
        ({"name": ""}, "name and closing must not be empty"),
        ({"think_end": "", "think_start": "<think>"}, "think_start needs a think_end"),
        ({"steps": "lines"}, "steps must be"),
        ({"box_prefix": "", "answer_end": "."}, "answer_end needs a box_prefix"),
        ({"answer_phrase": "The"}, "exclude each other"),
        ({"think_end": "", "answer_phrase": "Answer:"}, "answer_phrase must stand in closing"),
        ({"colour": ""}, "unexpected keyword argument 'colour'.*its fields"),
        ({"closing": None}, "closing is None; it must be a text"),
        ({"step_tokens": -1}, "step_tokens is "),
        *(
            ({"template_args": wrong}, "template_args must be a JSON object")
            for wrong in ("[1]", "{", '{"messages": 1}', '{"a b": 1}', '{"a": null}', '{"a": [1]}')
        ),
    ],
)
def test_bad_literals_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ReasoningFormat.from_dict(DEEPSEEK_R1.to_dict() | fields)


def test_tokenizers_that_lack_a_marker_are_refused(real_r1: Compiled) -> None:
    model = models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")
    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), unk_token="[UNK]")
    with pytest.raises(ValueError, match=r"no thinking end marker '</think>'.*texts join to it"):
        TokenFormat.compile(DEEPSEEK_R1, plain)
    with pytest.raises(ValueError, match="turn of several messages it must be one token"):
        TokenFormat.compile(HARMONY, real_r1[0])


@pytest.fixture(params=["real_r1", "real_harmony"])
def real(request: pytest.FixtureRequest) -> Compiled:
    compiled: Compiled = request.getfixturevalue(request.param)
    return compiled


def test_each_token_that_ends_in_a_blank_line_ends_a_step(real: Compiled, shared_dir: Path) -> None:
    tokenizer, fmt = real
    folder = "gpt-oss-o200k-harmony" if fmt.channels else "deepseek-r1-distill-qwen"
    path = shared_dir / "data" / "tokenizers" / folder / "newline_tokens.json"
    listed = json.loads(path.read_text())["ends_with_double_newline"]
    assert len(listed) > 500
    after_text = token_ids(tokenizer, "x")
    for token_id in listed:
        assert boundaries(fmt, [*after_text, token_id]), tokenizer.decode([token_id])


def test_real_traces(shared_dir: Path, real_r1: Compiled) -> None:
    """Boundaries of token ids are the blank lines of the text, found there by a regex."""
    path = shared_dir / "data" / "traces" / "traces_mit.jsonl.gz"
    (tokenizer, fmt), total = real_r1, 0
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in islice(lines, 0, None, 20)]
    for row in rows:
        text = row["reasoning"].strip()
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        found = [offsets[i][1] for i in boundaries(fmt, ids)]
        wanted = [m.end() for m in re.finditer(r"(?<=\S)[^\S\n]*\n(?:\n)+", text)]
        assert found == wanted, row["id"]
        total += len(found)
        # The span of the thinking, in a prompt of the chat template with all that was written.
        prompt, answer = chat_ids(tokenizer, row["problem"]), token_ids(tokenizer, row["response"])
        whole = [*prompt, *ids, *((fmt.think_end_id, *answer) if row["closed"] else ())]
        span = fmt.thinking_span(whole)
        assert span == (len(prompt), len(prompt) + len(ids), row["closed"]), row["id"]
    assert total > 500


@pytest.mark.parametrize(
    ("pieces", "ends"),
    [
        (["So", ":", "\n", "\n", "5", ".\n\n"], [5]),
        (["\\", "[\n", "a\n\n", "\\", "]\n\n", "b\n\n"], [4, 5]),
        (["\\", "x", "[", "a\n\n"], [3]),  # no delimiter
        (["``", "`py\n", "a\n\n", "`", "``", "\n\n"], [5]),
        (["$$a$$", "b\n\n"], [1]),
        (["It:\n\n", "1. **A**:\n\n", "\\[\nx\n\n", "+ 3\n\\", "]\n\n", "2.", "\n\n"], [4, 6]),
        (["a.\n\n\\[", "b\n\n", "\\]", "\n\n"], [0, 3]),  # opened after the break
        (["```\n", *["a\n\n"] * 10], [9, 10]),  # never closed: 8 blank lines are bridged
    ],
)
def test_what_goes_on_over_a_blank_line(pieces: list[str], ends: list[int]) -> None:
    fmt = made_format(bytes(map(kind_of, pieces)), PLAIN, texts=pieces)
    assert boundaries(fmt, range(len(pieces))) == ends


MARKERS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
TEXTS = ("assistant", "analysis", "final", "commentary", " to=x", "a", " ", "\n", ".\n\n", "}\n\nb")
IDS = {piece: i for i, piece in enumerate((*MARKERS, *TEXTS))}
BODY = st.lists(st.sampled_from(["a", " ", "\n", ".\n\n", "}\n\nb", "analysis"]), max_size=8)


def ids_of(*pieces: str) -> list[int]:
    return [IDS[piece] for piece in pieces]


CLOSING = ids_of("<|end|>", "<|start|>", "assistant", "<|channel|>", "final", "<|message|>")
FORMAT = made_format(
    bytes(0 if piece in MARKERS else kind_of(piece) for piece in IDS),
    HARMONY,
    think_end_id=IDS["<|end|>"],
    closing_ids=tuple(CLOSING),
    added_ids=frozenset(range(len(MARKERS))),
    think_start_ids=tuple(ids_of("<|channel|>", "analysis", "<|message|>")),
)


CHANNELS = st.sampled_from(["analysis", "commentary", "final"])
MESSAGES = st.lists(st.tuples(CHANNELS, st.booleans(), st.booleans(), BODY), min_size=1, max_size=4)


@given(MESSAGES)
@settings(max_examples=150, deadline=None)
def test_only_analysis_has_steps_and_ends_the_thinking(
    messages: list[tuple[str, bool, bool, list[str]]],
) -> None:
    """The reference reads the messages as they were made, and looks for steps body by body."""
    stream, wanted = list[int](), list[int]()
    ended_after, thinking_tokens = None, 0
    for channel, called, addressed, body in messages:  # a recipient in the role, in the header
        stream += ids_of(*[" to=x"] * called)
        header = len(stream)
        stream += ids_of("<|channel|>", channel, *[" to=x"] * addressed, "<|message|>")
        begin = len(stream)
        stream += ids_of(*body)
        if ended_after is None and channel == "analysis" and not (called or addressed):
            plain = made_format(FORMAT.kinds)  # without channels: the plain rule
            wanted += [begin + place for place in boundaries(plain, stream[begin:])]
            ended_after, thinking_tokens = len(stream) + 1, len(stream)
        elif ended_after is None and channel == "final" and not called:
            ended_after, thinking_tokens = begin, header
        stream += ids_of("<|end|>", "<|start|>", "assistant")
    state, found, ended_at = FORMAT.boundary_state(), list[int](), None
    for place, token in enumerate(stream):
        found += [place] * state.push(token)
        if state.ended and ended_at is None:
            ended_at = place + 1
    assert found == wanted
    assert ended_at == ended_after
    if ended_at is not None:
        assert state.thinking_tokens == thinking_tokens
        by_end_marker = stream[ended_at - 1] == FORMAT.think_end_id
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
    state = MarkerState(Marker(literal, CUT))
    found = None
    for i, token in enumerate(ids):
        if state.push(token):
            found = i + 1 - state.tokens, i + 1, state.overhang
            break
    assert found == naive([CUT[i] for i in ids], literal)


def test_markers_that_a_real_tokenizer_has_no_tokens_for(real: Compiled) -> None:
    tokenizer = real[0]
    fmt = TokenFormat.compile(TEXTUAL, tokenizer)
    assert (fmt.think_end_id, fmt.think_end_ids, fmt.reentry_ids) == (-1, (), ())
    for text, thinking in [
        ("One.\n\nTwo</reason>\n\nIt", "One.\n\nTwo"),
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
