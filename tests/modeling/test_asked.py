"""Asking the policy while the base runs: lazily, row by row, exact."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import Qwen2ForCausalLM

from modeling_ospruner.generation_ospruner import Asked
from modeling_ospruner.policy_ospruner import StoppingPolicy
from ospruner.train.untrained import fresh_layers

PADS = (0, 4, 1)
COLUMNS = 30
IDS = torch.randint(3, 300, (len(PADS), COLUMNS), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=[(0, "layers"), (1, "layers"), (2, "layers"), (2, "queries")])
def policy(request: pytest.FixtureRequest, tiny_base: Qwen2ForCausalLM) -> StoppingPolicy:
    n, tuning = request.param
    policy = fresh_layers(tiny_base, n, tuning)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        torch.nn.init.normal_(policy.head.weight, std=0.2)
    return policy


@torch.no_grad()
def wanted(base: Qwen2ForCausalLM, policy: StoppingPolicy, row: int, columns: int) -> float:
    """A row's probability after so many columns, from one pass over the row alone.

    Copies that nobody has trained give the base's last hidden states.
    """
    last = base.get_decoder()(input_ids=IDS[row : row + 1, PADS[row] : columns]).last_hidden_state
    return float(torch.sigmoid(policy.head(last[0, -1])))


@torch.no_grad()
def pieces(base: Qwen2ForCausalLM, asked: Any, prompt: int = 7) -> Iterator[int]:
    """Runs the rows side by side, column by column after the prompt; yields the columns so far."""
    mask = torch.tensor([[0] * pad + [1] * (COLUMNS - pad) for pad in PADS])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache, begin = None, 0
    for end in range(prompt, COLUMNS + 1):
        cache = base(
            input_ids=IDS[:, begin:end],
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
    asks = {7: [0], 8: [0, 1], 15: [1], 16: [2], 29: [0], COLUMNS: [0, 1, 2]}
    found: dict[tuple[int, int], float] = {}
    with Asked(tiny_base, policy, None) as asked:
        for columns in pieces(tiny_base, asked):
            asked.keep([0, 1, 2], torch.empty(0))
            if rows := asks.get(columns):
                said = asked.ask(rows, [], IDS)
                found |= {(columns, i): one.signal for i, one in zip(rows, said, strict=True)}  # type: ignore[misc]
    assert len(found) == 9
    for (columns, row), probability in found.items():
        alone = wanted(tiny_base, policy, row, columns)
        assert probability == pytest.approx(alone, abs=1e-5), (columns, row)
    assert max(found.values()) - min(found.values()) > 0.1


@pytest.mark.parametrize("policy", [(2, "layers")], indirect=True)
def test_what_nobody_waits_for_is_forgotten(
    tiny_base: Qwen2ForCausalLM, policy: StoppingPolicy
) -> None:
    with Asked(tiny_base, policy, None) as asked:
        for columns in pieces(tiny_base, asked):
            asked.keep([0, 1] if columns < 20 else [1], torch.empty(0))
            held = sum(chunk.shape[1] for chunk in asked._reader.chunks)
            assert held == columns if columns < 11 else held <= columns - 10
            if columns in (10, 20):
                asked.ask([0, 1] if columns == 10 else [1], [], IDS)
        asked.keep([], torch.empty(0))
        assert asked._reader.chunks == []


@pytest.mark.parametrize("policy", [(2, "layers"), (2, "queries")], indirect=True)
def test_other_threads_and_closed_contexts_feel_nothing(
    tiny_base: Qwen2ForCausalLM, policy: StoppingPolicy
) -> None:
    before = sum(len(m._forward_pre_hooks) for m in (*tiny_base.modules(), *policy.modules()))
    with Asked(tiny_base, policy, None) as asked, torch.no_grad():
        tiny_base(input_ids=IDS[:1])
        other = threading.Thread(target=lambda: tiny_base(input_ids=IDS[:2, :5]))
        other.start()
        other.join()
        asked.keep([0], torch.empty(0))
        (said,) = asked.ask([0], [], IDS)
        assert said.signal == pytest.approx(wanted(tiny_base, policy, 0, COLUMNS), abs=1e-5)
    after = sum(len(m._forward_pre_hooks) for m in (*tiny_base.modules(), *policy.modules()))
    assert after == before
