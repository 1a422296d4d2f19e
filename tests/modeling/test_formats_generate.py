"""Formats inside generate: a model that writes what a script says, and what is forced after it."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, PreTrainedTokenizerFast, Qwen2ForCausalLM

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.formats_ospruner import ReasoningFormat
from ospruner.formats import HARMONY
from ospruner.train.untrained import untrained

ANALYSIS = "<|channel|>analysis<|message|>"
NEVER: dict[str, Any] = {"mode": "threshold", "threshold": 1.0}
ALWAYS: dict[str, Any] = {"mode": "threshold", "threshold": 0.0}


class Script(LogitsProcessor):
    """The model's own will: it writes the script, whatever has been forced in between."""

    def __init__(self, ids: list[int], prompt_tokens: int) -> None:
        self.ids = ids
        self.prompt_tokens = prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        at = input_ids.shape[1] - self.prompt_tokens
        if at < len(self.ids):
            scores = scores.clone()
            scores[:, self.ids[at]] = 1e4
        return scores


@pytest.fixture
def model(
    tiny_base: Qwen2ForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> OSPrunerForCausalLM:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    markers = ["<|start|>", "<|channel|>", "<|message|>", "<|return|>"]
    tokenizer.add_tokens(markers, special_tokens=True)
    tokenizer.eos_token = "<|return|>"
    tokenizer.chat_template = (
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    tiny_base.resize_token_embeddings(len(tokenizer))
    tiny_base.generation_config.eos_token_id = tokenizer.eos_token_id
    return untrained(tiny_base, tokenizer, tuning="layers")


@pytest.fixture
def reasoning_model(
    tiny_base: Qwen2ForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> OSPrunerForCausalLM:
    """Of one message a turn, with Qwen3's markers of calls."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    tiny_base.resize_token_embeddings(len(tokenizer))
    return untrained(tiny_base, tokenizer, tuning="layers")


def tokens(model: OSPrunerForCausalLM, text: str) -> list[int]:
    assert model.tokenizer is not None
    return list(model.tokenizer.encode(text, add_special_tokens=False))


def write(
    model: OSPrunerForCausalLM, script: str, prefill: str = "", **settings: Any
) -> tuple[str, Any]:
    """What is written after the prompt, and the record."""
    tokenizer = model.tokenizer
    assert tokenizer is not None
    chat = [{"role": "user", "content": "2 + 3?"}]
    text = str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
    prompt = tokenizer.encode(text + prefill, add_special_tokens=False)
    ids = tokenizer.encode(script, add_special_tokens=False)
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        stop_policy={"max_answer_tokens": 4, **settings},
        logits_processor=[Script(ids, len(prompt))],
        max_new_tokens=len(ids) + 30,
        do_sample=False,
    )
    return str(tokenizer.decode(output[0][len(prompt) :])), model.last_stop[0]


def test_the_format_is_harmony(model: OSPrunerForCausalLM) -> None:
    assert model.token_format.format == HARMONY
    assert model.token_format.channels is not None


def test_a_stop_forces_the_whole_closing(model: OSPrunerForCausalLM) -> None:
    text, record = write(model, f"{ANALYSIS}First.\n\nThen.\n\n", **ALWAYS)
    assert text.startswith(f"{ANALYSIS}First.\n\n{HARMONY.closing}\\boxed{{")
    assert record.reason == "policy"


def test_a_natural_end_is_completed(model: OSPrunerForCausalLM) -> None:
    """The model has written <|end|> and wants to call a tool: the final channel is forced."""
    script = f"{ANALYSIS}First.\n\nThen.<|end|><|start|>assistant to=x<|channel|>commentary"
    text, record = write(model, script, **NEVER)
    assert text.startswith(f"{ANALYSIS}First.\n\nThen.{HARMONY.closing}\\boxed{{")
    assert record.reason == "natural"
    assert len(record.step_ends) == 1
    free, record = write(model, script, answer="free", max_answer_tokens=90, **NEVER)
    assert free.startswith(script)  # nothing is forced after a natural end
    assert record.reason == "natural"


def test_other_channels_do_not_end_or_stop(model: OSPrunerForCausalLM) -> None:
    preamble = "<|channel|>commentary<|message|>I add.\n\nSo.<|end|><|start|>assistant"
    text, record = write(model, f"{preamble}{ANALYSIS}First.\n\nThen.\n\n", **ALWAYS)
    assert text.startswith(f"{preamble}{ANALYSIS}First.\n\n{HARMONY.closing}\\boxed{{")
    assert len(record.step_ends) == 1


def test_a_final_channel_at_once_is_a_natural_end(model: OSPrunerForCausalLM) -> None:
    opened = "<|channel|>final<|message|>"
    text, record = write(model, f"{opened}It is.\n\n5.\n\n", **ALWAYS)
    assert text.startswith(f"{opened}\\boxed{{")
    assert (record.reason, record.step_ends, record.thinking_tokens) == ("natural", [], 0)
    text, record = write(model, f"{opened}It is.\n\n5.\n\n", answer="free", **ALWAYS)
    assert text.startswith(f"{opened}It")
    assert "<|end|>" not in text


def test_prefilled_analysis(model: OSPrunerForCausalLM) -> None:
    """The second half of a break whose first half stands in the prompt ends a step."""
    text, record = write(model, "\nThen.\n\n", prefill=f"{ANALYSIS}First.\n", **ALWAYS)
    assert text.startswith(f"\n{HARMONY.closing}\\boxed{{")
    assert record.step_ends == [1]
    text, record = write(model, "5.\n\n", prefill=HARMONY.closing, **ALWAYS)
    assert record.reason == "natural"
    assert text.startswith("5.\n\n")


def test_the_answer_cannot_open_the_analysis_again(model: OSPrunerForCausalLM) -> None:
    tokenizer = model.tokenizer
    assert tokenizer is not None
    thought = f"{ANALYSIS}First.\n\n"
    closing = HARMONY.closing + "\\boxed{"
    again = f"{thought}{closing}<|channel|><|channel|><|channel|>"
    text, _ = write(model, again, **ALWAYS)
    assert text.startswith(thought + closing)
    assert "<|channel|>" not in text[len(thought + closing) :]


def test_the_answer_ends_with_its_message(model: OSPrunerForCausalLM) -> None:
    script = f"{ANALYSIS}First.\n\n{HARMONY.closing}\\boxed{{5<|end|>xxxxxxxx"
    text, _ = write(model, script, max_answer_tokens=20, **ALWAYS)
    assert text.endswith("\\boxed{5<|end|>")


CALL = "<|channel|>commentary to=x<|constrain|>json<|message|>{\n\n}"


def test_a_call_in_harmony_is_left_to_the_model(model: OSPrunerForCausalLM) -> None:
    """With answer "tools" the model chooses the channel of its reply, after either end."""
    thought, role = f"{ANALYSIS}First.\n\n", "<|end|><|start|>assistant"
    script = f"{thought}{role}{CALL}<|return|>"
    text, record = write(model, script, answer="tools", max_answer_tokens=90, **ALWAYS)
    assert (text, record.reason) == (script, "policy")
    text, record = write(model, script, answer="tools", max_answer_tokens=90, **NEVER)
    assert (text, record.reason) == (script, "natural")
    free, _ = write(model, script, answer="free", **ALWAYS)
    assert free.startswith(thought + HARMONY.closing)


def test_after_a_stop_any_channel_but_the_analysis_opens(model: OSPrunerForCausalLM) -> None:
    role = "<|end|><|start|>assistant"
    begun = f"{ANALYSIS}First.\n\n{role}<|channel|>"
    again = f"{begun}analysis<|message|>Again.\n\n"
    settings: dict[str, Any] = {"answer": "tools", "max_answer_tokens": 40, **ALWAYS}
    text, _ = write(model, again, **settings)
    assert text.startswith(begun)
    assert not text.startswith(f"{begun}a")
    text, _ = write(model, again, mask_reentry=False, **settings)
    assert text.startswith(again)


def test_a_call_without_an_end_of_the_thinking(reasoning_model: OSPrunerForCausalLM) -> None:
    """Qwen3 may open a call within its thinking: it is the model's own end, and is let be."""
    call = '<tool_call>\n{"name": "add"}\n\n</tool_call>'
    script = f"First.\n\nI add.{call}<|end|>"
    for answer in ("forced", "free", "tools"):
        text, record = write(reasoning_model, script, answer=answer, max_answer_tokens=60, **NEVER)
        assert text.startswith(f"First.\n\nI add.{call}"), answer
        assert record.reason == "natural"
        assert len(record.step_ends) == 1
        assert record.thinking_tokens == len(tokens(reasoning_model, "First.\n\nI add."))


def test_a_call_after_a_stop(reasoning_model: OSPrunerForCausalLM) -> None:
    closing = reasoning_model.token_format.format.closing
    script = f"First.\n\n{closing}<tool_call>{{\n\n}}</tool_call>"
    text, record = write(reasoning_model, script, answer="tools", max_answer_tokens=90, **ALWAYS)
    assert text.startswith(script)
    assert record.reason == "policy"


def test_a_sentence_before_the_closing(reasoning_model: OSPrunerForCausalLM) -> None:
    fmt, soft = reasoning_model.token_format.format, "I have what I need, so:"
    script = "First.\n\nThen."
    plain, before = write(reasoning_model, script, **ALWAYS)
    text, record = write(reasoning_model, script, wind_down=soft, **ALWAYS)
    assert plain.startswith(f"First.\n\n{fmt.closing}\\boxed{{")
    assert text.startswith(f"First.\n\n{soft}{fmt.closing}\\boxed{{")
    assert record == before  # what is forced is no thinking of the model's
    natural, _ = write(reasoning_model, f"{script}{fmt.think_end}", wind_down=soft, **NEVER)
    assert natural.startswith(f"{script}{fmt.closing}\\boxed{{")
    with pytest.raises(ValueError, match="with the markers '</think>'"):
        write(reasoning_model, script, wind_down="So: </think>", **ALWAYS)
    with pytest.raises(TypeError, match="wind_down is 3; it must be a text"):
        write(reasoning_model, script, wind_down=3, **ALWAYS)


def test_a_policys_own_sentence(reasoning_model: OSPrunerForCausalLM) -> None:
    """It stands in the format that is saved with a policy, and a call may leave it out."""
    tokenizer = reasoning_model.tokenizer
    assert tokenizer is not None
    fmt = replace(reasoning_model.token_format.format, wind_down="Enough, so:")
    made = untrained(reasoning_model.base, tokenizer, reasoning_format=fmt, tuning="layers")
    text, _ = write(made, "First.\n\n", **ALWAYS)
    assert text.startswith(f"First.\n\nEnough, so:{fmt.closing}")
    text, _ = write(made, "First.\n\n", wind_down="", **ALWAYS)
    assert text.startswith(f"First.\n\n{fmt.closing}")
    assert ReasoningFormat.from_dict(fmt.to_dict()) == fmt
    assert "wind_down" not in replace(fmt, wind_down="").to_dict()
