"""The area under a method's accuracy-length frontier, and the share of the oracle's gap it closes.

A method is a family of rules, such as one policy at many prices or one classifier at many
thresholds. Which of them make up its frontier is chosen on validation traces: those on the upper
concave hull of accuracy over length, the two trivial rules included (never stop, stop after the
first step), between which anyone can draw lots. The area is then measured on test traces, as the
mean accuracy over all lengths between the two trivial rules' own.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from .evaluation import Rule, choose, intervals, resampled
from .metrics import AES_ABSOLUTE, AesVariant
from .replay import hindsight_oracle, replay_full, replay_step
from .results import frame_of, price_name
from .table import FloatArray, TraceTable


def hull(points: FloatArray) -> list[int]:
    """Numbers of points (tokens, accuracy), (P, 2), on their upper concave hull, shortest first.

    The shortest and the longest are always on it.
    """
    at: list[list[float]] = points.tolist()  # thousands of resamples: lists are faster here

    def below(left: int, middle: int, right: int) -> bool:
        """Whether the middle point lies on or below the line between its neighbours."""
        (x0, y0), (x1, y1), (x2, y2) = at[left], at[middle], at[right]
        return (x1 - x0) * (y2 - y0) >= (y1 - y0) * (x2 - x0)

    found: list[int] = []
    for k in np.lexsort((-points[:, 1], points[:, 0])).tolist():
        if found and at[k][0] == at[found[-1]][0]:
            continue  # as long as one before, and no more accurate
        while len(found) > 1 and below(found[-2], found[-1], k):
            found.pop()
        found.append(k)
    return found


def area(points: FloatArray) -> float:
    """Mean height of the line through (tokens, accuracy) points, (P, 2), over its length."""
    tokens, accuracy = points[np.argsort(points[:, 0], kind="stable")].T
    return float(np.trapezoid(accuracy, tokens) / np.ptp(tokens))


def tokens_for(points: FloatArray, accuracy: float) -> float:
    """The fewest tokens at which the line through (tokens, accuracy) points, (P, 2), is so right.

    Where it nowhere is, those of its most accurate point, which favours it.
    """
    points = points[np.argsort(points[:, 0], kind="stable")]
    reached = points[:, 1] >= accuracy
    if not reached.any():
        return float(points[points[:, 1].argmax(), 0])
    k = int(reached.argmax())
    (x0, y0), (x1, y1) = points[max(k - 1, 0)], points[k]
    return float(x1 if k == 0 else x0 + (accuracy - y0) / (y1 - y0) * (x1 - x0))


def _on_hull(chosen_on: FloatArray, measured: FloatArray) -> FloatArray:
    """The points measured of those that the other points choose, the two trivial rules at the ends.

    The ends stand for themselves: a frontier runs from one trivial rule to the other.
    """
    return measured[[0, *(k for k in hull(chosen_on) if k > 1), 1]]


def frontiers(
    methods: Mapping[str, Sequence[Rule]],
    validation: TraceTable,
    test: TraceTable,
    prices: Sequence[float] = (),
    variant: AesVariant = AES_ABSOLUTE,
) -> tuple[pd.DataFrame, dict[str, list[int]]]:
    """Area, the first method's lead, and the share of the oracle's gap of each method.

    Beside the lead stands what the first method, at the setting of its highest AES on validation,
    thinks less than each other method needs for the same accuracy (`tokens_for`). The share of the
    gap at a price is (R - R_full) / (R_oracle - R_full), R = accuracy - price * tokens on test, of
    that rule of a method, or trivial one, which has the highest R on validation: there no method is
    below 0; on test one may be, by as much as its choice was unlucky.

    A resample draws problems of both splits and training seeds anew, the same for all methods, and
    each method chooses its frontier, and its rule at a price, again on what was drawn for
    validation.

    Returns:
        The frame of `Results.frontiers`, and of each method, whose rules have outcomes on both
        tables, the numbers of those that its frontier is made of, the two trivial ones left out.
    """
    chosen: dict[str, list[int]] = {}
    validation_areas, areas, fewer = [], [], []
    gaps: dict[str, list[FloatArray]] = defaultdict(list)  # (1 + B,) of each method
    oracles = [(hindsight_oracle(test, price),) for price in prices]
    ends, test_ends = ([(replay_full(one),), (replay_step(one, 1),)] for one in (validation, test))
    for method, rules in methods.items():
        blocks = [*ends, *(rule.validation for rule in rules)]
        chosen_on = resampled(blocks, validation.problem_index, validation=True)
        blocks = [*test_ends, *(rule.outcomes for rule in rules), *oracles]
        measured = resampled(blocks, test.problem_index)
        own = slice(2 + len(rules))
        lines = [_on_hull(*both) for both in zip(chosen_on, measured[:, own], strict=True)]
        areas.append([area(line) for line in lines])
        if not chosen:  # tokens and accuracy of the first one's setting, (1 + B, 2)
            ours = np.full((len(lines), 2), np.nan)
            if rules:
                best, _ = choose(rules, *ends[0], validation.problem_index, variant)
                ours = measured[np.arange(len(lines)), 2 + np.asarray(best.picks)]
        needed = [tokens_for(line, a) for line, a in zip(lines, ours[:, 1], strict=True)]
        fewer.append((np.array(needed) - ours[:, 0]) / measured[:, 0, 0])
        for price, oracle in zip(prices, range(own.stop, measured.shape[1]), strict=True):
            rewards, before = (p[..., 1] - price * p[..., 0] for p in (measured, chosen_on))
            taken = np.take_along_axis(rewards, before.argmax(axis=1)[:, None], axis=1)[:, 0]
            whole = rewards[:, oracle] - rewards[:, 0]
            gaps[f"gap@{price_name(price)}"].append((taken - rewards[:, 0]) / whole)
        validation_areas.append(area(_on_hull(chosen_on[0], chosen_on[0])))
        chosen[method] = [k - 2 for k in hull(chosen_on[0]) if k > 1]
    stacked = {"area": areas, "lead": areas, "fewer": fewer, **gaps}
    numbers = {name: np.array(of).T for name, of in stacked.items()}  # each (1 + B, methods)
    numbers["lead"] = numbers["area"][:, :1] - numbers["area"]
    for name in ("lead", "fewer"):
        numbers[name][:, 0] = np.nan
    frame = pd.DataFrame({"method": list(methods), "validation_area": validation_areas})
    return frame_of(frame.join(intervals(numbers)), "frontiers"), chosen
