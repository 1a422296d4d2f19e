"""Accuracy, thinking tokens, AES, and their intervals by problem: pure functions of arrays.

Traces of one problem are not independent, so intervals resample problems with all their traces
(cluster bootstrap, percentile method). Where a method was trained with several seeds, these are
resampled, too (hierarchical bootstrap). The same seed resamples the same problems for every rule,
which makes differences between two rules paired.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from .results import Estimate
from .table import FloatArray, IntArray

__all__ = [
    "AES_ABSOLUTE",
    "AES_RELATIVE",
    "AesVariant",
    "Charge",
    "aes",
    "bootstrap_interval",
    "bootstrap_means",
    "charged_tokens",
    "charged_variant",
    "reduction",
    "reward",
    "seed_weights",
]

Statistic = Callable[[FloatArray], FloatArray]
"""Takes means (..., K) of K per-trace quantities, returns one number for each (...)."""

REPLICATES = 2_000
_BLOCK_ENTRIES = 4_000_000  # resampling counts held at once: 32 MB


Charge = Literal["thinking", "compute"]
"""What a rule pays for: its thinking tokens (the paper), or all that it computes."""


@dataclass(frozen=True)
class AesVariant:
    """Which accuracy-efficiency score: reports print it, `aes` computes it.

    Attributes:
        alpha: weight of the length reduction.
        beta: weight of a gain in accuracy.
        gamma: weight of a loss in accuracy.
        relative: the accuracy difference is divided by the baseline's accuracy.
        charge: what the length counts, here and in rewards: "thinking" tokens, as in the paper, or
            "compute" (`charged_tokens`).
    """

    alpha: float = 1.0
    beta: float = 3.0
    gamma: float = 5.0
    relative: bool = False
    charge: Charge = "thinking"

    def __post_init__(self) -> None:
        if self.charge not in ("thinking", "compute"):
            raise ValueError(f"charge is {self.charge!r}; it must be 'thinking' or 'compute'")

    @property
    def label(self) -> str:
        """Such as "absolute, α=1, β=3, γ=5"."""
        kind = "relative" if self.relative else "absolute"
        length = ", of compute" if self.charge == "compute" else ""
        return f"{kind}, α={self.alpha:g}, β={self.beta:g}, γ={self.gamma:g}{length}"

    def __call__(
        self,
        accuracy: npt.ArrayLike,
        tokens: npt.ArrayLike,
        base_accuracy: npt.ArrayLike,
        base_tokens: npt.ArrayLike,
    ) -> FloatArray:
        """The score under this variant; see `aes`."""
        return aes(
            accuracy,
            tokens,
            base_accuracy,
            base_tokens,
            alpha=self.alpha,
            beta=self.beta,
            gamma=self.gamma,
            relative=self.relative,
        )


AES_ABSOLUTE = AesVariant()
"""The variant that the numbers of the paper's Table 1 follow, and our default."""

AES_RELATIVE = AesVariant(gamma=7.0, relative=True)
"""The variant that the paper's text prints."""


def charged_variant(charge: str, *, relative: bool = False) -> AesVariant:
    """One of the two variants, with its length by name: "thinking" or "compute".

    Raises:
        ValueError: another name.
    """
    return replace(AES_RELATIVE if relative else AES_ABSOLUTE, charge=charge)  # type: ignore[arg-type]


def charged_tokens(
    charge: Charge,
    tokens: npt.ArrayLike,
    flops: npt.ArrayLike,
    base_tokens: npt.ArrayLike,
    base_flops: npt.ArrayLike,
) -> FloatArray:
    """The length that AES and rewards see; arrays broadcast.

    With "compute" it is the thinking tokens of a full trace, scaled by what the rule computes over
    what the full trace does: the full trace pays the same either way, and lambda keeps its meaning.

    Args:
        charge: what is paid for.
        tokens: mean thinking tokens.
        flops: mean operations; NaN where not counted.
        base_tokens: the full trace's mean thinking tokens.
        base_flops: the full trace's mean operations.

    Raises:
        ValueError: "compute" where operations were not counted.
    """
    if charge == "thinking":
        return np.asarray(tokens, np.float64)
    ratio = np.asarray(flops, np.float64) / np.asarray(base_flops, np.float64)
    if np.isnan(ratio).any():
        raise ValueError(
            "charge is 'compute', but what these rules compute was not counted: evaluate again "
            "with this version of ospruner, or charge 'thinking'"
        )
    result: FloatArray = ratio * np.asarray(base_tokens, np.float64)
    return result


def reduction(tokens: npt.ArrayLike, base_tokens: npt.ArrayLike) -> FloatArray:
    """Share of the baseline's mean thinking tokens that is saved, 1 - tokens / base_tokens."""
    return 1.0 - np.asarray(tokens, np.float64) / np.asarray(base_tokens, np.float64)


def reward(accuracy: npt.ArrayLike, tokens: npt.ArrayLike, price: float) -> FloatArray:
    """The mean reward (the paper's Eq. 2), accuracy - lambda * tokens; arrays broadcast.

    Args:
        accuracy: in [0, 1].
        tokens: mean thinking tokens.
        price: lambda >= 0.

    Raises:
        ValueError: lambda is negative or not finite.
    """
    if not (math.isfinite(price) and price >= 0):
        raise ValueError(f"price is {price!r}; it must be a finite number >= 0")
    return np.asarray(accuracy, np.float64) - price * np.asarray(tokens, np.float64)


