"""Trial answers: right ones, of which the row that they are tried on notices nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto import CONFIG_MAPPING

from modeling_ospruner import DEEPSEEK_R1, TokenFormat, generate_with_rule
from modeling_ospruner.rules_ospruner import Ask, RowRule, StepEnd, TrialAnswer, Verdict

SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "top_k": 0}
NEW_TOKENS = 24
WINDOW = 8  # shorter than any prompt: what a sliding layer holds has long been cut

ATTENTION = ["sliding_attention", "full_attention"] * 2
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "layer_types": ATTENTION,
    },
    "gemma3_text": {"sliding_window": WINDOW, "layer_types": ATTENTION},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 8},
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 8,
    },
}


def make_base(family: str, tokenizer: PreTrainedTokenizerFast, **extra: Any) -> Any:
    """A tiny random model of a family, which likes to end paragraphs and never ends its text."""
    make_config: Any = CONFIG_MAPPING[family]
    config = make_config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,
        **{**FAMILIES.get(family, {}), **extra},
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        base: Any = AutoModelForCausalLM.from_config(config).eval()
    fmt = TokenFormat.compile(DEEPSEEK_R1, tokenizer)
    breaks = [i for i, kind in enumerate(fmt.kinds) if kind & 1 and kind & 8]
    base.generation_config.eos_token_id = tokenizer.eos_token_id
    base.generation_config.pad_token_id = tokenizer.pad_token_id
    base.generation_config.sequence_bias = {
        **{(i,): 6.0 for i in breaks},
        (tokenizer.eos_token_id,): -60.0,
        (fmt.think_end_id,): -60.0,
    }
    return base


def padded_prompts(tokenizer: PreTrainedTokenizerFast, batch: int = 2) -> dict[str, torch.Tensor]:
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "Ann has 3 apples" + " and buys 4 more" * i}],
            add_generation_prompt=True,
            tokenize=False,
        )
        for i in range(batch)
    ]
    encoded = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}


@dataclass(frozen=True)
class Asking:
    """Tries an answer at each step end and keeps it; stops at the step `stop_at`, if any."""

    max_tokens: int = 6
    stop_at: int | None = None
    reason: ClassVar[Literal["policy"]] = "policy"
    asks: ClassVar[frozenset[Ask]] = frozenset({"trial_answer", "text"})
    seen: list[tuple[int, int, TrialAnswer]] = field(default_factory=list)

    def for_row(self) -> RowRule:
        return self

    def at_step_end(self, end: StepEnd) -> Verdict:
        answer = end.trial_answer(self.max_tokens)
        self.seen.append((end.sample_index, end.thinking_tokens, answer))
        return Verdict(end.step == self.stop_at, answer.entropy)


def tensors_of(cache: Any) -> Iterator[torch.Tensor]:
    """All tensors that a cache holds, in a fixed order."""
    for layer in cache.layers:
        for _, value in sorted(vars(layer).items()):
            held = value.values() if isinstance(value, dict) else [value]
            yield from (one for one in held if isinstance(one, torch.Tensor))


@torch.no_grad()
def answer_by_whole_passes(
    base: PreTrainedModel, fmt: TokenFormat, text: list[int], most: int
) -> tuple[list[int], list[float], float]:
    """Greedy answer, log-probabilities and first entropy, without any cache."""
    box, entropy = fmt.box_state(), 0.0
    ids: list[int] = []
    logprobs: list[float] = []
    text = [*text, *fmt.forced_suffix("forced")]
    while len(ids) < most:
        logits = base(input_ids=torch.tensor([text + ids]), use_cache=False).logits[0, -1].double()
        logs = logits.log_softmax(-1)
        if not ids:
            top = logits.topk(20).values.softmax(-1)
            entropy = float(-(top * top.log()).sum())
        allowed = logits.clone()
        allowed[list(fmt.reentry_ids)] = -torch.inf
        token = int(allowed.argmax())
        if token in fmt.eos_ids:
            break
        ids.append(token)
        logprobs.append(float(logs[token]))
        if box.push(token):
            break
    return ids, logprobs, entropy


SLOW = ("qwen3_next", "gemma3_text")
CASES = [
    pytest.param(family, cache, marks=[pytest.mark.slow] if family in SLOW else [])
    for family in FAMILIES
    for cache in (None, "static")
    if cache is None
    or "layer_types" not in FAMILIES[family]
    or "sliding_window" in FAMILIES[family]
    if (family, cache) != ("falcon_h1", "static")
]


@pytest.mark.parametrize(("family", "cache"), CASES)
def test_rows_go_on_bitwise_and_trial_answers_are_right(
    tiny_tokenizer: PreTrainedTokenizerFast, family: str, cache: str | None
) -> None:
    """Cache, random state and texts are what they are without trial answers."""
    base = make_base(family, tiny_tokenizer)
    fmt = TokenFormat.compile(DEEPSEEK_R1, tiny_tokenizer)
    inputs = padded_prompts(tiny_tokenizer)
    assert (inputs["attention_mask"] == 0).any()
    how = {
        **SAMPLED,
        "max_new_tokens": NEW_TOKENS,
        "return_dict_in_generate": True,
        **({"cache_implementation": cache} if cache else {}),
    }
    torch.manual_seed(5)
    plain = base.generate(**inputs, disable_compile=True, **how)
    plain_state = torch.get_rng_state()
    rule = Asking()
    torch.manual_seed(5)
    asked, records = generate_with_rule(
        base, tiny_tokenizer, rule, token_format=fmt, **inputs, **how
    )
    assert torch.equal(torch.get_rng_state(), plain_state)
    assert torch.equal(asked.sequences, plain.sequences)
    ours, theirs = (list(tensors_of(one.past_key_values)) for one in (asked, plain))
    assert len(ours) == len(theirs) >= 4
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)

    assert len(rule.seen) == sum(len(record.step_ends) for record in records) > 8
    width, suffix = inputs["input_ids"].shape[1], len(fmt.forced_suffix())
    for row, record in enumerate(records):
        prompt = inputs["input_ids"][row][inputs["attention_mask"][row].bool()].tolist()
        answers = [(end, answer) for i, end, answer in rule.seen if i == row]
        assert record.probabilities == []
        assert record.signals == [answer.entropy for _, answer in answers]
        spent = sum(suffix + len(a.ids) + (a.ended == "eos") for _, a in answers)
        assert record.probe_tokens == spent > 0
        for end, answer in answers[:: max(1, len(answers) // 4)]:
            text = [*prompt, *asked.sequences[row, width : width + end].tolist()]
            ids, logprobs, entropy = answer_by_whole_passes(base, fmt, text, rule.max_tokens)
            assert list(answer.ids) == ids
            assert answer.logprobs == pytest.approx(logprobs, abs=1e-4)
            assert answer.entropy == pytest.approx(entropy, abs=1e-4)


def test_a_stopped_row_writes_its_trial_answer(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """What is forced after the stop is what was tried before it."""
    base = make_base("qwen2", tiny_tokenizer)
    base.generation_config.sequence_bias = None  # trial answers know the model alone
    fmt = TokenFormat.compile(DEEPSEEK_R1, tiny_tokenizer)
    inputs = padded_prompts(tiny_tokenizer, 3)
    rule = Asking(max_tokens=8, stop_at=1)
    breaks = [i for i, kind in enumerate(fmt.kinds) if kind & 1 and kind & 8]
    torch.manual_seed(1)
    output, records = generate_with_rule(
        base,
        tiny_tokenizer,
        {"rule": rule, "max_answer_tokens": 8},
        token_format=fmt,
        **inputs,
        **SAMPLED,
        max_new_tokens=200,
        logits_processor=[MoreBreaks(breaks, fmt.think_end_id)],
    )
    width = inputs["input_ids"].shape[1]
    assert [record.reason for record in records] == ["policy"] * 3
    for row, record in enumerate(records):
        assert len(record.step_ends) == 2
        tried = [answer for i, end, answer in rule.seen if (i, end) == (row, record.step_ends[1])]
        start = width + record.thinking_tokens + len(fmt.forced_suffix())
        ids = list(tried[0].ids)
        assert len(ids) >= 1
        assert output[row, start : start + len(ids)].tolist() == ids


class MoreBreaks:
    """Makes step ends likely while a row thinks."""

    def __init__(self, breaks: list[int], think_end: int) -> None:
        self.breaks = breaks
        self.think_end = think_end

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        thinking = ~(input_ids == self.think_end).any(-1)
        scores = scores.clone()
        scores[:, self.breaks] += 6.0 * thinking[:, None]
        scores[:, self.think_end] -= 60.0
        return scores


def test_a_base_without_a_cache_of_keys_is_refused(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    base = make_base("mamba", tiny_tokenizer)
    fmt = TokenFormat.compile(DEEPSEEK_R1, tiny_tokenizer)
    inputs = padded_prompts(tiny_tokenizer)
    with pytest.raises(ValueError, match="trial answers need past_key_values, which MambaFor"):
        generate_with_rule(
            base, tiny_tokenizer, Asking(), token_format=fmt, **inputs, max_new_tokens=3
        )
