"""Outcomes of stopping rules summarised: each number with its 95 % interval by problem.

All rules of one call see the same resamples of the problems, so that their intervals and the
differences between them belong together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .metrics import (
    AES_ABSOLUTE,
    REPLICATES,
    AesVariant,
    Charge,
    bootstrap_means,
    charged_tokens,
    estimate,
    reduction,
    reward,
    seed_weights,
)
from .replay import Outcome, pool
from .results import Difference, Named, Result
from .table import FloatArray, IntArray

__all__ = ["Choice", "Rule", "compare", "means_of", "pool_seeds", "summarise"]


@dataclass(frozen=True, eq=False)
class Choice:
    """How a rule was chosen on validation, so that each resample can choose again.

    Attributes:
        validation: each candidate's outcome there, of several training seeds a sequence.
        test: the outcomes of a candidate, by its number, on the traces that are summarised.
        base: the full traces' outcome on validation.
        problem_index: the problem of each validation trace.
        pick: the number of the candidate to take, from accuracy (C,) and mean tokens (C,) of all
            and of the full traces.
    """

    validation: Sequence[Sequence[Outcome]]
    test: Callable[[int], Sequence[Outcome]]
    base: Outcome
    problem_index: IntArray
    pick: Callable[[FloatArray, FloatArray, float, float], int]

    def picks(self, replicates: int = REPLICATES, seed: int = 0) -> IntArray:
        """(1 + B,) the candidate that is taken: on all validation traces, and in each resample.

        Args:
            replicates: B.
            seed: of the resamples of problems, and of training seeds, which are those of `test`.
        """
        blocks = [[self.base], *self.validation]
        columns = [x for block in blocks for one in block for x in (one.correct, one.tokens)]
        values = np.column_stack(columns)
        # Validation problems are others than those of `test`: drawn by themselves.
        drawn = bootstrap_means(values, self.problem_index, replicates, ~seed & 0xFFFF)
        means = np.concatenate([values.mean(axis=0)[None], drawn])
        points, start = np.empty((len(means), len(blocks), 2)), 0
        for number, block in enumerate(blocks):
            part = means[:, start : start + 2 * len(block)].reshape(len(means), len(block), 2)
            weights = seed_weights(len(block), replicates, seed)
            points[:, number] = np.einsum("bs,bsk->bk", weights, part)
            start += 2 * len(block)
        return np.array(
            [self.pick(p[1:, 0], p[1:, 1], float(p[0, 0]), float(p[0, 1])) for p in points]
        )


@dataclass(frozen=True)
class Rule(Named):
    """A rule to summarise.

    Attributes:
        method: name of its family.
        outcome: of its training seeds the mean.
        parameter: what picks it from its family.
        parameter_name: what that is.
        seeds: each training seed's outcome, where there are several.
        choice: how it was chosen on validation; its intervals then contain the choice.
    """

    method: str
    outcome: Outcome
    parameter: float | None = None
    parameter_name: str = ""
    seeds: tuple[Outcome, ...] = ()
    choice: Choice | None = None


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
        first, outcomes = rules[numbers[0]], tuple(rules[k].outcome for k in numbers)
        if len(outcomes) == 1:
            pooled.append(first)
        else:
            pooled.append(dataclasses.replace(first, outcome=pool(outcomes), seeds=outcomes))
    return pooled, list(groups.values())


def summarise(
    rules: Sequence[Rule],
    base: Outcome,
    problem_index: IntArray,
    *,
    variant: AesVariant = AES_ABSOLUTE,
    length_penalties: Sequence[float] = (),
    replicates: int = REPLICATES,
    seed: int = 0,
) -> list[Result]:
    """Accuracy, tokens, reduction, AES and more of each rule, with 95 % intervals by problem.

    Args:
        rules: rules and their outcomes on the same N traces.
        base: the full traces' outcome, to which reductions and AES refer.
        problem_index: (N,) the problem of each trace, 0 .. P-1.
        variant: which AES, and what it and rewards charge.
        length_penalties: lambdas at which to give the expected reward.
        replicates: bootstrap resamples.
        seed: of the resamples.

    Raises:
        ValueError: an outcome of another number of traces.
    """
    for rule in rules:
        if len(rule.outcome) != len(base):
            raise ValueError(
                f"{rule.method}: an outcome of {len(rule.outcome)} traces, the full traces are "
                f"{len(base)}"
            )
    means = _means_of_rules(base, rules, problem_index, replicates, seed)  # (1 + B, K) each
    problems = len(np.unique(problem_index))
    full = _Means(means[0])
    results = []
    for number, rule in enumerate(rules, start=1):
        ours = _Means(means[number])
        numbers = ours.against(full, variant)
        correct, charged = ours.of["correct"], ours.charged(full, variant.charge)
        results.append(
            Result(
                method=rule.method,
                parameter=rule.parameter,
                parameter_name=rule.parameter_name,
                **{name: estimate(*_first_and_rest(x)) for name, x in numbers.items()},
                rewards=tuple(
                    (
                        penalty,
                        estimate(*_first_and_rest(reward(correct, charged, penalty))),
                    )
                    for penalty in length_penalties
                ),
                aes_label=variant.label,
                traces=len(base),
                problems=problems,
            )
        )
    return results


def means_of(
    blocks: Sequence[Sequence[Outcome]],
    problem_index: IntArray,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> list[FloatArray]:
    """The means (1 + B, K) of each rule's columns: on all traces, and on each resample.

    Problems are resampled, and with them the training seeds of a rule that has several.

    Args:
        blocks: for each rule its seeds' outcomes on the same N traces; one where it has none.
        problem_index: (N,) the problem of each trace.
        replicates: B.
        seed: of the resamples.
    """
    columns = [outcome.columns() for block in blocks for outcome in block]  # each (N, K)
    values, width = np.concatenate(columns, axis=1), columns[0].shape[1]
    resampled = bootstrap_means(values, problem_index, replicates, seed)
    means = np.concatenate([values.mean(axis=0)[None], resampled])  # row 0: all traces
    found, start = [], 0
    for block in blocks:
        part = means[:, start : start + width * len(block)].reshape(len(means), len(block), width)
        weights = seed_weights(len(block), replicates, seed)  # (1 + B, S)
        found.append(np.einsum("bs,bsk->bk", weights, part))
        start += width * len(block)
    return found


def _means_of_rules(
    base: Outcome, rules: Sequence[Rule], problem_index: IntArray, replicates: int, seed: int
) -> list[FloatArray]:
    """`means_of` the full traces and each rule; each resample chooses again what was chosen."""
    blocks = [[base], *(rule.seeds or [rule.outcome] for rule in rules)]
    found = means_of(blocks, problem_index, replicates, seed)
    for number, rule in enumerate(rules, start=1):
        if rule.choice is not None:
            picks = rule.choice.picks(replicates, seed)
            taken, place = np.unique(picks, return_inverse=True)
            candidates = [rule.choice.test(int(k)) for k in taken]
            means = np.stack(means_of(candidates, problem_index, replicates, seed))  # (U, 1+B, K)
            found[number] = means[place, np.arange(len(picks))]
    return found


class _Means:
    """The means of one outcome's columns, on all traces and on each resample: (1 + B, K)."""

    def __init__(self, means: FloatArray) -> None:
        self.of = dict(zip([f.name for f in dataclasses.fields(Outcome)], means.T, strict=True))

    @property
    def generated(self) -> FloatArray:
        """Thinking and answer tokens."""
        return self.of["tokens"] + self.of["answer_tokens"]

    def charged(self, full: _Means, charge: Charge) -> FloatArray:
        """The length that AES and rewards see."""
        own, base = self.of, full.of
        return charged_tokens(charge, own["tokens"], own["flops"], base["tokens"], base["flops"])

    def against(self, full: _Means, variant: AesVariant) -> dict[str, FloatArray]:
        """The fields of `Result` by name, as arrays."""
        own, base = self.of, full.of
        return {
            "accuracy": own["correct"],
            "tokens": own["tokens"],
            "reduction": reduction(own["tokens"], base["tokens"]),
            "aes": variant(
                own["correct"],
                self.charged(full, variant.charge),
                base["correct"],
                base["tokens"],
            ),
            "answer_tokens": own["answer_tokens"],
            "helped": own["helped"],
            "harmed": own["harmed"],
            "truncated": own["truncated"],
            "probe_tokens": own["probe_tokens"],
            "generated_tokens": self.generated,
            "total_reduction": reduction(self.generated, full.generated),
            "time_ratio": own["seconds"] / base["seconds"],
            "tokens_per_second": self.generated / own["seconds"],
            "flops": own["flops"],
            "flops_ratio": own["flops"] / base["flops"],
        }


def _first_and_rest(values: FloatArray) -> tuple[float, FloatArray]:
    return float(values[0]), values[1:]


def compare(
    a: Rule,
    b: Rule,
    base: Outcome,
    problem_index: IntArray,
    *,
    variant: AesVariant = AES_ABSOLUTE,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> Difference:
    """Paired differences a - b on the same traces, with 95 % intervals by problem.

    Args:
        a: one rule.
        b: the other; the full trace's own for a comparison with it.
        base: the full traces' outcome, for reduction and AES.
        problem_index: (N,) the problem of each trace.
        variant: which AES.
        replicates: bootstrap resamples.
        seed: of the resamples.
    """
    means = _means_of_rules(base, [a, b], problem_index, replicates, seed)
    full, left, right = (_Means(m) for m in means)
    ours, theirs = left.against(full, variant), right.against(full, variant)
    numbers = {
        name: estimate(*_first_and_rest(ours[name] - theirs[name]))
        for name in ("accuracy", "tokens", "reduction", "aes")
    }
    return Difference(a.name, b.name, **numbers)
