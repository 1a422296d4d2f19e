"""Problems with reference answers, from JSON lines or a dataset, and how one is asked."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

__all__ = ["Problem", "load_problems", "problems_from_rows", "user_message"]


@dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
        id: unique name; splits and intervals go by it.
        problem: the text shown to the reasoner.
        answer: the reference answer, as it would stand in a box.
        family: kind or difficulty of the problem, "" where there is none.
    """

    id: str
    problem: str
    answer: str
    family: str = ""


class AsksForAnswers(Protocol):
    """What `user_message` needs of a reasoning format (`ReasoningFormat` has it)."""

    @property
    def user_instruction(self) -> str:
        """The sentence that asks for a boxed answer; "" where the model needs none."""


def user_message(problem: Problem, fmt: AsksForAnswers) -> str:
    """The user's turn: the problem, then the format's instruction as a paragraph of its own."""
    if not fmt.user_instruction:
        return problem.problem
    return f"{problem.problem}\n\n{fmt.user_instruction}"


def load_problems(
    path: str | Path, *, limit: int | None = None, family_column: str = "family"
) -> list[Problem]:
    """Reads problems from a `.jsonl` or `.jsonl.gz` file, one object a line.

    Args:
        path: the file; each line has `id`, `problem` and `answer`.
        limit: read only the first so many problems; all where None.
        family_column: column that gives `Problem.family` (such as "subject"); may be absent.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a line is not a JSON object, or see `problems_from_rows`.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no problems at {path}: give a .jsonl or .jsonl.gz file")
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        return problems_from_rows(
            _json_rows(lines, str(path)),
            limit=limit,
            family_column=family_column,
            source=str(path),
        )


def problems_from_rows(
    rows: Iterable[Mapping[str, Any]],
    *,
    limit: int | None = None,
    family_column: str = "family",
    source: str = "the dataset",
) -> list[Problem]:
    """Makes problems of rows (dicts or a `datasets.Dataset`) with `id`, `problem` and `answer`.

    Numbers are taken as answers too. Where there is no `id` column, the row number is the id.

    Args:
        rows: the rows, read only as far as `limit`.
        limit: keep only the first so many; all where None.
        family_column: column that gives `Problem.family`; may be absent.
        source: what to call the rows in errors.

    Raises:
        ValueError: a missing or empty `problem` or `answer`, a repeated id, no rows, or limit < 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; it must be at least 1, or None for all problems")
    problems: list[Problem] = []
    seen: set[str] = set()
    for number, row in enumerate(rows):
        if limit is not None and number >= limit:
            break
        where = f"{source}, row {number}"
        problem = Problem(
            id=str(row["id"]) if row.get("id") is not None else str(number),
            problem=_text(row, "problem", where),
            answer=_text(row, "answer", where),
            family=str(row.get(family_column) or ""),
        )
        if problem.id in seen:
            raise ValueError(f"{where}: the id {problem.id!r} was used before; ids must be unique")
        seen.add(problem.id)
        problems.append(problem)
    if not problems:
        raise ValueError(f"{source} holds no problems")
    return problems


def _text(row: Mapping[str, Any], column: str, where: str) -> str:
    reason = {
        "problem": "it is the text put to the reasoner",
        "answer": "it is the reference that forced answers are graded against",
    }[column]
    if column not in row:
        raise ValueError(
            f"{where}: there is no column {column!r} ({reason}); the columns are "
            f"{', '.join(map(repr, row)) or 'none'}: rename or add one"
        )
    value = row[column]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(
            f"{where}: column {column!r} holds {value!r}; it must be a text ({reason})"
        )
    text = str(value).strip()
    if not text:
        raise ValueError(f"{where}: column {column!r} is empty ({reason}); fill it or drop the row")
    return text


def _json_rows(lines: Iterable[str], source: str) -> Iterator[Mapping[str, Any]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{source}, line {number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise ValueError(f"{source}, line {number}: a {type(row).__name__}, not an object")
        yield row