def aes(
    accuracy: npt.ArrayLike,
    tokens: npt.ArrayLike,
    base_accuracy: npt.ArrayLike,
    base_tokens: npt.ArrayLike,
    alpha: float = 1.0,
    beta: float = 3.0,
    gamma: float = 5.0,
    relative: bool = False,
) -> FloatArray:
    """Accuracy-efficiency score; arrays broadcast.

    AES = alpha dLength + beta |dAcc| where dAcc >= 0, else alpha dLength - gamma |dAcc|, with
    dLength = 1 - tokens / base_tokens and dAcc = accuracy - base_accuracy, divided by base_accuracy
    where `relative`. The paper (section 5) prints the relative form with gamma = 7; the numbers of
    its Table 1 follow the absolute form with gamma = 5.

    Args:
        accuracy: in [0, 1], not in percent.
        tokens: mean thinking tokens.
        base_accuracy: the full trace's accuracy.
        base_tokens: the full trace's mean thinking tokens.
        alpha: weight of the length reduction.
        beta: weight of a gain in accuracy.
        gamma: weight of a loss in accuracy.
        relative: divide the accuracy difference by `base_accuracy`.

    Raises:
        ValueError: an accuracy outside [0, 1], or a baseline without tokens.
    """
    acc, base = np.asarray(accuracy, np.float64), np.asarray(base_accuracy, np.float64)
    for name, values in (("accuracy", acc), ("base_accuracy", base)):
        if ((values < -1e-9) | (values > 1 + 1e-9)).any():
            raise ValueError(f"{name} is {values}; it must lie in [0, 1] (divide percent by 100)")
    if (np.asarray(base_tokens) <= 0).any():
        raise ValueError(f"base_tokens is {base_tokens!r}; the baseline must spend tokens")
    gain = acc - base
    if relative:
        # A baseline that is never right has no relative difference: NaN, not an exception, as a
        # bootstrap of few problems can draw one.
        gain = np.divide(gain, base, out=np.full(np.shape(gain), np.nan), where=base > 0)
    score: FloatArray = alpha * reduction(tokens, base_tokens) + np.where(
        gain >= 0, beta * gain, gamma * gain
    )
    return score


def bootstrap_means(
    values: FloatArray, problem_index: IntArray, replicates: int = REPLICATES, seed: int = 0
) -> FloatArray:
    """Means over traces in each resample of the problems.

    Args:
        values: (N, K) K quantities of each trace.
        problem_index: (N,) the problem of each trace, 0 .. P-1.
        replicates: how many resamples, B.
        seed: the resamples depend on it, on P and on B only.

    Returns:
        (B, K) mean of each quantity.

    Raises:
        ValueError: shapes do not fit, there is no trace, or replicates < 1.
    """
    if values.ndim != 2 or len(values) != len(problem_index) or not len(values):
        raise ValueError(
            f"values has shape {values.shape} for {len(problem_index)} traces; "
            "it must be (N, K) with at least one trace"
        )
    if replicates < 1:
        raise ValueError(f"replicates is {replicates}; it must be at least 1")
    problems = int(problem_index.max()) + 1
    sums = np.zeros((problems, values.shape[1] + 1))  # (P, K+1), the last counts traces
    np.add.at(sums, problem_index, np.column_stack([values, np.ones(len(values))]))
    rng = np.random.default_rng(seed)
    uniform = np.full(problems, 1.0 / problems)
    block = max(1, _BLOCK_ENTRIES // problems)
    totals = np.concatenate(
        [
            rng.multinomial(problems, uniform, size=min(block, replicates - start)) @ sums
            for start in range(0, replicates, block)
        ]
    )  # (B, K+1)
    means: FloatArray = totals[:, :-1] / totals[:, -1:]
    return means


def seed_weights(seeds: int, replicates: int = REPLICATES, seed: int = 0) -> FloatArray:
    """(1 + B, S) how much each training seed counts: alike, then in each resample of the seeds.

    Methods of as many seeds get the same weights, so that differences stay paired.

    Args:
        seeds: S.
        replicates: B.
        seed: of the resamples.
    """
    rng = np.random.default_rng([seed, 1 + seeds])
    drawn = rng.multinomial(seeds, np.full(seeds, 1.0 / seeds), size=replicates)
    return np.concatenate([np.ones((1, seeds)), drawn]) / seeds


def bootstrap_interval(
    values: FloatArray,
    problem_index: IntArray,
    statistic: Statistic = lambda means: means[..., 0],
    *,
    level: float = 0.95,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> Estimate:
    """A statistic of trace means with its interval by problem.

    Args:
        values: (N, K) or (N,) quantities of each trace.
        problem_index: (N,) the problem of each trace.
        statistic: of the means (..., K); by default the first mean.
        level: coverage, in (0, 1).
        replicates: resamples.
        seed: of the resamples.

    Returns:
        The statistic on all traces and the percentile interval. One problem alone, or one that
        never varies, has no width: it is an interval of this sample, not of all that may happen.

    Raises:
        ValueError: `level` outside (0, 1), or see `bootstrap_means`.
    """
    columns = values[:, None] if values.ndim == 1 else values
    resampled = bootstrap_means(columns, problem_index, replicates, seed)
    return estimate(statistic(columns.mean(axis=0)), statistic(resampled), level)


def estimate(value: npt.ArrayLike, resampled: FloatArray, level: float = 0.95) -> Estimate:
    """The value with the percentile interval of its resampled values, (B,); NaNs are left out.

    Raises:
        ValueError: `level` outside (0, 1).
    """
    if not 0.0 < level < 1.0:
        raise ValueError(f"level is {level!r}; it must lie strictly between 0 and 1")
    finite = resampled[~np.isnan(resampled)]
    if not finite.size:
        return Estimate(float(value), float("nan"), float("nan"))  # type: ignore[arg-type]
    low, high = np.quantile(finite, [(1 - level) / 2, (1 + level) / 2])
    return Estimate(float(value), float(low), float(high))  # type: ignore[arg-type]
