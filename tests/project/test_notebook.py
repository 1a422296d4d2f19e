"""docs/notebooks/first_policy.ipynb runs from top to bottom, and is kept without outputs."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs/notebooks/first_policy.ipynb"
CELLS = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]


def test_the_notebook_is_kept_without_outputs_and_its_links_lead_somewhere() -> None:
    """Outputs would hold sampled texts, which differ in their last digits between machines."""
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CODE)
    text = "\n".join("".join(one["source"]) for one in CELLS if one["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)#]+)", text)
    assert links
    assert [link for link in links if not (NOTEBOOK.parent / link).is_file()] == []


def run_cell(source: str, names: dict[str, Any]) -> None:
    """Runs a cell as a kernel does: the value of a last expression is shown."""
    statements = ast.parse(source).body
    last = statements.pop() if isinstance(statements[-1], ast.Expr) else None
    exec(compile(ast.Module(statements, []), "cell", "exec"), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        print("" if value is None else repr(value))


def test_the_notebook_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    shown = []
    for cell in CODE:
        run_cell("".join(cell["source"]), names)
        shown.append(capsys.readouterr().out)
    problem, labels, trace, stages, compared, stopped = shown
    assert "Problem(id='toy-" in problem
    assert sum(int(rows) for rows in re.findall(r"num_rows: (\d+)", labels)) == 48
    assert "forced answer:" in trace
    assert "reference" in trace
    assert "SavedPolicy(" in stages
    accuracies = [float(one) for one in re.findall(r"accuracy ([\d.]+)", compared)]
    tokens = [int(one) for one in re.findall(r"(\d+) tokens$", compared, re.MULTILINE)]
    assert len(accuracies) == len(tokens) == 6
    assert min(tokens[1:4]) < tokens[0], "policies think shorter than the full trace"
    assert accuracies[-1] >= max(accuracies[:-1]), "nobody beats hindsight"
    assert stopped.count("boxed{") >= 3
    assert re.search(r"-> (policy|natural) after \d+ thinking tokens", stopped)
    assert "-> budget after" in stopped or stopped.count("-> policy") == 2
