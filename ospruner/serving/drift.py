"""Whether a promise has gone stale, without references: a server against its calibration.

Of a control request, which thinks to its end, the answer forced where the policy would have stopped
is held against the answer at the end. A calibration says how often the two differ on its problems;
if traffic drifts, they differ more often.

How requests are distributed is told in histograms over fixed bins, so that a server counts into
them without keeping what it saw. Bins are cut where tenths of the calibration's traces lie.
"""

import math

import numpy as np
import numpy.typing as npt

from modeling_ospruner.stopping_ospruner import StopRecord

_EXCESSES = np.array([0.02, 0.05, 0.1, 0.2])  # of the share that differ, which the bets look for
_TENTHS = np.arange(1, 10) / 10


class Drift:
    """An e-process against "at most `allowed` of the answers differ".

    A capital that starts at answer s is multiplied by 1 + b (x - allowed) with each answer from s
    on, x being 1 where the two differ, b = excess / (allowed (1 - allowed)), at most 1 / allowed,
    so that no capital falls below 0. `evidence` is the mean
    over `_EXCESSES` and over the starts, of which s has the weight 1 / (s (s + 1)): under the null
    a supermartingale from 1. Whatever the number of answers, and whenever one looks, it reaches
    1 / level with probability `level` at most (Ville 1939). Starts at any time are why what was in
    order for long does not hide a drift. Streams are followed side by side, each by itself.

    Raises:
        ValueError: `allowed` or `level` is no number between 0 and 1.
    """

    def __init__(self, allowed: float, level: float = 0.05, streams: int = 1) -> None:
        for name, value in (("allowed", allowed), ("level", level)):
            if not 0 < value < 1:
                raise ValueError(f"{name} is {value}; it must lie between 0 and 1")
        self.allowed, self.level = allowed, level
        self.seen = 0  # answers compared
        self._bets = np.minimum(_EXCESSES / (1 - allowed), 1) / allowed
        self._capital = np.zeros((streams, len(self._bets)))
        self.differed = np.zeros(streams, int)  # how many of them did, (C,)
        self.evidence = self.highest = np.ones(streams)  # (C,), and the highest so far

    @property
    def alarmed(self) -> npt.NDArray[np.bool_]:
        """(C,) whether the evidence has ever reached 1 / level."""
        return self.highest >= 1 / self.level

    def see(self, differs: npt.ArrayLike) -> None:
        """Takes in whether the next answers, (C,) or one, differ."""
        now = np.broadcast_to(np.asarray(differs, bool), self.differed.shape)
        self.seen += 1
        factors = 1 + self._bets * (now[:, None] - self.allowed)
        self._capital = (self._capital + 1 / (self.seen * (self.seen + 1))) * factors
        self.differed = self.differed + now
        self.evidence = self._capital.mean(axis=1) + 1 / (self.seen + 1)
        self.highest = np.maximum(self.highest, self.evidence)


def answers_differ(one: str, other: str) -> bool:
    """Whether two forced answers differ, but for white space: the same in calibration and server.

    Equal values written in two ways differ here, on both sides alike: what is watched is whether
    they differ more often than they did.
    """
    return "".join(one.split()) != "".join(other.split())


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
