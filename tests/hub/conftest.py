"""The local Hub, one a test module, and fresh processes that use it."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from .local_hub import TOKEN, LocalHub

WITHOUT_PACKAGE = """
import importlib.util, sys
sys.path.append(sys.argv.pop(1))
for name in ("modeling_ospruner", "ospruner", "ospruner_cli"):
    assert importlib.util.find_spec(name) is None, name
"""


@pytest.fixture(scope="module")
def hub() -> Iterator[LocalHub]:
    """A Hub on 127.0.0.1, empty at the module's start."""
    with LocalHub() as server:
        yield server


class Stranger(Protocol):
    """Runs Python code in another user's process; returns what it did."""

    def __call__(
        self, code: str, *arguments: str, home: Path | None = None, token: str | None = TOKEN
    ) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture
def stranger(hub: LocalHub, tmp_path: Path) -> Stranger:
    """A fresh process with an empty cache, in which our package is not importable.

    -S skips the .pth files that make the editable install importable, -I the current folder.
    """

    def run(
        code: str, *arguments: str, home: Path | None = None, token: str | None = TOKEN
    ) -> subprocess.CompletedProcess[str]:
        packages = sysconfig.get_paths()["purelib"]
        return subprocess.run(
            [sys.executable, "-I", "-S", "-c", WITHOUT_PACKAGE + code, packages, *arguments],
            env={
                "PATH": "/usr/bin:/bin",
                "OMP_NUM_THREADS": "1",
                **hub.environment(home or tmp_path / "hf-home", token),
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    return run
