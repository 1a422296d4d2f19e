"""Processes that compare answers: several at once, each replaced when it hangs or dies.

Math-Verify's own time limit is a signal: it works only in the main thread and cannot interrupt a
long computation inside C code. A child process (`worker.py`) can be killed.

Not `pebble.ProcessPool` (tried: 5.2.3): a worker that dies while it is idle ends its whole pool,
one that hangs before it has taken a task is never missed, and spawned workers need the user's
script to be guarded by `if __name__ == "__main__"`.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

__all__ = ["GradingPool", "Verdict"]

MAX_WORKERS = 16


class Verdict(NamedTuple):
    """Whether an answer is right, or why that is not known.

    Attributes:
        correct: True, False, or None where there is no verdict.
        reason: why there is none: "no answer", "too long", "unreadable", "undecided",
            "time limit" or "crash"; None where there is one.
    """

    correct: bool | None
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
        """Forgets all workers: a fork's child must not share its parent's pipes and locks."""
        self._idle: list[_Worker] = []
        self._started = 0
        self._changed = threading.Condition()

    def compare(self, reference: str, answer: str, seconds: float) -> Verdict:
        """One worker's verdict; waits for one to be free.

        Args:
            reference: the content of a box.
            answer: the content of another.
            seconds: what one parse or one comparison may take.
        """
        with self._worker() as worker:
            return worker.compare(reference, answer, seconds)

    def close(self) -> None:
        """Ends the idle workers."""
        with self._changed:
            while self._idle:
                self._idle.pop().stop()
                self._started -= 1

    @contextmanager
    def _worker(self) -> Iterator[_Worker]:
        with self._changed:
            self._changed.wait_for(lambda: self._idle or self._started < self.size)
            if self._idle:
                worker = self._idle.pop()
            else:
                worker = _Worker()
                self._started += 1
        try:
            yield worker
        finally:
            with self._changed:
                self._idle.append(worker)
                self._changed.notify()


class _Worker:
    """One child process, used by one thread at a time."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def compare(self, reference: str, answer: str, seconds: float) -> Verdict:
        """The child's verdict; none where it gave none within the limit or died."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        request = json.dumps([reference, answer, seconds]).encode() + b"\n"
        try:
            process.stdin.write(request)
            process.stdin.flush()
        except BrokenPipeError:
            self.stop()
            return Verdict(None, "crash")
        # Three limited calls (two parses, a comparison) and then some: beyond that the child
        # hangs where its own signal cannot reach it.
        reply = _read_line(process.stdout.fileno(), 4.0 * seconds)
        if not reply:
            self.stop()
            return Verdict(None, "time limit" if reply is None else "crash")
        return Verdict(*json.loads(reply))

    def stop(self) -> None:
        """Kills the child."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
        self.process = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self.process is None or self.process.poll() is not None:
            script = Path(__file__).with_name("worker.py")
            self.process = subprocess.Popen(
                # -P: our folder must not shadow other packages' modules of the same names.
                [sys.executable, "-P", str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                # Ctrl-C is for us: the child must not die of it before it has answered.
                start_new_session=True,
            )
            assert self.process.stdout is not None
            if _read_line(self.process.stdout.fileno(), 120.0) != b"ready":
                self.stop()
                raise RuntimeError(
                    "the grading process did not start: check that "
                    f"`{sys.executable} -c 'import math_verify'` works"
                )
        return self.process


def _read_line(descriptor: int, timeout_seconds: float) -> bytes | None:
    """One line; b"" at the end of the stream; None after so many seconds without a byte."""
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(timeout_seconds):
                return None
            part = os.read(descriptor, 4096)
            if not part:
                return b""
            line += part
    return line.rstrip(b"\n")
