"""What the gates of the embedded reasoner measure."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ospruner.demo.check import Gate, gates, repairs_and_breaks, run_check


def row(grades: list[float], paragraphs: list[str], ended: str = "natural") -> dict[str, Any]:
    """A labelled trace whose token ids are its paragraphs, one token each."""
    return {
        "forced_correct": grades,
        "natural_correct": grades[-1],
        "step_ends": list(range(1, len(grades) + 1)),
        "trace_ids": paragraphs,
        "ended": ended,
    }


def decode(ids: list[int]) -> str:
    return "".join(map(str, ids))


def test_repairs_and_breaks_compare_before_the_first_recheck_with_the_end() -> None:
    rows = [
        row([0, 0, 1, 1], ["1+1=3.", "Let me check.\n\n", "1+1=2.", "Check it again."]),
        row([1, 1, 0], ["1+1=2.", "Go back from the result.", "1+1=3."]),
        row([0, 1, 1], ["1+1=3.", "1+1=2.", "It matches."]),
    ]
    assert repairs_and_breaks(rows, decode) == (1, 1)


def test_gates_measure_what_they_name() -> None:
    rows = [
        row([0, 1, 1, 1], ["a", "b", "c", "d"]),
        row([0, 0, 0, 0], ["a", "b", "c", "d"], ended="cap"),
    ]
    values = {gate.name: gate.value for gate in gates(rows, [0.0, 1.0], decode)}
    assert values["accuracy of the full trace (forced answer)"] == 0.5
    assert values["accuracy without thinking"] == 0.5
    assert values["never right at any step"] == 0.5
    assert values["first right answer, share of the length"] == 0.5
    assert values["paragraphs a trace"] == 4
    assert values["traces that finish"] == 0.5
    assert Gate("x", 0.6, 0.6, 0.9).passed
    assert not Gate("x", 0.5999, 0.6, 0.9).passed


def test_what_cannot_be_measured_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="limit is 0"):
        run_check(None, 0, 1, Console(quiet=True))
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        run_check(tmp_path, 1, 1, Console(quiet=True))


@pytest.mark.slow
def test_the_shipped_reasoner_meets_every_gate() -> None:
    found = run_check(None, 1000, 1, Console(quiet=True))
    assert [gate for gate in found if not gate.passed] == []
