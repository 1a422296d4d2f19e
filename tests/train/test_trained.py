"""How a tail is computed while it is trained: in bfloat16, or with less memory."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from ospruner.train.objective import batch_loss
from ospruner.train.tail import TrainedPolicy, no_denormals
from ospruner.train.traces import LabelledTraces
from ospruner.train.untrained import untrained

from .conftest import MakeLabels


def gradients(
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    traces: LabelledTraces,
    half: bool = False,
    checkpointing: bool = False,
) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    """Logits, gradients by name, and the activations kept for the backward pass, in bytes."""
    model = untrained(base, tokenizer, tuning="layers")
    model.policy.head.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    trained = TrainedPolicy(model.policy, half, checkpointing)
    batch = traces.batch(np.arange(12))
    hidden = traces.states(model, batch.rows)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = trained(hidden, batch.positions)[..., 0]
    batch_loss("os-pruner", logits, batch, 1e-2).backward()
    found = {name: p.grad for name, p in model.policy.named_parameters() if p.grad is not None}
    return logits.detach(), found, sum(kept.values())


@pytest.fixture
def traces(make_labels: MakeLabels) -> LabelledTraces:
    return LabelledTraces.from_dataset(make_labels(12))


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SINKS: dict[str, Any] = {
    "pad_token_id": None,
    "head_dim": 8,
    "sliding_window": 8,
    "num_local_experts": 2,
    "num_experts_per_tok": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    # Scales what enters its first layer, which the policy puts back.
    "granite": {"embedding_multiplier": 12.0, "pad_token_id": None},
    "gpt_oss": SINKS,
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_checkpointing_changes_the_memory_and_nothing_else(
    kind: str, tiny_tokenizer: PreTrainedTokenizerFast, traces: LabelledTraces
) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES, **FAMILIES[kind], vocab_size=len(tiny_tokenizer))
    base = AutoModelForCausalLM.from_config(config).eval()
    plain = gradients(base, tiny_tokenizer, traces)
    saving = gradients(base, tiny_tokenizer, traces, checkpointing=True)
    assert torch.equal(plain[0], saving[0])
    assert plain[1].keys() == saving[1].keys()
    for name, gradient in plain[1].items():
        assert torch.equal(gradient, saving[1][name]), name
    assert saving[2] < plain[2]


def test_bases_with_sinks_train_as_with_their_eager_attention(
    tiny_tokenizer: PreTrainedTokenizerFast,
    traces: LabelledTraces,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt_oss", **SIZES, **SINKS, vocab_size=len(tiny_tokenizer))
    base = AutoModelForCausalLM.from_config(config).eval()
    assert base.config._attn_implementation == "eager"
    logits, found, kept = gradients(base, tiny_tokenizer, traces)
    monkeypatch.setattr("ospruner.train.tail.sinks_as_keys", lambda config: nullcontext())
    theirs, wanted, kept_by_eager = gradients(base, tiny_tokenizer, traces)
    torch.testing.assert_close(logits, theirs, atol=1e-5, rtol=1e-5)
    assert found.keys() == wanted.keys()
    assert "tail.layers.1.self_attn.sinks" in found
    for name, gradient in found.items():
        close = 1e-5 * float(wanted[name].abs().max())
        torch.testing.assert_close(gradient, wanted[name], atol=close, rtol=1e-5)
    assert kept != kept_by_eager  # another way was taken


def test_bfloat16_tail_keeps_weights_head_and_loss_in_float32(
    tiny_base: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, traces: LabelledTraces
) -> None:
    exact, _, kept = gradients(tiny_base, tiny_tokenizer, traces)
    logits, found, kept_half = gradients(tiny_base, tiny_tokenizer, traces, half=True)
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())  # the head was not in bfloat16
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    assert 0 < (logits - exact).abs().max() < 0.1 * exact.abs().max()
    assert kept_half < kept


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this CPU cannot")
def test_denormal_numbers_count_as_zero_while_training() -> None:
    smallest = torch.tensor([1e-39])
    with no_denormals():
        assert (smallest * 0.5).item() == 0
    assert (smallest * 0.5).item() > 0
