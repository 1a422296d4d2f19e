"""Attention with sinks, computed as one more key, against transformers' own eager attention."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from ospruner.train.sinks import sinks_as_keys, takes_sinks_as_keys

from ..families import COMMON
from .conftest import Held

SIZES: dict[str, Any] = {
    **COMMON,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "max_position_embeddings": 512,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "initializer_range": 0.3,
    "pad_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}


def decoder_of(kind: str, dtype: torch.dtype) -> Any:
    """A random decoder whose sinks take a good share."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES, **({} if kind == "granite_swa" else EXPERTS))
    config._experts_implementation = "eager"  # takes float64
    decoder = AutoModelForCausalLM.from_config(config).eval().to(dtype).get_decoder()
    sinks = [p for name, p in decoder.named_parameters() if name.endswith("sinks")]
    assert len(sinks) == 2
    for one in sinks:
        torch.nn.init.normal_(one, 1.0)
    return decoder


def states_and_gradients(
    decoder: Any, ids: Tensor, mask: Tensor | None, ours: bool
) -> list[Tensor]:
    decoder.zero_grad(set_to_none=True)
    with sinks_as_keys(decoder.config) if ours else nullcontext():
        states = decoder(ids, attention_mask=mask, use_cache=False).last_hidden_state
        if mask is not None:
            states = states[mask.bool()]
        states.tanh().pow(3).sum().backward()
    gradients = {n: p.grad for n, p in decoder.named_parameters() if p.grad is not None}
    assert sum(float(one.abs().max()) > 0 for n, one in gradients.items() if "sinks" in n) == 2
    return [states.detach(), *gradients.values()]


@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [
        ("gpt_oss", torch.float64, 1e-11),
        # Their eager attention computes its softmax in float32 always.
        ("granite_swa", torch.float32, 1e-5),
        ("granitemoe_swa", torch.float32, 1e-5),
    ],
    ids=str,
)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("tokens", [1, 8, 9, 48])  # the window is 8
def test_states_and_gradients_are_those_of_eager_attention(
    tokens: int, padded: bool, kind: str, dtype: torch.dtype, tolerance: float
) -> None:
    decoder = decoder_of(kind, dtype)
    ids = torch.randint(0, 64, (3, tokens), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids) if padded else None
    if mask is not None:
        mask[1, : tokens // 3] = 0
    found, wanted = (states_and_gradients(decoder, ids, mask, ours) for ours in (True, False))
    for ours, theirs in zip(found, wanted, strict=True):
        close = tolerance * float(theirs.abs().max().clamp(min=1))
        torch.testing.assert_close(ours, theirs, atol=close, rtol=tolerance)
    assert decoder.config._attn_implementation == "eager"


def test_no_tensor_grows_with_the_square_of_the_text() -> None:
    decoder = decoder_of("gpt_oss", torch.float32)
    peaks = {}
    for ours in (True, False):
        for tokens in (256, 512):
            ids = torch.zeros(1, tokens, dtype=torch.int64)
            with Held(decoder.parameters()) as held:
                states_and_gradients(decoder, ids, None, ours)
            peaks[ours, tokens] = held.peak
    assert peaks[True, 512] <= 2 * peaks[True, 256]
    assert peaks[False, 512] > 2 * peaks[True, 512]


def test_bases_without_sinks_and_chosen_kernels_are_left_alone() -> None:
    for config in (
        AutoConfig.for_model("qwen2", attn_implementation="eager"),
        AutoConfig.for_model("gpt_oss", attn_implementation="flash_attention_3"),
    ):
        before = config._attn_implementation
        assert not takes_sinks_as_keys(config)
        with sinks_as_keys(config):
            assert config._attn_implementation == before
        assert config._attn_implementation == before
