"""Rules on the same traces, and their means on resamples of problems and training seeds.

Problems are resampled with all their traces, and with them the training seeds of a rule that has
several; what was chosen on validation is chosen again in each resample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .metrics import AES_ABSOLUTE, AesVariant
from .replay import Outcome, pool
from .results import Estimate
from .table import FloatArray, IntArray
from .text import parameter_text

REPLICATES = 2_000
_BLOCK_ENTRIES = 4_000_000  # resampling counts held at once: 32 MB


@dataclass(frozen=True)
class Rule:
    """One setting of a method, and what it does.

    Attributes:
        method: name of the method.
        outcome: of its training seeds the mean.
        parameter: what picks it from its method: a price, threshold, budget ...
        parameter_name: "price", "threshold", "tokens", "step"; "" where there is none.
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
    choice: Chosen | None = None

    @property
    def setting(self) -> str:
        """Such as "price=5e-4", "≥.70", "110 tokens", or ""."""
        return parameter_text(self.parameter, self.parameter_name)

    @property
    def name(self) -> str:
        """Method and setting: "OS-Pruner price=5e-4"."""
        return f"{self.method} {self.setting}".strip()

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """Each training seed's."""
        return self.seeds or (self.outcome,)


@dataclass(frozen=True, eq=False)
class Chosen:
    """How a rule was chosen on validation, so that each resample can choose again.

    Attributes:
        candidates: rules with their outcomes on validation.
        base: the full traces' outcome there.
        problem_index: the problem of each validation trace.
        variant: the AES that chooses; of equals the first.
    """

    candidates: Sequence[Rule]
    base: Outcome
    problem_index: IntArray
    variant: AesVariant = AES_ABSOLUTE

    def scores(self, replicates: int = REPLICATES, seed: int = 0) -> FloatArray:
        """(1 + B, R) the AES of each candidate: on all validation traces, and in each resample.

        Resamples of problems differ from the test's, those of training seeds are the same.
        """
        blocks = [(self.base,), *(rule.validation for rule in self.candidates)]
        if self.variant.charge == "generated":
            blocks = [tuple(one.with_answers() for one in block) for block in blocks]
        points = resampled_points(blocks, self.problem_index, replicates, seed, validation=True)
        (tokens, base_tokens), (accuracy, base_accuracy) = (
            (points[:, 1:, k], points[:, :1, k]) for k in (0, 1)
        )
        return self.variant(accuracy, tokens, base_accuracy, base_tokens)

    def picks(self, replicates: int = REPLICATES, seed: int = 0) -> IntArray:
        """(1 + B,) the candidate that is taken: on all validation traces, and in each resample."""
        return np.nanargmax(self.scores(replicates, seed), axis=1)

    def taken(self) -> Rule:
        """The candidate that validation chooses, with this choice."""
        return dataclasses.replace(self.candidates[int(self.picks(1)[0])], choice=self)


def pool_seeds(rules: Sequence[Rule]) -> list[Rule]:
    """Rules of one method and parameter as one rule, with each as a training seed.

    They are on the same traces, and stay in order of first appearance.
    """
    groups: dict[tuple[str, float | None], list[Rule]] = {}
    for rule in rules:
        groups.setdefault((rule.method, rule.parameter), []).append(rule)
    return [_pooled(of) if len(of) > 1 else of[0] for of in groups.values()]


def _pooled(rules: Sequence[Rule]) -> Rule:
    seeds = tuple(rule.outcome for rule in rules)
    validation = tuple(one for rule in rules for one in rule.validation)
    return dataclasses.replace(rules[0], outcome=pool(seeds), seeds=seeds, validation=validation)


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


def resampled_points(
    blocks: Sequence[Sequence[Outcome]],
    problem_index: IntArray,
    replicates: int,
    seed: int,
    *,
    validation: bool,
) -> FloatArray:
    """(1 + B, R, 2) mean tokens and accuracy of each rule, whose seeds' outcomes a block holds.

    On validation, whose problems are others than the test's, problems are drawn anew.
    """
    columns = [[np.column_stack([one.tokens, one.correct]) for one in block] for block in blocks]
    drawn = ~seed & 0xFFFF if validation else seed
    return np.stack(resampled_means(columns, problem_index, replicates, seed, drawn), axis=1)


def bootstrap_means(
    values: FloatArray, problem_index: IntArray, replicates: int = REPLICATES, seed: int = 0
) -> FloatArray:
    """(B, K) means over traces in each resample of the problems.

    Args:
        values: (N, K) K quantities of each trace.
        problem_index: (N,) the problem of each trace, 0 .. P-1.
        replicates: how many resamples, B.
        seed: the resamples depend on it, on P and on B only.
    """
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
    """The mean over traces of values (N,) with its percentile interval by problem.

    One problem alone, or one that never varies, has no width: it is an interval of this sample, not
    of all that may happen.
    """
    resampled = bootstrap_means(values[:, None], problem_index, replicates, seed)
    return estimate(np.append(values.mean(), resampled), level)


def estimate(values: FloatArray, level: float = 0.95) -> Estimate:
    """The first of (1 + B,) values with the percentile interval of the others, NaNs left out.

    Raises:
        ValueError: `level` outside (0, 1).
    """
    if not 0.0 < level < 1.0:
        raise ValueError(f"level is {level!r}; it must lie strictly between 0 and 1")
    value, resampled = float(values[0]), values[1:]
    finite = resampled[~np.isnan(resampled)]
    if not finite.size:
        return Estimate(value, float("nan"), float("nan"))
    low, high = np.quantile(finite, [(1 - level) / 2, (1 + level) / 2])
    return Estimate(value, float(low), float(high))
