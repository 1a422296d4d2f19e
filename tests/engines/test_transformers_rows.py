"""What the transformers engine decodes with: choices, attention, batches of rows, memory."""

import os
import re
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ospruner.engines.interface import SamplingSettings
from ospruner.engines.transformers import choosing, memory
from ospruner.engines.transformers.batch import SlotLayer
from ospruner.engines.transformers.choosing import choose

from .conftest import Tiny


def test_choose_follows_the_warped_distribution() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 200) * 2
    settings = SamplingSettings(temperature=0.7, top_p=0.9, top_k=50)
    warped = torch.softmax(logits[0] / 0.7, -1)
    warped[warped < warped.topk(50).values[-1]] = 0
    warped /= warped.sum()
    values, order = warped.sort(descending=True)
    warped[order[(values.cumsum(-1) - values) >= 0.9]] = 0
    warped /= warped.sum()
    n = 40_000
    draws = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    chosen, _ = choose(logits.expand(n, -1), draws, settings)
    frequencies = torch.bincount(chosen, minlength=200) / n
    assert float((frequencies - warped).abs().max()) < 2e-4
    # The first candidates do not hold the nucleus: all are sorted.
    flat = torch.zeros(1, 1000)
    everywhere, _ = choose(flat.expand(n, -1), draws, SamplingSettings(temperature=1, top_p=0.9))
    assert 890 <= len(everywhere.unique()) <= 910


@pytest.mark.parametrize(
    "settings",
    [
        SamplingSettings(temperature=0.6, top_p=0.95),
        SamplingSettings(temperature=1, top_p=1),
        SamplingSettings(temperature=0.8, top_p=0.9, top_k=5),
        SamplingSettings(temperature=1, top_p=1, top_k=3),
        SamplingSettings(temperature=0),
    ],
)
def test_a_choice_that_noise_turned_was_called_close(settings: SamplingSettings) -> None:
    torch.manual_seed(0)
    n, noise = 10_000, 1e-3
    logits = torch.randn(n, 100) * 3
    logits[: n // 2].copy_((logits[: n // 2] * 4).round() / 4)  # exact ties, too
    directions = torch.rand(n, 100) * 2 - 1
    # The worst that noise can do: all that is likelier than something up, all else down.
    split = logits.gather(-1, torch.randint(100, (n, 1)))
    directions[::2] = torch.where(logits >= split, 1.0, -1.0)[::2]
    directions[::4] *= -1
    moved = logits + directions * noise * logits.abs().amax(-1, keepdim=True)
    draws = torch.rand(n, dtype=torch.float64)
    tokens, close = choose(logits, draws, settings, noise)
    others, also_close = choose(moved, draws, settings, noise)
    turned = tokens != others
    assert int(turned.sum()) > 10
    # Twice the noise between the two: what one does not call close the other may not either.
    assert bool(close[turned].all())
    assert bool(also_close[turned].all())
    assert float(close[n // 2 :].float().mean()) < 0.4  # of those without exact ties


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("qwen3_moe", {"num_experts": 4}, r"\(qwen3_moe\) routes tokens to experts"),
        ("qwen3_5_text", {}, r"\(qwen3_5_text\) has recurrent states"),
        ("lfm2", {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, None),
        ("gemma2", {}, None),
    ],
)
def test_bases_of_unbounded_roundings_are_named(name: str, fields: Any, said: str | None) -> None:
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(name, **fields), dtype=torch.float32
        )
    found = choosing.batch_effects(base)
    assert found is None if said is None else re.search(said, str(found))


def test_free_memory_of_this_machine() -> None:
    free = memory.free_bytes(torch.device("cpu"))
    assert free is not None
    assert 10**6 < free < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert memory.free_bytes(torch.device("meta")) is None


def test_grouped_attention_in_half_precision(tiny: Tiny) -> None:
    """No worse than sdpa, against float32."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, heads, length, 8) for heads, length in ((4, 1), (2, 50), (2, 50)))
    mask = torch.zeros(3, 1, 1, 50).masked_fill(torch.arange(50) < 9, -1e9)
    layer = tiny.base("qwen2").get_decoder().layers[0].self_attn
    exact = sdpa_attention_forward(layer, q, k, v, mask)[0]
    q, k, v, mask = (states.bfloat16() for states in (q, k, v, mask))
    errors = [
        float((attend(layer, q, k, v, mask)[0].float() - exact).abs().max())
        for attend in (sdpa_attention_forward, AttentionInterface()["ospruner_grouped"])
    ]
    assert 0 < errors[1] <= 1.5 * errors[0]


def test_slots_on_several_devices() -> None:
    """Fake tensors refuse what mixes devices, as GPUs do, and hold no values."""
    with FakeTensorMode():
        for device in (torch.device("cpu"), torch.device("meta")):
            layer, other = SlotLayer(), SlotLayer()
            for one, rows_, columns in ((layer, 4, 9), (other, 2, 5)):
                states = torch.zeros(rows_, 2, columns, 4, device=device)
                one.update(states, states)
            some = torch.tensor([3, 1, 0])
            pieces = [(layer, some, slice(2, 9)), (other, torch.arange(2), slice(5))]
            taken = SlotLayer.joined(pieces, 8)
            for buffer in taken.buffers:
                assert (buffer.device, buffer.shape[:2]) == (device, (5, 2))
