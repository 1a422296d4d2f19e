from __future__ import annotations

import gzip
import json
import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from modeling_ospruner.formats_ospruner import (
    BoundaryState,
    BoxState,
    ReasoningFormat,
    TokenFormat,
    kind_of,
)
from ospruner.formats import DEEPSEEK_R1, HARMONY, PRESETS, QWEN3, guess

from .made_formats import boundaries, made_format

Compiled = tuple[PreTrainedTokenizerBase, TokenFormat]
PIECES = ["a", " ", "\n", "\n\n", ".\n", ".\n\n", "\n\n\n", "}\n\n//", "\n\n//", " \n", "<think>"]
MARKER = PIECES.index("<think>")


def kinds_of(pieces: list[str]) -> bytes:
    return bytes(0 if i == MARKER else kind_of(piece) for i, piece in enumerate(pieces))


def reference_boundaries(pieces: list[str]) -> list[bool]:
    """The rule as it is written down, over texts: slow and plain."""
    out = []
    since = ""  # text since the last boundary
    previous = ""
    for piece in pieces:
        marker = piece == "<think>"
        shown = "" if marker else piece
        lone = shown == "\n" and previous.endswith("\n")
        broken = "\n\n" in shown or lone
        head, _, rest = shown.rpartition("\n\n") if "\n\n" in shown else (shown, "", "")
        boundary = broken and bool((since + head).strip())
        out.append(boundary)
        since = rest if boundary else since + shown
        previous = shown
    return out


@given(st.lists(st.integers(0, len(PIECES) - 1), max_size=30))
@settings(max_examples=500, deadline=None)
def test_boundaries_follow_the_rule(ids: list[int]) -> None:
    state = BoundaryState(made_format(kinds_of(PIECES)))
    found = [state.push(i) for i in ids]
    assert found == reference_boundaries([PIECES[i] for i in ids])


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
    for preset in PRESETS.values():
        assert ReasoningFormat.from_dict(preset.to_dict()) == preset


def test_format_refuses_bad_literals() -> None:
    with pytest.raises(ValueError, match="closing .* must begin with think_end"):
        ReasoningFormat("x", "", "</t>", "oops", "")
    with pytest.raises(ValueError, match="name and closing must not be empty"):
        ReasoningFormat("x", "", "", "", "")
    with pytest.raises(ValueError, match=r"unknown: \['colour'\].*missing: \['closing'\]"):
        ReasoningFormat.from_dict(
            {"name": "x", "user_instruction": "", "think_end": "e", "box_prefix": "", "colour": ""}
        )
    literals: dict[str, Any] = {**DEEPSEEK_R1.to_dict(), "closing": None}
    with pytest.raises(TypeError, match="closing is None; it must be a text"):
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


@given(st.text(alphabet="{}\\a1", max_size=20))
@settings(max_examples=300, deadline=None)
def test_box_closes_at_the_balanced_brace(text: str) -> None:
    box = BoxState({i: c for i, c in enumerate("{}\\")})
    closed_at = None
    for i, character in enumerate(text):
        if box.push("{}\\a1".index(character)):
            closed_at = i
            break
    depth, expected = 1, None
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            expected = match.start()
            break
    assert closed_at == expected


def test_tiny_tokenizer(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    fmt = TokenFormat.compile(guess(tiny_tokenizer), tiny_tokenizer)
    assert fmt.format == DEEPSEEK_R1
    assert tiny_tokenizer.decode(fmt.forced_suffix("forced")) == "</think>\n\n\\boxed{"
    assert tiny_tokenizer.decode(fmt.forced_suffix("free")) == "</think>\n\n"
    with pytest.raises(ValueError, match="answer is 'loud'"):
        fmt.forced_suffix("loud")  # type: ignore[arg-type]
    chat = [{"role": "user", "content": "What does </think> mean?\n\nTell me."}]
    text = tiny_tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    prompt = tiny_tokenizer.encode(text, add_special_tokens=False)
    assert not fmt.thinking_span(prompt).closed
    assert fmt.thinking_span([*prompt, *fmt.closing_ids]).closed
    answer = tiny_tokenizer.encode("So 3", add_special_tokens=False)
    assert fmt.thinking_span([*prompt, *fmt.closing_ids, *answer]).closed


REAL = [
    ("deepseek-r1-distill-qwen", "real_r1", DEEPSEEK_R1, ["<think>"]),
    (
        "gpt-oss-o200k-harmony",
        "real_harmony",
        HARMONY,
        ["<|channel|>", "<|start|>", "<|message|>"],
    ),
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
    chat = [
        {"role": "user", "content": "Hi <think> </think>"},
        {"role": "assistant", "content": "<think>\nhm\n\n</think>\n\nHello.\n\nYes."},
        {"role": "user", "content": "More."},
    ]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer.encode(text, add_special_tokens=False)
    assert not fmt.thinking_span(prompt).closed
    assert fmt.thinking_span([*prompt, *fmt.closing_ids]).closed
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
