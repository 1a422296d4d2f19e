"""The benchmark of generate does what it says, on a tiny base; its numbers are not looked at."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch


@pytest.fixture
def timing(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("benchmarks/timing.py")


def test_it_prints_its_keys_on_the_last_line(repo_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "generate.json"
    done = subprocess.run(
        [
            *(sys.executable, str(repo_dir / "benchmarks" / "generate.py"), "--shape", "tiny"),
            *("--prompt-tokens", "8", "--trace-tokens", "64", "--runs", "2", "--batches", "1"),
            *("8", "--seed", "3", "--json", str(file)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == json.loads(file.read_text())
    keys = ("never_stop_ratio_batch1", "never_stop_ratio_batch8", "half_stop_time_ratio")
    for key in (*keys, *(f"queries_{key}" for key in keys)):
        assert math.isfinite(found[key])
        assert found[key] > 0
        low, high = found[f"{key}_interval"]
        assert low <= found[key] <= high
    assert 0 < found["queries_tail_over_base"] < found["tail_over_base"] < 1
    assert "time, stopping at half, queries, batch 1" in done.stdout


def test_arms_take_turns_and_keep_their_own_draws(
    load_script: Callable[[str], ModuleType],
) -> None:
    bench, order = load_script("benchmarks/generate.py"), []
    turns = bench.Turns(7)

    def call(name: str, steps: int) -> list[float]:
        draws = []
        for _ in range(steps):
            turns.pause(name)
            order.append(name)
            draws.append(torch.rand(()).item())
        return draws

    drawn = turns.run({"a": lambda: call("a", 4), "b": lambda: call("b", 2)}, turn=1)
    assert drawn["b"] == drawn["a"][:2], "of one seed, whoever drew in between"
    assert order == ["b", "a", "a", "b", "a", "a"]
    assert {name: len(steps) for name, steps in turns.steps.items()} == {"a": 3, "b": 1}
    with pytest.raises(ZeroDivisionError):
        turns.run({"a": lambda: call("a", 1), "b": lambda: 1 / 0}, turn=0)


def test_the_interval_holds_the_median_at_its_confidence(timing: ModuleType) -> None:
    nine = timing.median_ratio([9, 1, 8, 2, 7, 3, 6, 4, 5])
    assert (nine.median, nine.low, nine.high) == (5, 2, 8)
    assert nine.confidence == pytest.approx(1 - 2 * (1 + 9) / 2**9)
    three = timing.median_ratio([1.0, 2.0, 4.0])
    assert (three.median, three.low, three.high) == (2, 1, 4)
    assert three.confidence == pytest.approx(0.75)
    assert timing.median_ratio([1.0, 2.0]).median == 1.5


def test_what_slows_both_arms_is_no_difference(timing: ModuleType) -> None:
    draws, steps = np.random.default_rng(0), np.arange(400)
    slow = 1 + 3 * (steps // 50 % 2)  # the machine is busy for 50 steps at a time
    plain = [slow * draws.uniform(1, 1.2, 400) for _ in range(2)]
    found = timing.paired_ratio(plain, [1.05 * run for run in plain])
    assert (found.low, found.median, found.high) == pytest.approx((1.05, 1.05, 1.05))
    half = [np.where(steps < 200, run, 0.5 * run) for run in plain]
    unlike = timing.paired_ratio(plain, half)
    assert 0.5 < unlike.low < unlike.median < unlike.high < 1
    assert unlike.median == pytest.approx(0.75, abs=0.01)
    few = timing.paired_ratio([[1.0, 2.0]], [[2.0, 4.0]])  # fewer steps than a run of them
    assert few.median == pytest.approx(2)
    shorter = timing.paired_ratio([[1.0, 2.0, 5.0], [1.5, 1.0, 9.0]], [[2.0, 2.0], [3.0, 1.0]])
    assert shorter.median == pytest.approx((2 + 1) / (1 + 1 + 5)), "each step's least time"
