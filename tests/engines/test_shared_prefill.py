"""Texts run together share their beginnings: same keys and values, fewer tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, PreTrainedTokenizerFast, Qwen2ForCausalLM

from modeling_ospruner import TokenFormat
from ospruner.engines import (
    ForkRequest,
    SamplingSettings,
    TokenCount,
    TokenTrie,
    TransformersEngine,
)
from ospruner.engines.transformers import packed_forks, rows
from ospruner.engines.transformers.cache import fast_attention
from ospruner.engines.transformers.packed_forks import _classes, _cuts, prefill_shared
from ospruner.formats import DEEPSEEK_R1


def texts_of_three_problems() -> list[list[int]]:
    """A template, three prompts, several traces each; one text twice, one cut short."""
    draws = random.Random(0)
    template = [draws.randrange(5, 300) for _ in range(40)]
    texts = []
    for problem in range(3):
        prompt = template + [draws.randrange(5, 300) for _ in range(30 + 20 * problem)]
        for _ in range(3):
            texts.append(prompt + [draws.randrange(5, 300) for _ in range(draws.randrange(9, 90))])
    draws.shuffle(texts)
    return [*texts, texts[0], texts[1][:60]]


@pytest.mark.parametrize("pass_columns", [1024, 7])
def test_keys_and_values_equal_those_of_each_text_alone(
    pass_columns: int, tiny_base: Qwen2ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_forks, "_PASS_COLUMNS", pass_columns)
    texts, count = texts_of_three_problems(), TokenCount()
    with torch.no_grad(), fast_attention(tiny_base):
        cache = prefill_shared(tiny_base, 4, texts, count)
    assert cache.columns == max(map(len, texts))
    for row, text in enumerate(texts):
        alone = DynamicCache(config=tiny_base.config)
        with torch.no_grad():
            tiny_base(input_ids=torch.tensor([text]), past_key_values=alone, use_cache=True)
        layers: Any = alone.layers
        for layer, other in zip(cache.slots, layers, strict=True):
            assert layer.keys is not None
            assert layer.values is not None
            assert other.keys is not None
            assert other.values is not None
            torch.testing.assert_close(layer.keys[row, :, : len(text)], other.keys[0])
            torch.testing.assert_close(layer.values[row, :, : len(text)], other.values[0])
    trie = TokenTrie()
    for text in texts:
        trie.add(text)
    assert len(trie) <= count.computed <= 1.02 * len(trie)
    assert count.computed < 0.6 * sum(map(len, texts))


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_groups_only_split(agree: list[int]) -> None:
    columns = 9
    cuts = _cuts(agree, columns)
    assert cuts[0] == 0
    assert cuts[-1] == columns
    assert cuts == sorted(set(cuts))
    previous = [0] * (len(agree) + 1)
    for end in cuts[1:]:
        groups = _classes(agree, end)
        for i, shared in enumerate(agree):
            assert (groups[i + 1] != groups[i]) == (shared < end)
            assert previous[i + 1] == previous[i] or groups[i + 1] != groups[i]
        previous = groups


def test_samples_of_one_problem_share_its_prompt(
    tiny_base: Qwen2ForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rows, "_ROUNDINGS", 0)  # no near tie is decided by the row alone
    engine = TransformersEngine(tiny_base, tiny_tokenizer, batch_size=12)
    fmt = TokenFormat.compile(DEEPSEEK_R1, tiny_tokenizer)
    draws = random.Random(1)
    prompts = [[draws.randrange(5, 300) for _ in range(60)] for _ in range(3) for _ in range(4)]
    prompts = [prompts[4 * (i // 4)] for i in range(12)]
    sampling = SamplingSettings(temperature=1.0, top_p=1.0, max_new_tokens=30)
    traces = engine.sample(prompts, sampling, fmt)
    asked = [
        ForkRequest(prompt, trace.trace_ids, fmt.step_ends(trace.trace_ids))
        for prompt, trace in zip(prompts, traces, strict=True)
    ]
    engine.fork(asked, fmt.forced_suffix(), 8, fmt.box_state)
    assert engine.counts.computed <= 1.02 * engine.counts.unique
    # Each prompt runs once, but each row's last prompt token by itself, for its logits.
    fed = sum(len(trace.trace_ids) + len(trace.answer_ids) + 1 for trace in traces)
    assert engine.sample_counts.computed <= 3 * 60 + 12 + fed
