"""docs/notebooks/first_policy.ipynb runs from top to bottom, and shows what it printed."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs/notebooks/first_policy.ipynb"
CELLS = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]
# The page's traces and passes would take minutes.
SMALL = {'("train", 160)': '("train", 40)', "disable_tqdm=True": "num_train_epochs=2"}


def test_the_notebook_shows_outputs_and_a_picture_and_its_links_lead_somewhere() -> None:
    assert all(cell["outputs"] for cell in CODE)
    shown = [output for cell in CODE for output in cell["outputs"]]
    assert not [one for one in shown if one["output_type"] == "error"]
    assert sum("image/png" in one.get("data", {}) for one in shown) == 1
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
        source = "".join(cell["source"])
        for old, new in SMALL.items():
            source = source.replace(old, new)
        run_cell(source, names)
        shown.append(capsys.readouterr().out)
    problems, traces, trace, trained, compared, picture, stopped = shown
    assert problems.count('"problem"') == 3
    assert "'test': 60" in traces
    assert "(wrong)" in trace
    assert "reference" in trace
    assert "default price" in trained
    table = names["report"].frame
    ours, (full, *_) = table[table["method"] == "OS-Pruner, one policy"], table["tokens"]
    assert len(ours) == 31
    assert ours["tokens"].min() < full, "policies think shorter than the full trace"
    accuracy = table["accuracy"]
    assert accuracy[table["method"] == "hindsight oracle"].item() == accuracy.max()
    assert "OS-Pruner" in compared
    assert "Image" in picture
    assert stopped.count("boxed{") == 3
    assert len(re.findall(r"-> (?:policy|natural) after \d+ thinking tokens", stopped)) == 2
