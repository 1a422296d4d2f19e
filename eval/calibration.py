"""A promise about accuracy: the boldest setting of a rule that loses at most so much, so surely.

Learn-then-Test (Angelopoulos et al. 2021, arXiv:2110.01052): settings are ordered from careful to
bold before the data are seen; "it loses more than `max_loss`" is tested for one after the other,
and the boldest that is rejected is promised: on problems drawn as the calibration's were, the
chance that it loses more is at most 1 - confidence (`boldest_kept`).

What is tested is the loss of each *problem*, D in [-1, 1]: the grade of the answer forced at the
full trace's end less that of the one forced at the stop, averaged over the problem's traces, so
that several traces of a problem are one unit. Tests take (C, n) losses of C calibrations, in the
order of betting; `max_loss` is the null's, `level` the chance of a wrong rejection, and they return
(C,) which calibrations reject.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from scipy.special import expit
from scipy.stats import multinomial

from .replay import Outcome, replay_full
from .table import BoolArray, FloatArray, IntArray, TraceTable

Test = Literal["exact", "betting"]

THRESHOLDS: tuple[float, ...] = tuple(expit(np.linspace(7.0, -4.0, 45)).round(6).tolist())
"""Stop probabilities from careful (.999) to bold (.018), in even steps of the logit."""

VARIANCE, PRIOR_PROBLEMS = 0.06, 50
"""The first guess of D's variance, and how many problems it counts as.

They decide how much is saved, never whether the promise holds."""
_MOST_BET = 0.75  # of the capital, at a loss of 1
SECOND = 8  # the second sequence of tests starts this part of the way
FORECASTS = 200  # calibrations that a forecast draws
GRID = 200
"""Shares of helped problems at which the exact test's cut-off is looked for."""


@dataclass(frozen=True)
class Calibration:
    """What a calibration found.

    Attributes:
        value: the boldest setting that keeps the promise; None where none does.
        threshold: of a policy of every price, the stop probability from which on it stops at this
            price; None for one half, or where it draws.
        loss: mean loss of accuracy over the calibration's problems at that setting; where none
            passed, at the most careful one.
        tokens_saved: share of the full traces' thinking tokens, at the same setting.
        problems: how many were tested on.
        test: which test decided.
        full_accuracy: of the answers forced at the full traces' ends, which the loss is against.
        natural_accuracy: of the base's own answers after the full traces, where none counts as
            wrong; None where the labels hold none at all.
        enough: where none passed, about how many problems would do for the most careful setting;
            None where that one loses too much.
        efforts: what was found for each effort, as `OSPrunerConfig` holds it; None for a rule.
    """

    value: float | None
    loss: float
    tokens_saved: float
    problems: int
    test: Test
    full_accuracy: float
    natural_accuracy: float | None
    enough: int | None = None
    efforts: dict[str, dict[str, Any]] | None = None
    threshold: float | None = None

    def told(self, max_loss: float, confidence: float) -> str:
        """The finding in words, and how far the base's own answers lie from what it is against."""
        goal = f"the promise of at most {100 * max_loss:g} points lost at {confidence:g} confidence"
        if self.value is not None:
            at = "" if self.threshold is None else f"@{self.threshold:g}"
            said = (
                f"{self.value:g}{at} keeps {goal}: on {self.problems:,} problems it "
                f"loses {100 * self.loss:.2f} points and saves {self.tokens_saved:.1%} of the "
                f"thinking tokens ({self.test} test)."
            )
        else:
            more = (
                f"about {self.enough:,} such problems would do for the most careful setting"
                if self.enough
                else "more problems like these would not help: the most careful setting loses too "
                "much; add more careful ones (--values; 0@.95 is price 0 from probability .95 on)"
            )
            said = (
                f"No setting keeps {goal} on {self.problems:,} problems ({self.test} test; the "
                f"most careful one loses {100 * self.loss:.2f} points); {more}."
            )
        natural = "; the labels hold no natural answers."
        if self.natural_accuracy is not None:
            apart = 100 * (self.natural_accuracy - self.full_accuracy)
            natural = "; the natural answer there is right in "
            natural += f"{self.natural_accuracy:.1%} ({apart:+.2f} points)."
        return (
            f"{said} The loss is against the answer forced at the full trace's end, right in "
            f"{self.full_accuracy:.1%}{natural}"
        )


def losses(table: TraceTable, outcome: Outcome) -> FloatArray:
    """(P,) loss of accuracy of each problem against its full traces, in [-1, 1]."""
    return table.by_problem(table.full_correct - outcome.correct)


def _test_of(lost: Sequence[FloatArray]) -> Test:
    """The exact paired test where each problem's loss is -1, 0 or 1."""
    return "exact" if all(np.isin(one, (-1.0, 0.0, 1.0)).all() for one in lost) else "betting"


