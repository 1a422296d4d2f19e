"""Thresholds that control a risk, as LYNX and Thought Calibration choose theirs."""

from __future__ import annotations

import math

import numpy as np

from ..table import BoolArray, FloatArray

__all__ = ["binomial_tail", "conformal_quantile", "conformal_threshold", "learn_then_test"]


def conformal_quantile(scores: FloatArray, delta: float) -> float:
    """The ceil((n + 1)(1 - delta))-th smallest of n scores, the largest where there are too few.

    Args:
        scores: (n,) of nonconformity.
        delta: in [0, 1].

    Raises:
        ValueError: no scores.
    """
    if not scores.size:
        raise ValueError("there are no scores to take a quantile of")
    place = math.ceil((len(scores) + 1) * (1 - delta))
    return float(np.sort(scores)[min(max(place, 1), len(scores)) - 1])


def conformal_threshold(probabilities: FloatArray, right: BoolArray, delta: float) -> float:
    """LYNX's threshold: from it on the prediction set is {right}, at coverage 1 - delta.

    A label is in the set where 1 less its probability is at most the quantile over the steps with
    that label (split conformal prediction by class, arXiv 2512.05325, `calibrate_conformal.py`).

    Args:
        probabilities: (n,) of being right, at steps to calibrate on.
        right: (n,) whether they are.
        delta: share of miscoverage, in [0, 1].

    Returns:
        The lowest probability that stops, at most 1.

    Raises:
        ValueError: all steps are right, or none.
    """
    of_right = conformal_quantile(1 - probabilities[right], delta)
    of_wrong = conformal_quantile(probabilities[~right], delta)
    return min(1.0, max(1 - of_right, float(np.nextafter(of_wrong, 2.0))))


def binomial_tail(losses: int, count: int, rate: float) -> float:
    """P(X <= losses) of a binomial X of `count` draws, each lost with probability `rate`."""
    if losses >= count:
        return 1.0
    k = np.arange(losses + 1)
    logs = [
        math.lgamma(count + 1) - math.lgamma(i + 1) - math.lgamma(count - i + 1) for i in k.tolist()
    ]
    return float(
        np.exp(np.array(logs) + k * math.log(rate) + (count - k) * math.log1p(-rate)).sum()
    )


def learn_then_test(
    scores: FloatArray, consistent: BoolArray, mask: BoolArray, risk: float, count: int = 256
) -> float:
    """Thought Calibration's threshold: the lowest that a sequence of tests lets through.

    Thresholds are tried from 1 down. One passes where, on the traces, stopping at the first step
    whose score reaches it is inconsistent so rarely that a binomial test at level `risk` rejects a
    rate of `risk` (fixed sequence testing, arXiv 2505.18404, `3-calibrate.ipynb`, which takes one
    number for rate and level, too).

    Args:
        scores: (N, T) smoothed probabilities at each step.
        consistent: (N, T) whether the final answer has arrived.
        mask: (N, T) true on real steps.
        risk: epsilon, in (0, 1).
        count: thresholds to try.

    Returns:
        The threshold; 1 where none passes.
    """
    rows = np.arange(len(mask))
    last = mask.sum(axis=1) - 1
    passed = 1.0
    for threshold in np.linspace(1, 0, count):
        reached = (scores >= threshold) & mask
        stops = np.where(reached.any(axis=1), reached.argmax(axis=1), last)
        losses = int((~consistent[rows, stops]).sum())
        if binomial_tail(losses, len(mask), risk) > risk:
            break
        passed = float(threshold)
    return passed
