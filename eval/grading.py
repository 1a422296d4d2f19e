r"""Boxed answers and their grades, by Math-Verify under a time limit.

Most answers are decided here: equal texts and plain integers need no computer algebra. The rest
goes to a child process (`grading_worker.py`), because Math-Verify's own limit is a signal, which
works only in the main thread and cannot interrupt a long computation inside C code; a child can be
killed. It starts with the first answer that needs it and is reused.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import selectors
import subprocess
import sys
import threading
from functools import lru_cache
from pathlib import Path

__all__ = ["MAX_ANSWER_CHARS", "TIME_LIMIT_SECONDS", "equal", "extract_boxed", "grade", "read_box"]

TIME_LIMIT_SECONDS = 5
"""What one parse or one comparison may take; an answer beyond it stays ungraded."""

MAX_ANSWER_CHARS = 1_000
"""Longer answers stay ungraded: the longest reference of our benchmarks has 53 characters."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_INTEGER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)")


def read_box(text: str) -> str | None:
    r"""The content of a box that is already open: everything before its closing brace.

    For forced answers, whose `\boxed{` is forced and not part of the generated text.

    Returns:
        The content, stripped; None where the box never closes.
    """
    depth = 1
    position = 0
    while position < len(text):
        character = text[position]
        if character == "\\":  # an escaped brace, as in \left\{, neither opens nor closes
            position += 2
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:position].strip()
        position += 1
    return None


def extract_boxed(text: str) -> str | None:
    r"""The content of the last closed `\boxed{...}` (or `\fbox{...}`), braces balanced.

    A box inside the last one is part of its content. None where there is no closed box. One pass,
    so that a text of nothing but opening boxes is no trap.
    """
    answer = None
    open_braces: list[int | None] = []  # where a box's content starts; None for a plain brace
    position = 0
    while position < len(text):
        character = text[position]
        if character == "\\":
            box = _BOX.match(text, position)
            if box:
                open_braces.append(box.end())
            position = box.end() if box else position + 2
            continue
        if character == "{":
            open_braces.append(None)
        elif character == "}" and open_braces:
            start = open_braces.pop()
            if start is not None:
                answer = text[start:position].strip()  # an enclosing box closes later and wins
        position += 1
    return answer


def grade(answer: str | None, reference: str) -> bool | None:
    """Is the answer right?

    Args:
        answer: what stood in the box; None or "" where nothing did.
        reference: the reference answer.

    Returns:
        True or False; None where no verdict was reached: no answer, one of more than
        MAX_ANSWER_CHARS characters, or one that Math-Verify cannot read or decide in time.

    Raises:
        ValueError: the reference is empty.
    """
    if not reference.strip():
        raise ValueError("reference is empty: there is nothing to grade the answer against")
    if answer is None:
        return None
    return _compare(reference.strip(), answer.strip())


def equal(a: str | None, b: str | None) -> bool | None:
    """Do two answers mean the same? None where either is missing or there is no verdict."""
    if a is None or b is None:
        return None
    return _compare(a.strip(), b.strip())


def _compare(reference: str, answer: str) -> bool | None:
    if not reference or not answer:
        return None
    if max(len(reference), len(answer)) > MAX_ANSWER_CHARS:
        return None
    if reference == answer:
        return True
    if _INTEGER.fullmatch(reference) and _INTEGER.fullmatch(answer):
        return int(reference.replace(",", "")) == int(answer.replace(",", ""))
    return _ask(reference, answer)


@lru_cache(maxsize=200_000)
def _ask(reference: str, answer: str) -> bool | None:
    return _WORKER.compare(reference, answer)


class _Worker:
    """The child process: started when first asked, replaced when it hangs, dies, or we forked."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._owner_pid = 0
        self._lock = threading.Lock()

    def compare(self, reference: str, answer: str) -> bool | None:
        """The child's verdict; None where it gave none within the limit."""
        request = json.dumps([reference, answer, TIME_LIMIT_SECONDS]).encode() + b"\n"
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(request)
                process.stdin.flush()
            except BrokenPipeError:
                self._stop()
                return None
            # Three limited calls (two parses, a comparison) and then some: beyond that the child
            # hangs where its own signal cannot reach it.
            reply = _read_line(process.stdout.fileno(), 4.0 * TIME_LIMIT_SECONDS)
            if reply is None:
                self._stop()
                return None
        verdict: bool | None = json.loads(reply)
        return verdict

    def _running(self) -> subprocess.Popen[bytes]:
        if self._owner_pid != os.getpid():
            self._process = None  # a fork's child must not share its parent's pipes
        if self._process is None or self._process.poll() is not None:
            script = Path(__file__).with_name("grading_worker.py")
            self._process = subprocess.Popen(
                # -P: our folder must not shadow other packages' modules of the same names.
                [sys.executable, "-P", str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            self._owner_pid = os.getpid()
            assert self._process.stdout is not None
            if _read_line(self._process.stdout.fileno(), 120.0) != b"ready":
                self._stop()
                raise RuntimeError(
                    "the grading process did not start: check that "
                    f"`{sys.executable} -c 'import math_verify'` works"
                )
        return self._process

    def _stop(self) -> None:
        if self._process is not None and self._owner_pid == os.getpid():
            self._process.kill()
            self._process.communicate()
        self._process = None

    def close(self) -> None:
        """Ends the child, if any."""
        with self._lock:
            self._stop()


def _read_line(descriptor: int, timeout_seconds: float) -> bytes | None:
    """One line, or None at the end of the stream or after so many seconds without a byte."""
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(timeout_seconds):
                return None
            part = os.read(descriptor, 4096)
            if not part:
                return None
            line += part
    return line.rstrip(b"\n")


_WORKER = _Worker()
atexit.register(_WORKER.close)
