"""Where steps end, also in prose; what formats and tokenizers are refused."""

import gzip
import json
import re
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from modeling_ospruner.formats_ospruner import BoundaryState, ReasoningFormat, TokenFormat, kind_of
from ospruner.formats import DEEPSEEK_R1, HARMONY, PLAIN, PRESETS, QWEN3, guess

from .made_formats import boundaries, made_format

Compiled = tuple[PreTrainedTokenizerBase, TokenFormat]
PIECES = ["a", " ", "\n", "\n\n", ".\n", ".\n\n", "\n\n\n", "}\n\n//", "\n\n//", " \n", "<think>"]
MARKER = PIECES.index("<think>")


def kinds_of(pieces: list[str]) -> bytes:
    return bytes(0 if i == MARKER else kind_of(piece) for i, piece in enumerate(pieces))


def reference_boundaries(pieces: list[str], most: int = 0) -> list[bool]:
    """The rule as it is written down, over texts: slow and plain."""
    out: list[bool] = []
    since = ""  # text since the last boundary
    previous = ""
    length = 0
    for piece in pieces:
        marker = piece == "<think>"
        shown = "" if marker else piece
        lone = shown == "\n" and previous.endswith("\n")
        broken = "\n\n" in shown or lone
        head, _, rest = shown.rpartition("\n\n") if "\n\n" in shown else (shown, "", "")
        length += 1
        boundary = (broken and bool((since + head).strip())) or length == most
        length = 0 if boundary else length
        out.append(boundary)
        since = rest if boundary else since + shown
        previous = shown
    return out


@given(st.lists(st.integers(0, len(PIECES) - 1), max_size=30), st.sampled_from([0, 1, 2, 5]))
@settings(max_examples=500, deadline=None)
def test_boundaries_follow_the_rule(ids: list[int], most: int) -> None:
    literals = replace(DEEPSEEK_R1, step_tokens=most)
    state = BoundaryState(made_format(kinds_of(PIECES), literals))
    found = [state.push(i) for i in ids]
    assert found == reference_boundaries([PIECES[i] for i in ids], most)


def test_a_loop_without_blank_lines_has_steps(real_r1: Compiled) -> None:
    tokenizer, fmt = real_r1
    ids = tokenizer.encode("So 4 bottles. " * 40, add_special_tokens=False)
    assert fmt.step_ends(ids) == [len(ids)]
    capped = replace(fmt, format=replace(fmt.format, step_tokens=64))
    assert capped.step_ends(ids)[:2] == [64, 128]
    assert ReasoningFormat.from_dict(capped.format.to_dict()) == capped.format
    assert "step_tokens" not in fmt.format.to_dict()
    for wrong in (-1, True, 2.0, "64"):
        with pytest.raises((TypeError, ValueError), match="step_tokens"):
            ReasoningFormat.from_dict(fmt.format.to_dict() | {"step_tokens": wrong})


@pytest.mark.parametrize(
    ("pieces", "ends"),
    [
        (["a", ".\n\n", "a"], [2, 3]),  # the natural end is one more step
        (["a", ".\n\n"], [2]),  # unless it is a boundary itself
        (["a", "\n", "\n", "a"], [3, 4]),  # a break in two tokens
        (["\n\n", "a"], [2]),  # nothing to see before the break
        (["<think>", "\n\n", "a"], [3]),  # a marker is no visible text
        (["a", "\n\n", "\n\n", "a"], [2, 4]),  # one break, not two
        (["a", "}\n\n//", "\n\n"], [2, 3]),  # text after the break belongs to the next step
        ([], []),
    ],
)
def test_step_ends(pieces: list[str], ends: list[int]) -> None:
    compiled = made_format(kinds_of(PIECES), think_end_id=99, added_ids=frozenset({MARKER}))
    assert compiled.step_ends([PIECES.index(piece) for piece in pieces]) == ends


