"""The losses: OS-Pruner's negative expected reward, and the baselines' classification.

R = sum_i [prod_{j<i} (1 - pi_j)] pi_i (A_i - lambda L_i) is differentiable in the stop logits, and
A_i, L_i are labels (the paper's Eq. 3-4): no trace is sampled while training.

An entropy bonus adds alpha H(tau). Gradients fade with pi (1 - pi): once most choices are all but
certain, runs stay with what they happened to learn first; the bonus keeps those open on which
little depends (maximum-entropy policy gradients; docs/training.md tells what it does).

The baselines classify prefixes, and compare the probability with a threshold when generating: is
the answer forced here right, or (answer convergence) the trace's final answer (the paper's section
on baselines)?
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ospruner.eval.stopping import expected_reward, stop_entropy
from ospruner.eval.table import classifier_targets

from .traces import Batch

__all__ = ["batch_loss", "loss_weight", "objective_loss"]


def objective_loss(
    logits: Tensor,
    correct: Tensor,
    lengths: Tensor,
    price: float | Sequence[float],
    mask: Tensor,
    entropy_bonus: float = 0.0,
) -> Tensor:
    """-(1/N) sum_n (R_n + alpha H_n) over a batch of N traces; of J prices the plain mean.

    Among several prices 0 has no bonus: it would pay for stops, and nothing there pays for going on
    where the answer stands already. The objective there is the accuracy alone.

    Args:
        logits: (N, T) stop logits at step ends; (J, N, T) at each of J prices.
        correct: (N, T) A_i.
        lengths: (N, T) L_i in tokens.
        price: of a token, >= 0, or J of them.
        mask: (N, T) bool, true on real steps.
        entropy_bonus: alpha >= 0, reward for a nat of the stopping time's entropy.

    Returns:
        A scalar.

    Raises:
        TypeError, ValueError: see `expected_reward`; or there are not J prices.
    """
    if isinstance(price, Sequence):
        losses = [
            objective_loss(of_price, correct, lengths, one, mask, entropy_bonus if one else 0.0)
            for of_price, one in zip(logits, price, strict=True)
        ]
        return torch.stack(losses).mean()
    gain = expected_reward(logits, correct, lengths, price, mask)  # (N,)
    if entropy_bonus:
        gain = gain + entropy_bonus * stop_entropy(logits, mask)
    return -gain.mean()


def batch_loss(
    method: str,
    logits: Tensor,
    batch: Batch,
    price: float | Sequence[float],
    entropy_bonus: float = 0.0,
) -> Tensor:
    """The loss of one batch: `objective_loss`, or the mean binary cross-entropy over its steps.

    Args:
        method: of `OSPrunerConfig`.
        logits: (B, T) stop logits at step ends, or (J, B, T) at each of J prices.
        batch: the labels.
        price: of a token, or J of them; only "os-pruner" has one.
        entropy_bonus: of the stopping time, in reward a nat; only "os-pruner" has one.
    """
    mask, correct, lengths = (
        one.to(logits.device) for one in (batch.mask, batch.correct, batch.lengths)
    )
    if method == "os-pruner":
        return objective_loss(logits, correct, lengths, price, mask, entropy_bonus)
    labels = (batch.correct.numpy(), batch.matches_final.numpy(), batch.mask.numpy())
    targets = torch.from_numpy(classifier_targets(method, *labels)).to(logits)  # (B, T)
    return F.binary_cross_entropy_with_logits(logits[mask], targets[mask])


def loss_weight(method: str, part: Batch, batch: Batch) -> float:
    """What the loss of a part of a batch counts in that of the whole, both means.

    Means over traces for "os-pruner", over steps for the baselines.
    """
    if method == "os-pruner":
        return len(part.mask) / len(batch.mask)
    return float(part.mask.sum() / batch.mask.sum())
