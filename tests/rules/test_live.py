"""Rules at work in generate: right trial answers, of which the row notices nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto import CONFIG_MAPPING

from modeling_ospruner import OSPrunerConfig, StopPolicyConfig, StopRecord, TokenFormat
from ospruner.demo.shipped import Reasoner, draw_split
from ospruner.eval.measured import thinking_entropies
from ospruner.eval.problems.problem import user_message
from ospruner.formats import DEEPSEEK_R1
from ospruner.rules import Agreement, AnswerEntropy, Budget, Family, StopRule, TrialConfidence
from ospruner.rules.live import generate_with_rule
from ospruner.rules.signals import TrialAnswer

from ..eval.evaluations import tabled

SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "top_k": 0}
NEW_TOKENS = 24
WINDOW = 8  # shorter than any prompt: what a sliding layer holds has long been cut

ATTENTION = ["sliding_attention", "full_attention"] * 2
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "num_local_experts": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "gpt_oss": {**EXPERTS, "sliding_window": WINDOW, "layer_types": ATTENTION},
    "gemma3_text": {"sliding_window": WINDOW, "layer_types": ATTENTION},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 8},
    "qwen3_next": {
        **EXPERTS,
        "layer_types": ["linear_attention", "full_attention"] * 2,
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


def asking(seen: list[tuple[int, int, TrialAnswer]], max_tokens: int, stop_at: int) -> StopRule:
    """Tries an answer at each step end and keeps it; stops at the step `stop_at`."""

    def steps(ends: Iterator[Any], same: Any) -> Iterator[float]:
        for end in ends:
            answer = end.trial_answer(max_tokens)
            seen.append((end.row, end.thinking_tokens, answer))
            yield float(end.step)

    return Family("asking", steps, high=1e9, asks=frozenset({"trial_answer", "text"}))(stop_at)


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


SLOW = ("qwen3_next", "gemma3_text")  # as gpt_oss and falcon_h1 here
CASES = [
    pytest.param(family, marks=[pytest.mark.slow] if family in SLOW else []) for family in FAMILIES
]


@pytest.mark.parametrize("family", CASES)
def test_rows_go_on_bitwise_and_trial_answers_are_right(
    tiny_tokenizer: PreTrainedTokenizerFast, family: str
) -> None:
    """Cache, random state and texts are what they are without trial answers."""
    base = make_base(family, tiny_tokenizer)
    fmt = TokenFormat.compile(DEEPSEEK_R1, tiny_tokenizer)
    inputs = padded_prompts(tiny_tokenizer)
    assert (inputs["attention_mask"] == 0).any()
    how = {**SAMPLED, "max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
    torch.manual_seed(5)
    plain = base.generate(**inputs, disable_compile=True, **how)
    plain_state = torch.get_rng_state()
    seen: list[tuple[int, int, TrialAnswer]] = []
    rule = asking(seen, 6, 10**6)
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

    assert len(seen) == sum(len(record.step_ends) for record in records) > 8
    width, suffix = inputs["input_ids"].shape[1], len(fmt.forced_suffix())
    for row, record in enumerate(records):
        prompt = inputs["input_ids"][row][inputs["attention_mask"][row].bool()].tolist()
        answers = [(end, answer) for i, end, answer in seen if i == row]
        assert record.probabilities == []
        assert record.signals == list(range(len(answers)))
        spent = sum(suffix + len(a.ids) + (a.ended == "eos") for _, a in answers)
        assert record.probe_tokens == spent > 0
        for end, answer in answers[:: max(1, len(answers) // 4)]:
            text = [*prompt, *asked.sequences[row, width : width + end].tolist()]
            ids, logprobs, entropy = answer_by_whole_passes(base, fmt, text, 6)
            assert list(answer.ids) == ids
            assert answer.logprobs == pytest.approx(logprobs, abs=1e-4)
            assert answer.entropy == pytest.approx(entropy, abs=1e-4)


def test_a_stopped_row_writes_its_trial_answer(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """What is forced after the stop is what was tried before it."""
    base = make_base("qwen2", tiny_tokenizer)
    base.generation_config.sequence_bias = None  # trial answers know the model alone
    fmt = TokenFormat.compile(DEEPSEEK_R1, tiny_tokenizer)
    inputs = padded_prompts(tiny_tokenizer, 3)
    seen: list[tuple[int, int, TrialAnswer]] = []
    rule = asking(seen, 8, 1)
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
        tried = [answer for i, end, answer in seen if (i, end) == (row, record.step_ends[1])]
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
            base, tiny_tokenizer, asking([], 6, 9), token_format=fmt, **inputs, max_new_tokens=3
        )


def prompts_of(reasoner: Reasoner) -> list[str]:
    """The prompts of six problems."""
    return [
        str(
            reasoner.tokenizer.apply_chat_template(
                [{"role": "user", "content": user_message(problem, reasoner.token_format.format)}],
                add_generation_prompt=True,
                tokenize=False,
            )
        )
        for problem in draw_split("test", 6, 0)
    ]


def solve(
    reasoner: Reasoner, rule: StopRule | dict[str, Any]
) -> tuple[list[StopRecord], list[list[int]]]:
    """Greedy traces of six problems under a rule: records, and what was generated."""
    tokenizer = reasoner.tokenizer
    inputs = tokenizer(
        prompts_of(reasoner),
        return_tensors="pt",
        padding=True,
        padding_side="left",
        add_special_tokens=False,
    )
    output, records = generate_with_rule(
        reasoner.model,
        tokenizer,
        rule,
        token_format=reasoner.token_format,
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=160,
        do_sample=False,
    )
    return records, output[:, inputs["input_ids"].shape[1] :].tolist()


@pytest.fixture(scope="module")
def whole(reasoner: Reasoner) -> tuple[list[StopRecord], list[list[int]]]:
    """What the reasoner writes when nothing stops it."""
    return solve(reasoner, Budget(10_000))


RULES: dict[str, StopRule] = {
    "entropy": AnswerEntropy(0.05),
    "confidence": TrialConfidence(0.97),
    "confidence before words": TrialConfidence(0.97, transition_words=("Let", "That")),
    "agreement": Agreement(2),
}


@pytest.mark.parametrize("name", RULES)
def test_training_free_rules_shorten_the_reasoners_traces(
    reasoner: Reasoner, whole: tuple[list[StopRecord], list[list[int]]], name: str
) -> None:
    """Each row is the whole trace up to its stop, and then the answer that was tried there."""
    records, texts = solve(reasoner, RULES[name])
    full, full_texts = whole
    stopped = [i for i, record in enumerate(records) if record.reason == "policy"]
    assert len(stopped) >= 4
    tokens, full_tokens = (sum(r.thinking_tokens for r in rs) for rs in (records, full))
    assert tokens + sum(r.probe_tokens for r in records) < full_tokens
    suffix = reasoner.token_format.forced_suffix()
    for i, record in enumerate(records):
        kept = record.thinking_tokens
        assert texts[i][:kept] == full_texts[i][:kept]
        assert len(record.signals) == len(record.step_ends)
        assert record.probabilities == []
        measured = [signal for signal in record.signals if not math.isnan(signal)]
        assert record.nan_steps == 0
        assert (record.probe_tokens > 0) == bool(measured)
        if i in stopped:
            assert texts[i][kept : kept + len(suffix)] == suffix
            assert not math.isnan(record.signals[-1])
            assert "}" in reasoner.tokenizer.decode(texts[i][kept + len(suffix) :])


def told(found: dict[int, list[tuple[str, float]]]) -> StopRule:
    """Keeps what each row's step ends say of the thinking."""

    def keep(ends: Iterator[Any], same: Any) -> Iterator[float]:
        for end in ends:
            found.setdefault(end.row, []).append((end.step_text(), end.thinking_entropy()))
            yield math.nan

    return Family("told", keep, asks=frozenset({"text", "thinking_entropy"}))(1.0)


