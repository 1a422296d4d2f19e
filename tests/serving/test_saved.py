"""What a server has saved, by its counters, and whether its traffic has drifted."""

import functools
import http.server
import math
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from modeling_ospruner.stopping_ospruner import StopRecord
from ospruner.serving.drift import Drift, answers_differ, distribution, observed
from ospruner.serving.saved import saved_by


def metrics(groups: dict[tuple[str, str], list[int]]) -> str:
    """As Prometheus writes them."""
    lines = ["# TYPE ospruner_thinking_tokens_total counter"]
    for (group, reason), tokens in groups.items():
        for kind, power in (("ended", 0), ("tokens", 1), ("squares", 2)):
            total = float(sum(one**power for one in tokens))
            labels = f'group="{group}",reason="{reason}"'
            lines.append(f"ospruner_thinking_{kind}_total{{{labels}}} {total}")
    return "\n".join([*lines, "other_total 3.0", ""])


@pytest.fixture
def told(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A server's address, and the file that holds its metrics."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", tmp_path / "metrics"
        server.shutdown()


def test_the_saving_and_its_interval(told: tuple[str, Path]) -> None:
    """The interval holds the truth in about 95 of 100 drawn servers."""
    url, said = told
    draw, held = np.random.default_rng(0), 0
    for _ in range(200):
        pruned, whole = draw.geometric(1 / 300, 800), draw.geometric(1 / 500, 60)
        groups = {("policy", "policy"): pruned[:700].tolist()}
        groups |= {("policy", "natural"): pruned[700:].tolist()}
        said.write_text(metrics(groups | {("control", "natural"): whole.tolist()}))
        text = saved_by(f"{url}/v1")
        found = re.search(r"saved (.*)% \[(.*)%, (.*)%\]: (\S+) thinking tokens \[", text)
        assert found is not None
        share, low, high, tokens = (float(one.replace(",", "")) for one in found.groups())
        assert share == pytest.approx(100 * (1 - pruned.mean() / whole.mean()), abs=0.051)
        assert tokens == pytest.approx(800 * whole.mean() - pruned.sum(), abs=0.51)
        held += low <= 40 <= high
    assert "800 requests with the policy" in text
    assert "ended by: natural 100, policy 700" in text
    assert abs(held / 200 - 0.95) < 3.5 * math.sqrt(0.95 * 0.05 / 200)


def test_what_is_missing_is_said(told: tuple[str, Path]) -> None:
    url, said = told
    said.write_text(metrics({("policy", "budget"): [5, 6]}))
    assert "11 thinking tokens; ended by: budget 2\nno control group" in saved_by(url)
    said.write_text("other_total 3.0\n")
    with pytest.raises(ValueError, match="no thinking has ended"):
        saved_by(url)
    with pytest.raises(ConnectionError, match="127.0.0.1:9/metrics does not answer"):
        saved_by("http://127.0.0.1:9")


def test_each_promise_says_whether_its_traffic_has_drifted(told: tuple[str, Path]) -> None:
    url, said = told
    lines = [metrics({("policy", "policy"): [5, 6]})]
    for max_loss, evidence in ((0.02, 0.5), (0.05, 45.0)):
        labels = f'max_loss="{max_loss}",confidence="0.95",allowed="0.1000"'
        lines += [
            f'ospruner_control_answers_total{{{labels},differs="{name}"}} {count}.0'
            for name, count in (("yes", 30), ("no", 170))
        ]
        lines.append(f"ospruner_drift_evidence{{{labels}}} {evidence}")
    said.write_text("\n".join(lines) + "\n")
    _, fine, drifted = saved_by(url).replace("\nno control", " no control").split("\n")
    assert fine.startswith("promise of 2 points: of 200 control answers 15.0% differ")
    assert fine.endswith("evidence 0.5 of 40: no sign of drift")
    assert drifted.endswith("evidence 45 of 40: DRIFTED: calibrate on today's problems")


# The e-process on the answers of control requests, and how requests are distributed.


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
def test_drifts_alone_are_seen(allowed: float, share: float, least: float, most: float) -> None:
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
