"""The losses against their definitions, one trace and step after the other, in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ospruner.eval.replay import stop_weights
from ospruner.train.objective import (
    batch_loss,
    expected_reward,
    last_step_mask,
    log_stop_distribution,
    objective_loss,
    stop_entropy,
)
from ospruner.train.traces import Batch

from ..eval.evaluations import tabled

PRICE = 3e-4


def ragged(rows: int, steps: int, scale: float, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random logits within +-scale, grades, increasing lengths, and a mask of 1..steps steps."""
    g = torch.Generator().manual_seed(seed)
    logits = (2 * torch.rand(rows, steps, generator=g, dtype=torch.float64) - 1) * scale
    correct = torch.rand(rows, steps, generator=g, dtype=torch.float64)
    lengths = torch.randint(1, 40, (rows, steps), generator=g).cumsum(dim=1).double()
    num_steps = torch.randint(1, steps + 1, (rows,), generator=g)
    num_steps[0] = steps
    mask = torch.arange(steps) < num_steps[:, None]
    return logits, correct, lengths, mask


def brute_force(
    logits: Tensor,
    correct: Tensor,
    lengths: Tensor,
    mask: Tensor,
    price: float = PRICE,
    bonus: float = 0.0,
) -> Tensor:
    """(N,) Eq. 1-3 literally, with the bonus: sigmoids and products, differentiable."""
    rewards = []
    for n, steps in enumerate(mask.sum(1).tolist()):
        survival = torch.ones((), dtype=torch.float64)
        reward = 0.0 * logits[n].sum()  # T = 1 depends on no logit
        for i in range(steps):
            pi = torch.sigmoid(logits[n, i]) if i < steps - 1 else torch.ones_like(survival)
            reward = reward + survival * pi * (correct[n, i] - price * lengths[n, i])
            if bonus:
                reward = reward - bonus * survival * pi * (survival * pi).log()
            survival = survival * (1 - pi)
        rewards.append(reward)
    return torch.stack(rewards)


