import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from ospruner.cli import app
from ospruner.demo.check import (
    Family,
    Gate,
    first_recheck,
    gates,
    repairs_and_breaks,
    scored_card,
)
from ospruner.demo.domains import DOMAINS, draw_domain
from ospruner.demo.shipped import MIXED_SHIPPED, SHIPPED, Reasoner
from ospruner.train.tail import no_denormals


def row(grades: list[float], paragraphs: list[str], ended: str = "natural") -> dict[str, Any]:
    """A labelled trace whose token ids are its paragraphs' numbers, one token each."""
    return {
        "forced_correct": grades,
        "natural_correct": grades[-1],
        "step_ends": list(range(1, len(grades) + 1)),
        "trace_ids": paragraphs,
        "ended": ended,
    }


def decode(ids: list[int]) -> str:
    return "".join(map(str, ids))


def test_first_recheck_is_the_first_announced_one() -> None:
    assert first_recheck(["2+2=4.\n\n", "Let me check.\n\n", "Check it again.\n\n"]) == 1
    assert first_recheck(["2+2=4.\n\n"]) is None


def test_repairs_and_breaks_compare_before_the_recheck_with_the_end() -> None:
    rows = [
        row([0, 0, 1], ["1+1=3.", "Let me check.", "1+1=2."]),
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


def test_a_gate_includes_its_ends() -> None:
    assert Gate("x", 0.6, 0.6, 0.9).passed
    assert not Gate("x", 0.5999, 0.6, 0.9).passed


def test_the_tables_replace_what_stood_under_their_heading() -> None:
    card = "# R\n\n## What it scores\n\nold\n\n## Limits\n\nMany.\n"
    measured = {
        "math": ([Gate("g", 0.5, 0.0, 1.0)], [Family("chain", 3, 0.1, 0.2, 0.3, 40.4)]),
        "choice": ([Gate("g", 2.0, 0.0, 1.0)], []),
    }
    written = scored_card(card, measured, "ospruner toy check")
    assert "old" not in written
    assert "| g | 0.500 (0 to 1) | 2.000 (0 to 1: FAILED) |" in written
    assert "| math: chain | 3 | 0.100 | 0.200 | 0.300 | 40 |" in written
    assert written.startswith("# R\n\n## What it scores\n")
    assert written.endswith("\n## Limits\n\nMany.\n")
    assert scored_card(written, measured, "ospruner toy check") == written


def test_a_card_without_the_heading_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(SHIPPED, tmp_path / "reasoner")
    (folder / "README.md").write_text("# R\n")
    command = ["toy", "check", "--limit", "1", "--write-card", "--reasoner", str(folder)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "has no line '## What it scores'" in str(result.exception)


def test_limit_below_one_is_refused() -> None:
    result = CliRunner().invoke(app, ["toy", "check", "--limit", "0"])
    assert result.exit_code == 1
    assert "limit is 0" in str(result.exception)


def test_a_missing_reasoner_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["toy", "check", "--reasoner", str(tmp_path)])
    assert result.exit_code == 1
    assert "no config.json" in str(result.exception)


@pytest.mark.slow
def test_the_shipped_reasoner_meets_every_gate(tmp_path: Path) -> None:
    numbers = tmp_path / "gates.json"
    result = CliRunner().invoke(app, ["toy", "check", "--limit", "1000", "--json", str(numbers)])
    assert result.exit_code == 0, result.output
    assert json.loads(numbers.read_text())["limit"] == 1000


def test_the_mixed_reasoner_knows_its_domains(tmp_path: Path) -> None:
    """On fewer problems than its card has: the last answer beats the first."""
    reasoner = Reasoner(MIXED_SHIPPED)
    with no_denormals():
        for domain in ("math", "choice"):
            problems = draw_domain(domain, "test", 32, seed=0)
            out = tmp_path / domain
            rows = reasoner.label(problems, out, 0, task=DOMAINS[domain]).to_list()
            first, last = (
                np.mean([row["forced_correct"][place] for row in rows]) for place in (0, -1)
            )
            assert last > max(0.45, first + 0.1), domain
