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
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

START_SECONDS = 900  # as long as it takes on two busy cores


@contextmanager
def running_server(
    command: Sequence[str], environment: Mapping[str, str], log: Path
) -> Iterator[str]:
    """Runs a server on a free port of this machine; its address, once its `/health` has answered.

    All of its processes end afterwards. What it prints goes into `log`.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _healthy(url):
            told = log.read_text("utf-8", "replace")[-4000:]
            assert process.poll() is None, f"the server ended:\n{told}"
            assert time.monotonic() < deadline, f"the server does not come up:\n{told}"
            time.sleep(0.5)
        yield url
    finally:
        with suppress(ProcessLookupError):  # it has ended by itself, and its log says why
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def running_vllm(command: Sequence[str], log: Path) -> AbstractContextManager[str]:
    """Runs what serves with vLLM on a CPU, by this Python."""
    on_a_cpu = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024")
    whole = [sys.executable, *command, *on_a_cpu, "--block-size", "32"]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return running_server(whole, environment, log)


SGLANG_PYTHON = os.environ.get("OSPRUNER_SGLANG_PYTHON")
"""SGLang's environment, which `make test-sglang` names."""


def running_sglang(command: Sequence[str], log: Path) -> AbstractContextManager[str]:
    """Runs what serves with SGLang on a CPU, by the Python of its environment.

    SGLang's kernels want CUDA; plain decoding calls none of them, and two stand-ins let it start.
    """
    on_a_cpu = (
        *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend"),
        *("pytorch", "--dtype", "float32", "--mem-fraction-static", "0.2"),
        "--skip-server-warmup",
    )
    stand_ins = Path(__file__).parent / "stand_ins"
    environment = {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(stand_ins)}
    return running_server([str(SGLANG_PYTHON), *command, *on_a_cpu], environment, log)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False
