r"""A child process of `pool.py`: reads [reference, answer, seconds] lines, writes verdicts.

Run as a script, never imported; one JSON value a line on each side: [true, null], [false, null], or
[null, reason] where an expression cannot be read or decided within the limit. Math-Verify's limits
work here, because this is the main thread of its process.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from math_verify import parse, verify
from math_verify.errors import TimeoutException

MEMORY_LIMIT_BYTES = 4 * 2**30


def verdict(reference: str, answer: str, seconds: int) -> tuple[bool | None, str | None]:
    """Math-Verify's verdict on two box contents, or None and why it has none."""
    references, why = _readings(reference, seconds)
    answers, why_not = _readings(answer, seconds)
    reason = why or why_not
    for gold in references:
        for target in answers:
            match, failed = _match(gold, target, seconds)
            if match:
                return True, None
            reason = reason or failed
    return (None, reason) if reason else (False, None)


def _readings(text: str, seconds: int) -> tuple[list[Any], str | None]:
    """Math-Verify's readings of a box's content (expressions, or texts), or why there are none."""
    try:
        readings: list[Any] = parse(
            rf"\boxed{{{text}}}", parsing_timeout=seconds, raise_on_error=True
        )
    except TimeoutException:
        return [], "time limit"
    except Exception:  # noqa: BLE001 - whatever it is, the next is to be served
        return [], "unreadable"
    return readings, None if readings else "unreadable"


def _match(gold: Any, target: Any, seconds: int) -> tuple[bool, str | None]:
    try:
        # In both orders: it reads `x > 2` as an interval where that is the reference alone.
        pairs = ((gold, target), (target, gold))
        return any(
            verify(*pair, timeout_seconds=seconds, raise_on_error=True) for pair in pairs
        ), None
    except TimeoutException:
        return False, "time limit"
    except Exception:  # noqa: BLE001 - such as recursion or memory running out
        return False, "undecided"


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