def test_presets_are_pinned() -> None:
    instruction = "Please reason step by step, and put your final answer within \\boxed{}."
    assert DEEPSEEK_R1.to_dict() == {
        "name": "deepseek-r1",
        "user_instruction": instruction,
        "think_end": "</think>",
        "closing": "</think>\n\n",
        "box_prefix": "\\boxed{",
        "think_start": "<think>",
    }
    assert QWEN3.to_dict() == {**DEEPSEEK_R1.to_dict(), "name": "qwen3"}
    assert HARMONY.to_dict() == {
        "name": "harmony",
        "user_instruction": instruction,
        "think_end": "<|end|>",
        "closing": "<|end|><|start|>assistant<|channel|>final<|message|>",
        "box_prefix": "\\boxed{",
        "think_start": "<|channel|>analysis<|message|>",
    }
    phrased = replace(PLAIN, answer_phrase="The final answer is")
    assert phrased.to_dict()["answer_phrase"] == "The final answer is"
    assert "answer_phrase" not in PLAIN.to_dict()
    for preset in (*PRESETS.values(), phrased):
        assert ReasoningFormat.from_dict(preset.to_dict()) == preset


def test_format_refuses_bad_literals() -> None:
    with pytest.raises(ValueError, match="closing must begin with think_end"):
        ReasoningFormat("x", "", "</t>", "oops", "")
    for fields, said in (
        ({"name": ""}, "name and closing must not be empty"),
        ({"think_end": "", "think_start": "<think>"}, "think_start needs a think_end"),
        ({"steps": "lines"}, "steps must be '' or 'prose'"),
        ({"answer_phrase": "The"}, "exclude each other"),
        ({"think_end": "", "answer_phrase": "Answer:"}, "answer_phrase must stand in closing"),
    ):
        with pytest.raises(ValueError, match=said):
            ReasoningFormat.from_dict(DEEPSEEK_R1.to_dict() | fields)
    with pytest.raises(ValueError, match="unexpected keyword argument 'colour'.*its fields"):
        ReasoningFormat.from_dict(
            {"name": "x", "user_instruction": "", "think_end": "e", "box_prefix": "", "colour": ""}
        )
    literals: dict[str, Any] = {**DEEPSEEK_R1.to_dict(), "closing": None}
    with pytest.raises(ValueError, match="closing is None; it must be a text"):
        ReasoningFormat.from_dict(literals)


def test_tokenizer_without_marker_is_refused() -> None:
    vocabulary = {"a": 0, "[UNK]": 1}
    plain = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]")),
        unk_token="[UNK]",
    )
    with pytest.raises(ValueError, match="no thinking end marker"):
        guess(plain)
    with pytest.raises(ValueError, match=r"no thinking end marker '</think>'.*texts join to it"):
        TokenFormat.compile(DEEPSEEK_R1, plain)


REAL = [
    ("deepseek-r1-distill-qwen", "real_r1", DEEPSEEK_R1, ["<think>"]),
    ("gpt-oss-o200k-harmony", "real_harmony", HARMONY, ["<|channel|>", "<|start|>", "<|message|>"]),
]


@pytest.mark.parametrize(("folder", "fixture", "expected", "reentry"), REAL)
def test_real_tokenizers(
    request: pytest.FixtureRequest,
    shared_dir: Path,
    folder: str,
    fixture: str,
    expected: ReasoningFormat,
    reentry: list[str],
) -> None:
    tokenizer, fmt = request.getfixturevalue(fixture)
    assert fmt.format == expected
    assert set(fmt.reentry_ids) == set(tokenizer.convert_tokens_to_ids(reentry))
    forced = fmt.forced_suffix("forced")
    assert forced == tokenizer.encode(
        expected.closing + expected.box_prefix, add_special_tokens=False
    )
    path = shared_dir / "data" / "tokenizers" / folder / "newline_tokens.json"
    listed = json.loads(path.read_text())["ends_with_double_newline"]
    assert len(listed) > 500
    after_text = tokenizer.encode("x", add_special_tokens=False)
    for token_id in listed:
        assert boundaries(fmt, [*after_text, token_id])[-1], tokenizer.decode([token_id])


