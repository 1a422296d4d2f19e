"""Thresholds that control a risk, against cases computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ospruner.eval.frontier.risk import (
    binomial_tail,
    conformal_quantile,
    conformal_threshold,
    learn_then_test,
)


def test_the_conformal_quantile_counts_one_more_score() -> None:
    scores = np.array([0.4, 0.1, 0.3, 0.2])
    # ceil(5 * .5) = 3, ceil(5 * .8) = 4, ceil(5 * .95) = 5: beyond the scores, so the largest.
    assert [conformal_quantile(scores, delta) for delta in (0.5, 0.2, 0.05)] == [0.3, 0.4, 0.4]
    assert conformal_quantile(scores, 1.0) == 0.1
    with pytest.raises(ValueError, match="no scores to take a quantile of"):
        conformal_quantile(scores[:0], 0.1)


def test_lynx_stops_where_right_alone_is_in_the_set() -> None:
    said = np.array([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3])
    right = np.array([True, True, True, False, True, False, False])
    # delta .5: of the wrong steps' .3, .4, .6 the second; "wrong" is out of the set above .4. Of
    # the right steps' .1, .2, .3, .5 the third; "right" is in from .7 on.
    assert conformal_threshold(said, right, 0.5) == pytest.approx(0.7)
    # delta .2: the largest of both: above .6, and from .5 on.
    assert conformal_threshold(said, right, 0.2) == np.nextafter(0.6, 1)
    assert conformal_threshold(np.array([1.0, 1.0]), np.array([True, False]), 0.1) == 1.0


def test_the_binomial_tail() -> None:
    assert binomial_tail(0, 5, 0.2) == pytest.approx(0.8**5)
    assert binomial_tail(1, 3, 0.5) == pytest.approx(0.5)
    assert binomial_tail(3, 3, 0.5) == 1.0
    exact = sum(math.comb(200, k) * 0.1**k * 0.9 ** (200 - k) for k in range(16))
    assert binomial_tail(15, 200, 0.1) == pytest.approx(exact)


def test_thought_calibration_goes_down_until_a_test_fails() -> None:
    # Twenty traces of two steps. The first step of half of them is consistent, and says .9; that
    # of the others is not, and says .5: from there on half of the stops are inconsistent.
    scores = np.array([[0.9, 1.0]] * 10 + [[0.5, 1.0]] * 10)
    consistent = np.array([[True, True]] * 10 + [[False, True]] * 10)
    mask = np.ones((20, 2), bool)
    # Without a loss P(X <= 0) = .8^20 = .012 passes at .2; ten of twenty do not.
    assert learn_then_test(scores, consistent, mask, 0.2, 11) == pytest.approx(0.6)
    # .95^20 = .36 is above .05: not even no loss at all is proof enough.
    assert learn_then_test(scores, consistent, mask, 0.05, 11) == 1.0
    # At .6, P(X <= 10 | 20, .6) = .245 passes: nothing is ever refused.
    assert learn_then_test(scores, consistent, mask, 0.6, 11) == 0.0
