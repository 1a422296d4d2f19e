"""docs/training.md: every command of the page is run, on the embedded reasoner and few labels."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ospruner.cli import app

SMALL = {
    "--prices r1": "--prices 5e-4,5e-5",
    "eval_steps=50": "eval_steps=2",
    "Qwen/Qwen2.5-7B-Instruct": "{judge}",
}


def commands(page: Path) -> list[str]:
    """The commands of a page, a line each."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    return [line for block in blocks for line in block.strip().splitlines()]


def test_every_command_runs(
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
        # What accelerate launches is run in this process; test_several_processes launches it.
        launched = line.rpartition("-m ospruner.cli ")[2].removeprefix("ospruner ")
        if launched.startswith("python "):
            continue  # tests/project/test_pages.py
        arguments = shlex.split(launched)
        arguments += ["--batch-size", "8", "--limit", "14"]
        if "--num-train-epochs" not in arguments:
            arguments += ["--num-train-epochs", "2"]
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert result.exit_code == 0, f"{line}\n{result.output}"
        done.append(result.output)
    assert len(done) == len(lines) - 1  # one of them is a script
    assert all("On the validation traces" in output for output in done)
    assert (tmp_path / "runs" / "annealed" / "price5e-5" / "model.safetensors").is_file()
