"""How requests are distributed, as a calibration and a server count them."""

from dataclasses import replace

import numpy as np
import pytest

from modeling_ospruner.stopping_ospruner import StopRecord
from ospruner.serving.traffic import bin_of, distribution, observed


def test_bins_are_tenths_and_hold_their_lower_edge() -> None:
    found = distribution(np.arange(100, dtype=np.float64), np.ones(100))
    assert found["shares"] == pytest.approx([0.1] * 10, abs=0.011)
    assert bin_of(found["edges"], found["edges"][3]) == 4
    assert bin_of(found["edges"], np.inf) == 9
    # Where half of all is one number, it has a bin of its own; weights count.
    weights = np.array([1.0, 2.0, 1.0, 1.0])
    half = distribution(np.array([0.0, 0.0, 1.0, 2.0]), weights)
    assert half["shares"][0] == pytest.approx(0.6)
    assert distribution(np.full(5, np.inf, np.float64), np.ones(5)) == {
        "edges": [],
        "shares": [1.0],
    }


def test_what_a_record_says() -> None:
    nan = float("nan")
    record = StopRecord([5, 9], [nan, 0.2], [nan, 3e-4], 20, "natural")
    assert observed(record) == {"thinking_tokens": 20.0, "first_step": 3e-4}
    assert observed(replace(record, prices=[]))["first_step"] == 0.2
    # The end of a trace is no step to decide on in labels.
    assert observed(replace(record, thinking_tokens=9)) == {"thinking_tokens": 9.0}
    assert "first_step" in observed(replace(record, thinking_tokens=9, reason="policy"))
