"""README, docs/generate.md and the notebook: their Python runs as it stands, on less.

Names of real models are the embedded reasoner's, and sizes those of seconds.
"""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ospruner.demo import REASONER
from ospruner.demo.shipped import Reasoner
from ospruner.train.untrained import untrained

from ..pages import blocks

POLICIES: dict[str, dict[str, Any]] = {
    "org/ospruner-r1-7b-price5e-5": {"init_bias": -1.0},
    "org/ospruner-r1-7b-price2e-5": {"init_bias": -0.5},
    "org/ospruner-r1-7b": {"price_range": (5e-5, 1e-2)},
}


@pytest.fixture(scope="module")
def models(reasoner: Reasoner, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The base, and policies on it that stop at about every third paragraph, by name."""
    folders = {"deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": str(REASONER)}
    for name, more in POLICIES.items():
        folders[name] = str(tmp_path_factory.mktemp("policies") / name.split("/")[1])
        model = untrained(reasoner.model, reasoner.tokenizer, tuning="layers", **more)
        model.save_pretrained(folders[name])
    return folders


def test_the_examples_of_generate_run_as_written(
    repo_dir: Path, models: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = blocks(repo_dir / "docs" / "generate.md", "python")
    assert len(found) >= 14
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    for block in found:
        for name, folder in models.items():
            block = block.replace(f'"{name}"', repr(folder))
        # The reasoner is short of breath; 2,000 tokens of rambling would take minutes.
        block = block.replace("max_new_tokens=2000", "max_new_tokens=300")
        assert "org/ospruner" not in block
        exec(compile(block, "docs/generate.md", "exec"), names)
    printed = capsys.readouterr().out
    for wanted, count in (
        (r"</think>\n\n\\boxed\{", 1),  # a stop
        (r"^(policy|natural) \d+ \[\d+", 1),  # what happened
        (r"^(0|5e-05|0.001) \d+ \[", 3),  # one policy, every price
        (r"^(?:[2-9]\d|\d{3,}) ", 1),  # a budget
        (r"tensor\(\[\[", 1),  # the score of a given text
        (r"^(policy|natural)$", 1),  # a base that is loaded already
        (r"\\boxed\{", 3),  # the pipeline's, too
    ):
        assert len(re.findall(wanted, printed, re.M)) >= count, (wanted, printed)


# The pages' traces and passes would take minutes.
SMALLER = {
    '("train", 200), ("test", 60)': '("train", 30), ("test", 16)',
    'StopConfig("policy")': 'StopConfig("policy", num_train_epochs=2)',
    '("train", 160)': '("train", 40)',
    "disable_tqdm=True": "num_train_epochs=2",
}


def smaller(source: str) -> str:
    for old, new in SMALLER.items():
        source = source.replace(old, new)
    return source


def test_the_three_programs_run_as_written(
    repo_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    stop, make, compare = blocks(repo_dir / "README.md", "python")
    monkeypatch.chdir(tmp_path)
    exec(stop, {})
    plain, stopped = capsys.readouterr().out.split("<|im_end|>")
    assert "48+54=102. Good." in plain
    assert stopped.strip().endswith("\\boxed{16}\npolicy 36")
    assert "policy 36" in (repo_dir / "README.md").read_text("utf-8")
    names: dict[str, object] = {}
    exec(smaller(make), names)
    exec(compare, names)
    printed = capsys.readouterr().out
    for method in ("full trace", "OS-Pruner, one policy  price=3e-4", "fixed budget"):
        assert method in printed
    assert Path("pareto.png").is_file()


NOTEBOOK = Path(__file__).resolve().parents[2] / "docs/notebooks/first_policy.ipynb"
CELLS = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]


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
        run_cell(smaller("".join(cell["source"])), names)
        shown.append(capsys.readouterr().out)
    problems, traces, trace, trained, compared, picture, stopped = shown
    assert problems.count('"problem"') == 3
    assert "'test': 60" in traces
    for said in ("(wrong)", "reference"):
        assert said in trace
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
