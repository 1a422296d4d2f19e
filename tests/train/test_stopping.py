from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ospruner.eval.replay import stop_weights
from ospruner.train.objective import (
    expected_reward,
    last_step_mask,
    log_stop_distribution,
    stop_entropy,
)

from ..eval.evaluations import tabled

PENALTY = 3e-4


def ragged(
    rows: int, steps: int, scale: float, seed: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random logits within +-scale, grades, increasing lengths, and a mask of 1..steps steps."""
    g = torch.Generator().manual_seed(seed)
    logits = (2 * torch.rand(rows, steps, generator=g, dtype=torch.float64) - 1) * scale
    correct = torch.rand(rows, steps, generator=g, dtype=torch.float64)
    lengths = torch.randint(1, 40, (rows, steps), generator=g).cumsum(dim=1).double()
    num_steps = torch.randint(1, steps + 1, (rows,), generator=g)
    num_steps[0] = steps
    mask = torch.arange(steps) < num_steps[:, None]
    return logits.to(dtype), correct.to(dtype), lengths, mask


def brute_force(logits: Tensor, correct: Tensor, lengths: Tensor, mask: Tensor) -> Tensor:
    """Eq. 1-3 literally: Python loops, sigmoids and products, float64, differentiable."""
    rewards = []
    for n in range(len(logits)):
        steps = int(mask[n].sum())
        survival = torch.ones((), dtype=torch.float64)
        reward = torch.zeros((), dtype=torch.float64)
        for i in range(steps):
            pi = torch.sigmoid(logits[n, i]) if i < steps - 1 else torch.ones_like(survival)
            reward = reward + survival * pi * (correct[n, i] - PENALTY * lengths[n, i])
            survival = survival * (1 - pi)
        rewards.append(reward + 0.0 * logits[n].sum())  # T = 1 depends on no logit
    return torch.stack(rewards)


@given(st.integers(1, 30), st.sampled_from([0.5, 5.0, 50.0]), st.integers(0, 10**6))
@settings(deadline=None)
def test_entropy_is_that_of_the_choices_on_the_way(steps: int, scale: float, seed: int) -> None:
    logits, _, _, mask = ragged(4, steps, scale, seed)
    for n, row in enumerate(stop_entropy(logits, mask)):
        expected, survival = 0.0, 1.0
        for i in range(int(mask[n].sum()) - 1):
            p = torch.sigmoid(logits[n, i]).item()
            q = torch.sigmoid(-logits[n, i]).item()
            expected -= survival * (p * math.log(p) + q * math.log(q))
            survival *= q
        assert row.item() == pytest.approx(expected, abs=1e-9)


def test_entropy_has_a_finite_gradient_where_no_probability_is_left() -> None:
    logits = torch.tensor([[200.0, 5.0, -300.0, 1.0], [-300.0, 200.0, 0.0, 9.0]])
    logits.requires_grad_(True)
    mask = torch.tensor([[True, True, True, True], [True, True, True, False]])
    entropy = stop_entropy(logits, mask)
    entropy.sum().backward()
    assert entropy.tolist() == [0.0, 0.0]
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[~mask] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("rows", "steps", "scale"), [(16, 12, 3.0), (16, 12, 50.0), (4, 1, 50.0), (2, 1000, 50.0)]
)
def test_reward_and_gradient_equal_brute_force(
    rows: int, steps: int, scale: float, dtype: torch.dtype
) -> None:
    logits, correct, lengths, mask = ragged(rows, steps, scale, seed=steps)
    expected_logits = logits.clone().requires_grad_()
    expected = brute_force(expected_logits, correct, lengths, mask)
    expected.sum().backward()
    assert expected_logits.grad is not None

    x = logits.to(dtype).requires_grad_()
    reward = expected_reward(x, correct.to(dtype), lengths, PENALTY, mask)
    reward.sum().backward()
    assert x.grad is not None
    # Rewards reach -PENALTY * 20,000 = -6 at T = 1000: float32 rounds there.
    tolerance = 1e-11 if dtype == torch.float64 else 5e-6
    torch.testing.assert_close(reward.double(), expected.detach(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        x.grad.double(), expected_logits.grad, rtol=10 * tolerance, atol=tolerance
    )


def test_long_trace_of_small_probabilities_equals_brute_force() -> None:
    """T = 1000 with a stop probability of .7 % each: mass on every step, not only on the first."""
    logits, correct, lengths, mask = ragged(3, 1000, 0.5, seed=7)
    logits = logits - 5.0
    x, y = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    reward = expected_reward(x, correct, lengths, PENALTY, mask)
    expected = brute_force(y, correct, lengths, mask)
    torch.testing.assert_close(reward, expected, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(r.sum(), v)[0] for r, v in ((reward, x), (expected, y))]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-13)
    assert float(grads[0].abs()[0, -2]) > 0


def test_gradcheck() -> None:
    logits, correct, lengths, mask = ragged(3, 5, 2.0, seed=1)
    assert torch.autograd.gradcheck(
        lambda x: expected_reward(x, correct, lengths, PENALTY, mask), logits.requires_grad_()
    )


def test_last_step_and_padding_have_no_effect() -> None:
    logits, correct, lengths, mask = ragged(6, 9, 4.0, seed=2)
    before = expected_reward(logits, correct, lengths, PENALTY, mask)
    unread = ~mask | last_step_mask(mask)
    poisoned = logits.masked_fill(unread, math.nan).requires_grad_()
    after = expected_reward(poisoned, correct.masked_fill(~mask, math.nan), lengths, PENALTY, mask)
    assert torch.equal(before, after)
    (grad,) = torch.autograd.grad(after.sum(), poisoned)
    assert not grad.isnan().any()
    assert (grad[unread] == 0).all()


def test_half_precision_is_computed_in_float32() -> None:
    logits, correct, lengths, mask = ragged(4, 200, 4.0, seed=3)
    half = logits.bfloat16()
    reward = expected_reward(half, correct, lengths, PENALTY, mask)
    assert reward.dtype == torch.float32
    exact = expected_reward(half.double(), correct, lengths, PENALTY, mask)
    torch.testing.assert_close(reward.double(), exact, rtol=1e-5, atol=1e-6)


traces = st.integers(1, 40).flatmap(
    lambda steps: st.tuples(
        st.lists(st.floats(-50, 50), min_size=steps, max_size=steps),
        st.lists(st.floats(0, 1), min_size=steps, max_size=steps),
        st.integers(1, steps),
    )
)


@given(traces, st.floats(0, 1e-2))
@settings(deadline=None)
def test_distribution_and_reward_properties(
    trace: tuple[list[float], list[float], int], penalty: float
) -> None:
    values, grades, real = trace
    logits = torch.tensor([values], dtype=torch.float64)
    correct = torch.tensor([grades], dtype=torch.float64)
    lengths = 7 * torch.arange(1, len(values) + 1, dtype=torch.float64)[None]
    mask = torch.arange(len(values))[None] < real
    distribution = log_stop_distribution(logits, mask).exp()
    assert float(distribution.sum()) == pytest.approx(1.0, abs=1e-12)
    assert (distribution[~mask] == 0).all()
    rewards = (correct - penalty * lengths)[mask]
    reward = float(expected_reward(logits, correct, lengths, penalty, mask))
    assert float(rewards.min()) - 1e-12 <= reward <= float(rewards.max()) + 1e-12
    weights = stop_weights(tabled(mask.numpy()), torch.sigmoid(logits).numpy())
    np.testing.assert_allclose(weights, distribution, rtol=1e-9, atol=1e-12)


def test_errors_name_the_argument() -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    x = torch.zeros(1, 2)
    with pytest.raises(ValueError, match=r"price is -0\.1"):
        expected_reward(x, x, x, -0.1, mask)
    with pytest.raises(ValueError, match="price is nan"):
        expected_reward(x, x, x, math.nan, mask)
    with pytest.raises(ValueError, match=r"correct has shape \(1, 3\)"):
        expected_reward(x, torch.zeros(1, 3), x, 0.0, mask)
    with pytest.raises(TypeError, match="mask has dtype"):
        log_stop_distribution(x, mask.long())
    with pytest.raises(ValueError, match="after padding"):
        log_stop_distribution(torch.zeros(1, 3), torch.tensor([[True, False, True]]))
    with pytest.raises(ValueError, match="without steps"):
        log_stop_distribution(x, torch.zeros(1, 2, dtype=torch.bool))
