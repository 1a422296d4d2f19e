"""Problems with reference answers, from files or rows, and how one is asked."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from modeling_ospruner.formats_ospruner import ReasoningFormat

__all__ = [
    "COLUMNS",
    "Columns",
    "Problem",
    "problems_from_rows",
    "read_rows",
    "user_message",
]


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


def user_message(problem: Problem, fmt: ReasoningFormat) -> str:
    """The user's turn: the problem, then the format's instruction as a paragraph of its own."""
    if not fmt.user_instruction:
        return problem.problem
    return f"{problem.problem}\n\n{fmt.user_instruction}"


Columns = Mapping[str, Sequence[str]]
"""For each field of `Problem`, the columns that may hold it; the first one present is read."""

COLUMNS: Columns = {
    "id": ("id",),
    "problem": ("problem",),
    "answer": ("answer",),
    "family": ("family",),
}
"""The columns of plain files and datasets."""


def read_rows(path: str | Path) -> Iterator[Mapping[str, Any]]:
    """The rows of a `.jsonl`, `.jsonl.gz` or `.parquet` file, read as they are asked for.

    Raises:
        FileNotFoundError: no such file.
        ValueError: another kind of file, or a line is not UTF-8 or not a JSON object.
    """
    path = Path(path)
    if not path.is_file():
        what = "a folder, and no file, is" if path.is_dir() else "no rows"
        raise FileNotFoundError(f"{what} at {path}: give a .jsonl, .jsonl.gz or .parquet file")
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return _json_rows(path)
    raise ValueError(f"{path} is no .jsonl, .jsonl.gz or .parquet file: convert it to one of them")


def problems_from_rows(
    rows: Iterable[Mapping[str, Any]],
    *,
    limit: int | None = None,
    columns: Columns = COLUMNS,
    source: str = "the dataset",
) -> list[Problem]:
    """Makes problems of rows (dicts or a `datasets.Dataset`) with `id`, `problem` and `answer`.

    Numbers are taken as answers too. Where there is no `id` column, the row number is the id.

    Args:
        rows: the rows, read only as far as `limit`.
        limit: keep only the first so many; all where None.
        columns: where each field stands, if not under its own name; see `COLUMNS`.
        source: what to call the rows in errors.

    Raises:
        ValueError: a missing or empty `problem` or `answer`, a repeated id, no rows, limit < 1,
            or an unknown field in `columns`.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; it must be at least 1, or None for all problems")
    if unknown := sorted(set(columns) - set(COLUMNS)):
        raise ValueError(f"columns names the fields {unknown}; a problem has {list(COLUMNS)}")
    columns = {**COLUMNS, **columns}
    problems: list[Problem] = []
    seen: set[str] = set()
    for number, row in enumerate(rows):
        if limit is not None and number >= limit:
            break
        where = f"{source}, row {number}"
        given_id, family = _first(row, columns["id"]), _first(row, columns["family"])
        if not (given_id is None or isinstance(given_id, str) or _is_number(given_id)):
            raise ValueError(f"{where}: the id is {given_id!r}; it must be a text or a number")
        problem = Problem(
            id=str(number) if given_id is None else str(given_id),
            problem=_text(row, "problem", columns["problem"], where),
            answer=_text(row, "answer", columns["answer"], where),
            family=str(family or ""),
        )
        if problem.id in seen:
            raise ValueError(f"{where}: the id {problem.id!r} was used before; ids must be unique")
        seen.add(problem.id)
        problems.append(problem)
    if not problems:
        raise ValueError(f"{source} holds no problems")
    return problems


def _first(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _text(row: Mapping[str, Any], field: str, names: Sequence[str], where: str) -> str:
    reason = {
        "problem": "it is the text put to the reasoner",
        "answer": "it is the reference that forced answers are graded against",
    }[field]
    column = next((name for name in names if name in row), None)
    if column is None:
        raise ValueError(
            f"{where}: there is no column {' or '.join(map(repr, names))} ({reason}); the columns "
            f"are {', '.join(map(repr, row)) or 'none'}: rename one, or say which it is "
            f"(columns {field}=NAME)"
        )
    value = row[column]
    known = isinstance(value, str) or (not isinstance(value, bool) and _is_number(value))
    if not known:
        raise ValueError(
            f"{where}: column {column!r} holds {value!r}; it must be a text or a finite number "
            f"({reason}): fill it, or drop the row"
        )
    text = str(value).strip()
    if not text:
        raise ValueError(f"{where}: column {column!r} is empty ({reason}); fill it or drop the row")
    return text


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _parquet_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is no readable Parquet file ({error})") from error
    with file:
        for batch in file.iter_batches():
            yield from batch.to_pylist()


def _json_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _json_row(line, f"{path}, line {number}")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(
            f"{path}, after line {number}: not gzip, or cut off ({error}); copy the file again"
        ) from error


def _json_row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where}: not UTF-8 (byte {line[error.start]:#04x} at column {error.start + 1}); "
            "convert the file, such as by iconv -f latin1 -t utf-8"
        ) from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(
            f"{where}: not JSON ({error}); a .jsonl file holds one object a line"
        ) from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a {type(row).__name__}, not an object")
    return row
