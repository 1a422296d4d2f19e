"""Processes that compare answers: several at once, each replaced when it hangs or dies.

Math-Verify's own time limit is a signal: it works only in the main thread and cannot interrupt a
long computation inside C code. A child process (`worker.py`) can be killed.

By hand, not by `pebble.ProcessPool`: processes that multiprocessing spawns import the user's script
again, which then must be guarded by `if __name__ == "__main__"`; a notebook line or a plain script
that calls `ospruner.label` is not.
"""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

MAX_WORKERS = 16
START_SECONDS = 120.0

Worker = subprocess.Popen[bytes]


class Grade(NamedTuple):
    """What an answer is worth, or why that is not known."""

    value: float | None  # in [0, 1], True for right; None where there is no verdict
    # Why there is none: "no answer", "too long", "unreadable", "undecided", "time limit", "crash".
    reason: str | None = None


class GradingPool:
    """Child processes, started when they are first needed and kept until the end.

    Args:
        size: how many there may be; by default one a core, at most `MAX_WORKERS`.
    """

    def __init__(self, size: int | None = None) -> None:
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        self.size = size or min(cores, MAX_WORKERS)
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        """Forgets all workers: a fork's child must not share its parent's pipes."""
        self.idle: queue.LifoQueue[Worker | None] = queue.LifoQueue()  # None: not started
        for _ in range(self.size):
            self.idle.put(None)

    def compare(self, reference: str, answer: str, seconds: float) -> Grade:
        """One worker's verdict on the contents of two boxes; waits for one to be free.

        One parse, or one comparison, may take so many seconds.

        Raises:
            RuntimeError: no worker can be started.
        """
        worker = self.idle.get()
        try:
            if worker is None or worker.poll() is not None:
                worker = _started()
            # Three limited calls (two parses, a comparison) and then some: beyond that the child
            # hangs where its own signal cannot reach it.
            request = json.dumps([reference, answer, seconds]).encode() + b"\n"
            reply, late = _answer(worker, request, 4.0 * seconds)
            if not reply:
                _end(worker)
                return Grade(None, "time limit" if late else "crash")
            return Grade(*json.loads(reply))
        finally:
            self.idle.put(worker)

    def close(self) -> None:
        """Ends the idle workers."""
        while not self.idle.empty():
            if (worker := self.idle.get()) is not None:
                _end(worker)


def _started() -> Worker:
    worker = subprocess.Popen(
        # -P: our folder must not shadow other packages' modules of the same names.
        [sys.executable, "-P", str(Path(__file__).with_name("worker.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        # Ctrl-C is for us: it must not die before it has answered. No session of its own, which
        # Linux's autogroups can leave without a core for minutes beside a busy engine.
        process_group=0,
    )
    if _answer(worker, b"", START_SECONDS)[0] != b"ready\n":
        _end(worker)
        raise RuntimeError(
            "the grading process did not start: check that "
            f"`{sys.executable} -c 'import math_verify'` works"
        )
    return worker


def _answer(worker: Worker, request: bytes, seconds: float) -> tuple[bytes, bool]:
    """The worker's next line, b"" where it ended before; and whether it was killed for the time."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    begun, timer = time.monotonic(), threading.Timer(seconds, worker.kill)
    timer.start()
    try:
        worker.stdin.write(request)
        worker.stdin.flush()
        line = worker.stdout.readline()
    except BrokenPipeError:
        line = b""
    finally:
        timer.cancel()
    return line, time.monotonic() - begun >= seconds


def _end(worker: Worker) -> None:
    worker.kill()
    worker.communicate()
