"""Real engine servers in processes of their own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
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


_VLLM_ON_A_CPU = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024")


@contextmanager
def running_vllm(command: Sequence[str], log: Path) -> Iterator[str]:
    """Runs what serves with vLLM on a CPU, as `running_sglang`, by this Python."""
    address = f"http://127.0.0.1:{free_port()}"
    place = ("--host", "127.0.0.1", "--port", address.rpartition(":")[2])
    whole = [sys.executable, *command, *_VLLM_ON_A_CPU, "--block-size", "32", *place]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with running_server(whole, address, environment, log):
        yield address


SGLANG_PYTHON = os.environ.get("OSPRUNER_SGLANG_PYTHON")
"""SGLang's environment, which `make test-sglang` names."""

ON_A_CPU = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--dtype", "float32", "--mem-fraction-static", "0.2", "--skip-server-warmup"),
)


@contextmanager
def running_sglang(command: Sequence[str], log: Path) -> Iterator[str]:
    """Runs a command that serves with SGLang on a CPU, and yields the address.

    SGLang's kernels want CUDA; plain decoding calls none of them, and two stand-ins let it start.

    Args:
        command: what follows the Python of SGLang's environment.
        log: the file for what it prints.
    """
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    whole = [str(SGLANG_PYTHON), *command, *ON_A_CPU, "--host", "127.0.0.1", "--port", str(port)]
    stand_ins = Path(__file__).parent / "stand_ins"
    environment = {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(stand_ins)}
    with running_server(whole, address, environment, log):
        yield address


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def _tail(log: Path) -> str:
    return log.read_text("utf-8", "replace")[-4000:]
