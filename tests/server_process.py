"""Real engine servers in processes of their own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

START_SECONDS = 900  # as long as it takes on two busy cores


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running_server(
    command: Sequence[str], url: str, environment: Mapping[str, str], log: Path
) -> Iterator[None]:
    """Runs a server until its `/health` has answered, and ends all of its processes afterwards."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _healthy(url):
            assert process.poll() is None, f"the server ended:\n{_tail(log)}"
            assert time.monotonic() < deadline, f"the server does not come up:\n{_tail(log)}"
            time.sleep(0.5)
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def _tail(log: Path) -> str:
    return log.read_text("utf-8", "replace")[-4000:]
