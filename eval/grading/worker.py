r"""A child process of `pool.py`: reads [reference, answer, seconds] lines, writes verdicts.

Run as a script, never imported; one JSON value a line on each side: [true, null], [false, null], or
[null, reason] where an expression cannot be read or decided within the limit. Math-Verify's limits
work here, because this is the main thread of its process.
"""

import itertools
import json
import logging
import operator
import sys
from typing import Any

from math_verify import parse, verify
from math_verify.errors import TimeoutException
from sympy import Basic

MEMORY_LIMIT_BYTES = 4 * 2**30


def verdict(reference: str, answer: str, seconds: int) -> tuple[bool | None, str | None]:
    """Math-Verify's verdict on two box contents, or None and why it has none."""
    readings: list[list[Any]] = []  # expressions, or texts
    for text in (reference, answer):
        boxed = rf"\boxed{{{text}}}"
        try:
            found = parse(boxed, parsing_timeout=seconds, raise_on_error=True)
            readings.append([_roots_apart(one) for one in found])
        except TimeoutException:
            return None, "time limit"
        except Exception:  # noqa: BLE001 - whatever it is, the next is to be served
            return None, "unreadable"
    if not all(readings):
        return None, "unreadable"
    reason = None
    for pair in itertools.product(*readings):
        for gold, target in (pair, pair[::-1]):  # `x > 2` is an interval as the reference alone
            try:
                if verify(gold, target, timeout_seconds=seconds, raise_on_error=True):
                    return True, None
            except TimeoutException:
                reason = reason or "time limit"
            except Exception:  # noqa: BLE001 - such as recursion or memory running out
                reason = reason or "undecided"
    return (None, reason) if reason else (False, None)


def _roots_apart(reading: Any) -> Any:
    """Roots of quotients as quotients of roots: sympy tells them apart, as for n < 0 they are."""
    if not isinstance(reading, Basic):
        return reading
    return reading.replace(
        lambda one: one.is_Pow and one.exp.is_Rational and not one.exp.is_Integer,
        lambda one: operator.truediv(*(part**one.exp for part in one.base.as_numer_denom())),
    )


def main() -> None:
    """Serves requests until the input ends."""
    logging.disable(logging.CRITICAL)  # its warnings quote whole answers
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    print("ready", flush=True)
    for line in sys.stdin:
        reference, answer, seconds = json.loads(line)
        print(json.dumps(verdict(reference, answer, seconds)), flush=True)


if __name__ == "__main__":
    main()
