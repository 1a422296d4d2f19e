"""The study of stops that are right more often than the full trace: its arithmetic."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="module")
def study(load_script: Callable[[str], ModuleType]) -> Any:
    return load_script("benchmarks/above_full.py")


def test_votes_take_the_most_frequent_of_the_last_answers(study: Any) -> None:
    answers, grades = ["4", "5", "5", "7", "7"], [0.0, 1.0, 1.0, 0.0, 0.0]
    assert study.voted(answers, grades, 1) == 0.0
    assert study.voted(answers, grades, 3) == 0.0
    assert study.voted(answers, grades, 4) == 0.0, "of equals the latest"
    assert study.voted(["5", "5", "7"], [1.0, 1.0, 0.0], 10**6) == 1.0
    assert study.voted(["5"], [1.0], 3) == 1.0


def test_gains_are_told_beside_what_chance_gives(study: Any) -> None:
    """Rules without skill exceed what is called chance in one of forty."""
    draw, problems = np.random.default_rng(0), np.arange(400)
    changed = draw.random((500, 1, 400)) < 0.2
    gains = 100.0 * changed * draw.choice([-1, 1], changed.shape)
    found = [study.told(one, problems) for one in gains[:2]]
    means = gains.mean(axis=(1, 2))
    for one, own in zip(found, gains, strict=False):
        assert one["gain"] == pytest.approx(own.mean())
        assert one["better"] - one["worse"] == pytest.approx(one["gain"])
        assert one["low"] < one["gain"] < one["high"]
        assert 0.01 < (means > one["by_chance"]).mean() < 0.045
