"""The e-process on the answers of control requests, and how requests are distributed."""

from dataclasses import replace

import numpy as np
import pytest

from modeling_ospruner.stopping_ospruner import StopRecord
from ospruner.serving.drift import Drift, answers_differ, distribution, observed


def test_evidence_is_the_mean_of_the_bets_capital() -> None:
    """Against the sums written out: every start, every bet."""
    draws = np.random.default_rng(0).random(60) < 0.3
    allowed, drift = 0.2, Drift(0.2)
    for now in draws:
        drift.see(now)
    n = len(draws)
    capital = [1 / (n + 1)]
    for start in range(n):
        bets = [
            np.prod(1 + e / (allowed * (1 - allowed)) * (draws[start:] - allowed))
            for e in (0.02, 0.05, 0.1, 0.2)
        ]
        capital.append(float(np.mean(bets)) / ((start + 1) * (start + 2)))
    assert drift.evidence[0] == pytest.approx(sum(capital))
    assert (drift.seen, drift.differed[0]) == (n, draws.sum())


@pytest.mark.parametrize(
    ("allowed", "share", "least", "most"),
    [(0.1, 0.25, 0.95, 1.0), *((one, one, 0.0, 0.05) for one in (0.1, 0.5, 0.85, 0.95))],
)
def test_false_alarms_are_rare_and_drifts_are_seen(
    allowed: float, share: float, least: float, most: float
) -> None:
    """In 400 streams of 1,000 answers; no bet is so large that a capital falls below 0."""
    draw, drift = np.random.default_rng(1), Drift(allowed, 0.05, streams=400)
    for _ in range(1000):
        drift.see(draw.random(400) < share)
        assert (drift.evidence >= 0).all()
    assert least <= drift.alarmed.mean() <= most


def test_an_alarm_is_remembered() -> None:
    drift = Drift(0.1)
    for differs in [True] * 20 + [False] * 300:
        drift.see(differs)
    assert drift.evidence[0] < 1 < 1 / drift.level < drift.highest[0]
    assert drift.alarmed[0]


@pytest.mark.parametrize("wrong", [{"allowed": 0.0}, {"allowed": 1.0}, {"level": 0.0}])
def test_wrong_shares_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=" is ".join(map(str, *wrong.items()))):
        Drift(wrong.get("allowed", 0.1), wrong.get("level", 0.05))


def test_white_space_alone_is_no_difference() -> None:
    assert not answers_differ("1 000}", " 1000 }")
    assert answers_differ("1/2}", "0.5}")


def test_bins_are_tenths_and_hold_their_lower_edge() -> None:
    found = distribution(np.arange(100, dtype=np.float64), np.ones(100))
    assert found["shares"] == pytest.approx([0.1] * 10, abs=0.011)
    assert len(found["edges"]) == 9
    # Where half of all is one number, it has a bin of its own; weights count.
    weights = np.array([1.0, 2.0, 1.0, 1.0])
    half = distribution(np.array([0.0, 0.0, 1.0, 2.0]), weights)
    assert half["shares"][0] == pytest.approx(0.6)
    infinite = distribution(np.full(5, np.inf, np.float64), np.ones(5))
    assert infinite == {"edges": [], "shares": [1.0]}


def test_what_a_record_says() -> None:
    nan = float("nan")
    record = StopRecord([5, 9], [nan, 0.2], [nan, 3e-4], 20, "natural")
    assert observed(record) == {"thinking_tokens": 20.0, "first_step": 3e-4}
    assert observed(replace(record, prices=[]))["first_step"] == 0.2
    # The end of a trace is no step to decide on in labels.
    assert observed(replace(record, thinking_tokens=9)) == {"thinking_tokens": 9.0}
    assert "first_step" in observed(replace(record, thinking_tokens=9, reason="policy"))
