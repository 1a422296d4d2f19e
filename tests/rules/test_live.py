"""Rules at work in generate: right trial answers, of which the row notices nothing."""

import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from modeling_ospruner import OSPrunerConfig, StopPolicyConfig, TokenFormat
from ospruner.demo.shipped import Reasoner
from ospruner.eval.measured import thinking_entropies
from ospruner.eval.table import TraceTable
from ospruner.formats import DEEPSEEK_R1
from ospruner.rules import Agreement, Budget, Family, StepEnd, StopRule
from ospruner.rules.live import generate_with_rule
from ospruner.rules.signals import TrialAnswer

from ..chats import asked_of, chat_batch, prompts_of
from ..eval.evaluations import dataset_of
from ..families import let_write_paragraphs, make_base

SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "top_k": 0}


def writer(family: str, tokenizer: Any) -> tuple[Any, TokenFormat, Any]:
    """A tiny random base, which likes to end paragraphs and never ends its text; two prompts."""
    base: Any = make_base(family, tokenizer, max_position_embeddings=512)
    fmt, asked = TokenFormat.compile(DEEPSEEK_R1, tokenizer), "Ann has 3 apples"
    let_write_paragraphs(base, fmt, 10.0, -60.0)
    return base, fmt, chat_batch(tokenizer, [asked, f"{asked} and buys 4 more"])


def asking(seen: list[tuple[int, int, TrialAnswer]]) -> StopRule:
    """Tries an answer at each step end and keeps it; never stops."""

    def steps(end: StepEnd) -> float:
        seen.append((end.row, end.thinking_tokens, end.trial_answer(6)))
        return end.step

    return Family("asking", steps, high=1e9, asks=frozenset({"trial_answer", "text"}))(1e9)


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
        logits[list(fmt.reentry_ids)] = -torch.inf
        token = int(logits.argmax())
        if token in fmt.eos_ids:
            break
        ids.append(token)
        logprobs.append(float(logs[token]))
        if box.push(token):
            break
    return ids, logprobs, entropy


CASES = [  # the windows are shorter than any prompt: what such a layer holds has long been cut
    *("qwen2", "gpt_oss", "lfm2", "falcon_h1"),
    *(pytest.param(one, marks=pytest.mark.slow) for one in ("qwen3_next", "gemma3_text")),
]


@pytest.mark.parametrize("family", CASES)
def test_rows_go_on_bitwise_and_trial_answers_are_right(tiny_tokenizer: Any, family: str) -> None:
    """Cache, random state and texts are what they are without trial answers."""
    base, fmt, inputs = writer(family, tiny_tokenizer)
    assert (inputs["attention_mask"] == 0).any()
    how = {**SAMPLED, "max_new_tokens": 24, "return_dict_in_generate": True}
    torch.manual_seed(5)
    plain = base.generate(**inputs, disable_compile=True, **how)
    plain_state = torch.get_rng_state()
    seen: list[tuple[int, int, TrialAnswer]] = []
    torch.manual_seed(5)
    how["token_format"] = fmt
    asked, records = generate_with_rule(base, tiny_tokenizer, asking(seen), **inputs, **how)
    assert torch.equal(torch.get_rng_state(), plain_state)
    assert torch.equal(asked.sequences, plain.sequences)
    ours, theirs = (list(tensors_of(one.past_key_values)) for one in (asked, plain))
    assert len(ours) == len(theirs) >= 4
    assert all(map(torch.equal, ours, theirs))
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


def test_a_base_without_a_cache_is_refused(tiny_tokenizer: Any) -> None:
    base, fmt, inputs = writer("mamba", tiny_tokenizer)
    inputs |= {"token_format": fmt, "max_new_tokens": 3}
    with pytest.raises(ValueError, match="trial answers need past_key_values, which MambaFor"):
        generate_with_rule(base, tiny_tokenizer, asking([]), **inputs)


def test_rules_are_told_steps_and_the_thinkings_entropy(reasoner: Reasoner) -> None:
    """As a pass over each whole text finds them."""
    found: dict[int, list[tuple[str, float]]] = defaultdict(list)

    def keep(end: StepEnd) -> float:
        found[end.row].append((end.step_text(), end.thinking_entropy()))
        return math.nan

    rule = Family("told", keep, asks=frozenset({"text", "thinking_entropy"}))(1.0)
    inputs = chat_batch(reasoner.tokenizer, asked_of(reasoner, 6))
    inputs |= {"token_format": reasoner.token_format, "do_sample": False, "max_new_tokens": 160}
    output, records = generate_with_rule(reasoner.model, reasoner.tokenizer, rule, **inputs)
    texts = output[:, inputs["input_ids"].shape[1] :].tolist()
    ends = [record.step_ends for record in records]
    traces = [text[: row[-1]] for text, row in zip(texts, ends, strict=True)]
    dataset = dataset_of(ends, prompt_ids=prompts_of(reasoner, 6), trace_ids=traces)
    table = TraceTable.from_dataset(dataset)
    entropies = thinking_entropies(reasoner.model, dataset, table)
    for i, row in enumerate(ends):
        said = [reasoner.tokenizer.decode(traces[i][a:b]) for a, b in pairwise([0, *row])]
        assert [text for text, _ in found[i]] == said
        np.testing.assert_allclose([h for _, h in found[i]], entropies[i, : len(row)], 1e-3)
    assert len({round(h, 6) for row in found.values() for _, h in row}) > len(ends)


def test_rules_and_the_learned_policys_settings_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="mode, threshold and price are the learned"):
        StopPolicyConfig(rule=Agreement(2), threshold=0.3)
    assert StopPolicyConfig.of(Agreement(2)) == StopPolicyConfig(rule=Agreement(2))
    assert StopPolicyConfig(rule=Budget(5)).with_defaults(OSPrunerConfig()).mode is None