def test_rules_are_told_steps_and_the_thinkings_entropy(
    reasoner: Reasoner, whole: tuple[list[StopRecord], list[list[int]]]
) -> None:
    """As a pass over each whole text finds them."""
    found: dict[int, list[tuple[str, float]]] = {}
    records, texts = solve(reasoner, told(found))
    assert texts == whole[1]
    prompts = reasoner.tokenizer(prompts_of(reasoner), add_special_tokens=False)["input_ids"]
    traces = [text[: r.step_ends[-1]] for text, r in zip(texts, records, strict=True)]
    ends = [r.step_ends for r in records]
    steps = max(len(row) for row in ends)
    lengths = np.array([[*row, *[row[-1]] * (steps - len(row))] for row in ends])
    mask = np.arange(steps) < np.array([[len(row)] for row in ends])
    table = tabled(mask, lengths=lengths)
    dataset = Dataset.from_dict({"prompt_ids": prompts, "trace_ids": traces})
    entropies = thinking_entropies(reasoner.model, dataset, table)
    for i, row in enumerate(ends):
        said = [reasoner.tokenizer.decode(traces[i][a:b]) for a, b in pairwise([0, *row])]
        assert [text for text, _ in found[i]] == said
        np.testing.assert_allclose([h for _, h in found[i]], entropies[i, : len(row)], 1e-3)
    assert len({round(h, 6) for row in found.values() for _, h in row}) > len(ends)


def test_a_budget_needs_no_policy(
    reasoner: Reasoner, whole: tuple[list[StopRecord], list[list[int]]]
) -> None:
    records, _ = solve(reasoner, Budget(40))
    assert [r.reason for r in records].count("budget") >= 4
    for record, full in zip(records, whole[0], strict=True):
        ends = full.step_ends
        expected = next((end for end in ends if end >= 40), full.thinking_tokens)
        assert record.thinking_tokens == expected
        assert record.probe_tokens == 0
    limited, _ = solve(reasoner, {"rule": Budget(10_000), "max_thinking_tokens": 40})
    assert [r.thinking_tokens for r in limited] == [r.thinking_tokens for r in records]


def test_rules_and_the_learned_policys_settings_exclude_each_other(reasoner: Reasoner) -> None:
    with pytest.raises(ValueError, match="stop_policy holds no rule"):
        solve(reasoner, {"threshold": 0.5})
    with pytest.raises(ValueError, match="mode, threshold and price are the learned"):
        StopPolicyConfig(rule=Agreement(2), threshold=0.3)
    for wrong in ("entropy", Agreement):
        with pytest.raises(TypeError, match="rule is .* it must be a RuleLike"):
            StopPolicyConfig.of({"rule": wrong})
    assert StopPolicyConfig.of(Agreement(2)) == StopPolicyConfig(rule=Agreement(2))
    assert StopPolicyConfig(rule=Budget(5)).with_defaults(OSPrunerConfig()).mode is None
