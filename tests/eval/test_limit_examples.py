"""The two examples of docs/examples: what they claim holds."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest


def load(repo_dir: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, repo_dir / "docs/examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("length_penalty", [0.01, 0.5, 0.99])
def test_theorem_1_holds_for_every_k(repo_dir: Path, length_penalty: float) -> None:
    example = load(repo_dir, "theorem1")
    for ratio, gap in zip(example.ratios(length_penalty), example.GAPS, strict=True):
        assert ratio > gap


def test_theorem_1_is_drawn(repo_dir: Path, tmp_path: Path) -> None:
    load(repo_dir, "theorem1").main(tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_a_trained_policy_approaches_the_optimum_and_no_threshold_does(repo_dir: Path) -> None:
    example = load(repo_dir, "markov_stopping")
    values = {name: np.array(v) for name, v in example.values(example.make_problem()).items()}
    best = values["Bellman optimum"]
    assert (values["trained policy"] <= best + 1e-9).all()
    assert (best - values["trained policy"] < 0.01).all()
    lost = best - values["best threshold"]
    assert lost.max() > 0.03
    assert (best - values["trained policy"] < lost).sum() >= len(best) - 1
