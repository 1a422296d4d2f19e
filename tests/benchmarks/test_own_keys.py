"""The study's forms with keys and values of their own: what they see, and what is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import Qwen2ForCausalLM

from modeling_ospruner.policy_ospruner import LayerKeys, Reader, StoppingPolicy, TrunkDone

FORMS = ("queries, own keys at step ends", "queries, own projections")
ENDS = torch.tensor([[3, 7, 11], [4, 9, 0]])  # the second row has two steps


@pytest.fixture
def own_keys(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("benchmarks/own_keys.py")


def read(base: Qwen2ForCausalLM, ids: torch.Tensor) -> tuple[torch.Tensor, Sequence[LayerKeys]]:
    """States at the step ends, (B, T, H), and what the policy reads of all tokens."""
    with torch.no_grad(), Reader(base, 2, queries=True, stop_there=True) as reader:
        with suppress(TrunkDone):
            base.model(input_ids=ids, use_cache=False)
        hidden, keys = reader.hidden, reader.keys
    return hidden.gather(1, ENDS[..., None].expand(-1, -1, hidden.shape[-1])), keys


def own(layer: Any) -> Any:
    """A copy's attention."""
    return layer.self_attn


def trained_a_little(base: Qwen2ForCausalLM) -> StoppingPolicy:
    """A fresh policy whose key projections have moved; `from_base` checks it untrained."""
    policy = StoppingPolicy.from_base(base, 2, "queries")
    torch.nn.init.normal_(policy.head.weight)
    with torch.no_grad():
        for layer in policy.layers:
            own(layer).k_proj.weight.mul_(-1.5)
    return policy


@pytest.mark.parametrize("form", FORMS)
def test_projections_are_trained_and_later_text_is_not_seen(
    own_keys: ModuleType, tiny_base: Qwen2ForCausalLM, form: str
) -> None:
    ids = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[:, 8] += 1
    with own_keys.OWN_KEYS[form]():
        policy = trained_a_little(tiny_base)
        hidden, keys = read(tiny_base, ids)
        said = policy(hidden, ENDS, keys=keys, columns=ENDS)
        said[:, :2].sum().backward()
        first = own(policy.layers[0])
        assert first.k_proj.weight.grad.abs().max() > 0
        assert first.v_proj.weight.grad.abs().max() > 0
        hidden, keys = read(tiny_base, changed)
        other = policy(hidden, ENDS, keys=keys, columns=ENDS)
    torch.testing.assert_close(other[0, :2], said[0, :2])
    torch.testing.assert_close(other[1, 0], said[1, 0])
    assert (other[0, 2] - said[0, 2]).abs() > 1e-4
    assert (other[1, 1] - said[1, 1]).abs() > 1e-4


def test_own_keys_stand_at_step_ends_alone(own_keys: ModuleType) -> None:
    known = [LayerKeys(torch.zeros(2, 1, 12, 4), torch.zeros(2, 1, 12, 4))]
    own = torch.ones(2, 1, 3, 4)
    keys, values = own_keys._OwnAtStepEnds(known, ENDS).update(own, 2 * own, 0)
    assert keys[:, 0, :, 0].nonzero().tolist() == [[0, 3], [0, 7], [0, 11], [1, 4], [1, 9]]
    torch.testing.assert_close(values, 2 * keys)


def test_outside_them_a_policy_has_no_keys(
    own_keys: ModuleType, tiny_base: Qwen2ForCausalLM
) -> None:
    for form in FORMS:
        with own_keys.OWN_KEYS[form]():
            pass
    policy = StoppingPolicy.from_base(tiny_base, 2, "queries")
    assert not [name for name in policy.state_dict() if "k_proj" in name]
