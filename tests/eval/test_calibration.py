"""Promises about accuracy: how often they are broken, and what they refuse."""

import math
from typing import Any

import numpy as np
import pytest

from ospruner.eval.calibration import (
    betting_rejects,
    boldest_kept,
    calibrate,
    exact_rejects,
    forecast,
    losses,
    problems_needed,
)
from ospruner.eval.replay import Outcome, replay, replay_at, replay_full
from ospruner.eval.table import FloatArray, TraceTable

from .evaluations import graded

CALIBRATIONS = 1000
LEVEL = 0.05
MARGIN = 0.02
# What a true error of LEVEL stays below in all but one of 10,000 such tests.
BOUND = LEVEL + 3.7 * math.sqrt(LEVEL * (1 - LEVEL) / CALIBRATIONS)


def pairs(helped: float, n: int, loss: float = MARGIN, seed: int = 0) -> FloatArray:
    """(C, n) losses of calibrations in which `loss` is lost exactly."""
    draws = np.random.default_rng(seed).random((CALIBRATIONS, n))
    return np.where(draws < helped + loss, 1.0, np.where(draws < 2 * helped + loss, -1.0, 0.0))


@pytest.mark.parametrize("helped", [0.0, 0.003, 0.02, 0.15])
@pytest.mark.parametrize("n", [120, 400])
def test_a_loss_exactly_at_the_limit_is_rarely_promised(helped: float, n: int) -> None:
    lost = pairs(helped, n)
    assert exact_rejects(lost, MARGIN, LEVEL).mean() <= BOUND
    assert betting_rejects(lost, MARGIN, LEVEL).mean() <= BOUND
    # Several traces a problem, drawn stops: losses of any size.
    shares = lost * 0.5 + pairs(helped, n, seed=1) * 0.5
    assert betting_rejects(shares, MARGIN, LEVEL, variance=0.001).mean() <= BOUND
    assert betting_rejects(shares, MARGIN, LEVEL, variance=1.0).mean() <= BOUND


def candidates(traces: TraceTable) -> list[tuple[float, Outcome]]:
    """Stop at step T, T - 1, ..., 1: from careful to bold."""
    steps = range(traces.mask.shape[1] - 1, -1, -1)
    return [(float(step), replay_at(traces, np.full(len(traces), step))) for step in steps]


def drawn(n: int, seed: int) -> TraceTable:
    """Problems whose early answers are right less often: .8, .795, .77 and .6 of the full's."""
    draws = np.random.default_rng(seed)
    u = draws.random((n, 1))
    noise = draws.random((n, 4)) < 0.03  # answers that change for no reason
    return graded(((u < [0.6, 0.77, 0.795, 0.8]) ^ noise).astype(float))


def test_the_whole_search_keeps_its_word() -> None:
    """A rule that draws: losses of any size, one of its settings exactly at the limit."""
    mixing = [1.0, 0.9, 0.7, 0.4]  # how often it stops at the end, from careful to bold
    truth = {share: (1 - share) * (0.25 - 0.05) for share in mixing}  # a quarter is harmed
    lost = []
    for seed in range(CALIBRATIONS):
        u, right = np.random.default_rng(seed).random((2, 400))
        early = np.where(u < 0.25, 0.0, np.where(u < 0.3, 1.0, right < 0.7))
        late = np.where(u < 0.3, 1.0 - early, early)
        traces = graded(np.stack([early, late], axis=1))
        stops = [np.tile([1 - share, 0.0], (400, 1)) for share in mixing]
        settings = [(s, replay(traces, one)) for s, one in zip(mixing, stops, strict=True)]
        found = calibrate(traces, settings, truth[0.7])
        assert (found.test, found.natural_accuracy) == ("betting", None)
        lost += [] if found.value is None else [truth[found.value]]
    assert sum(one >= truth[0.7] for one in lost) / CALIBRATIONS <= BOUND
    assert len(lost) / CALIBRATIONS > 0.5


def test_several_traces_of_a_problem_are_one_unit() -> None:
    one = drawn(500, seed=3)
    twice = graded(np.repeat(one.correct, 2, axis=0), per_problem=2)
    alone, doubled = (calibrate(t, candidates(t), 0.05) for t in (one, twice))
    assert (alone.value, alone.problems) == (doubled.value, doubled.problems) == (2.0, 500)
    assert (alone.loss, alone.test) == (doubled.loss, "exact")
    grades = one.correct.copy()
    grades[::2, :2] = 0.5  # the share of right forced answers
    shares = graded(grades)
    assert calibrate(shares, candidates(shares), 0.05).test == "betting"


def test_where_nothing_passes_it_says_how_many_problems_would_do() -> None:
    small = drawn(40, seed=5)
    found = calibrate(small, candidates(small), 0.02)
    assert found.value is None
    assert f"about {found.enough:,} such problems" in found.told(0.02, 0.95)
    assert problems_needed(np.full(100, 1.0), 0.02, LEVEL) is None
    # By approximation 88 would do of 90 that did not.
    even = graded(np.ones((90, 4)))
    found = calibrate(even, candidates(even), 0.03)
    assert (found.value, problems_needed(np.zeros(90), 0.03, LEVEL)) == (None, 88)
    assert found.enough is not None
    more = graded(np.ones((found.enough, 4)))
    assert calibrate(more, candidates(more), 0.03).value is not None


