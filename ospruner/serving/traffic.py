"""How requests are distributed: what a calibration keeps of its traces, to compare a server with.

A distribution is a histogram over fixed bins, so that a server counts into it without keeping what
it saw. Bins are cut where tenths of the calibration's traces lie.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from modeling_ospruner.stopping_ospruner import StopRecord

_TENTHS = np.arange(1, 10) / 10


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
    cuts = np.unique(np.quantile(values, _TENTHS, weights=weights, method="inverted_cdf"))
    edges = [float(cut) for cut in cuts if values.min() < cut < math.inf]
    counts, _ = np.histogram(values, [-np.inf, *edges, np.inf], weights=weights)
    return {"edges": edges, "shares": (counts / weights.sum()).round(6).tolist()}


def bin_of(edges: Sequence[float], value: float) -> int:
    """The number of a value's bin."""
    return bisect.bisect_right(edges, value)


def observed(record: StopRecord) -> dict[str, float]:
    """What a record says of thinking tokens and of the first step at which the policy was asked.

    Of that the price of indifference, with a policy of one price the stop probability: it does not
    depend on where requests stop. What is not said is left out.
    """
    found = {"thinking_tokens": float(record.thinking_tokens)}
    told = zip(record.step_ends, record.prices or record.probabilities, strict=True)
    asked = [(end, number) for end, number in told if not math.isnan(number)]
    # In labels the end of a trace is no step to decide on.
    if asked and not (record.reason == "natural" and asked[0][0] >= record.thinking_tokens):
        found["first_step"] = asked[0][1]
    return found
