"""docs/training.md and docs/labels.md: every command and line of Python is run, on little."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from ospruner.demo import REASONER
from ospruner.demo.shipped import draw_split

from ..pages import blocks, commands
from .conftest import command, write_rows

SMALL = {
    "--prices r1": "--prices 5e-4,5e-5",
    "eval_steps=50": "eval_steps=2",
    "Qwen/Qwen2.5-7B-Instruct": "{judge}",
}


def test_every_command_of_training(
    labelled: Path,
    repo_dir: Path,
    tiny_base_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(labelled / "train", tmp_path / "runs" / "labels")
    monkeypatch.chdir(tmp_path)
    lines = commands(repo_dir / "docs" / "training.md")
    for old in SMALL:
        assert any(old in line for line in lines), f"{old!r} is not in the page any more"
    done = []
    for line in lines:
        for old, new in SMALL.items():
            line = line.replace(old, new.format(judge=tiny_base_dir))
        # What accelerate launches is run in this process; test_several_processes has two.
        launched = line.rpartition("-m ospruner.cli ")[2].removeprefix("ospruner ")
        if launched.startswith("python "):
            continue  # tests/project/test_pages.py
        arguments = shlex.split(launched)
        arguments += ["--batch-size", "8", "--limit", "14"]
        if "--num-train-epochs" not in arguments:
            arguments += ["--num-train-epochs", "2"]
        done.append(command(*arguments))
    assert len(done) == len(lines) - 1  # one of them is a script
    assert all("On the validation traces" in output for output in done)
    assert (tmp_path / "runs" / "annealed" / "price5e-5" / "model.safetensors").is_file()


def test_commands_of_labels_on_the_reasoner_and_its_python_lines(
    repo_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = repo_dir / "docs" / "labels.md"
    write_rows(tmp_path / "problems.jsonl", map(vars, draw_split("test", 4, 0)))
    monkeypatch.chdir(tmp_path)
    ran = 0
    for line in commands(page):
        arguments = shlex.split(line, comments=True)[1:]
        if "labels/toy" not in arguments:
            continue
        arguments = [str(REASONER) if a == "ospruner/demo/reasoner" else a for a in arguments]
        if arguments[0] == "label":  # the page's 60 traces would take a minute
            arguments[arguments.index("--limit") + 1] = "4"
            arguments[arguments.index("--max-thinking-tokens") + 1] = "300"
        command(*arguments)
        ran += 1
    assert ran == 2
    names: dict[str, Any] = {}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), names)
    assert len(names["traces"]) == 4
    assert len(names["prefixes"]) == sum(map(len, names["traces"]["step_ends"]))
