"""`ospruner doctor drift`: what a server counts against what the calibration's traces were."""

from __future__ import annotations

import http.server
import io
import json
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from modeling_ospruner import OSPrunerConfig
from modeling_ospruner.configuration_ospruner import CALIBRATION_FIELDS
from modeling_ospruner.stopping_ospruner import StopRecord
from ospruner.doctor.drift import compare, counts_of_metrics, run_drift
from ospruner.serving.traffic import SIGNALS, bin_of, distribution, observed

PROBLEMS = 1000


def lengths(count: int, seed: int, scale: float = 100.0) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.ceil(np.random.default_rng(seed).gamma(2.0, scale, count))


def prices(count: int, seed: int, shift: float = 0.0) -> np.ndarray[Any, np.dtype[np.float64]]:
    draws = np.random.default_rng(seed + 100)
    found = 10 ** draws.normal(-3 + shift, 1, count)
    return np.where(found > 0.1, np.inf, np.where(found < 1e-5, 0.0, found))


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """A configuration with one promise."""
    config = OSPrunerConfig(head="price", price_range=[1e-5, 0.1])
    ones = np.ones(PROBLEMS)
    traffic = {
        "problems": PROBLEMS,
        "thinking_tokens": distribution(lengths(PROBLEMS, 0), ones),
        "first_step": distribution(prices(PROBLEMS, 0), ones),
    }
    promise = dict.fromkeys(CALIBRATION_FIELDS, 0.02) | {"mode": "threshold", "problems": PROBLEMS}
    config.calibrations = [promise | {"confidence": 0.95, "traffic": traffic}]
    config.save_pretrained(tmp_path / "policy")
    return tmp_path / "policy"


def records(path: Path, tokens: Any, first: Any) -> Path:
    lines = []
    for length, price in zip(tokens, first, strict=True):
        record = StopRecord(
            step_ends=[int(length) - 1, int(length)],
            probabilities=[0.1, 0.6],
            prices=[float(price), 0.0],
            thinking_tokens=int(length),
            reason="policy",
        )
        lines.append(json.dumps(asdict(record)))
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def told(policy: Path, served: Path | str, *more: str) -> tuple[int, str]:
    printed = io.StringIO()
    loss = float(more[1]) if more else None
    try:
        same = run_drift(str(policy), str(served), loss, Console(file=printed, width=200))
    except (ValueError, OSError) as error:
        return 1, " ".join(printed.getvalue().split()) + str(error)
    return int(not same), " ".join(printed.getvalue().split())


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
    record = asdict(StopRecord([5, 9], [nan, 0.2], [nan, 3e-4], 20, "natural"))
    assert observed(record) == {"thinking_tokens": 20.0, "first_step": 3e-4}
    assert observed(record | {"prices": []})["first_step"] == 0.2
    assert observed(record | {"prices": [None, "inf"]})["first_step"] == np.inf
    # The end of a trace is no step to decide on in labels.
    assert observed(record | {"thinking_tokens": 9}) == {"thinking_tokens": 9.0}
    assert "first_step" in observed(record | {"thinking_tokens": 9, "reason": "policy"})


def test_chance_is_no_drift() -> None:
    """Of servers that see the same traffic, one in a hundred or so has p below .01."""
    low = 0
    for seed in range(400):
        shares = distribution(lengths(PROBLEMS, seed), np.ones(PROBLEMS))
        seen = lengths(3000, seed + 1000)
        counts = np.bincount(np.searchsorted(shares["edges"], seen, side="right"), minlength=10)
        distance, p = compare(shares["shares"], PROBLEMS, counts.astype(float))
        assert distance < 0.1
        low += p < 0.01
    assert low <= 12


def test_the_same_traffic_agrees_and_another_does_not(policy: Path, tmp_path: Path) -> None:
    same = records(tmp_path / "same.jsonl", lengths(2000, 1), prices(2000, 1))
    code, text = told(policy, same, "--json", str(tmp_path / "found.json"))
    assert code == 0, text
    assert "Nothing is wrong" in text
    found = json.loads((tmp_path / "found.json").read_text())
    assert sum(found["counts"]["first_step"]) == 2000

    longer = records(tmp_path / "long.jsonl", lengths(2000, 2, 150.0), prices(2000, 2))
    code, text = told(policy, longer)
    assert code == 1
    assert "thinking tokens distance 0." in text
    assert "higher than the calibration's" in text
    assert "1 thing to mend" in text

    easier = records(tmp_path / "easy.jsonl", lengths(2000, 3), prices(2000, 3, -1.0))
    code, text = told(policy, easier)
    assert code == 1
    assert "lower than the calibration's" in text

    few = records(tmp_path / "few.jsonl", lengths(50, 2, 500.0), prices(50, 2))
    code, text = told(policy, few)
    assert code == 0
    assert "50 requests are too few to tell" in text


def metrics(promise: dict[str, Any], tokens: Any, first: Any) -> str:
    lines = ["# TYPE ospruner_promised_total counter"]
    for signal, values in zip(SIGNALS, (tokens, first), strict=True):
        edges = promise["traffic"][signal]["edges"]
        places, counts = np.unique(np.searchsorted(edges, values, "right"), return_counts=True)
        lines += [
            f'ospruner_promised_total{{bin="{k}",confidence="0.95",max_loss="0.02",'
            f'signal="{signal}"}} {float(n)}'
            for k, n in zip(places, counts, strict=True)
        ]
    lines.append('ospruner_promised_total{bin="0",confidence="0.95",max_loss="0.1",'
                 'signal="first_step"} 9e9')  # fmt: skip  # another promise's
    return "\n".join(lines) + "\n"


def test_a_servers_counters_are_read_from_its_address(policy: Path, tmp_path: Path) -> None:
    (promise,) = OSPrunerConfig.from_pretrained(policy).calibrations or []
    text = metrics(promise, lengths(2000, 4, 60.0), prices(2000, 4))
    counts = counts_of_metrics(text, promise)
    assert counts["thinking_tokens"].sum() == counts["first_step"].sum() == 2000

    class Metrics(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Metrics)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        code, said = told(policy, f"http://127.0.0.1:{server.server_port}/metrics")
    finally:
        server.shutdown()
        server.server_close()
    assert code == 1
    assert "lower than the calibration's" in said
    (tmp_path / "metrics.txt").write_text(text, "utf-8")
    assert told(policy, tmp_path / "metrics.txt")[0] == 1


def test_what_cannot_be_compared_is_refused(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "none.txt").write_text("vllm:num_requests_running 1.0\n", "utf-8")
    code, text = told(policy, tmp_path / "none.txt")
    assert code == 1
    assert "counts no request that stopped by the promise of max_loss 0.02" in text
    assert "has the promises [0.02]" in told(policy, tmp_path / "none.txt", "--max-loss", "0.5")[1]
    (tmp_path / "bad.jsonl").write_text('{"thinking_tokens": 3}\n', "utf-8")
    assert "line 1 is no StopRecord" in told(policy, tmp_path / "bad.jsonl")[1]
    OSPrunerConfig().save_pretrained(tmp_path / "plain")
    assert "promises nothing" in told(tmp_path / "plain", tmp_path / "none.txt")[1]