@given(st.integers(1, 30), st.sampled_from([0.5, 5.0, 50.0, 300.0]), st.integers(0, 10**6))
@settings(deadline=None)
def test_entropy_is_that_of_the_choices_on_the_way(steps: int, scale: float, seed: int) -> None:
    logits, _, _, mask = ragged(4, steps, scale, seed)
    entropy = stop_entropy(logits.requires_grad_(), mask)
    for n, row in enumerate(entropy):
        expected, survival = 0.0, 1.0
        for i in range(int(mask[n].sum()) - 1):
            p = torch.sigmoid(logits[n, i]).item()
            q = torch.sigmoid(-logits[n, i]).item()
            expected -= survival * (p * math.log(p) + q * math.log(q))
            survival *= q
        assert row.item() == pytest.approx(expected, abs=1e-9)
    (gradient,) = torch.autograd.grad(entropy.sum(), logits)  # also where no probability is left
    assert gradient.isfinite().all()
    assert (gradient[~mask | last_step_mask(mask)] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("rows", "steps", "scale", "shift"),
    [
        (16, 12, 3.0, 0.0),
        (16, 12, 50.0, 0.0),
        (4, 1, 50.0, 0.0),
        (2, 1000, 50.0, 0.0),
        (3, 1000, 0.5, -5.0),  # stops with .7 % at each step: mass on all, not only on the first
    ],
)
def test_reward_and_gradient_equal_brute_force(
    rows: int, steps: int, scale: float, shift: float, dtype: torch.dtype
) -> None:
    logits, correct, lengths, mask = ragged(rows, steps, scale, seed=steps)
    exact = (logits + shift).requires_grad_()
    expected = brute_force(exact, correct, lengths, mask)
    x = exact.detach().to(dtype).requires_grad_()
    reward = expected_reward(x, correct.to(dtype), lengths, PRICE, mask)
    (gradient,) = torch.autograd.grad(reward.sum(), x)
    (wanted,) = torch.autograd.grad(expected.sum(), exact)
    # Rewards reach -PRICE * 20,000 = -6 at T = 1000: float32 rounds there.
    tolerance = 1e-11 if dtype == torch.float64 else 5e-6
    torch.testing.assert_close(reward.double(), expected.detach(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradient.double(), wanted, rtol=10 * tolerance, atol=tolerance)
    assert shift == 0 or float(gradient[0, -2].abs()) > 0


traces = st.integers(1, 40).flatmap(
    lambda steps: st.tuples(
        st.lists(st.floats(-50, 50), min_size=steps, max_size=steps),
        st.lists(st.floats(0, 1), min_size=steps, max_size=steps),
        st.integers(1, steps),
    )
)


@given(traces, st.floats(0, 1e-2))
@settings(deadline=None)
def test_distribution_properties(trace: tuple[list[float], list[float], int], price: float) -> None:
    values, grades, real = trace
    logits = torch.tensor([values], dtype=torch.float64)
    correct = torch.tensor([grades], dtype=torch.float64)
    lengths = 7 * torch.arange(1, len(values) + 1, dtype=torch.float64)[None]
    mask = torch.arange(len(values))[None] < real
    distribution = log_stop_distribution(logits, mask).exp()
    assert float(distribution.sum()) == pytest.approx(1.0, abs=1e-12)
    assert (distribution[~mask] == 0).all()
    rewards = (correct - price * lengths)[mask]
    reward = float(expected_reward(logits, correct, lengths, price, mask))
    assert float(rewards.min()) - 1e-12 <= reward <= float(rewards.max()) + 1e-12
    weights = stop_weights(tabled(mask.numpy()), torch.sigmoid(logits).numpy())
    np.testing.assert_allclose(weights, distribution, rtol=1e-9, atol=1e-12)
    # The last step's logit and padding have no effect, whatever stands there.
    unread = ~mask | last_step_mask(mask)
    poisoned = logits.masked_fill(unread, math.nan).requires_grad_()
    again = expected_reward(poisoned, correct.masked_fill(~mask, math.nan), lengths, price, mask)
    assert again.item() == reward
    (gradient,) = torch.autograd.grad(again.sum(), poisoned)
    assert (gradient[unread] == 0).all()
    assert not gradient.isnan().any()
    # Half precision is computed in float32.
    half = logits.bfloat16()
    rough = expected_reward(half, correct, lengths, price, mask)
    assert rough.dtype == torch.float32
    exact = expected_reward(half.double(), correct, lengths, price, mask)
    torch.testing.assert_close(rough.double(), exact, rtol=1e-5, atol=1e-6)


# The loop's losses, of batches.


@pytest.fixture
def batch() -> Batch:
    _, correct, lengths, mask = ragged(3, 5, 1.0, seed=1)
    draws = torch.Generator().manual_seed(0)
    final = torch.randint(0, 2, mask.shape, generator=draws).double()
    positions = torch.zeros(mask.shape, dtype=torch.int64)
    return Batch(np.arange(3), positions, lengths, correct.round(), final, mask)


@pytest.mark.parametrize("bonus", [0.0, 0.03])
def test_the_loss_is_the_mean_reward_and_its_gradient(batch: Batch, bonus: float) -> None:
    logits = ragged(3, 5, 3.0, seed=4)[0].requires_grad_()
    labels = (batch.correct, batch.lengths, batch.mask)
    found = batch_loss("os-pruner", logits, batch, 3e-3, bonus)
    wanted = -brute_force(logits, *labels, 3e-3, bonus).mean()
    assert found.item() == pytest.approx(wanted.item(), abs=1e-12)
    gradients = (torch.autograd.grad(loss, logits)[0] for loss in (found, wanted))
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ["probe", "convergence", "final-answer"])
def test_baselines_classify_every_step(batch: Batch, method: str) -> None:
    logits, losses = ragged(3, 5, 3.0, seed=4)[0], []
    for n, steps in enumerate(batch.mask.sum(1).tolist()):
        final = batch.matches_final[n, :steps].tolist()
        for i in range(steps):
            right = float(batch.correct[n, i])
            y = {"probe": right, "convergence": min(final[i:]), "final-answer": final[i]}[method]
            p = 1 / (1 + math.exp(-float(logits[n, i])))
            losses.append(-y * math.log(p) - (1 - y) * math.log(1 - p))
    assert batch_loss(method, logits, batch, 0.0).item() == pytest.approx(np.mean(losses))


def test_the_loss_is_the_mean_over_prices_and_at_0_accuracy_alone(batch: Batch) -> None:
    logits = torch.randn(3, 3, 5, generator=torch.Generator().manual_seed(0)).double()
    prices = (0.0, 1e-3, 2e-2)
    labels = (batch.correct, batch.lengths, batch.mask)
    alone = [
        -brute_force(logits[j], *labels, price, 0.01 if price else 0.0).mean().item()
        for j, price in enumerate(prices)
    ]
    found = objective_loss(logits, batch.correct, batch.lengths, prices, batch.mask, 0.01)
    assert found.item() == pytest.approx(sum(alone) / 3, abs=1e-12)
    with pytest.raises(ValueError, match="zip"):
        objective_loss(logits, batch.correct, batch.lengths, prices[:2], batch.mask)
