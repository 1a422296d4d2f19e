"""What the benchmarks share: steps in turn, intervals, two checkouts in one run."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

LoadScript = Callable[[str], ModuleType]


@pytest.fixture
def timing(load_script: LoadScript) -> ModuleType:
    return load_script("benchmarks/timing.py")


def test_arms_take_turns_and_keep_their_own_draws(
    load_script: LoadScript, timing: ModuleType
) -> None:
    bench, order = load_script("benchmarks/generate.py"), []

    def arm_of(name: str, steps: int) -> Any:
        def call(pause: Callable[[], None]) -> list[float]:
            draws = []
            for _ in range(steps):
                pause()
                order.append(name)
                draws.append(torch.rand(()).item())
            return draws

        return bench.Stepwise(7, call)

    a, b = arm_of("a", 4), arm_of("b", 2)
    times = timing.in_turn({"a": a.step, "b": b.step}, turn=1)
    assert b.result == a.result[:2], "of one seed, whoever drew in between"
    assert len(set(a.result)) == 4
    assert order == ["b", "a", "a", "b", "a", "a"]
    assert {name: len(steps) for name, steps in times.items()} == {"a": 5, "b": 3}
    broken = bench.Stepwise(7, lambda pause: 1 / 0)
    assert not broken.step()
    with pytest.raises(ZeroDivisionError):
        _ = broken.result


def test_what_slows_both_arms_is_no_difference(timing: ModuleType) -> None:
    draws, steps = np.random.default_rng(0), np.arange(400)
    slow = 1 + 3 * (steps // 50 % 2)  # the machine is busy for 50 steps at a time
    plain = [slow * draws.uniform(1, 1.2, 400) for _ in range(2)]
    found = timing.paired_ratio(plain, [1.05 * run for run in plain])
    apart = 1.05 * 1.96 * timing.PROCESSES  # what processes differ by is all that is left
    assert found == pytest.approx((1.05, 1.05 - apart, 1.05 + apart))
    half = [np.where(steps < 200, run, 0.5 * run) for run in plain]
    unlike = timing.paired_ratio(plain, half)
    assert 0.5 < unlike.low < unlike.median < unlike.high < 1
    assert unlike.median == pytest.approx(0.75, abs=0.01)
    few = timing.paired_ratio([[1.0, 2.0]], [[2.0, 4.0]])  # fewer steps than a run of them
    assert few.median == pytest.approx(2)
    shorter = timing.paired_ratio([[1.0, 2.0, 5.0], [1.5, 1.0, 9.0]], [[2.0, 2.0], [3.0, 1.0]])
    assert shorter.median == pytest.approx((2 + 1) / (1 + 1 + 5)), "each step's least time"


def test_the_one_for_a_gpu_starts(repo_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it imports by name is there; tests/project/test_pages.py starts the others."""
    monkeypatch.syspath_prepend(repo_dir / "benchmarks")
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(repo_dir / "benchmarks" / "gpu.py"), run_name="__main__")