def calibrate(
    table: TraceTable,
    outcomes: Sequence[tuple[float, Outcome]],
    max_loss: float,
    confidence: float = 0.95,
    *,
    salt: str = "",
    looks: int = 1,
) -> Calibration:
    """The boldest setting that loses at most `max_loss`.

    Where every problem's loss is -1, 0 or 1 (one trace a problem, each answer right or wrong, no
    drawn stops) the exact paired test decides, else betting. Which one is a matter of how the
    labels were made, not of what they show.

    Args:
        table: N labelled traces that nothing was chosen or trained on.
        outcomes: settings of a rule with what each does on the traces by replay; from careful to
            bold, in an order that does not depend on these traces.
        max_loss: the accuracy that may be lost, as a share, in (0, 1).
        confidence: in (0, 1).
        salt: names the rule and the labels. The order in which problems are bet on follows from it
            and their ids, so that nobody can try orders until one passes.
        looks: how often in all labels that grow are calibrated on, where the first promise may be
            taken: each look spends so small a part of 1 - confidence.

    Raises:
        ValueError: a number out of its range, or no setting.
    """
    for name, number in {"max_loss": max_loss, "confidence": confidence}.items():
        if not 0 < number < 1:
            raise ValueError(f"{name} is {number}; it must lie in (0, 1), such as 0.02 or 0.95")
    if not outcomes:
        raise ValueError("there is no setting to try; give some from careful to bold")
    places = [hashlib.sha256(f"{salt}/{one}".encode()).digest() for one in table.problem_ids]
    order = sorted(range(len(places)), key=places.__getitem__)
    tested = [losses(table, outcome)[order] for _, outcome in outcomes]
    test, level = _test_of(tested), (1 - confidence) / looks
    kept = int(boldest_kept([lost[None] for lost in tested], max_loss, level, test)[0])
    value, outcome = outcomes[max(kept, 0)]
    natural = table.natural_correct
    enough = None if kept >= 0 else problems_needed(tested[0], max_loss, level / 2, test)
    while enough is not None and enough < 4 * len(order):  # these did not do: more like them must
        more = [np.resize(lost, (1, enough)) for lost in tested]
        if enough > len(order) and boldest_kept(more, max_loss, level, test)[0] >= 0:
            break
        enough = max(math.ceil(1.1 * enough), len(order) + 1)
    return Calibration(
        value=value if kept >= 0 else None,
        loss=float(tested[max(kept, 0)].mean()),
        tokens_saved=1 - outcome.mean_tokens / replay_full(table).mean_tokens,
        problems=len(order),
        test=test,
        full_accuracy=float(table.by_problem(table.full_correct).mean()),
        natural_accuracy=None
        if np.isnan(natural).all()
        else float(table.by_problem(np.nan_to_num(natural)).mean()),
        enough=enough,
    )


