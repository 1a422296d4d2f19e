"""Runs programs that a model wrote, each in a child process that has locked itself in (`jail.py`).

What holds while a program runs, on Linux with Landlock and seccomp (x86-64 and arm64), and on no
other system: anything else is refused before a program runs.

- No socket can be made, and no process: no network, no fork bomb, nothing that outlives the child.
- No file can be made, changed or deleted, anywhere. Only Python's standard library can be read:
  no home, no `/proc`, so no environment of another process either.
- Its environment is empty, its folder is empty, what it prints goes nowhere.
- Wall-clock, CPU time and address space are limited; past the limit it is killed.

What does not hold: the kernel itself is trusted, and a program that searches its own process may
forge its grade.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["MEMORY_BYTES", "TIME_LIMIT_SECONDS", "Ran", "check_sandbox", "run_program"]

TIME_LIMIT_SECONDS = 10.0
MEMORY_BYTES = 1 << 30
_START_SECONDS = 30.0
_MOST_SAID = 1 << 22  # bytes of a result


class Ran(NamedTuple):
    """How a program ended.

    Attributes:
        ended: "done" by itself, "error" by an exception (or by leaving early), "time limit",
            "memory", "output" (it wrote too much where its result is told), or "killed".
        result: with "done", what it assigned to `result`, JSON values; with "error", the name of
            the exception.
    """

    ended: str
    result: Any = None


def run_program(
    program: str,
    seconds: float = TIME_LIMIT_SECONDS,
    memory_bytes: int = MEMORY_BYTES,
    given: Mapping[str, Any] | None = None,
    packages: bool = False,
) -> Ran:
    """Runs a Python program locked in, and waits for it.

    Args:
        program: its text; what it assigns to `result` is handed back.
        seconds: of wall-clock.
        memory_bytes: of address space.
        given: JSON values that it finds by name.
        packages: whether it may read and import installed packages, beside the standard library.

    Raises:
        RuntimeError: this system has no lock.
    """
    token = secrets.token_hex(16)
    paths = [path for path in sys.path if path.endswith("-packages")] if packages else []
    asked = {
        "program": program,
        "memory_bytes": memory_bytes,
        "cpu_seconds": int(seconds) + 1,
        "folders": [*_library(), *paths],
        "paths": paths,
        "token": token,
        "given": dict(given or {}),
    }
    script = Path(__file__).with_name("jail.py").read_text("utf-8")
    with tempfile.TemporaryDirectory(prefix="ospruner-") as empty:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-X", "utf8", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=empty,
            env={},
            start_new_session=True,
        )
        try:
            said = _said(process, json.dumps(asked).encode(), seconds)
        finally:
            _end(process)
    if said is None:
        return Ran("time limit")
    if len(said) > _MOST_SAID:
        return Ran("output")
    lines = said.decode("utf-8", "replace").splitlines()
    if not lines or lines[0] != "locked":
        raise RuntimeError(
            "programs cannot be run safely here "
            f"({lines[0] if lines else 'the child said nothing'}): it takes Linux with Landlock "
            "(5.13 or newer) and seccomp on x86-64 or arm64; grade on such a machine "
            "(ospruner labels regrade)"
        )
    return _ran(lines[1:], token, process.wait())


def _said(process: subprocess.Popen[bytes], asked: bytes, seconds: float) -> bytes | None:
    """What the child wrote until its end, or until it was too much; None past the time limit."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(asked)
        process.stdin.close()
    said, deadline = b"", time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while len(said) <= _MOST_SAID:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return None
            part = os.read(process.stdout.fileno(), 1 << 16)
            if not part:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.1, deadline - time.monotonic()))
                break
            said += part
    return said


def _ran(lines: Sequence[str], token: str, status: int) -> Ran:
    if lines and lines[-1].startswith(f"{token} "):
        return Ran("done", json.loads(lines[-1].removeprefix(token)))
    if lines == ["memory"]:
        return Ran("memory")
    if status == -signal.SIGXCPU:
        return Ran("time limit")
    if lines and lines[-1].startswith("error "):
        return Ran("error", lines[-1].removeprefix("error "))
    if status == 0:
        return Ran("error", "exit")  # os._exit, before the tests were done
    return Ran("killed")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills the child with its group, if it still runs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.wait()


@functools.cache
def _library() -> tuple[str, ...]:
    """Where the standard library and the shared libraries that it loads stand."""
    paths = sysconfig.get_paths()
    folders = [paths["stdlib"], paths["platstdlib"], "/lib", "/lib64", "/usr/lib", "/usr/lib64"]
    folders.append(str(Path(sys.base_prefix) / "lib"))
    return tuple(dict.fromkeys(folders))


@functools.cache
def check_sandbox() -> None:
    """Runs a few programs whose ends are known, once a process.

    Raises:
        ValueError: this system has no lock, or it does not hold.
    """
    known = {
        "result = 6 * 7": Ran("done", 42),
        "import socket; socket.socket()": Ran("error", "PermissionError"),
        "import os; os.fork()": Ran("error", "PermissionError"),
        "open('x', 'w')": Ran("error", "PermissionError"),
        "open('/proc/self/environ')": Ran("error", "PermissionError"),
    }
    for program, expected in known.items():
        try:
            ran = run_program(program, _START_SECONDS)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        if ran != expected:
            raise ValueError(
                f"programs cannot be run safely here: {program!r} ended as {ran}, and should have "
                f"as {expected}"
            )
