"""Outcomes of stopping rules summarised: each number with its 95 % interval by problem.

All rules of one call see the same resamples of the problems, so that their intervals and the
differences between them belong together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .metrics import (
    AES_ABSOLUTE,
    REPLICATES,
    AesVariant,
    Estimate,
    bootstrap_means,
    estimate,
    paired_difference,
    reduction,
)
from .replay import Outcome
from .table import IntArray

__all__ = ["Result", "Rule", "compare", "summarise"]


@dataclass(frozen=True)
class Rule:
    """A rule to summarise: its name, the parameter that picks it from its family, its outcome."""

    method: str
    outcome: Outcome
    parameter: float | None = None
    parameter_name: str = ""


@dataclass(frozen=True)
class Result:
    """A rule's numbers, each with its 95 % interval by problem.

    Attributes:
        method: name of the method.
        parameter: length penalty, threshold, budget...; None where there is none.
        parameter_name: "λ", "threshold", "tokens", "step"; "" where there is none.
        accuracy: share of right answers.
        tokens: mean thinking tokens.
        reduction: share of the full trace's thinking tokens saved.
        aes: accuracy-efficiency score, of the variant `aes_label`.
        answer_tokens: mean tokens of the forced answer.
        helped: share of traces right under the rule and wrong in full.
        harmed: share of traces wrong under the rule and right in full.
        aes_label: which AES.
        traces: how many traces.
        problems: how many problems.
    """

    method: str
    parameter: float | None
    parameter_name: str
    accuracy: Estimate
    tokens: Estimate
    reduction: Estimate
    aes: Estimate
    answer_tokens: Estimate
    helped: Estimate
    harmed: Estimate
    aes_label: str
    traces: int
    problems: int

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Result:
        """What `to_dict` wrote.

        Raises:
            TypeError: missing or unknown keys.
        """
        read: dict[str, Any] = {
            name: Estimate(**value) if isinstance(value, dict) else value
            for name, value in values.items()
        }
        return cls(**read)


def summarise(
    rules: Sequence[Rule],
    base: Outcome,
    problem_index: IntArray,
    *,
    variant: AesVariant = AES_ABSOLUTE,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> list[Result]:
    """Accuracy, tokens, reduction, AES and more of each rule, with 95 % intervals by problem.

    Args:
        rules: rules and their outcomes on the same N traces.
        base: the full traces' outcome, to which reductions and AES refer.
        problem_index: (N,) the problem of each trace, 0 .. P-1.
        variant: which AES.
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
    blocks = [base.columns(), *(rule.outcome.columns() for rule in rules)]  # each (N, K)
    values = np.concatenate(blocks, axis=1)
    width = blocks[0].shape[1]
    resampled = bootstrap_means(values, problem_index, replicates, seed)  # (B, K (1 + rules))
    means = np.concatenate([values.mean(axis=0)[None], resampled])  # row 0: all traces
    base_means = means[:, :width]
    problems = len(np.unique(problem_index))

    results = []
    for number, rule in enumerate(rules, start=1):
        accuracy, tokens, answer, helped, harmed = means[:, number * width : (number + 1) * width].T
        score = variant(accuracy, tokens, base_means[:, 0], base_means[:, 1])
        saved = reduction(tokens, base_means[:, 1])
        results.append(
            Result(
                method=rule.method,
                parameter=rule.parameter,
                parameter_name=rule.parameter_name,
                accuracy=estimate(accuracy[0], accuracy[1:]),
                tokens=estimate(tokens[0], tokens[1:]),
                reduction=estimate(saved[0], saved[1:]),
                aes=estimate(score[0], score[1:]),
                answer_tokens=estimate(answer[0], answer[1:]),
                helped=estimate(helped[0], helped[1:]),
                harmed=estimate(harmed[0], harmed[1:]),
                aes_label=variant.label,
                traces=len(base),
                problems=problems,
            )
        )
    return results


def compare(
    a: Outcome,
    b: Outcome,
    base: Outcome,
    problem_index: IntArray,
    *,
    variant: AesVariant = AES_ABSOLUTE,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> dict[str, Estimate]:
    """Paired differences a - b on the same traces, with 95 % intervals by problem.

    Args:
        a: one rule's outcome.
        b: the other's; the full traces' own for a comparison with them.
        base: the full traces' outcome, for reduction and AES.
        problem_index: (N,) the problem of each trace.
        variant: which AES.
        replicates: bootstrap resamples.
        seed: of the resamples.

    Returns:
        "accuracy", "tokens", "reduction", "aes" -> the difference.
    """
    left, right = (
        np.column_stack([outcome.correct, outcome.tokens, base.correct, base.tokens])
        for outcome in (a, b)
    )
    statistics = {
        "accuracy": lambda m: m[..., 0],
        "tokens": lambda m: m[..., 1],
        "reduction": lambda m: reduction(m[..., 1], m[..., 3]),
        "aes": lambda m: variant(m[..., 0], m[..., 1], m[..., 2], m[..., 3]),
    }
    return {
        name: paired_difference(
            left, right, problem_index, statistic, replicates=replicates, seed=seed
        )
        for name, statistic in statistics.items()
    }
