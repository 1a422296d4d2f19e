"""The task `code`: a function is asked for, the answer is a program, its tests grade it."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..grading.sandbox import check_sandbox, run_program
from .problem import Problem
from .task import Grade, Task

__all__ = ["ANSWER_LINE", "Code", "program_of"]

ANSWER_LINE = "# THE ANSWER"
"""A line of the reference in whose place the answer is put; without one, it is put before it."""

_FREE = re.compile(r"```[ \t]*(?:python|py)?[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_WORKERS = 4


class Code(Task):
    """Functions to be written in Python, graded by running their tests, locked in (`sandbox`).

    The reference (`Problem.answer`) is a program: what stands before the answer, `ANSWER_LINE`, and
    the tests. An answer is right if the whole program runs to its end.

    Args:
        prompt: see `Task`.
        seconds: that a program may take.
        allow_code: whether programs that the model wrote may be run.
    """

    name = "code"
    instruction = (
        "Please reason step by step, and give your final answer as one complete Python program in "
        "a block of code: ```python ... ```. It defines the function and all that it needs."
    )
    box_prefix = "```python\n"
    answer_end = "\n```"
    max_answer_tokens = 512

    def __init__(
        self, prompt: str = "default", seconds: float | str = 10.0, allow_code: bool = False
    ) -> None:
        super().__init__(prompt)
        try:
            self.seconds = float(seconds)
        except ValueError:
            raise ValueError(f"code: seconds is {seconds!r}; it must be a number") from None
        if not 0 < self.seconds <= 600:
            raise ValueError(f"code: seconds is {self.seconds:g}; it must lie in (0, 600]")
        self.allow_code = allow_code

    @property
    def settings(self) -> dict[str, Any]:
        """See `Task.settings`."""
        return super().settings | ({} if self.seconds == 10.0 else {"seconds": self.seconds})

    def check(self) -> None:
        """Refuses to run programs without leave, or where they cannot be locked in."""
        if not self.allow_code:
            raise ValueError(
                "the task code runs programs that the model wrote, and is off by default: say "
                "--allow-code once you have read what locks them in (docs/tasks.md)"
            )
        check_sandbox()

    def read_row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """A row of HumanEval (`prompt`, `test`, `entry_point`) as problem and tests."""
        if not {"prompt", "test", "entry_point"} <= set(row):
            return row
        asked = str(row["prompt"])
        before = asked[: asked.rfind(f"def {row['entry_point']}")]
        problem = (
            "Complete this Python function. Repeat its head and what it imports.\n\n"
            f"```python\n{asked.strip()}\n```"
        )
        reference = f"{before}\n{ANSWER_LINE}\n{row['test']}\ncheck({row['entry_point']})\n"
        named = {"id": row["task_id"]} if "task_id" in row else {}
        return {**named, **row, "problem": problem, "answer": reference}

    def read_forced(self, text: str) -> str | None:
        """The program before the closing fence; None where the fence never came."""
        program, fence, _ = f"\n{text}".partition(self.answer_end)
        return program.strip("\n") or None if fence else None

    def read_free(self, text: str) -> str | None:
        """The last block of code in a text; None where there is none."""
        found = _FREE.findall(text)
        return (found[-1].strip("\n") or None) if found else None

    def grade(self, answer: str | None, problem: Problem) -> float | None:
        """Whether the program passes its tests; None without an answer."""
        return self.grade_many([(answer or "", problem)])[0].value

    def grade_many(self, asked: Sequence[tuple[str, Problem]]) -> list[Grade]:
        """See `Task.grade_many`; several at once, equal ones once."""
        self.check()
        known = dict.fromkeys((answer, problem.answer) for answer, problem in asked if answer)

        def passes(pair: tuple[str, str]) -> Grade:
            return Grade(float(run_program(program_of(*pair), self.seconds).ended == "done"))

        with ThreadPoolExecutor(_WORKERS) as threads:
            grades = dict(zip(known, threads.map(passes, known), strict=True))
        none = Grade(None, "no answer")
        return [grades.get((answer, problem.answer), none) for answer, problem in asked]

    def equal(self, one: str, other: str) -> bool | None:
        """Whether both are the same program but for its layout and comments."""
        try:
            return ast.dump(ast.parse(one)) == ast.dump(ast.parse(other))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return one.strip() == other.strip()


def program_of(answer: str, reference: str) -> str:
    """The whole program that grades an answer: compiled in parts, so that none reaches over."""
    before, line, tests = reference.partition(ANSWER_LINE)
    parts = (before, answer, tests) if line else ("", answer, reference)
    runs = [f"exec({json.dumps(part)}, globals())\n" for part in parts if part.strip()]
    return "".join([*runs, "result = None\n"])
