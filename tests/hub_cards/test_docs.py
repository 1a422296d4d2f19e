"""The pages of docs/ that end at the Hub: every command and every Python block is run.

Names of real models and problems are replaced by the embedded reasoner's; each replacement must
be needed, so that a page cannot drift from what is run here.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ospruner.demo.shipped import write_split

from ..pages import blocks, commands
from .conftest import Run, Stranger
from .local_hub import LocalHub, Repo

BASE = "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"
LABELLING = {  # of the paper's model and problems: of the embedded reasoner, on 40 of its own
    "--engine vllm": "--max-thinking-tokens 300",
    "--dataset deepscaler": "--dataset train.jsonl",
    "--dataset math500": "--dataset test.jsonl",
    "train --labels runs/labels": "train --labels runs/labels --num-train-epochs 2",
}


@pytest.fixture(autouse=True)
def place(hub: LocalHub, base_repo: Repo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty folder, and the page's base on the Hub."""
    hub.repos["model", BASE] = base_repo
    monkeypatch.chdir(tmp_path)


def adapted(lines: list[str], changes: dict[str, str]) -> Iterator[str]:
    """The lines with every replacement made; each must be needed somewhere."""
    for old in changes:
        assert any(old in line for line in lines), f"{old!r} is not in the page any more"
    for line in lines:
        for old, new in changes.items():
            line = line.replace(old, new)
        yield line


def test_own_model(run: Run, hub: LocalHub, repo_dir: Path, stranger: Stranger) -> None:
    """From problems to the Hub, and from there into a fresh process."""
    page = repo_dir / "docs" / "own-model.md"
    write_split(Path(), "train", 40, 3)
    write_split(Path(), "test", 8, 3)
    lines = commands(page)
    # Its processes know no local Hub: tests/train/test_rounds.py runs it.
    assert lines.pop(0).startswith(f"ospruner make {BASE} --dataset deepscaler --max-loss 0.02 ")
    said = [run(line) for line in adapted(lines, LABELLING)]
    assert len(said) == 10
    policy = hub.repos["model", "your-org/ospruner-r1-7b"]
    labels = hub.repos["dataset", "your-org/ospruner-labels-r1-7b"]
    assert len(policy.commits) == len(labels.commits) == 2
    (use,) = blocks(page, "python")
    card = labels.head.files["README.md"].content.decode()
    (snippet,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    stranger(f"{use}\n{snippet}")


def test_quickstart(
    run: Run, policy_dir: Path, repo_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = repo_dir / "docs" / "quickstart.md"
    app, demo, check = (line.partition("#")[0].strip() for line in commands(page))
    assert (app, demo) == ("ospruner app", "ospruner demo --quick")
    names: dict[str, object] = {}
    for block in blocks(page, "python"):
        exec(block, names)
    assert "</think>" in capsys.readouterr().out
    policy = "org/ospruner-r1-7b"
    run(f"ospruner publish {policy_dir} {policy} --base {BASE}")
    assert check == f"ospruner verify {policy}"
    assert "NO" not in run(check)


def test_method(repo_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = repo_dir / "docs" / "method.md"
    assert commands(page) == []
    (block,) = blocks(page, "python")
    exec(block, {})
    assert capsys.readouterr().out.startswith("expected reward 0.760")


def messages_of(package: Path) -> Iterator[str]:
    """Every text in the package's code, `…` for what is formatted into it."""
    for file in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "…" for p in node.values]
                yield "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_messages_in_troubleshooting_are_real(repo_dir: Path) -> None:
    page = (repo_dir / "docs" / "troubleshooting.md").read_text("utf-8")
    quoted = re.findall(r"^### `(.*?)`", page, re.MULTILINE)
    assert len(quoted) >= 15
    folders = ("modeling_ospruner", "ospruner", "train", "eval", "hub_cards")
    real = [text for folder in folders for text in messages_of(repo_dir / folder)]
    missing = [text for text in quoted if not any(_fits(text, one) for one in real)]
    assert missing == []


def _fits(quoted: str, real: str) -> bool:
    """Whether a message begins or goes on as quoted; `…` may stand for more than one part."""
    at = 0
    for part in quoted.split("…"):
        if (found := real.find(part, at)) < 0:
            return False
        at = found + len(part)
    return True
