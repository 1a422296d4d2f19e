"""Traces packed into lines: every token once, and the trunk's states those of a trace alone."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    PreTrainedTokenizerFast,
)

from ospruner.scoring import trunk
from ospruner.train.packing import pack, takes_packing
from ospruner.train.traces import LabelledTraces
from ospruner.train.untrained import untrained

from .conftest import MakeLabels

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
}
SLIDING: dict[str, Any] = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20))
def test_every_token_has_one_slot_and_lines_hold_whole_traces(lengths: list[int]) -> None:
    starts = np.cumsum([0, *lengths])
    sequences = [np.arange(a + 1, b + 1) for a, b in itertools.pairwise(starts)]
    packed = pack(sequences)
    P, C = packed.input_ids.shape
    assert max(lengths) == C
    # First fit decreasing leaves at most one line half empty.
    assert 2 * sum(lengths) + C >= C * P
    unpacked = packed.unpack(packed.input_ids[..., None])[..., 0]
    positions = packed.unpack(packed.position_ids[..., None])[..., 0]
    for b, ids in enumerate(sequences):
        assert unpacked[b, : len(ids)].tolist() == ids.tolist()
        assert positions[b, : len(ids)].tolist() == list(range(len(ids)))
    assert sorted(packed.input_ids[packed.input_ids > 0].tolist()) == list(range(1, starts[-1] + 1))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "config",
    [
        AutoConfig.for_model("qwen2", **SIZES),
        AutoConfig.for_model("llama", **SIZES),
        Gemma3TextConfig(**SIZES, **SLIDING),
        GptOssConfig(**SIZES, **SLIDING, num_local_experts=2, num_experts_per_tok=1),
        AutoConfig.for_model(
            "qwen3_next", **SIZES, num_experts=2, moe_intermediate_size=16,
            shared_expert_intermediate_size=16, num_experts_per_tok=1, linear_num_key_heads=2,
            linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        ),
    ],
    ids=lambda config: config.model_type,
)  # fmt: skip
def test_states_are_those_of_each_trace_alone(
    config: Any,
    implementation: str,
    make_labels: MakeLabels,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    if config.model_type == "gpt_oss" and implementation == "sdpa":
        pytest.skip("gpt_oss has no sdpa attention")
    torch.manual_seed(0)
    config.vocab_size = len(tiny_tokenizer)
    config.pad_token_id = None
    base = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    model = untrained(base, tiny_tokenizer, num_policy_layers=1, tuning="layers")
    hybrid = config.model_type == "qwen3_next"
    # Recurrent layers would carry over; other attention than sdpa goes unpacked.
    assert takes_packing(base) is (implementation == "sdpa" and not hybrid)
    traces = LabelledTraces.from_dataset(make_labels(12))
    rows = np.random.default_rng(0).permutation(12)
    together = traces.states(model, rows).hidden
    lines = len(pack([np.zeros(traces.token_lengths[row]) for row in rows]).input_ids)
    assert hybrid or lines < len(rows)  # something was packed
    for b, row in enumerate(rows):
        alone = trunk(model, traces.input_ids(rows[b : b + 1]))[0]
        close = 1e-5 * float(alone.abs().max())  # of the largest state, in float32
        found = together[b, : traces.token_lengths[row]]
        torch.testing.assert_close(found, alone, atol=close, rtol=0)
