from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from modeling_ospruner.configuration_ospruner import PriceRange
from ospruner.eval.report.viewer import PricesShown, median_stop


@given(arrays(np.float64, st.integers(1, 30), elements=st.floats(0, 1)))
@settings(deadline=None)
def test_the_median_stop_halves_the_stopping_distribution(pi: np.ndarray) -> None:
    stop = median_stop(pi)
    survival = np.cumprod(np.concatenate([1 - pi[:-1], [0.0]]))  # after each step
    assert survival[stop] <= 0.5
    assert stop == 0 or survival[stop - 1] > 0.5


def test_prices_have_their_places_on_the_line() -> None:
    known = PriceRange(5e-5, 1e-2)
    middle = known.price_at(2.5)
    prices = np.array([[0.0, middle, np.inf, 1.0]])
    view = PricesShown(prices, 1e-2, known).view(0, 3)
    assert view["places"] == [0.0, 0.5, 1.0]
    assert (view["price"], view["place"]) == (1e-2, 1.0)
    assert view["prices"][0] == 0
    assert view["prices"][1] == pytest.approx(middle, rel=0.01)
    assert view["prices"][2] is None


def test_nan_goes_on() -> None:
    assert median_stop(np.array([np.nan, np.nan, 0.0])) == 2
    assert median_stop(np.array([1.0, 0.0])) == 0
    assert median_stop(np.array([0.3])) == 0
