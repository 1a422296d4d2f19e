"""docs/labels.md: commands on the embedded reasoner are run, and so are the Python lines."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ospruner.cli import app
from ospruner.demo import REASONER
from ospruner.demo.shipped import draw_split


def blocks(page: Path, language: str) -> list[str]:
    parts = page.read_text(encoding="utf-8").split(f"```{language}\n")[1:]
    return [part.split("\n```")[0] for part in parts]


def commands(page: Path) -> list[list[str]]:
    return [
        shlex.split(line, comments=True)
        for block in blocks(page, "bash")
        for line in block.replace("\\\n", " ").splitlines()
        if line.startswith("ospruner ")
    ]


def test_commands_on_the_reasoner_and_the_python_lines(
    repo_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = repo_dir / "docs" / "labels.md"
    rows = [vars(problem) for problem in draw_split("test", 4, 0)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    ran = 0
    for _, *arguments in commands(page):
        if "labels/toy" not in arguments:
            continue
        arguments = [str(REASONER) if a == "ospruner/demo/reasoner" else a for a in arguments]
        if arguments[0] == "label":  # the page's 60 traces would take a minute
            arguments[arguments.index("--limit") + 1] = "4"
            arguments[arguments.index("--max-thinking-tokens") + 1] = "300"
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        ran += 1
    assert ran == 2
    names: dict[str, Any] = {}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), names)
    assert len(names["traces"]) == 4
    assert len(names["prefixes"]) == sum(map(len, names["traces"]["step_ends"]))
