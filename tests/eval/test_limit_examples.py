"""The two examples of docs/examples: what they claim holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

LoadScript = Callable[[str], ModuleType]


@pytest.mark.parametrize("price", [0.01, 0.5, 0.99])
def test_theorem_1_holds_for_every_k(load_script: LoadScript, price: float) -> None:
    example = load_script("docs/examples/theorem1.py")
    for ratio, gap in zip(example.ratios(price), example.GAPS, strict=True):
        assert ratio > gap


def test_theorem_1_is_drawn(load_script: LoadScript, tmp_path: Path) -> None:
    load_script("docs/examples/theorem1.py").main(tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_a_trained_policy_approaches_the_optimum_and_no_threshold_does(
    load_script: LoadScript,
) -> None:
    example = load_script("docs/examples/markov_stopping.py")
    values = {name: np.array(v) for name, v in example.values(example.make_problem()).items()}
    best = values["Bellman optimum"]
    assert (values["trained policy"] <= best + 1e-9).all()
    assert (best - values["trained policy"] < 0.01).all()
    lost = best - values["best threshold"]
    assert lost.max() > 0.03
    assert (best - values["trained policy"] < lost).sum() >= len(best) - 1