def test_real_traces(shared_dir: Path, real_r1: Compiled) -> None:
    """Boundaries of token ids are the blank lines of the text, found there by a regex."""
    path = shared_dir / "data" / "traces" / "traces_mit.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"{path} does not exist")
    tokenizer, fmt = real_r1
    total = 0
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in islice(lines, 0, None, 20)]
    for row in rows:
        text = row["reasoning"].strip()
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        found = [offsets[i][1] for i, b in enumerate(boundaries(fmt, ids)) if b]
        wanted = [m.end() for m in re.finditer(r"(?<=\S)[^\S\n]*\n(?:\n)+", text)]
        assert found == wanted, row["id"]
        total += len(found)
        ends = fmt.step_ends(ids)
        assert ends == sorted(set(ends))
        assert ends[-1] == len(ids)
        # The span of the thinking, in a prompt of the chat template with all that was written.
        chat = [{"role": "user", "content": row["problem"]}]
        asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        prompt = tokenizer.encode(str(asked), add_special_tokens=False)
        answer = tokenizer.encode(row["response"], add_special_tokens=False)
        whole = [*prompt, *ids, *((fmt.think_end_id, *answer) if row["closed"] else ())]
        span = fmt.thinking_span(whole)
        assert span == (len(prompt), len(prompt) + len(ids), row["closed"]), row["id"]
    assert total > 500


STEPS = [
    "To solve it:\n\n1. **Add**, as in:\n\n\\[\nx = 2\n\n+ 3\n\\]\n\n",
    "2. Check with a program:\n\n```python\na = 2\n\nb = 3\n\nprint(a + b)\n```\n\n",
    "It prints $$5$$.\n\n",
    "So the answer is \\boxed{5}.",
]


def compiled(tokenizer: PreTrainedTokenizerBase) -> TokenFormat:
    return TokenFormat.compile(PLAIN, tokenizer)


def steps_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    ends = compiled(tokenizer).step_ends(ids)
    return [
        str(tokenizer.decode(ids[a:b], clean_up_tokenization_spaces=False))
        for a, b in zip([0, *ends], ends, strict=False)
    ]


def test_steps_of_prose_with_qwen_s_tokenizer(real_r1: tuple[Any, Any]) -> None:
    assert steps_of(real_r1[0], "".join(STEPS)) == STEPS


def pushed(pieces: list[str], prose: bool = True) -> list[int]:
    """Which pieces, a token each, end a step."""
    literals = PLAIN if prose else replace(PLAIN, steps="")
    state = BoundaryState(made_format(bytes(map(kind_of, pieces)), literals, texts=pieces))
    return [i for i in range(len(pieces)) if state.push(i)]


@pytest.mark.parametrize(
    ("pieces", "ends"),
    [
        (["So", ":\n\n", "5", ".\n\n"], [3]),
        (["So", ":", "\n", "\n", "5", ".\n\n"], [5]),
        (["\\", "[\n", "a\n\n", "\\", "]\n\n", "b\n\n"], [4, 5]),
        (["\\", "x", "[", "a\n\n"], [3]),  # no delimiter
        (["``", "`py\n", "a\n\n", "`", "``", "\n\n"], [5]),
        (["$$a$$", "b\n\n"], [1]),
        (["a.\n\n\\[", "b\n\n", "\\]", "\n\n"], [0, 3]),  # opened after the break
        (["```\n", *["a\n\n"] * 10], [9, 10]),  # never closed: 8 blank lines are bridged
    ],
)
def test_what_goes_on_over_a_blank_line(pieces: list[str], ends: list[int]) -> None:
    assert pushed(pieces) == ends
    breaks = [i for i in range(len(pieces)) if "\n\n" in pieces[i]]
    assert pushed(pieces, prose=False)[-1:] == breaks[-1:]  # elsewhere each of them counts
