"""Methods as families of rules on validation and test traces, at the best that tuning gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from ..methods import METHOD_NAMES
from ..replay import Outcome, replay, windowed
from ..rules.families import FAMILIES
from ..rules.replayed import replay_rule
from ..table import FloatArray, TraceTable, classifier_targets
from .areas import Family
from .causal import Known
from .grids import COUNT, policy_grid, rule_grid
from .learnstop import LEARN_STOP, backtracking, cross_fitted, fit_scores
from .risk import conformal_threshold, learn_then_test

__all__ = [
    "Said",
    "Split",
    "Splits",
    "drawn_family",
    "learn_stop_family",
    "rule_families",
    "rule_family",
    "threshold_family",
]

VOTES = (1, 3, 10)
"""TERMINATOR's windows, in steps; validation chooses. The original's ten tokens are less than a
paragraph."""
SMOOTHED = 10
"""Thought Calibration's window, in steps, as its authors'."""


@dataclass(frozen=True, eq=False)
class Split:
    """Labelled traces, and what was found about them.

    Attributes:
        dataset: the traces.
        table: the same as arrays.
        thinking_entropy: (N, T) see `rules.thinking`; None where no base was at hand.
    """

    dataset: Any
    table: TraceTable
    thinking_entropy: FloatArray | None = None


@dataclass(frozen=True, eq=False)
class Splits:
    """The traces to choose on and to measure on.

    Attributes:
        validation: to choose on.
        test: to measure on; of other problems.
        suffix_tokens: tokens forced before an answer.
        decode: text of token ids; None where there is no tokenizer.
    """

    validation: Split
    test: Split
    suffix_tokens: int
    decode: Callable[[list[int]], str] | None = None


class Said(NamedTuple):
    """Stop probabilities of one policy, trained with one seed.

    Attributes:
        validation: (N, T).
        test: (N, T).
    """

    validation: FloatArray
    test: FloatArray


def drawn_family(name: str, splits: Splits, policies: Sequence[Sequence[Said]]) -> Family:
    """Policies that draw their stops, one rule each.

    Args:
        name: of the method.
        splits: the traces.
        policies: for each the probabilities of its seeds.
    """
    return Family(
        name,
        [[replay(splits.validation.table, said.validation) for said in of] for of in policies],
        [[replay(splits.test.table, said.test) for said in of] for of in policies],
    )


def threshold_family(
    method: str, splits: Splits, seeds: Sequence[Said], name: str | None = None
) -> Family:
    """A classifier at many thresholds, which are chosen as its authors choose them.

    "lynx" controls miscoverage and "thought-calibration" inconsistency, at COUNT levels each, on
    the validation traces, each seed by itself. All others try COUNT quantiles of what they say
    there; "terminator" each with a vote over `VOTES` steps.

    Args:
        method: of `OSPrunerConfig`, or another classifier's.
        splits: the traces.
        seeds: the probabilities of each training seed.
        name: what tables call it; None for the method's name.
    """
    table = splits.validation.table
    rules: list[list[tuple[Said, float]]] = []  # for each rule, each seed's scores and threshold
    if method == "lynx":
        free = table.mask & (np.arange(table.mask.shape[1]) < table.last[:, None])
        right = table.correct[free] > 0.5
        for delta in np.linspace(0, 1, COUNT):
            rules.append(
                [(s, conformal_threshold(s.validation[free], right, float(delta))) for s in seeds]
            )
    elif method == "thought-calibration":
        arrived = classifier_targets("terminator", table.correct, table.matches_final, table.mask)
        smooth = [_windowed(splits, said, SMOOTHED, "mean") for said in seeds]
        for risk in np.linspace(0, 1, COUNT + 2)[1:-1]:
            found = (arrived > 0, table.mask, float(risk))
            rules.append([(s, learn_then_test(s.validation, *found)) for s in smooth])
    else:
        for window in VOTES if method == "terminator" else (1,):
            seen = [_windowed(splits, said, window, "vote") for said in seeds]
            for threshold in policy_grid(table, np.stack([said.validation for said in seen])):
                rules.append([(said, threshold) for said in seen])
    return Family(
        METHOD_NAMES[method] if name is None else name,
        [[_stopped(table, said.validation, t) for said, t in rule] for rule in rules],
        [[_stopped(splits.test.table, said.test, t) for said, t in rule] for rule in rules],
    )


def _stopped(table: TraceTable, scores: FloatArray, threshold: float) -> Outcome:
    return replay(table, scores, "threshold", threshold)


def _windowed(splits: Splits, said: Said, window: int, by: Literal["vote", "mean"]) -> Said:
    return Said(
        windowed(splits.validation.table, said.validation, window, by),
        windowed(splits.test.table, said.test, window, by),
    )


def learn_stop_family(splits: Splits, train: Split | None = None) -> Family:
    """LearnStop at many thresholds; see `learnstop`.

    Args:
        splits: the traces.
        train: on which to fit; None to fit on the validation traces, of which each is then scored
            by a fit without its problem.
    """
    validation, test = (
        _scalars(split, splits.decode) for split in (splits.validation, splits.test)
    )
    if train is None:
        (on_test,) = fit_scores(validation, test)
        said = Said(cross_fitted(validation), on_test)
    else:
        said = Said(*fit_scores(_scalars(train, splits.decode), validation, test))
    return threshold_family("", splits, [said], LEARN_STOP)


def _scalars(split: Split, decode: Callable[[list[int]], str] | None) -> Known:
    known = Known.of_labels(split.dataset, split.table)
    if decode is None:
        return known
    words = backtracking(split.dataset, split.table, decode)[..., None].astype(np.float32)
    return replace(known, features=np.concatenate([known.features, words], axis=-1))


def rule_family(name: str, splits: Splits) -> Family:
    """A rule without training, at COUNT quantiles of what it measures on the validation traces.

    Args:
        name: of `rules.families.FAMILIES`.
        splits: the traces.

    Raises:
        ValueError: no such rule, or labels that do not hold what it reads.
    """
    first = splits.validation
    grid = rule_grid(
        name,
        first.dataset,
        first.table,
        splits.decode,
        thinking_entropy=first.thinking_entropy,
    )

    def outcomes(split: Split) -> list[Outcome]:
        return [
            replay_rule(
                split.dataset,
                split.table,
                FAMILIES[name].make(value),
                splits.suffix_tokens,
                splits.decode,
                thinking_entropy=split.thinking_entropy,
            )
            for value in grid
        ]

    return Family(FAMILIES[name].method, outcomes(first), outcomes(splits.test))


def rule_families(splits: Splits, names: Sequence[str]) -> tuple[list[Family], dict[str, str]]:
    """Rules without training as families, and why any of them is left out.

    Args:
        names: of `rules.families.FAMILIES`.
        splits: the traces.
    """
    families, left_out = [], {}
    for name in names:
        try:
            families.append(rule_family(name, splits))
        except ValueError as error:
            left_out[FAMILIES[name].method if name in FAMILIES else name] = str(error)
    return families, left_out
