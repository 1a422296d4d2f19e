r"""The child process of `grading`: reads [reference, answer, seconds] lines, writes verdicts.

Run as a script, never imported; one JSON value a line on each side: true, false, or null where an
expression cannot be read or decided within the limit. Math-Verify's limits work here, because this
is the main thread of its process.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from math_verify import parse, verify
from math_verify.errors import TimeoutException

MEMORY_LIMIT_BYTES = 4 * 2**30


def verdict(reference: str, answer: str, seconds: int) -> bool | None:
    """Math-Verify's verdict on two box contents; None where it has none."""
    references = _readings(reference, seconds)
    answers = _readings(answer, seconds)
    decided = bool(references and answers)
    for gold in references:
        for target in answers:
            match = _match(gold, target, seconds)
            if match:
                return True
            decided &= match is not None
    return False if decided else None


def _readings(text: str, seconds: int) -> list[Any]:
    """Math-Verify's readings of a box's content (expressions, or texts); none where it fails."""
    try:
        readings: list[Any] = parse(
            rf"\boxed{{{text}}}", parsing_timeout=seconds, raise_on_error=True
        )
    except (Exception, TimeoutException):  # noqa: BLE001 - whatever it is, the next is to be served
        return []
    return readings


def _match(gold: Any, target: Any, seconds: int) -> bool | None:
    try:
        return bool(verify(gold, target, timeout_seconds=seconds, raise_on_error=True))
    except (Exception, TimeoutException):  # noqa: BLE001 - such as recursion or memory running out
        return None


def main() -> None:
    """Serves requests until the input ends."""
    logging.disable(logging.CRITICAL)  # its warnings quote whole answers
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        reference, answer, seconds = json.loads(line)
        sys.stdout.write(json.dumps(verdict(reference, answer, seconds)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