def boldest_kept(
    lost: Sequence[FloatArray], max_loss: float, level: float, test: Test = "exact"
) -> IntArray:
    """The boldest setting that keeps the promise in each of C calibrations.

    Settings are tested in two sequences, each at half of the level until its first that is not
    rejected: from the most careful one, and from one `1 / SECOND` of the way. Where the first gets
    to the second's start, it hands its half on, and the second goes on at the whole level. This is
    Wiens' fallback procedure (Pharmaceutical Statistics 2, 2003), exact at any dependence: so a
    point that is lost at the most careful setting alone does not end it all.

    Args:
        lost: (C, n) losses at each of J settings, from careful to bold.
        max_loss: the accuracy that may be lost.
        level: the chance that a setting is taken that loses more.
        test: which one.

    Returns:
        (C,) its number; -1 where none does.
    """

    def leading(some: Sequence[FloatArray], level: float) -> IntArray:
        """(C,) how many settings are rejected before the first that is not."""
        rejects = exact_rejects if test == "exact" else betting_rejects
        rejected = [rejects(one, max_loss, level) for one in some]
        found: IntArray = np.logical_and.accumulate(np.stack(rejected)).sum(axis=0)
        return found

    if len(lost) == 1:
        return leading(lost, level) - 1
    start = max(1, len(lost) // SECOND)
    first, second = (leading(part, level / 2) for part in (lost[:start], lost[start:]))
    whole = start + leading(lost[start:], level)
    return np.where(first == start, whole, np.where(second > 0, start + second, first)) - 1


def forecast(
    lost: Sequence[FloatArray], saved: FloatArray, problems: int, max_loss: float, level: float
) -> float:
    """What calibrations on so many problems, drawn from these with replacement, save in the mean.

    Settings stand from careful to bold: (P,) losses of the problems at hand at each of J, and (J,)
    shares of the thinking tokens that they save.
    """
    picks = np.random.default_rng(problems).integers(0, len(lost[0]), (FORECASTS, problems))
    kept = boldest_kept([one[picks] for one in lost], max_loss, level, _test_of(lost))
    return float(np.where(kept >= 0, saved[kept], 0.0).mean())


def problems_needed(
    lost: FloatArray, max_loss: float, level: float, test: Test = "exact"
) -> int | None:
    """About how many problems like these a test needs to pass in half of all calibrations.

    By the normal approximation of the score, and by the growth of a capital that is bet well. None
    where these (P,) losses are as much as `max_loss`, so that no number does.
    """
    gap = max_loss - float(lost.mean())
    if gap <= 0:
        return None
    variance = float(lost.var())
    if test == "exact":
        quantile = NormalDist().inv_cdf(1 - level)
        return math.ceil(max(variance, max_loss * (1 - max_loss)) * (quantile / gap) ** 2)
    wanted = math.log(1 / level)
    most = math.log1p(_MOST_BET / (1 - max_loss) * gap)  # growth a problem of the largest bet
    return math.ceil(max(2 * variance * wanted / gap**2, wanted / most))


def betting_rejects(
    lost: FloatArray, max_loss: float, level: float, variance: float = VARIANCE
) -> BoolArray:
    """Rejects "the mean loss is `max_loss` or more" by betting against it.

    A capital of 1 is multiplied by 1 + b_t (max_loss - D_t), where the bet b_t depends on the
    problems before t only: under the null it is a supermartingale, which reaches 1 / level with
    probability `level` at most (Waudby-Smith and Ramdas 2024, arXiv:2010.09686, theorem 3). The
    variance is what D's is thought to be before any was seen.
    """
    seen = np.arange(n := lost.shape[1])
    mean = (np.cumsum(lost, axis=1) - lost) / np.maximum(seen, 1)  # of those before
    squares = np.cumsum(lost**2, axis=1) - lost**2
    spread = (PRIOR_PROBLEMS * variance + squares - seen * mean**2) / (PRIOR_PROBLEMS + seen)
    bet = np.sqrt(2 * math.log(1 / level) / (n * np.maximum(spread, 1e-6)))
    bet = np.minimum(bet, _MOST_BET / (1 - max_loss))  # the capital stays positive at D = 1
    capital = np.cumsum(np.log1p(bet * (max_loss - lost)), axis=1)
    return np.asarray(capital.max(axis=1) >= math.log(1 / level))


def exact_rejects(lost: FloatArray, max_loss: float, level: float) -> BoolArray:
    """Rejects the same by the counts of harmed and helped problems: each loss is -1, 0 or 1."""
    n = lost.shape[1]
    score = _score((lost > 0.5).sum(axis=1), (lost < -0.5).sum(axis=1), n, max_loss)
    return np.asarray(score <= _cutoff(n, max_loss, level))


def _score(harmed: IntArray, helped: IntArray, n: int, margin: float) -> FloatArray:
    """Tango's score of p_harm - p_help = margin (Statistics in Medicine 17, 1998): low is good."""
    b = (2 * n - harmed + helped) * margin - harmed - helped
    c = -helped * margin * (1 - margin)
    p_help = (np.sqrt(np.maximum(b * b - 8 * n * c, 0.0)) - b) / (4 * n)  # its likeliest value
    variance = n * (2 * p_help + margin * (1 - margin))
    return (harmed - helped - n * margin) / np.sqrt(variance)


@lru_cache(maxsize=64)
def _cutoff(n: int, margin: float, level: float) -> float:
    """The largest c with P(score <= c) <= level under every null with p_harm = p_help + margin.

    The unknown share of helped problems is looked for on a grid that is dense near 0, where the
    score's distribution changes most; .98 of the level is spent, for what lies between its points.
    """
    cutoff = math.inf
    for p_help in (1 - margin) / 2 * np.linspace(0.0, 1.0, GRID) ** 2:
        p_harm = p_help + margin
        harmed, helped = np.meshgrid(_likely(n, p_harm), _likely(n, p_help), indexing="ij")
        counts = np.stack([harmed, helped, n - harmed - helped], axis=-1)
        counts = counts[counts[..., 2] >= 0]
        chances = multinomial.pmf(counts, n, [p_harm, p_help, max(1 - p_harm - p_help, 0)])
        score = _score(counts[:, 0], counts[:, 1], n, margin)
        order = np.argsort(score)
        spent = np.cumsum(chances[order])
        left_out = min(int(spent.searchsorted(0.98 * level)), len(order) - 1)
        cutoff = min(cutoff, float(score[order[left_out]]) - 1e-9)
    return cutoff


def _likely(n: int, p: float) -> IntArray:
    """The counts that a binomial takes, but for a chance of 1e-9 or so."""
    half = 7 * math.sqrt(n * p * (1 - p)) + 12
    return np.arange(max(0, int(n * p - half)), min(n, int(n * p + half)) + 1)
