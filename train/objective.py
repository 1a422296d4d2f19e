"""The losses: OS-Pruner's negative expected reward, and the baselines' classification.

R = sum_i [prod_{j<i} (1 - pi_j)] pi_i (A_i - lambda L_i) is differentiable in the stop logits, and
A_i, L_i are labels (the paper's Eq. 3-4): no trace is sampled while training.

An entropy bonus adds alpha H(tau). Gradients fade with pi (1 - pi): once most choices are all but
certain, runs stay with what they happened to learn first; the bonus keeps those open on which
little depends (maximum-entropy policy gradients; docs/training.md tells what it does).

Both baselines classify prefixes, and compare the probability with a threshold when generating: the
classification probe of "the answer forced here is right", and answer convergence, "the answer
forced here is the trace's final answer" (the paper's section on baselines).

Auxiliary losses classify prefixes, too, beside the objective: linear read-outs of the same states
that the head reads say how the answers forced so far have gone. They exist while training only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ospruner.eval.stopping import expected_reward, stop_entropy
from ospruner.eval.table import FloatArray

__all__ = [
    "AUXILIARY_TARGETS",
    "answer_history",
    "auxiliary_loss",
    "classification_loss",
    "every_price_loss",
    "objective_loss",
]

AUXILIARY_TARGETS = ("repeats", "run", "distinct", "confidence")
"""What of the answers' history can be learned beside the objective: whether the answer forced here
equals the one before; 1 - 1/r of the r equal ones in a row; 1 - 1/d of the d different ones so far;
and the mean probability of its tokens (the exponential of the mean log-probability)."""


def answer_history(answers: Sequence[str], logprobs: Sequence[float | None]) -> FloatArray:
    """(T, 4) the `AUXILIARY_TARGETS` of one trace, each in [0, 1].

    Answers are equal where their texts are, without spaces; nothing is graded.

    Args:
        answers: T forced answers.
        logprobs: their mean log-probabilities; None counts as no confidence.
    """
    found = np.zeros((len(answers), len(AUXILIARY_TARGETS)))
    seen: set[str] = set()
    before, run = None, 0
    for step, (answer, logprob) in enumerate(zip(answers, logprobs, strict=True)):
        text = "".join(answer.split())
        run = run + 1 if text == before else 1
        before = text
        seen.add(text)
        sure = 0.0 if logprob is None else math.exp(logprob)
        found[step] = (run > 1, 1 - 1 / run, 1 - 1 / len(seen), sure)
    return found


def objective_loss(
    logits: Tensor,
    correct: Tensor,
    lengths: Tensor,
    price: float,
    mask: Tensor,
    entropy_bonus: float = 0.0,
) -> Tensor:
    """-(1/N) sum_n (R_n + alpha H_n) over a batch of N traces.

    Args:
        logits: (N, T) stop logits at step ends.
        correct: (N, T) A_i.
        lengths: (N, T) L_i in tokens.
        price: lambda >= 0.
        mask: (N, T) bool, true on real steps.
        entropy_bonus: alpha >= 0, reward for a nat of the stopping time's entropy.

    Returns:
        A scalar.

    Raises:
        TypeError, ValueError: see `expected_reward`.
    """
    gain = expected_reward(logits, correct, lengths, price, mask)  # (N,)
    if entropy_bonus:
        gain = gain + entropy_bonus * stop_entropy(logits, mask)
    return -gain.mean()


def every_price_loss(
    logits: Tensor,
    correct: Tensor,
    lengths: Tensor,
    length_penalties: Sequence[float],
    mask: Tensor,
    entropy_bonus: float = 0.0,
) -> Tensor:
    """The plain mean of `objective_loss` over J prices of a token.

    At the price 0 there is no bonus: it would pay for stops, and nothing there pays for going on
    where the answer stands already. The objective there is the accuracy alone.

    Args:
        logits: (J, N, T) stop logits at step ends, at each price.
        correct: (N, T) A_i.
        lengths: (N, T) L_i in tokens.
        length_penalties: the J prices, each >= 0.
        mask: (N, T) bool, true on real steps.
        entropy_bonus: alpha >= 0, reward for a nat of the stopping time's entropy.

    Returns:
        A scalar.

    Raises:
        TypeError, ValueError: see `expected_reward`; or there are not J prices.
    """
    pairs = zip(logits, length_penalties, strict=True)
    found = [
        objective_loss(of_price, correct, lengths, price, mask, entropy_bonus if price else 0.0)
        for of_price, price in pairs
    ]
    return torch.stack(found).mean()


def classification_loss(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Binary cross-entropy, the mean over the batch's real steps.

    Args:
        logits: (N, T) at step ends.
        targets: (N, T) in [0, 1]: correctness A_i for the probe, equality with the answer forced
            at T for convergence.
        mask: (N, T) bool, true on real steps.

    Returns:
        A scalar.

    Raises:
        ValueError: there is no real step.
    """
    if not bool(mask.any()):
        raise ValueError("mask has no real step: there is nothing to classify")
    return F.binary_cross_entropy_with_logits(logits[mask], targets[mask].to(logits.dtype))


def auxiliary_loss(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Binary cross-entropy with soft targets: the mean over targets, a trace's steps, and traces.

    Args:
        logits: (N, T, A) of the read-outs at step ends.
        targets: (N, T, A) in [0, 1].
        mask: (N, T) bool, true on real steps, one at least in each row.

    Returns:
        A scalar.
    """
    losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(-1)
    of_traces = losses.masked_fill(~mask, 0.0).sum(1) / mask.sum(1)
    return of_traces.mean()
