"""Outcomes of rules as a frame: each number with its 95 % interval by problem and training seed.

Problems are resampled with all their traces, and with them the training seeds of a rule that has
several. All rules of one `Resampled` see the same resamples, so that differences between them are
paired; what was chosen on validation is chosen again in each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from .metrics import AES_ABSOLUTE, AesVariant, charged_tokens, reduction, reward
from .replay import Outcome, pool
from .results import Estimate, frame_of
from .table import FloatArray, IntArray
from .text import parameter_text, price_name

REPLICATES = 2_000
_BLOCK_ENTRIES = 4_000_000  # resampling counts held at once: 32 MB
_MEANS = [one.name for one in dataclasses.fields(Outcome)]

Numbers = dict[str, FloatArray]
"""Numbers of one rule by name: on all traces, then on each resample, (1 + B,)."""


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
        went_by: (N, T) the stop probabilities that it decided by; None where there are none.
    """

    method: str
    outcome: Outcome
    parameter: float | None = None
    parameter_name: str = ""
    seeds: tuple[Outcome, ...] = ()
    validation: tuple[Outcome, ...] = ()
    choice: Chosen | None = None
    went_by: npt.NDArray[Any] | None = None

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

    def picks(self, replicates: int = REPLICATES, seed: int = 0) -> IntArray:
        """(1 + B,) the candidate that is taken: on all validation traces, and in each resample.

        Args:
            replicates: B.
            seed: of the resamples of problems, and of training seeds, which are those of the test.
        """
        blocks = [(self.base,), *(rule.validation for rule in self.candidates)]
        if self.variant.charge == "generated":
            blocks = [tuple(one.with_answers() for one in block) for block in blocks]
        points = resampled_points(blocks, self.problem_index, replicates, seed, validation=True)
        (tokens, base_tokens), (accuracy, base_accuracy) = (
            (points[:, 1:, k], points[:, :1, k]) for k in (0, 1)
        )
        scores = self.variant(accuracy, tokens, base_accuracy, base_tokens)
        return np.nanargmax(scores, axis=1)

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
    said = [rule.went_by for rule in rules if rule.went_by is not None]
    went_by = np.mean(said, axis=0) if len(said) == len(rules) else None
    return dataclasses.replace(
        rules[0], outcome=pool(seeds), seeds=seeds, validation=validation, went_by=went_by
    )


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


class Resampled:
    """Rules on the same traces with their means on each resample; made once, read often.

    Args:
        rules: rules and their outcomes on the same N traces.
        base: the full traces' outcome, to which reductions and AES refer.
        problem_index: (N,) the problem of each trace, 0 .. P-1.
        limits: what rules are measured against.
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
        limits: Sequence[Rule] = (),
        *,
        replicates: int = REPLICATES,
        seed: int = 0,
    ) -> None:
        self.rules, self.limits = list(rules), list(limits)
        self.base, self.problem_index = base, problem_index
        for rule in self.rules:
            if len(rule.outcome) != len(base):
                raise ValueError(
                    f"{rule.method}: an outcome of {len(rule.outcome)} traces, the full traces are "
                    f"{len(base)}"
                )
        self._how = (problem_index, replicates, seed)

    @cached_property
    def _means(self) -> list[Numbers]:
        """Of the full traces and of each rule; a resample chooses again what was chosen."""
        everything = [*self.rules, *self.limits]
        found = self._means_of([(self.base,), *(rule.outcomes for rule in everything)])
        for number, rule in enumerate(everything, start=1):
            if rule.choice is not None:
                picks = rule.choice.picks(*self._how[1:])
                taken, place = np.unique(picks, return_inverse=True)
                blocks = [rule.choice.candidates[int(k)].outcomes for k in taken]
                means = np.stack(self._means_of(blocks))  # (U, 1 + B, K)
                found[number] = means[place, np.arange(len(picks))]
        return [dict(zip(_MEANS, means.T, strict=True)) for means in found]

    def _means_of(self, blocks: Sequence[Sequence[Outcome]]) -> list[FloatArray]:
        return resampled_means([[one.columns() for one in block] for block in blocks], *self._how)

    def frame(
        self, variant: AesVariant = AES_ABSOLUTE, prices: Sequence[float] = ()
    ) -> pd.DataFrame:
        """A row for each rule and each limit; see `Results`.

        Args:
            variant: which AES, and what it and rewards charge.
            prices: of a token, at which to give the expected reward.
        """
        full, *means = self._means
        rows: list[dict[str, Any]] = []
        for rule, own in zip([*self.rules, *self.limits], means, strict=True):
            row: dict[str, Any] = {
                "kind": "rule" if len(rows) < len(self.rules) else "limit",
                "method": rule.method,
                "parameter": rule.parameter,
                "parameter_name": rule.parameter_name,
                "setting": rule.setting,
                "chosen": rule.choice is not None,
            }
            for name, values in _numbers(own, full, variant, prices).items():
                row |= estimate(values).spread(name)
            problems = len(np.unique(self.problem_index))
            rows.append(
                row | {"aes_label": variant.label, "traces": len(self.base), "problems": problems}
            )
        return frame_of(rows)

    def differences(
        self, one: int, others: Sequence[int], variant: AesVariant = AES_ABSOLUTE
    ) -> pd.DataFrame:
        """Paired differences of a rule to others, by their numbers: the one less each."""
        full, *means = self._means
        left = _numbers(means[one], full, variant)
        rows = []
        for other in others:
            right = _numbers(means[other], full, variant)
            row: dict[str, Any] = {"rule": self.rules[one].name, "other": self.rules[other].name}
            for name in ("accuracy", "tokens", "reduction", "aes"):
                row |= estimate(left[name] - right[name]).spread(name)
            rows.append(row)
        return frame_of(rows, "differences")


def _numbers(
    own: Numbers, full: Numbers, variant: AesVariant, prices: Sequence[float] = ()
) -> Numbers:
    """The numbers of a frame's row from a rule's means and those of the full traces."""
    generated, of_full = (one["tokens"] + one["answer_tokens"] for one in (own, full))
    paid, base = generated, of_full
    if variant.charge != "generated":
        base = full["tokens"]
        paid = charged_tokens(variant.charge, own["tokens"], own["flops"], base, full["flops"])
    with np.errstate(divide="ignore", invalid="ignore"):  # where all stop, or none: NaN
        after_stop = own["stopped_answer"] / own["stopped"]
        after_end = (own["answer_tokens"] - own["stopped_answer"]) / (1 - own["stopped"])
    return {
        "accuracy": own["correct"],
        "tokens": own["tokens"],
        "reduction": reduction(own["tokens"], full["tokens"]),
        "aes": variant(own["correct"], paid, full["correct"], base),
        **{
            name: own[name]
            for name in ("answer_tokens", "helped", "harmed", "truncated", "probe_tokens")
        },
        "answer_after_stop": np.where(own["stopped"] > 0, after_stop, np.nan),
        "answer_after_end": np.where(own["stopped"] < 1, after_end, np.nan),
        "rethought": own["rethought"],
        "generated_tokens": generated,
        "total_reduction": reduction(generated, of_full),
        "time_ratio": own["seconds"] / full["seconds"],
        "tokens_per_second": generated / own["seconds"],
        "flops": own["flops"],
        "flops_ratio": own["flops"] / full["flops"],
        **{f"reward@{price_name(price)}": reward(own["correct"], paid, price) for price in prices},
    }
