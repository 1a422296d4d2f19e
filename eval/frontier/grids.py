"""Thresholds to try, as many for every method: quantiles of what it measures on validation.

A grid written down by hand suits the scale of one signal and misses that of another. Here each
method's thresholds run from "at once" to "never", through values that its own signal takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..rules.families import FAMILIES
from ..rules.replayed import measured
from ..table import FloatArray, TraceTable

__all__ = ["COUNT", "policy_grid", "rule_grid", "spread_values"]

COUNT = 64
"""Points of each grid, the two ends included, where the signal takes as many values."""


def spread_values(signals: npt.ArrayLike, count: int) -> list[float]:
    """Up to so many of the values that a signal takes, evenly spread by rank; NaN is none.

    Equal values count once, so that a signal that is mostly saturated is still resolved.

    Args:
        signals: of any shape.
        count: at least 1.

    Raises:
        ValueError: count < 1.
    """
    if count < 1:
        raise ValueError(f"count is {count}; it must be at least 1")
    values = np.asarray(signals, np.float64)
    different = np.unique(values[~np.isnan(values)])
    if not different.size:
        return []
    places = np.linspace(0, len(different) - 1, min(count, len(different)))
    return [float(value) for value in different[np.round(places).astype(int)]]


def policy_grid(
    table: TraceTable, probabilities: npt.ArrayLike, count: int = COUNT
) -> tuple[float, ...]:
    """Thresholds for a policy that stops from a stop probability: from 1 (never) down to 0.

    Args:
        table: the validation traces.
        probabilities: (N, T) on these, or (S, N, T) of several training seeds.
        count: points, the two ends included.
    """
    pi = np.asarray(probabilities, np.float64)
    free = table.mask & (np.arange(table.mask.shape[1]) < table.last[:, None])
    values = spread_values(np.where(free, pi, np.nan), count - 2)
    return tuple(sorted({0.0, 1.0, *values}, reverse=True))


def rule_grid(
    name: str,
    dataset: Any,
    table: TraceTable,
    decode: Callable[[list[int]], str] | None = None,
    count: int = COUNT,
    thinking_entropy: FloatArray | None = None,
) -> tuple[float, ...]:
    """Numbers for the rules of one family, from its "at once" to its "never".

    Args:
        name: of the family, such as "entropy" (`rules.families.FAMILIES`).
        dataset: the labelled validation traces.
        table: the same as arrays.
        decode: text of token ids, for rules that read the thinking.
        count: points, the two ends included. A signal that takes fewer values has fewer.
        thinking_entropy: as in `replay_rule`.

    Raises:
        ValueError: no such family, or the labels lack what it reads.
    """
    if name not in FAMILIES:
        raise ValueError(f"rule {name!r} is not known; known are {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    signals = measured(dataset, table, family.make(family.never), decode, thinking_entropy)
    low, high = sorted((family.at_once, family.never))
    within = signals[(signals > low) & (signals < high)]
    values = {*spread_values(within, count - 2), family.at_once, family.never}
    return tuple(sorted(values, reverse=family.never < family.at_once))
