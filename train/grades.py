"""Grades of a labelled trace: every different answer once, over many traces side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ospruner.eval.grading import Verdict, compare_many

__all__ = ["GRADE_COLUMNS", "grade_rows"]

GRADE_COLUMNS = ("forced_correct", "matches_final", "ungraded_reasons", "natural_correct")
"""The columns that `grade_rows` fills in."""

_BATCH = 1_000
_Pair = tuple[str | None, str | None]


def grade_rows(
    rows: Sequence[dict[str, Any]], on_graded: Callable[[int, int], None] | None = None
) -> None:
    """Fills in `GRADE_COLUMNS` from the answers in the rows.

    Most steps of a trace give one of a few answers: each is graded, and compared with the answer
    forced at the last step, once.

    Args:
        rows: labelled traces; changed in place.
        on_graded: called with the comparisons done so far and their number.
    """
    wanted: dict[_Pair, None] = {}
    for row in rows:
        for answer in {*row["forced_answers"], row["natural_answer"]}:
            wanted[row["answer"], answer] = None
        for answer in set(row["forced_answers"]):
            wanted[row["forced_answers"][-1], answer] = None
    pairs = list(wanted)
    verdicts: dict[_Pair, Verdict] = {}
    for start in range(0, len(pairs), _BATCH):
        batch = pairs[start : start + _BATCH]
        verdicts |= zip(batch, compare_many(batch), strict=True)
        if on_graded is not None:
            on_graded(len(verdicts), len(pairs))
    for row in rows:
        answers, final = row["forced_answers"], row["forced_answers"][-1]
        graded = [verdicts[row["answer"], answer] for answer in answers]
        row["forced_correct"] = [_number(verdict) for verdict in graded]
        row["ungraded_reasons"] = [verdict.reason for verdict in graded]
        row["matches_final"] = [verdicts[final, answer].correct for answer in answers]
        row["natural_correct"] = _number(verdicts[row["answer"], row["natural_answer"]])


def _number(verdict: Verdict) -> float | None:
    return None if verdict.correct is None else float(verdict.correct)
