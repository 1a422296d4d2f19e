"""The area under a method's accuracy-length frontier, and the share of the oracle's gap it closes.

A method is a family of rules, such as one policy at many prices or one classifier at many
thresholds. Which of them make up its frontier is chosen on validation traces: those on the upper
concave hull of accuracy over length, the two trivial rules included (never stop, stop after the
first step), between which anyone can draw lots. The area is then measured on test traces, as the
mean accuracy over all lengths between the two trivial rules' own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .intervals import REPLICATES, Rule, estimate, resampled_means
from .limits import hindsight_oracle
from .replay import Outcome, replay_full, replay_step
from .results import Estimate, Frontier
from .table import FloatArray, TraceTable

__all__ = ["area", "areas", "frontier_points", "frontiers", "hull", "worth_asking"]


def hull(points: FloatArray) -> list[int]:
    """Numbers of the points (tokens, accuracy) on their upper concave hull, shortest first.

    The shortest and the longest are always on it.

    Args:
        points: (P, 2).
    """
    found: list[int] = []
    for k in np.lexsort((-points[:, 1], points[:, 0])).tolist():
        if found and points[k, 0] == points[found[-1], 0]:
            continue  # as long as one before, and no more accurate
        while len(found) > 1 and _below(points[found[-2]], points[found[-1]], points[k]):
            found.pop()
        found.append(k)
    return found


def _below(left: FloatArray, middle: FloatArray, right: FloatArray) -> bool:
    """Whether the middle point lies on or below the line between its neighbours."""
    a, b = middle - left, right - left
    return float(a[0] * b[1] - a[1] * b[0]) >= 0


def area(points: FloatArray) -> float:
    """Mean height of the line through (tokens, accuracy) points, (P, 2), over its length."""
    points = points[np.argsort(points[:, 0], kind="stable")]
    widths = np.diff(points[:, 0])
    heights = (points[1:, 1] + points[:-1, 1]) / 2
    return float(widths @ heights / widths.sum())


def _both(
    rules: Sequence[Rule],
    validation: TraceTable,
    test: TraceTable,
    replicates: int,
    seed: int,
    *limits: Outcome,
) -> tuple[FloatArray, FloatArray]:
    """(1 + B, 2 + R, 2) mean tokens and accuracy, on validation and on test traces.

    First the two trivial rules, never stopping and stopping after the first step; last, on the
    test traces alone, the limits.
    """

    def points(
        blocks: Sequence[Sequence[Outcome]], table: TraceTable, problem_seed: int
    ) -> FloatArray:
        trivial = [(replay_full(table),), (replay_step(table, 1),)]
        columns = [
            [np.column_stack([one.tokens, one.correct]) for one in block]
            for block in [*trivial, *blocks]
        ]
        found = resampled_means(columns, table.problem_index, replicates, seed, problem_seed)
        return np.stack(found, axis=1)

    return (
        points([rule.validation for rule in rules], validation, ~seed & 0xFFFF),
        points([*(rule.outcomes for rule in rules), *((one,) for one in limits)], test, seed),
    )


def _on_hull(chosen_on: FloatArray, measured: FloatArray) -> FloatArray:
    """The points measured of those that the other points choose, the two trivial rules at the ends.

    The ends stand for themselves: a frontier runs from one trivial rule to the other.
    """
    return measured[[0, *(k for k in hull(chosen_on) if k > 1), 1]]


def frontier_points(rules: Sequence[Rule], validation: TraceTable, test: TraceTable) -> FloatArray:
    """(P, 2) mean tokens and accuracy, on test traces, of the rules chosen on validation.

    The two trivial rules are among them; by length.

    Args:
        rules: of one method, with their outcomes on both.
        validation: the validation traces.
        test: the test traces.
    """
    chosen_on, measured = _both(rules, validation, test, 1, 0)
    points = _on_hull(chosen_on[0], measured[0])
    ordered: FloatArray = points[np.argsort(points[:, 0], kind="stable")]
    return ordered


def areas(
    methods: Sequence[Sequence[Rule]],
    validation: TraceTable,
    test: TraceTable,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> FloatArray:
    """(1 + B, M) area of each method: on all test traces, and on each resample.

    A resample draws problems of both splits and training seeds anew, and each method chooses its
    frontier again on what was drawn for validation.

    Args:
        methods: the rules of M methods.
        validation: the validation traces, on which the frontiers are chosen.
        test: the test traces.
        replicates: resamples, B.
        seed: of the resamples, which are the same for all methods.
    """
    found = np.empty((1 + replicates, len(methods)))
    for number, rules in enumerate(methods):
        both = zip(*_both(rules, validation, test, replicates, seed), strict=True)
        found[:, number] = [area(_on_hull(*points)) for points in both]
    return found


def frontiers(
    methods: Mapping[str, Sequence[Rule]],
    validation: TraceTable,
    test: TraceTable,
    prices: Sequence[float] = (),
    replicates: int = REPLICATES,
    seed: int = 0,
) -> list[Frontier]:
    """Area, the first method's lead, and the share of the oracle's gap of each method.

    Args:
        methods: rules by method, with outcomes on both; leads are the first one's.
        validation: the validation traces, on which all is chosen.
        test: the test traces.
        prices: of a token, of the gaps.
        replicates: resamples.
        seed: of the resamples.
    """
    found = areas(list(methods.values()), validation, test, replicates, seed)
    return [
        Frontier(
            name,
            estimate(found[0, k], found[1:, k]),
            estimate(found[0, 0] - found[0, k], found[1:, 0] - found[1:, k]) if k else None,
            tuple(
                (price, _gap_closed(rules, validation, test, price, replicates, seed))
                for price in prices
            ),
        )
        for k, (name, rules) in enumerate(methods.items())
    ]


def _gap_closed(
    rules: Sequence[Rule],
    validation: TraceTable,
    test: TraceTable,
    price: float,
    replicates: int,
    seed: int,
) -> Estimate:
    """How much of the reward between the full trace and the hindsight oracle a method gets.

    (R - R_full) / (R_oracle - R_full), with R = accuracy - lambda tokens on the test traces; 0 is
    the full trace, 1 the oracle, which no rule without hindsight can be sure of. Of the method's
    rules and the two trivial ones, which whoever has its rules has, too, the one of the highest
    reward on validation is taken, and again in each resample. On the validation traces no method is
    below 0; on test traces one may be, by as much as its choice was unlucky.
    """
    oracle = hindsight_oracle(test, price)
    both = _both(rules, validation, test, replicates, seed, oracle)
    chosen_on, rewards = (points[..., 1] - price * points[..., 0] for points in both)
    taken = np.take_along_axis(rewards, chosen_on.argmax(axis=1)[:, None], axis=1)[:, 0]
    share = (taken - rewards[:, 0]) / (rewards[:, -1] - rewards[:, 0])
    return estimate(share[0], share[1:])


def worth_asking(table: TraceTable) -> tuple[float, ...]:
    """Prices of a token at which the mean full trace costs a tenth, .04 and .02 of an answer.

    With one digit: they suit the labels' lengths, whatever these are.
    """
    tokens = float(table.full_tokens.mean())
    return tuple(float(f"{share / tokens:.0e}") for share in (0.1, 0.04, 0.02))
