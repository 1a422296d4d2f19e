"""Outcomes of rules summarised: each number with its 95 % interval by problem and training seed.

Problems are resampled with all their traces, and with them the training seeds of a rule that has
several. All rules of one `Resampled` see the same resamples, so that differences between them are
paired; what was chosen on validation is chosen again in each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from .metrics import AES_ABSOLUTE, AesVariant, charged_tokens, reduction, reward
from .replay import Outcome, pool
from .results import Difference, Estimate, Named, Result
from .table import FloatArray, IntArray

__all__ = [
    "REPLICATES",
    "Choice",
    "Resampled",
    "Rule",
    "bootstrap_interval",
    "bootstrap_means",
    "estimate",
    "pool_seeds",
    "resampled_means",
    "seed_weights",
    "summarise",
]

REPLICATES = 2_000
_BLOCK_ENTRIES = 4_000_000  # resampling counts held at once: 32 MB

Pick = Callable[[FloatArray, FloatArray, float, float], int]
"""The number of the candidate to take, from accuracy (C,) and mean tokens (C,) of all candidates
and those of the full traces (`metrics.best_aes`)."""


@dataclass(frozen=True)
class Rule(Named):
    """One setting of a method, and what it does.

    Attributes:
        method: name of the method.
        outcome: of its training seeds the mean.
        parameter: what picks it from its method.
        parameter_name: what that is.
        seeds: each training seed's outcome, where there are several.
        validation: each training seed's outcome on the traces to choose on; empty where there are
            none.
        choice: how it was chosen there; its intervals then contain the choice.
    """

    method: str
    outcome: Outcome
    parameter: float | None = None
    parameter_name: str = ""
    seeds: tuple[Outcome, ...] = ()
    validation: tuple[Outcome, ...] = ()
    choice: Choice | None = None

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """Each training seed's."""
        return self.seeds or (self.outcome,)


@dataclass(frozen=True, eq=False)
class Choice:
    """How a rule was chosen on validation, so that each resample can choose again.

    Attributes:
        candidates: rules with their outcomes on validation.
        base: the full traces' outcome there.
        problem_index: the problem of each validation trace.
        pick: chooses.
    """

    candidates: Sequence[Rule]
    base: Outcome
    problem_index: IntArray
    pick: Pick

    def picks(self, replicates: int = REPLICATES, seed: int = 0) -> IntArray:
        """(1 + B,) the candidate that is taken: on all validation traces, and in each resample.

        Args:
            replicates: B.
            seed: of the resamples of problems, and of training seeds, which are those of the test.
        """
        blocks = [(self.base,), *(rule.validation for rule in self.candidates)]
        points = _accuracy_and_tokens(blocks, self.problem_index, replicates, seed)
        return np.array(
            [self.pick(p[1:, 0], p[1:, 1], float(p[0, 0]), float(p[0, 1])) for p in points]
        )

    def taken(self) -> Rule:
        """The candidate that validation chooses, with this choice."""
        return dataclasses.replace(self.candidates[int(self.picks(1)[0])], choice=self)


def _accuracy_and_tokens(
    blocks: Sequence[Sequence[Outcome]], problem_index: IntArray, replicates: int, seed: int
) -> FloatArray:
    """(1 + B, R, 2) on validation, whose problems are others than the test's: drawn anew."""
    columns = [[np.column_stack([one.correct, one.tokens]) for one in block] for block in blocks]
    found = resampled_means(columns, problem_index, replicates, seed, ~seed & 0xFFFF)
    return np.stack(found, axis=1)


