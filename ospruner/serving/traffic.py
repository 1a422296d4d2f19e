"""How requests are distributed: what a calibration keeps of its traces, to compare a server with.

A distribution is a histogram over fixed bins, so that a server counts into it without keeping what
it saw. Bins are cut where tenths of the calibration's traces lie.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["bin_of", "distribution", "observed"]

_BINS = 10


def distribution(
    values: npt.NDArray[np.float64], weights: npt.NDArray[np.float64]
) -> dict[str, list[float]]:
    """A histogram over tenths.

    Args:
        values: (M,) numbers; inf is one.
        weights: (M,) how much each counts, of a positive sum.

    Returns:
        "edges", K rising finite numbers, and "shares" of the K + 1 bins between them. A bin holds
        its lower edge.
    """
    order = np.argsort(values, kind="stable")
    values, reached = values[order], np.cumsum(weights[order]) / weights.sum()
    places = np.searchsorted(reached, np.arange(1, _BINS) / _BINS)
    cuts = np.unique(values[np.minimum(places, len(values) - 1)])
    edges = [float(cut) for cut in cuts if values[0] < cut < math.inf]
    bins = np.searchsorted(edges, values, side="right") if edges else np.zeros(len(values), int)
    shares = np.bincount(bins, weights=weights[order], minlength=len(edges) + 1) / weights.sum()
    return {"edges": edges, "shares": [round(float(share), 6) for share in shares]}


def bin_of(edges: Sequence[float], value: float) -> int:
    """The number of a value's bin."""
    return bisect.bisect_right(edges, value)


def observed(record: Mapping[str, Any]) -> dict[str, float]:
    """What a `StopRecord`, as a dict, says of thinking tokens and of the first step.

    Of that the price of indifference, with a policy of one lambda the stop probability: it does not
    depend on where requests stop. What is not said is left out.
    """
    found = {"thinking_tokens": float(record["thinking_tokens"])}
    said = record["prices"] or record["probabilities"]
    # JSON has no inf and no NaN: the server's route writes "inf" and null.
    numbers = [math.nan if x is None else float(x) for x in said]
    asked = [k for k, number in enumerate(numbers) if not math.isnan(number)]
    # In labels the end of a trace is no step to decide on.
    if asked and not (
        record["reason"] == "natural" and record["step_ends"][asked[0]] >= record["thinking_tokens"]
    ):
        found["first_step"] = numbers[asked[0]]
    return found
