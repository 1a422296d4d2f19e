"""The study of the policy's forms: its resamples and its tables; its run takes hours."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def forms(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("benchmarks/forms.py")


def test_every_form_can_be_trained(forms: ModuleType) -> None:
    for form in forms.FORMS:
        assert forms.settings(forms.Fit(form, 5e-4, 0), 2).head == "price"


def test_seeds_and_problems_are_resampled(forms: ModuleType) -> None:
    """Two seeds that differ by 2 on every trace: the mean, and the interval between them."""
    table = SimpleNamespace(problem_index=np.arange(40))
    lower = np.full((40, 7), 10.0)
    found = forms.resampled(table, [lower, lower + 2])
    assert found.shape == (2001, 8)
    first = forms.estimates(found)[0]
    assert (first.value, first.low, first.high) == (11.0, 10.0, 12.0)
    same = forms.estimates(found - found)[-1]
    assert (same.value, same.low, same.high) == (0.0, 0.0, 0.0)


def test_tables_of_a_finished_run(repo_dir: Path, tmp_path: Path) -> None:
    def eight(value: float) -> list[dict[str, Any]]:
        return [{"value": value, "low": value - 1, "high": value + 1}] * 8

    def form(name: str, value: float) -> dict[str, Any]:
        return {
            "form": name,
            "rate": 5e-4,
            "validation_points": {"5e-4": value},
            "seconds": 60.4,
            "reward_points": eight(value),
            "less_first": eight(value - 40),
        }

    full = {"form": "full trace", "reward_points": eight(20)}
    file = tmp_path / "forms.json"
    queries = form("queries", 39.5) | {
        "closed_percent": [{"value": 21.4, "low": -8.6, "high": 48.2}] * 2,
        "history_r2": {"repeats": 0.6, "run": 0.7, "distinct": 0.8, "confidence": 0.9},
    }
    file.write_text(json.dumps({"forms": [form("layers", 40), queries, full]}))
    command = [sys.executable, str(repo_dir / "benchmarks" / "forms.py"), "--show", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    own, less, closed, known, fits = done.stdout.strip().split("\n\n")
    assert own.splitlines()[-1].startswith("| full trace | 20.00 [19.00, 21.00] |")
    assert less.splitlines()[-1].startswith("| queries | -0.50 [-1.50, +0.50] |")
    assert closed.splitlines()[2:] == ["| queries | 21 [-9, 48] | 21 [-9, 48] |"]
    assert known.splitlines()[2:] == ["| queries | 0.600 | 0.700 | 0.800 | 0.900 |"]
    assert fits.splitlines()[2] == "| layers | 5e-4 | 5e-4: 40.00 | 60 |"
