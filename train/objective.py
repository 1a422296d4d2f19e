"""The losses: OS-Pruner's negative expected reward, and the baselines' classification.

A policy that stops at step i with probability pi_i, given that it got there, stops at step i with

    P(tau = i) = [prod_{j<i} (1 - pi_j)] pi_i,      pi_T := 1 (the natural end is a forced stop),

and earns R = sum_i P(tau = i) (A_i - lambda L_i), which is differentiable in the stop logits; A_i,
L_i are labels (the paper's Eq. 1-4): no trace is sampled while training. Products of sigmoids are
taken as sums of logsigmoids, so that logits of +-50 and traces of 1,000 steps lose nothing. Every
tensor is padded to T steps. As `TraceTable` makes them, nothing is checked here: each look at a
mask's values would make a GPU wait. Everywhere

    logits   (N, T) stop logits at step ends
    correct  (N, T) A_i in [0, 1], the correctness of the answer forced at each step
    lengths  (N, T) L_i, thinking tokens through each step
    mask     (N, T) bool, true on real steps, which come first in each row; each row has one
    price    of a token >= 0, reward lost per thinking token

An entropy bonus adds alpha H(tau). Gradients fade with pi (1 - pi): once most choices are all but
certain, runs stay with what they happened to learn first; the bonus keeps those open on which
little depends (maximum-entropy policy gradients; docs/training.md tells what it does).

The baselines classify prefixes, and compare the probability with a threshold when generating: is
the answer forced here right, or (answer convergence) the trace's final answer (the paper's section
on baselines)?
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from ospruner.eval.table import BoolArray

from .traces import Batch


def last_step_mask(mask: Tensor) -> Tensor:
    """(N, T) bool: true once a row, on the last real step, where stopping is forced."""
    return mask & ~F.pad(mask[:, 1:], (0, 1))


def log_stop_distribution(logits: Tensor, mask: Tensor) -> Tensor:
    """Log-probability that the policy stops at each step.

    log P(tau = i) = sum_{j<i} log(1 - pi_j) + log pi_i with pi = sigmoid(logits), and log pi_T = 0.
    Half precision is computed in float32. Logits of the last step and of padding have no effect and
    receive no gradient, whatever their value.

    Returns:
        (N, T) log-probabilities, -inf on padding; `exp` of each row sums to one.
    """
    last = last_step_mask(mask)  # (N, T)
    free = mask & ~last  # steps where the policy has a choice
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    x = torch.where(free, logits, torch.zeros_like(logits))  # (N, T)
    log_go = torch.where(free, F.logsigmoid(-x), torch.zeros_like(x))
    log_pi = torch.where(free, F.logsigmoid(x), torch.zeros_like(x))
    log_survival = F.pad(log_go.cumsum(dim=1)[:, :-1], (1, 0))  # (N, T) sum over j < i
    return (log_survival + log_pi).masked_fill(~mask, -math.inf)


def expected_reward(
    logits: Tensor, correct: Tensor, lengths: Tensor, price: float, mask: Tensor
) -> Tensor:
    """(N,) expected rewards of traces, R = sum_i P(tau = i) (A_i - lambda L_i); differentiable.

    In the logits' precision (float32 at least).
    """
    probability = log_stop_distribution(logits, mask).exp()  # (N, T)
    reward = correct.to(probability.dtype) - price * lengths.to(probability.dtype)
    return (probability * reward.masked_fill(~mask, 0.0)).sum(dim=1)


def stop_entropy(logits: Tensor, mask: Tensor) -> Tensor:
    """(N,) entropies of the step of stopping, H(tau) = -sum_i P(tau = i) log P(tau = i), in nats.

    It is also the entropy of the choices that are met on the way, each weighted with the
    probability that the policy gets there. Differentiable, in the logits' precision (float32 at
    least); 0 where a trace has one step.
    """
    log_probability = log_stop_distribution(logits, mask)  # (N, T)
    # Logs are finite on real steps: 0 log 0 is 0, and so is its gradient.
    terms = log_probability.exp() * log_probability.masked_fill(~mask, 0.0)
    return -terms.sum(dim=1)


def objective_loss(
    logits: Tensor,
    correct: Tensor,
    lengths: Tensor,
    price: float | Sequence[float],
    mask: Tensor,
    entropy_bonus: float = 0.0,
) -> Tensor:
    """-(1/N) sum_n (R_n + alpha H_n) over N traces, with alpha the entropy bonus, reward a nat.

    With J prices, logits are (J, N, T), one for each (else a ValueError), and it is the plain mean.
    Among several prices 0 has no bonus: it would pay for stops, and nothing there pays for going on
    where the answer stands already. The objective there is the accuracy alone.
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


def classifier_targets(
    method: str, correct: npt.NDArray[Any], matches_final: npt.NDArray[Any], mask: BoolArray
) -> npt.NDArray[Any]:
    """(N, T) what a classifier of `OSPrunerConfig.method` is trained to predict, 0 on padding.

    "convergence": the answer stays the final one from here to the end (Liu and Wang's words).
    "final-answer": it is the final one here. All others: it is right. `matches_final` (N, T) tells
    where the forced answer equals the one forced at T.
    """
    final = (matches_final > 0) & mask
    if method == "convergence":
        # Padding interrupts nothing.
        final = np.logical_and.accumulate((final | ~mask)[:, ::-1], axis=1)[:, ::-1] & mask
    elif method != "final-answer":
        return correct
    return final.astype(np.float64)


def batch_loss(
    method: str,
    logits: Tensor,
    batch: Batch,
    price: float | Sequence[float],
    entropy_bonus: float = 0.0,
) -> Tensor:
    """The loss of one batch: `objective_loss`, or the mean binary cross-entropy over its steps.

    Price and bonus are those of "os-pruner" alone.
    """
    device, mask = logits.device, batch.mask.to(logits.device)
    if method == "os-pruner":
        labels = batch.correct.to(device), batch.lengths.to(device)
        return objective_loss(logits, *labels, price, mask, entropy_bonus)
    known = (batch.correct.numpy(), batch.matches_final.numpy(), batch.mask.numpy())
    targets = torch.from_numpy(classifier_targets(method, *known)).to(logits)  # (B, T)
    return F.binary_cross_entropy_with_logits(logits[mask], targets[mask])


def loss_weight(method: str, part: Batch, batch: Batch) -> float:
    """What the loss of a part of a batch counts in that of the whole, both means.

    Means over traces for "os-pruner", over steps for the baselines.
    """
    if method == "os-pruner":
        return len(part.mask) / len(batch.mask)
    return float(part.mask.sum() / batch.mask.sum())
