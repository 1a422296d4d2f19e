"""The loop's losses: values by hand, gradients against finite differences in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ospruner.train.objective import batch_loss, objective_loss
from ospruner.train.traces import Batch

NUM_STEPS = (5, 1, 3)


def make_batch(seed: int = 0) -> Batch:
    draws = torch.Generator().manual_seed(seed)
    N, T = len(NUM_STEPS), max(NUM_STEPS)
    mask = torch.arange(T) < torch.tensor(NUM_STEPS)[:, None]
    lengths = torch.randint(5, 40, (N, T), generator=draws).cumsum(1).double()
    return Batch(
        rows=np.arange(N),
        positions=torch.zeros(N, T, dtype=torch.int64),
        lengths=lengths,
        correct=torch.randint(0, 2, (N, T), generator=draws).double(),
        matches_final=torch.randint(0, 2, (N, T), generator=draws).double(),
        mask=mask,
    )


def by_hand(method: str, logits: torch.Tensor, batch: Batch, penalty: float, bonus: float) -> float:
    """The loss from its definition, one trace and step after the other."""
    reward, entropy, steps = 0.0, 0.0, 0
    for n, T in enumerate(NUM_STEPS):
        survival = 1.0
        for i in range(T):
            p = 1 / (1 + math.exp(-float(logits[n, i])))
            stop = 1.0 if i == T - 1 else p
            gain = float(batch.correct[n, i]) - penalty * float(batch.lengths[n, i])
            reward += survival * stop * (gain - bonus * math.log(survival * stop))
            survival *= 1 - stop
            final = [float(value) for value in batch.matches_final[n, :T]]
            y = {
                "os-pruner": 0.0,
                "probe": float(batch.correct[n, i]),
                "convergence": min(final[i:]),
                "final-answer": final[i],
            }[method]
            entropy -= y * math.log(p) + (1 - y) * math.log(1 - p)
            steps += 1
    return -reward / len(NUM_STEPS) if method == "os-pruner" else entropy / steps


@pytest.mark.parametrize(
    ("method", "bonus"),
    [
        ("os-pruner", 0.0),
        ("os-pruner", 0.03),
        ("probe", 0.0),
        ("convergence", 0.0),
        ("final-answer", 0.0),
    ],
)
def test_batch_loss_and_its_gradient(method: str, bonus: float) -> None:
    batch, penalty = make_batch(), 3e-3
    draws = torch.Generator().manual_seed(1)
    logits = torch.randn(batch.mask.shape, generator=draws, dtype=torch.float64) * 2
    logits.requires_grad_(True)
    loss = batch_loss(method, logits, batch, penalty, bonus)
    expected = by_hand(method, logits.detach(), batch, penalty, bonus)
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    loss.backward()
    assert logits.grad is not None
    step = 1e-6
    for n, i in torch.cartesian_prod(*map(torch.arange, logits.shape)).tolist():
        moved = logits.detach().clone()
        moved[n, i] += step
        above = batch_loss(method, moved, batch, penalty, bonus).item()
        moved[n, i] -= 2 * step
        below = batch_loss(method, moved, batch, penalty, bonus).item()
        assert logits.grad[n, i].item() == pytest.approx((above - below) / (2 * step), abs=1e-8)
    assert (logits.grad[~batch.mask] == 0).all()
    assert (logits.grad[batch.mask] != 0).sum() >= 6


def test_the_loss_is_the_mean_over_prices_and_at_0_accuracy_alone() -> None:
    logits = torch.randn(3, 3, 5, generator=torch.Generator().manual_seed(0)).double()
    batch, prices = make_batch(), (0.0, 1e-3, 2e-2)
    alone = [
        by_hand("os-pruner", logits[j], batch, price, 0.01 if price else 0.0)
        for j, price in enumerate(prices)
    ]
    labels = (batch.correct, batch.lengths)
    found = objective_loss(logits, *labels, prices, batch.mask, 0.01)
    assert found.item() == pytest.approx(sum(alone) / 3, abs=1e-12)
    with pytest.raises(ValueError, match="zip"):
        objective_loss(logits, *labels, prices[:2], batch.mask)
