"""What each engine does a second, on the embedded reasoner."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ospruner.demo.shipped import Reasoner, draw_split

from .conftest import RunScript


def test_every_arm_labels_the_same_problems(run_script: RunScript, tmp_path: Path) -> None:
    """The first problem starts the engine and is not counted."""
    file = tmp_path / "problems.jsonl"
    rows = [vars(one) for one in draw_split("test", 3, 0)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--base", str(Reasoner().folder), "--dataset", str(file), "--limit", "2"]
    arguments += ["--max-tokens", "30", "--arms", "transformers:float32", "transformers"]
    found, printed = run_script("engines.py", *arguments)
    assert list(found["arms"]) == ["transformers:float32", "transformers"]
    first, second = found["arms"].values()
    assert first["problems"] == second["problems"] == 2
    assert first["thinking_tokens"] == second["thinking_tokens"] > 0  # both in float32, one seed
    assert first["thinking_tokens"] <= 2 * 30
    for arm in (first, second):
        rate = arm["thinking_tokens"] / arm["seconds"]
        assert arm["thinking_tokens_per_second"] == pytest.approx(rate, rel=0.02)
    assert "transformers:float32: " in printed