@pytest.mark.parametrize("helped", [0.0, 0.01, 0.1])
def test_the_number_of_problems_is_about_right(helped: float) -> None:
    """With twice as many most calibrations pass, with half as many few do."""
    lost, draws = pairs(helped, 400, loss=0.01)[0], np.random.default_rng(1)
    tests: tuple[tuple[Any, Any], ...] = (("exact", exact_rejects), ("betting", betting_rejects))
    for test, rejects in tests:
        needed = problems_needed(lost, 0.05, LEVEL, test)
        assert needed is not None
        few, many = (
            rejects(draws.choice(lost, (200, n)), 0.05, LEVEL).mean()
            for n in (needed // 2, 2 * needed)
        )
        assert few < 0.5 < 0.6 < many, (test, needed)


def test_it_promises_the_boldest_and_stops_at_the_first_failure() -> None:
    """What follows a setting that fails is not looked at, but for one at the most careful end."""
    grades = np.ones((1000, 4))
    grades[:300, 1] = 0  # step 2 loses 30 points, step 1 nothing
    traces = graded(grades)
    found = calibrate(traces, candidates(traces), 0.02)
    assert (found.value, found.loss) == (2.0, 0)
    assert found.tokens_saved == pytest.approx(1 - 30 / replay_full(traces).mean_tokens)
    grades = np.ones((1000, 4))
    grades[:30, 3] = 0  # the full trace errs where all earlier answers are right
    traces = graded(grades)
    settings = candidates(traces)
    worst = settings[0][0], replay_at(graded(1 - grades), np.full(1000, 0))  # none is right
    assert calibrate(traces, [worst, *settings[1:]], 0.02).value == 0.0
    assert calibrate(traces, [worst], 0.02).value is None


@pytest.mark.parametrize("at", [0, 1, 4])
def test_both_sequences_together_keep_their_word(at: int) -> None:
    """One setting of many loses exactly the limit, those before it nothing, the rest far more."""
    nothing, much = pairs(0.001, 300, loss=0.0, seed=1), np.ones((CALIBRATIONS, 300))
    lost = [nothing] * at + [pairs(0.01, 300)] + [much] * 11
    kept = boldest_kept(lost, MARGIN, LEVEL)
    assert (kept >= at).mean() <= BOUND
    assert (kept == at - 1).mean() > 0.5


def test_the_order_of_bets_follows_from_policy_and_data_alone() -> None:
    """Rows in another order are the same data and find the same answer."""
    grades = np.random.default_rng(0).choice([0.0, 0.5, 1.0], (300, 4))
    traces, turned = graded(grades), graded(grades[::-1].copy())
    turned.problem_ids.reverse()
    one, other = (calibrate(each, candidates(each), 0.1, salt="p") for each in (traces, turned))
    assert one == other
    assert one.test == "betting"
    near = np.where(np.random.default_rng(1).random((300, 2)) < [0.45, 0.5], 1.0, 0.5)
    found = {
        calibrate(graded(near), candidates(graded(near))[1:], 0.04, 0.7, salt=str(salt)).value
        for salt in range(8)
    }
    assert len(found) > 1, "another policy or other data may come to another answer"


def test_each_of_several_looks_at_growing_labels_spends_its_part_of_the_level() -> None:
    small = drawn(300, seed=12)
    four = calibrate(small, candidates(small), 0.02, looks=4)
    assert four == calibrate(small, candidates(small), 0.02, 1 - LEVEL / 4)
    assert four != calibrate(small, candidates(small), 0.02)


def test_a_forecast_is_what_larger_calibrations_save() -> None:
    small = drawn(400, seed=4)
    settings, full = candidates(small), replay_full(small).mean_tokens
    lost = [losses(small, one) for _, one in settings]
    saved = np.array([1 - one.mean_tokens / full for _, one in settings])
    expected = forecast(lost, saved, 800, 0.05, LEVEL)
    found = []
    for large in (drawn(800, seed) for seed in range(200)):
        value = calibrate(large, candidates(large), 0.05).value
        found.append(0.0 if value is None else saved[3 - int(value)])
    assert expected == pytest.approx(np.mean(found), abs=0.1)
    assert forecast(lost, saved, 100, 0.05, LEVEL) < expected


def test_numbers_out_of_range_are_refused() -> None:
    traces = drawn(20, 0)
    for max_loss, confidence in ((0.0, 0.95), (1.0, 0.95), (0.02, 95.0)):
        with pytest.raises(ValueError, match=r"is (0.0|1.0|95.0); it must lie in"):
            calibrate(traces, candidates(traces), max_loss, confidence)
    with pytest.raises(ValueError, match="no setting to try"):
        calibrate(traces, [], 0.02)
