"""The benchmark of training: its arms compute the same loss, and its keys are on the last line."""

from __future__ import annotations

import json
import math
import runpy
import sys
from pathlib import Path

import pytest


def test_arms_agree_and_keys_stand_on_the_last_line(
    repo_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script, file = repo_dir / "benchmarks" / "train.py", tmp_path / "train.json"
    monkeypatch.syspath_prepend(script.parent)
    small = ["--limit", "2", "--width", "56", "--layers", "4", "--tokens", "30", "--steps", "5"]
    monkeypatch.setattr(sys, "argv", [str(script), *small, "--rounds", "1", "--json", str(file)])
    runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr().out
    found = json.loads(printed.splitlines()[-1])
    assert found == json.loads(file.read_text())
    assert found["loss_difference"] < 1e-5
    arms = {"naive", "padded", "packed", "kept", "queries", "every_price"}
    assert set(found["arms"]) == arms
    for name in (
        "packed_over_naive",
        "queries_cost_ratio",
        "six_prices_cost_ratio",
    ):
        assert math.isfinite(found[name])
    operations = {name: arm["operations"] for name, arm in found["arms"].items()}
    # States in memory need no pass of the trunk.
    assert operations["kept"] < operations["packed"] < operations["padded"]
    # Five outputs more of the head, forward and backward: all prices share the tail's pass.
    assert operations["kept"] < operations["every_price"] < 1.01 * operations["kept"]
    # Five step ends of thirty tokens, of which no keys are made.
    assert operations["queries"] < 0.5 * operations["kept"]
    held = {name: found["arms"][name]["bytes_for_backward"] for name in ("kept", "queries")}
    assert held["queries"] < held["kept"]
