"""The area under a method's accuracy-length frontier, and the share of the oracle's gap it closes.

A method is a family of rules, such as one policy a lambda or one classifier at many thresholds.
Which of them make up its frontier is chosen on validation traces: those on the upper concave hull
of accuracy over length, the two trivial rules included (stop after the first step, never stop),
between which anyone can draw lots. The area is then measured on test traces, as the mean accuracy
over all lengths between the two trivial rules' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..limits import hindsight_oracle
from ..metrics import REPLICATES, bootstrap_means, estimate, seed_weights
from ..replay import Outcome, replay_full, replay_step
from ..results import Estimate, Frontier
from ..table import FloatArray, TraceTable

__all__ = [
    "Family",
    "area_differences",
    "areas",
    "best_rule",
    "frontier_of",
    "frontier_points",
    "frontiers",
    "gap_closed",
]


@dataclass(frozen=True)
class Family:
    """A method's rules, each with its outcome on validation and on test traces.

    Attributes:
        name: of the method.
        validation: outcomes on the validation traces, one a rule; of a rule that was trained with
            several seeds a sequence of them.
        test: the same rules' outcomes on the test traces.
    """

    name: str
    validation: Sequence[Outcome | Sequence[Outcome]]
    test: Sequence[Outcome | Sequence[Outcome]]


def frontier_of(outcomes: Sequence[Outcome]) -> list[int]:
    """Numbers of the outcomes on the upper concave hull of accuracy over length, shortest first.

    Args:
        outcomes: rules on the same traces; the shortest and the longest are always on it.
    """
    return _hull(np.array([(outcome.mean_tokens, outcome.accuracy) for outcome in outcomes]))


def _hull(points: FloatArray) -> list[int]:
    """Numbers of the points (tokens, accuracy) on their upper concave hull, shortest first."""
    hull: list[int] = []
    for k in np.lexsort((-points[:, 1], points[:, 0])).tolist():
        if hull and points[k, 0] == points[hull[-1], 0]:
            continue  # as long as one before, and no more accurate
        while len(hull) > 1 and _below(points[hull[-2]], points[hull[-1]], points[k]):
            hull.pop()
        hull.append(k)
    return hull


def _below(left: FloatArray, middle: FloatArray, right: FloatArray) -> bool:
    """Whether the middle point lies on or below the line between its neighbours."""
    a, b = middle - left, right - left
    return float(a[0] * b[1] - a[1] * b[0]) >= 0


def _points(
    rules: Sequence[Outcome | Sequence[Outcome]],
    table: TraceTable,
    replicates: int,
    seed: int,
    problem_seed: int,
) -> FloatArray:
    """(1 + B, R, 2) mean tokens and accuracy of rules: on all traces, and on each resample.

    Problems are resampled, and training seeds where there are several: these by `seed` alone, as a
    policy is the same on validation and on test traces.
    """
    seeds = [[rule] if isinstance(rule, Outcome) else list(rule) for rule in rules]
    columns = [value for rule in seeds for one in rule for value in (one.tokens, one.correct)]
    values = np.column_stack(columns)
    resampled = bootstrap_means(values, table.problem_index, replicates, problem_seed)
    means = np.concatenate([values.mean(axis=0)[None], resampled])
    found, start = np.empty((len(means), len(seeds), 2)), 0
    for number, rule in enumerate(seeds):
        part = means[:, start : start + 2 * len(rule)].reshape(len(means), len(rule), 2)
        weights = seed_weights(len(rule), replicates, seed)  # (1 + B, S)
        found[:, number] = np.einsum("bs,bsk->bk", weights, part)
        start += 2 * len(rule)
    return found


def _both(
    family: Family, validation: TraceTable, test: TraceTable, replicates: int, seed: int
) -> tuple[FloatArray, FloatArray]:
    """`_points` on validation and on test traces, the two trivial rules first."""
    chosen_on = _points(
        [*_trivial(validation), *family.validation], validation, replicates, seed, ~seed & 0xFFFF
    )
    measured = _points([*_trivial(test), *family.test], test, replicates, seed, seed)
    return chosen_on, measured


def frontier_points(family: Family, validation: TraceTable, test: TraceTable) -> FloatArray:
    """(P, 2) mean tokens and accuracy, on test traces, of the rules chosen on validation.

    The two trivial rules are among them; by length.

    Args:
        family: the method.
        validation: the validation traces.
        test: the test traces.
    """
    chosen_on, measured = _both(family, validation, test, 1, 0)
    points = measured[0][[0, *(k for k in _hull(chosen_on[0]) if k > 1), 1]]
    ordered: FloatArray = points[np.argsort(points[:, 0], kind="stable")]
    return ordered


def areas(
    families: Sequence[Family],
    validation: TraceTable,
    test: TraceTable,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> FloatArray:
    """(1 + B, M) area of each family: on all test traces, and on each resample.

    A resample draws problems of both splits and training seeds anew, and each method chooses its
    frontier again on what was drawn for validation.

    Args:
        families: M methods.
        validation: the validation traces, on which the frontiers are chosen.
        test: the test traces.
        replicates: resamples, B.
        seed: of the resamples, which are the same for all families.
    """
    found = np.empty((1 + replicates, len(families)))
    for number, family in enumerate(families):
        chosen_on, measured = _both(family, validation, test, replicates, seed)
        for b in range(len(found)):
            # The ends stand for themselves: a frontier runs from one trivial rule to the other.
            inner = [k for k in _hull(chosen_on[b]) if k > 1]
            found[b, number] = _area(measured[b][[0, *inner, 1]])
    return found


def _area(points: FloatArray) -> float:
    """Mean height of the line through (tokens, accuracy) points, over its length."""
    points = points[np.argsort(points[:, 0], kind="stable")]
    widths = np.diff(points[:, 0])
    heights = (points[1:, 1] + points[:-1, 1]) / 2
    return float(widths @ heights / widths.sum())


def area_differences(found: FloatArray, names: Sequence[str]) -> dict[str, Estimate]:
    """The first family's area less each other's, with paired 95 % intervals.

    Args:
        found: what `areas` gave.
        names: of its first families.
    """
    less = found[:, :1] - found[:, : len(names)]
    return {name: estimate(float(less[0, k]), less[1:, k]) for k, name in enumerate(names) if k > 0}


def frontiers(
    families: Sequence[Family],
    validation: TraceTable,
    test: TraceTable,
    length_penalties: Sequence[float],
    estimates: Sequence[Family] = (),
    replicates: int = REPLICATES,
    seed: int = 0,
) -> list[Frontier]:
    """Area, the first family's lead, and the share of the oracle's gap of each family.

    Args:
        families: the methods; leads are the first's.
        validation: the validation traces, on which all is chosen.
        test: the test traces.
        length_penalties: lambdas of the gaps.
        estimates: families that are no rivals (`causal.causal_family`): they have no lead.
        replicates: resamples.
        seed: of the resamples.
    """
    everything = [*families, *estimates]
    found = areas(everything, validation, test, replicates, seed)
    leads = area_differences(found, [family.name for family in families])
    return [
        Frontier(
            family.name,
            estimate(float(found[0, k]), found[1:, k]),
            leads.get(family.name) if k < len(families) else None,
            tuple(
                (penalty, gap_closed(family, validation, test, penalty, replicates, seed))
                for penalty in length_penalties
            ),
        )
        for k, family in enumerate(everything)
    ]


def best_rule(family: Family, validation: TraceTable, price: float) -> int:
    """Which of a method's rules has the highest reward on validation; of equals the first.

    A method may always do nothing, or stop at once: whoever has its rules has these, too.

    Args:
        family: the method.
        validation: the validation traces.
        price: lambda.

    Returns:
        0 for never stopping, 1 for stopping after the first step, 2 + k for the family's rule k.
    """
    points = _points([*_trivial(validation), *family.validation], validation, 1, 0, 0)
    return int(np.argmax(_rewards(points[0], price)))


def gap_closed(
    family: Family,
    validation: TraceTable,
    test: TraceTable,
    price: float,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> Estimate:
    """How much of the reward between the full trace and the hindsight oracle a method gets.

    Its rule is that of `best_rule`, chosen on validation, and again in each resample. On the
    validation traces no method is below 0; on test traces one may be, by as much as its choice was
    unlucky.

    (R - R_full) / (R_oracle - R_full), with R = accuracy - lambda tokens on the test traces; 0 is
    the full trace, 1 the oracle, which no rule without hindsight can be sure of.

    Args:
        family: the method.
        validation: the validation traces.
        test: the test traces.
        price: lambda.
        replicates: resamples.
        seed: of the resamples.
    """
    oracle = hindsight_oracle(test, price)
    with_oracle = Family(family.name, family.validation, [*family.test, oracle])
    chosen_on, measured = _both(with_oracle, validation, test, replicates, seed)
    rewards = _rewards(measured, price)  # (1 + B, 2 + rules + 1)
    chosen = _rewards(chosen_on, price).argmax(axis=1)
    taken = np.take_along_axis(rewards, chosen[:, None], axis=1)[:, 0]
    share = (taken - rewards[:, 0]) / (rewards[:, -1] - rewards[:, 0])
    return estimate(float(share[0]), share[1:])


def _trivial(table: TraceTable) -> tuple[Outcome, Outcome]:
    """Never stopping, and stopping after the first step."""
    return replay_full(table), replay_step(table, 1)


def _rewards(points: FloatArray, price: float) -> FloatArray:
    """Accuracy - lambda tokens of (..., 2) points."""
    rewards: FloatArray = points[..., 1] - price * points[..., 0]
    return rewards
