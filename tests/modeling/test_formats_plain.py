"""Models that reason in their reply, without markers: steps in prose, stops, natural ends."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2ForCausalLM,
)

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.formats_ospruner import BoundaryState, ReasoningFormat, TokenFormat, kind_of
from ospruner.formats import PLAIN, named
from ospruner.scoring import stop_logits
from ospruner.train.untrained import untrained

from .made_formats import made_format
from .test_formats_generate import ALWAYS, NEVER, write

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


def test_steps_of_prose_with_smollm_s_tokenizer() -> None:
    folder = os.environ.get("OSPRUNER_SMOLLM2")
    if folder is None:
        pytest.skip("OSPRUNER_SMOLLM2 names no folder of SmolLM2-135M-Instruct")
    tokenizer = AutoTokenizer.from_pretrained(Path(folder))
    assert steps_of(tokenizer, "".join(STEPS)) == STEPS


def pushed(pieces: list[str], prose: bool = True) -> list[int]:
    """Which pieces, a token each, end a step."""
    texts = dict(enumerate(pieces)) if prose else None
    state = BoundaryState(made_format(bytes(map(kind_of, pieces)), displays=texts))
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


def test_the_literals() -> None:
    assert named("plain") == PLAIN
    assert ReasoningFormat.from_dict(PLAIN.to_dict()) == PLAIN
    with pytest.raises(ValueError, match="think_start needs a think_end"):
        ReasoningFormat("x", "", "", "So ", "\\boxed{", "<think>")
    with pytest.raises(ValueError, match="steps is 'lines'; it must be '' or 'prose'"):
        ReasoningFormat("x", "", "", "So ", "\\boxed{", steps="lines")


def test_answer_phrases_are_checked() -> None:
    phrase = "The final answer is"
    assert replace(PLAIN, answer_phrase=phrase).to_dict()["answer_phrase"] == phrase
    assert "answer_phrase" not in PLAIN.to_dict()
    with pytest.raises(ValueError, match="exclude each other"):
        ReasoningFormat("x", "", "So", "So The", "\\boxed{", answer_phrase="The")
    with pytest.raises(ValueError, match="answer_phrase 'Answer:' must stand in closing"):
        replace(PLAIN, answer_phrase="Answer:")


@pytest.fixture
def phrasing(
    tiny_base: Qwen2ForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> OSPrunerForCausalLM:
    form = replace(PLAIN, answer_phrase="The final answer is")
    return untrained(tiny_base, tiny_tokenizer, reasoning_format=form, tuning="layers")


def test_the_model_s_own_phrase_is_the_natural_end(phrasing: OSPrunerForCausalLM) -> None:
    assert phrasing.tokenizer is not None
    thought = "It is.\n\nSo I check.\n\n"
    script = f"{thought}The final answer is 5, as.\n\nI said."
    kept = len(phrasing.tokenizer.encode(thought, add_special_tokens=False))
    text, record = write(phrasing, script, **NEVER)
    assert text.startswith(f"{thought}The final answer is \\boxed{{")
    assert (record.reason, record.thinking_tokens) == ("natural", kept)
    assert record.step_ends[-1] == kept
    free, record = write(phrasing, script, answer="free", max_answer_tokens=40, **NEVER)
    assert free.startswith(script)  # from there on nothing is thinking, and no step ends
    assert (record.reason, record.thinking_tokens, len(record.step_ends)) == ("natural", kept, 2)
    text, record = write(phrasing, script, **ALWAYS)
    assert text.startswith("It is.\n\n\n\nThe final answer is \\boxed{")
    text, record = write(phrasing, "It is 5.<|end|>", **NEVER)  # the end of the turn ends it, too
    assert (text, record.reason) == ("It is 5.<|end|>", "natural")


@pytest.fixture
def model(
    tiny_base: Qwen2ForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> OSPrunerForCausalLM:
    return untrained(tiny_base, tiny_tokenizer, reasoning_format=PLAIN, tuning="layers")


def test_a_stop_forces_the_continuation(model: OSPrunerForCausalLM) -> None:
    text, record = write(model, "It is:\n\n5.\n\nYes.\n\n", **ALWAYS)
    assert text.startswith("It is:\n\n5.\n\n\n\nThe final answer is \\boxed{")
    assert (record.reason, len(record.step_ends)) == ("policy", 1)
    free, _ = write(model, "It is:\n\n5.\n\nYes.\n\n", answer="free", **ALWAYS)
    assert free.startswith("It is:\n\n5.\n\n\n\nThe final answer is ")
    assert "\\boxed" not in free


def test_the_end_of_the_turn_is_the_natural_end(model: OSPrunerForCausalLM) -> None:
    script = "It is.\n\nSo \\boxed{5}.<|end|>"
    text, record = write(model, script, **NEVER)
    assert text == script
    assert model.tokenizer is not None
    tokens = len(model.tokenizer.encode(script, add_special_tokens=False))
    assert (record.reason, record.thinking_tokens) == ("natural", tokens - 1)


def test_the_thinking_begins_with_the_turn(model: OSPrunerForCausalLM) -> None:
    assert model.tokenizer is not None
    chat = [{"role": "user", "content": "2 + 3?"}]
    prompt = model.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = model.tokenizer.encode(str(prompt), add_special_tokens=False)
    begun = model.tokenizer.encode("It is.\n\nSo", add_special_tokens=False)
    fmt = model.token_format
    assert fmt.thinking_span(ids) == (len(ids), len(ids), False)
    assert fmt.thinking_span([*ids, *begun]) == (len(ids), len(ids) + len(begun), False)
    assert fmt.thinking_span([*ids, *begun, *fmt.eos_ids]).closed
    assert fmt.reentry_ids == ()
    assert torch.isfinite(stop_logits(model, torch.tensor([[*ids, *begun]]))).all()
