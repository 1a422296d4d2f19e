"""What a server has saved, by its counters."""

import functools
import http.server
import math
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

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