def pool_seeds(rules: Sequence[Rule]) -> tuple[list[Rule], list[list[int]]]:
    """Rules of one method and parameter as one rule, with each as a training seed.

    Args:
        rules: on the same traces.

    Returns:
        The rules in order of first appearance, and the numbers of the given ones in each.
    """
    groups: dict[tuple[str, float | None], list[int]] = {}
    for number, rule in enumerate(rules):
        groups.setdefault((rule.method, rule.parameter), []).append(number)
    pooled = []
    for numbers in groups.values():
        of_group = [rules[k] for k in numbers]
        outcomes = tuple(rule.outcome for rule in of_group)
        if len(outcomes) > 1:
            validation = tuple(one for rule in of_group for one in rule.validation)
            pooled.append(
                dataclasses.replace(
                    of_group[0], outcome=pool(outcomes), seeds=outcomes, validation=validation
                )
            )
        else:
            pooled.append(of_group[0])
    return pooled, list(groups.values())


def resampled_means(
    blocks: Sequence[Sequence[FloatArray]],
    problem_index: IntArray,
    replicates: int = REPLICATES,
    seed: int = 0,
    problem_seed: int | None = None,
) -> list[FloatArray]:
    """The means (1 + B, K) of each rule's columns: on all traces, and on each resample.

    Args:
        blocks: for each rule its seeds' columns (N, K) on the same N traces.
        problem_index: (N,) the problem of each trace.
        replicates: B.
        seed: of the resamples of training seeds: a policy is the same on all traces.
        problem_seed: of the resamples of problems; None for `seed`.
    """
    values = np.concatenate([one for block in blocks for one in block], axis=1)
    drawn = seed if problem_seed is None else problem_seed
    resampled = bootstrap_means(values, problem_index, replicates, drawn)
    means = np.concatenate([values.mean(axis=0)[None], resampled])  # row 0: all traces
    found, start = [], 0
    for block in blocks:
        width = block[0].shape[1]
        end = start + width * len(block)
        part = means[:, start:end].reshape(len(means), len(block), width)
        weights = seed_weights(len(block), replicates, seed)  # (1 + B, S)
        found.append(np.einsum("bs,bsk->bk", weights, part))
        start = end
    return found


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
    *,
    level: float = 0.95,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> Estimate:
    """A mean over traces with its interval by problem.

    Args:
        values: (N,) a quantity of each trace.
        problem_index: (N,) the problem of each trace.
        level: coverage, in (0, 1).
        replicates: resamples.
        seed: of the resamples.

    Returns:
        The mean and its percentile interval. One problem alone, or one that never varies, has no
        width: it is an interval of this sample, not of all that may happen.

    Raises:
        ValueError: `level` outside (0, 1), or see `bootstrap_means`.
    """
    resampled = bootstrap_means(values[:, None], problem_index, replicates, seed)
    return estimate(values.mean(), resampled[:, 0], level)


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


