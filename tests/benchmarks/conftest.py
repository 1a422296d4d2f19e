"""Benchmarks that need a process of their own."""

from __future__ import annotations

import json
import os
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
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        assert result == json.loads(file.read_text(encoding="utf-8"))
        return result, done.stdout

    return run
