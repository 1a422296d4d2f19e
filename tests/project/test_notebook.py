"""docs/notebooks/first_policy.ipynb runs from top to bottom, and is kept without outputs."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs/notebooks/first_policy.ipynb"


def test_the_notebook_is_kept_without_outputs() -> None:
    """They hold sampled texts, which differ in their last digits from machine to machine."""
    notebook = json.loads(NOTEBOOK.read_text("utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(code) >= 6
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def test_links_of_the_notebook_lead_somewhere() -> None:
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)#]+)", text)
    assert links
    for link in links:
        assert (NOTEBOOK.parent / link).is_file(), link


def printed(cell: Any) -> str:
    """What a cell has printed or shown."""
    parts = [one.get("text", "") for one in cell.outputs]
    return "".join([*parts, *(one.get("data", {}).get("text/plain", "") for one in cell.outputs)])


def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbclient is not installed: make test")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: make test")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed: make test")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    began = time.monotonic()
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=resources).execute()
    print(f"The notebook took {time.monotonic() - began:.0f} seconds.")
    shown = [printed(cell) for cell in notebook.cells if cell.cell_type == "code"]
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
