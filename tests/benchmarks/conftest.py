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
def run_script(
    repo_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> RunScript:
    """Runs a benchmark: the numbers of its last line, and all it printed."""

    def run(name: str, *arguments: str, here: bool = True) -> tuple[dict[str, Any], str]:
        script, file = repo_dir / "benchmarks" / name, tmp_path / "result.json"
        command = [str(script), *arguments, "--json", str(file)]
        if here:
            monkeypatch.syspath_prepend(script.parent)
            monkeypatch.setattr(sys, "argv", command)
            runpy.run_path(str(script), run_name="__main__")
            printed = capsys.readouterr().out
        else:
            done = subprocess.run(
                [sys.executable, *command],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr[-4000:]
            printed = done.stdout
        found: dict[str, Any] = json.loads(printed.splitlines()[-1])
        assert found == json.loads(file.read_text("utf-8"))
        return found, printed

    return run
