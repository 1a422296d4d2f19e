"""Feeding the policy while the base runs: lazily, row by row, exact."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from transformers import Qwen2ForCausalLM

from modeling_ospruner import generation_ospruner
from modeling_ospruner.generation_ospruner import Capture
from modeling_ospruner.policy_ospruner import StoppingPolicy

PADS = (0, 4, 1)
COLUMNS = 30


@pytest.fixture(params=[0, 1, 2])
def policy(request: pytest.FixtureRequest, tiny_base: Qwen2ForCausalLM) -> StoppingPolicy:
    policy = StoppingPolicy.from_base(tiny_base, request.param, tuning="layers")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        torch.nn.init.normal_(policy.head.weight, std=0.2)
    return policy


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask (B, COLUMNS) of left-padded rows."""
    ids = torch.randint(3, 300, (len(PADS), COLUMNS), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[0] * pad + [1] * (COLUMNS - pad) for pad in PADS])
    return ids, mask


def wanted(base: Qwen2ForCausalLM, policy: StoppingPolicy, row: int, columns: int) -> float:
    """A row's probability after so many columns, from one pass over the row alone."""
    ids = texts()[0][row : row + 1, PADS[row] : columns]
    n = len(policy.layers)
    with torch.no_grad():
        output = base(input_ids=ids, output_hidden_states=True)
        entering = output.hidden_states[-1 - n]  # (1, S, H); of n = 0 after the final norm
        logits = policy(entering, torch.arange(ids.shape[1])[None])
    return float(torch.sigmoid(logits[0, -1]))


def pieces(base: Qwen2ForCausalLM, prompt: int = 7) -> Any:
    """Runs the rows side by side, column by column after the prompt; yields the columns so far."""
    ids, mask = texts()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache, begin = None, 0
    for end in range(prompt, COLUMNS + 1):
        with torch.no_grad():
            cache = base(
                input_ids=ids[:, begin:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, begin:end],
                past_key_values=cache,
                use_cache=True,
            ).past_key_values
        begin = end
        yield end


def test_pieces_of_a_batch_equal_one_pass_of_a_row(
    tiny_base: Qwen2ForCausalLM, policy: StoppingPolicy
) -> None:
    asked = {7: [0], 8: [0, 1], 15: [1], 16: [2, 2], 29: [0], COLUMNS: [0, 1, 2]}
    found: dict[tuple[int, int], float] = {}
    with Capture(tiny_base, policy) as capture:
        for columns in pieces(tiny_base):
            found |= {(columns, i): capture.probability(i) for i in asked.get(columns, [])}
    assert len(found) == 9
    for (columns, row), probability in found.items():
        alone = wanted(tiny_base, policy, row, columns)
        assert probability == pytest.approx(alone, abs=1e-5), (columns, row)
    assert max(found.values()) - min(found.values()) > 0.1


@pytest.mark.parametrize("policy", [2], indirect=True)
def test_what_nobody_waits_for_is_forgotten(
    tiny_base: Qwen2ForCausalLM, policy: StoppingPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that is not wanted any more, or lags far behind, holds no hidden states up."""
    with Capture(tiny_base, policy) as capture:
        for columns in pieces(tiny_base):
            capture.probability(0)
            if columns == 10:
                assert sum(chunk.shape[1] for _, chunk in capture._chunks) == 10
                capture.only([0, 1])
                capture.probability(1)
                assert capture._chunks == []
    with Capture(tiny_base, policy) as capture:
        monkeypatch.setattr(generation_ospruner, "_MOST_WAITING", 5)
        for _ in pieces(tiny_base, prompt=5):
            capture.probability(0)
            assert sum(chunk.shape[1] for _, chunk in capture._chunks) <= 11
        last = capture.probability(1)
    assert last == pytest.approx(wanted(tiny_base, policy, 1, COLUMNS), abs=1e-5)


@pytest.mark.parametrize("policy", [2], indirect=True)
def test_the_last_layer_computes_what_is_looked_at(
    tiny_base: Qwen2ForCausalLM, policy: StoppingPolicy
) -> None:
    seen: dict[int, list[int]] = {0: [], 1: []}
    layers: Any = policy.layers
    for i, layer in enumerate(layers):
        layer.mlp.gate_proj.register_forward_pre_hook(
            lambda module, args, i=i: seen[i].append(args[0].shape[1])
        )
    with Capture(tiny_base, policy) as capture:
        for columns in pieces(tiny_base):
            if columns in (8, 20):
                capture.probability(1)
    assert seen == {0: [8 - PADS[1], 12], 1: [1, 1]}
    hidden = torch.randn(1, 6, 32)
    policy(hidden, torch.arange(6)[None])  # outside a capture every position counts
    assert seen[1][-1] == 6


@pytest.mark.parametrize("policy", [2], indirect=True)
def test_other_threads_and_closed_captures_feel_nothing(
    tiny_base: Qwen2ForCausalLM, policy: StoppingPolicy
) -> None:
    ids, _ = texts()
    with Capture(tiny_base, policy) as capture, torch.no_grad():
        tiny_base(input_ids=ids[:1])
        other = threading.Thread(target=lambda: tiny_base(input_ids=ids[:2, :5]))
        other.start()
        other.join()
        assert [chunk.shape for _, chunk in capture._chunks] == [(1, COLUMNS, 32)]
        assert capture.probability(0) == pytest.approx(
            wanted(tiny_base, policy, 0, COLUMNS), abs=1e-5
        )
    hooks = [m._forward_pre_hooks for m in (*tiny_base.modules(), *policy.modules())]
    assert sum(map(len, hooks)) == 1, "only the tail's own, which puts back what enters it"
