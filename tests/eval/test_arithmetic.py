"""Operations by arithmetic against torch's own counter, and against sums by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import GemmaConfig, MistralConfig, Qwen2ForCausalLM

from modeling_ospruner.policy_ospruner import decoder_layers
from ospruner.demo.shipped import Reasoner
from ospruner.eval.compute import LayerWork, ModelWork

from ..families import ORDINARY, OTHERS, make_base


def counted(base: Qwen2ForCausalLM, ids: torch.Tensor, **arguments: Any) -> tuple[int, Any]:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        output = base(ids, use_cache=True, logits_to_keep=1, **arguments)
    return counter.get_total_flops(), output.past_key_values


def test_a_decoded_token_costs_what_torch_counts(tiny_base: Qwen2ForCausalLM) -> None:
    tiny_base.set_attn_implementation("eager")
    work = ModelWork.of_config(tiny_base.config)
    assert len(work.layers) == 4
    _, cache = counted(tiny_base, torch.arange(10)[None])
    flops, _ = counted(tiny_base, torch.tensor([[3]]), past_key_values=cache)
    assert flops == float(work.read(10, 11)) + work.logits
    assert float(work.read(10, 11, 2)) == pytest.approx(float(work.read(10, 11)) / 2)
    assert float(work.read(0, 11, 0)) == 0
    assert float(work.read(0, 11)) == pytest.approx(
        sum(float(work.read(p, p + 1)) for p in range(11))
    )


def test_a_layer_by_hand() -> None:
    work = ModelWork((LayerWork(token=100, attended=10),), logits=0)
    assert work.read(0, 4) == 400 + 10 * (1 + 2 + 3 + 4)
    assert work.read(2, 4) == 200 + 10 * (3 + 4)
    windowed = ModelWork((LayerWork(token=100, attended=10, window=3),), logits=0)
    assert windowed.read(0, 6) == 600 + 10 * (1 + 2 + 3 + 3 + 3 + 3)
    np.testing.assert_array_equal(windowed.read([0, 4], [6, 6]), [750, 260])


def test_windows_are_read_from_the_configuration() -> None:
    small: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 50}
    small |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    for window, wanted in ((8, 8), (None, math.inf)):
        work = ModelWork.of_config(MistralConfig(**small, sliding_window=window))
        assert [layer.window for layer in work.layers] == [wanted, wanted]
    # A head's width of its own: 2 heads of 32 numbers on a width of 16.
    wide = ModelWork.of_config(GemmaConfig(**small, head_dim=32))
    assert wide.layers[0].attended == 4 * 2 * 32


@pytest.mark.parametrize("family", [*ORDINARY, *OTHERS])
def test_the_work_of_every_family_is_that_of_its_matrices(family: str, reasoner: Reasoner) -> None:
    """A token meets every number of a layer but those of experts, and of vectors."""
    base = make_base(family, reasoner.tokenizer)
    work = ModelWork.of_config(base.config)
    for layer, one in zip(decoder_layers(base), work.layers, strict=True):
        names = dict(layer.named_parameters())
        met = sum(p.numel() for p in names.values() if p.ndim > 1)
        experts = sum(p.numel() for name, p in names.items() if p.ndim == 3 and "experts" in name)
        if experts:
            assert 2 * (met - experts) < one.token < 2 * met
        else:
            assert one.token == 2 * met
