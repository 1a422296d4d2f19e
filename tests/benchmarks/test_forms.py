"""The study of the policy's forms: its resamples, its tables, and a run that proves nothing."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ospruner.demo.demo import SPLITS, STANDARD
from ospruner.demo.shipped import Reasoner, draw_split

from .conftest import RunScript


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


@pytest.mark.slow
def test_each_kind_of_form_is_measured(run_script: RunScript, tmp_path: Path) -> None:
    run = tmp_path / "demo"
    for split in SPLITS:
        Reasoner().label(draw_split(split, 34, 5), run / "labels" / split, 5)
    claim = dataclasses.asdict(STANDARD) | {"seed": 5}
    (run / "demo.json").write_text(json.dumps({"demo": claim}))
    trial = "queries, trial answers at every step"
    forms = [
        "queries",
        trial,
        "queries, distilled at 1",
        "queries, estimated answers at every step",
    ]
    forms += ["layers", "queries of four layers", "queries, own keys at step ends"]
    short = ("--epochs", "1", "--rates", "5e-4", "--seeds", "2")
    out = ("--run", str(run), "--out", str(tmp_path / "out"))
    found, printed = run_script("forms.py", *out, *short, "--forms", *forms)
    entries = {one["form"]: one for one in found["forms"]}
    assert list(entries) == [*forms, "full trace"]
    assert [name for name, one in entries.items() if "closed_percent" in one] == forms[2:4]
    for name in forms:
        assert set(entries[name]["history_r2"]) == {"repeats", "run", "distinct", "confidence"}
        assert all(value < 1 for value in entries[name]["history_r2"].values())
    values = [one["reward_points"][0]["value"] for one in entries.values()]
    assert len(set(values)) == len(values)
    assert printed.count("| queries of four layers |") == 4
