"""Benchmarks as their users start them, in this process or in one of their own."""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunScript = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture
def run_script(repo_dir: Path, tmp_path: Path) -> RunScript:
    """Runs a benchmark in its own process: the numbers of its last line, and all it printed."""

    def run(name: str, *arguments: str) -> tuple[dict[str, Any], str]:
        file = tmp_path / "result.json"
        done = subprocess.run(
            [sys.executable, str(repo_dir / "benchmarks" / name), *arguments, "--json", str(file)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return numbers(done.stdout, file), done.stdout

    return run


@pytest.fixture
def run_here(
    repo_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> RunScript:
    """The same in this process."""

    def run(name: str, *arguments: str) -> tuple[dict[str, Any], str]:
        script, file = repo_dir / "benchmarks" / name, tmp_path / "result.json"
        monkeypatch.syspath_prepend(script.parent)
        monkeypatch.setattr(sys, "argv", [str(script), *arguments, "--json", str(file)])
        runpy.run_path(str(script), run_name="__main__")
        printed = capsys.readouterr().out
        return numbers(printed, file), printed

    return run


def numbers(printed: str, file: Path) -> dict[str, Any]:
    """Those of the last line, which stand in the file, too."""
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    assert found == json.loads(file.read_text("utf-8"))
    return found