class Resampled:
    """Rules on the same traces with their means on each resample; made once, read often.

    Args:
        rules: rules and their outcomes on the same N traces.
        base: the full traces' outcome, to which reductions and AES refer.
        problem_index: (N,) the problem of each trace, 0 .. P-1.
        replicates: bootstrap resamples, B.
        seed: of the resamples.

    Raises:
        ValueError: an outcome of another number of traces.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        base: Outcome,
        problem_index: IntArray,
        replicates: int = REPLICATES,
        seed: int = 0,
    ) -> None:
        for rule in rules:
            if len(rule.outcome) != len(base):
                raise ValueError(
                    f"{rule.method}: an outcome of {len(rule.outcome)} traces, the full traces are "
                    f"{len(base)}"
                )
        self.rules = list(rules)
        self.base = base
        self.problem_index = problem_index
        self._how = (problem_index, replicates, seed)

    @cached_property
    def _means(self) -> list[_Means]:
        """Of the full traces and of each rule; a resample chooses again what was chosen."""
        blocks = [(self.base,), *(rule.outcomes for rule in self.rules)]
        found = resampled_means([[one.columns() for one in block] for block in blocks], *self._how)
        for number, rule in enumerate(self.rules, start=1):
            if rule.choice is not None:
                picks = rule.choice.picks(*self._how[1:])
                taken, place = np.unique(picks, return_inverse=True)
                candidates = [rule.choice.candidates[int(k)].outcomes for k in taken]
                columns = [[one.columns() for one in block] for block in candidates]
                means = np.stack(resampled_means(columns, *self._how))  # (U, 1 + B, K)
                found[number] = means[place, np.arange(len(picks))]
        return [_Means(means) for means in found]

    def results(
        self, variant: AesVariant = AES_ABSOLUTE, prices: Sequence[float] = ()
    ) -> list[Result]:
        """Accuracy, tokens, reduction, AES and more of each rule.

        Args:
            variant: which AES, and what it and rewards charge.
            prices: of a token, at which to give the expected reward.
        """
        full, *means = self._means
        problems = len(np.unique(self.problem_index))
        found = []
        for rule, ours in zip(self.rules, means, strict=True):
            charged = ours.charged(full, variant)
            found.append(
                Result(
                    method=rule.method,
                    parameter=rule.parameter,
                    parameter_name=rule.parameter_name,
                    **{name: _estimate(x) for name, x in ours.against(full, variant).items()},
                    rewards=tuple(
                        (price, _estimate(reward(ours.of["correct"], charged, price)))
                        for price in prices
                    ),
                    aes_label=variant.label,
                    traces=len(self.base),
                    problems=problems,
                    chosen=rule.choice is not None,
                )
            )
        return found

    def difference(self, a: int, b: int, variant: AesVariant = AES_ABSOLUTE) -> Difference:
        """Paired differences of two rules, by their numbers, a - b."""
        full, ours, theirs = (self._means[k] for k in (0, 1 + a, 1 + b))
        left, right = ours.against(full, variant), theirs.against(full, variant)
        numbers = {
            name: _estimate(left[name] - right[name])
            for name in ("accuracy", "tokens", "reduction", "aes")
        }
        return Difference(self.rules[a].name, self.rules[b].name, **numbers)


def summarise(
    rules: Sequence[Rule],
    base: Outcome,
    problem_index: IntArray,
    *,
    variant: AesVariant = AES_ABSOLUTE,
    prices: Sequence[float] = (),
    replicates: int = REPLICATES,
    seed: int = 0,
) -> list[Result]:
    """The numbers of rules, see `Resampled`."""
    return Resampled(rules, base, problem_index, replicates, seed).results(variant, prices)


class _Means:
    """The means of one rule's columns, on all traces and on each resample: (1 + B, K)."""

    def __init__(self, means: FloatArray) -> None:
        self.of = dict(zip([f.name for f in dataclasses.fields(Outcome)], means.T, strict=True))

    @property
    def generated(self) -> FloatArray:
        """Thinking and answer tokens."""
        return self.of["tokens"] + self.of["answer_tokens"]

    def charged(self, full: _Means, variant: AesVariant) -> FloatArray:
        """The length that AES and rewards see."""
        own, base = self.of, full.of
        return charged_tokens(
            variant.charge, own["tokens"], own["flops"], base["tokens"], base["flops"]
        )

    def against(self, full: _Means, variant: AesVariant) -> dict[str, FloatArray]:
        """The fields of `Result` by name, as arrays."""
        own, base = self.of, full.of
        kept = ("tokens", "answer_tokens", "helped", "harmed", "truncated", "probe_tokens", "flops")
        return {name: own[name] for name in kept} | {
            "accuracy": own["correct"],
            "reduction": reduction(own["tokens"], base["tokens"]),
            "aes": variant(
                own["correct"], self.charged(full, variant), base["correct"], base["tokens"]
            ),
            "generated_tokens": self.generated,
            "total_reduction": reduction(self.generated, full.generated),
            "time_ratio": own["seconds"] / base["seconds"],
            "tokens_per_second": self.generated / own["seconds"],
            "flops_ratio": own["flops"] / base["flops"],
        }


def _estimate(values: FloatArray) -> Estimate:
    """Of (1 + B,): on all traces, and on each resample."""
    return estimate(float(values[0]), values[1:])
