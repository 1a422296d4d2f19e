"""Problems with reference answers, from files or rows, and how one is asked."""

import gzip
import hashlib
import json
import math
import re
import unicodedata
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from modeling_ospruner.formats_ospruner import ReasoningFormat


@dataclass(frozen=True)
class Problem:
    """One problem."""

    id: str  # unique; splits and intervals go by it
    problem: str  # the text shown to the reasoner
    answer: str  # the reference, as it would stand in a box
    family: str = ""  # kind or difficulty, "" where there is none


def user_message(problem: Problem, fmt: ReasoningFormat) -> str:
    """The user's turn: the problem, then the format's instruction as a paragraph of its own."""
    if not fmt.user_instruction:
        return problem.problem
    return f"{problem.problem}\n\n{fmt.user_instruction}"


# LaTeX commands that change how a formula looks, not what it says.
_LOOKS = re.compile(r"\\(?:left|right|displaystyle|quad|qquad)(?![a-z])|\\[,;:!()\[\]]|\{,\}")
_LOOKS_1 = re.compile(r"\\(?:left|right|displaystyle|quad|qquad)(?![a-z])|\\[,;:!()]")
_WORDS = ("le", "ge", "ne", "times", "div", "cdot", "sqrt", "cup", "cap", "infty", "pi", "-", "-")
_NAMES = dict(zip("≤≥≠×÷·√∪∩∞π−–", _WORDS, strict=True))
_SEPARATED = re.compile(r"(?<=\d)\}?\s*([,;:{]|\s)\s*\{?(?=\d)")


def text_key(text: str) -> str:
    r"""A short name (16 hex digits) of what a problem says, equal in all its copies.

    Of its letters, numbers, signs and symbols, in lower case: copies differ in spacing, `$` and
    `\[`, braces, punctuation, `\dfrac`, and in how they write a sign (`≤`, `\le`, `\leq`) or
    thousands; but `1,2` is not `12`.
    """
    text = _LOOKS.sub("", unicodedata.normalize("NFKC", text).lower())
    text = re.sub(r"\\[dt]frac(?![a-z])", r"\\frac", text)
    for sign, name in _NAMES.items():
        text = text.replace(sign, name)
    text = re.sub(r"\\(le|ge|ne)q(?![a-z])", r"\\\1", text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    thousands = r"(?<![\d,])\d{1,3}(?:,\d{3})+(?![\d,])"
    text = re.sub(thousands, lambda found: found[0].replace(",", ""), text)
    text = _SEPARATED.sub(lambda found: found[1] if found[1] in ",;:" else "~", text)
    said = re.findall(r"[^\W_]|(?<=\d)[.,;:](?=\d)|[-+*/^_=<>|!%()~]|[^\x00-\x7f\w\s]", text)
    kept = (c for c in said if c.isascii() or c.isalnum() or unicodedata.category(c) == "Sm")
    return _digest("".join(kept))


def text_key_1(text: str) -> str:
    """The first version of `text_key`, blind to many signs: it names held-out problems and ids."""
    text = _LOOKS_1.sub("", unicodedata.normalize("NFKC", text).lower())
    text = re.sub(r"\\[dt]frac(?![a-z])", r"\\frac", text)
    return _digest("".join(re.findall(r"[^\W_]|(?<=\d)\.(?=\d)|[-+*/^_=<>|!%()]", text)))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def shared_problems(texts: Iterable[str], others: Iterable[str]) -> list[str]:
    """Those of some problems' texts that others hold too, by `text_key`, whatever their ids."""
    known = set(map(text_key, set(others)))
    return sorted(one for one in set(texts) if text_key(one) in known)


Row = Mapping[str, Any]  # of a file or a dataset

Columns = Mapping[str, Sequence[str]]
"""For each field of `Problem`, the columns that may hold it; the first one present is read."""

COLUMNS: Columns = {name: (name,) for name in ("id", "problem", "answer", "family")}
"""The columns of plain files and datasets."""


def read_rows(path: str | Path) -> Iterator[Row]:
    """The rows of a `.jsonl`, `.jsonl.gz` or `.parquet` file, lines read as they are asked for.

    By hand, not by pandas or `datasets`, which guess types (ids become numbers or dates).

    Raises:
        FileNotFoundError: no such file.
        ValueError: another kind of file, or a line is not UTF-8 or not a JSON object.
    """
    path = Path(path)
    if not path.is_file():
        what = "a folder, and no file, is" if path.is_dir() else "no rows"
        raise FileNotFoundError(f"{what} at {path}: give a .jsonl, .jsonl.gz or .parquet file")
    if path.suffix == ".parquet":
        try:
            yield from pq.read_table(path).to_pylist()
        except pa.ArrowInvalid as error:
            raise ValueError(f"{path} is no readable Parquet file ({error})") from error
        return
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise ValueError(
            f"{path} is no .jsonl, .jsonl.gz or .parquet file: convert it to one of them"
        )
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


def _as_written(fraction: str) -> str:
    """A fraction's text: 0.0000001, where Python says 1e-07."""
    if math.isinf(float(fraction)):
        raise ValueError(f"{fraction} is no finite number")
    return fraction


def _json_row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"), parse_float=_as_written)
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 ({error}); convert the file") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{where}: not JSON ({error}); a .jsonl file holds one object a line"
        ) from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a {type(row).__name__}, not an object")
    return row


def problems_from_rows(
    rows: Iterable[Row],
    *,
    limit: int | None = None,
    columns: Columns = COLUMNS,
    source: str = "the dataset",
) -> list[Problem]:
    """Makes problems of rows (dicts or a `datasets.Dataset`) with `id`, `problem` and `answer`.

    Numbers are taken as answers too. A row without an `id` gets its text's `text_key`.

    Args:
        rows: the rows, read only as far as `limit`.
        limit: keep only the first so many; all where None.
        columns: where each field stands, if not under its own name; see `COLUMNS`.
        source: what to call the rows in errors.

    Raises:
        ValueError: a missing or empty `problem` or `answer`, a repeated id, no rows, or an unknown
            field in `columns`.
    """
    if unknown := sorted(set(columns) - set(COLUMNS)):
        raise ValueError(f"columns names the fields {unknown}; a problem has {list(COLUMNS)}")
    columns = {**COLUMNS, **columns}
    problems: dict[str, Problem] = {}
    for number, row in enumerate(islice(rows, limit)):
        where = f"{source}, row {number}"
        own_id, family = (first_of(row, columns[name]) for name in ("id", "family"))
        if not (own_id is None or isinstance(own_id, str) or _is_number(own_id)):
            raise ValueError(f"{where}: the id is {own_id!r}; it must be a text or a number")
        text = _text(row, "problem", columns["problem"], where)
        answer = _text(row, "answer", columns["answer"], where)
        problem = Problem(
            text_key(text) if own_id is None else str(own_id), text, answer, str(family or "")
        )
        if problem.id in problems:
            said = f"{where}: the id {problem.id!r} was used before; ids must be unique"
            if own_id is None:
                said = f"{where}: the problem {text!r:.60} stands there twice: drop one of them"
            raise ValueError(said)
        problems[problem.id] = problem
    if not problems:
        raise ValueError(f"{source} holds no problems")
    return list(problems.values())


def first_of(row: Row, names: Sequence[str]) -> Any:
    """What the first of some columns holds that is there and not null; None where none does."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def _text(row: Row, field: str, names: Sequence[str], where: str) -> str:
    column = next((name for name in names if name in row), None)
    if column is None:
        raise ValueError(
            f"{where}: there is no column {' or '.join(map(repr, names))} (the {field}); the "
            f"columns are {', '.join(map(repr, row)) or 'none'}: rename one, or say which it is "
            f"(columns {field}=NAME)"
        )
    value = row[column]
    if not isinstance(value, str) and (isinstance(value, bool) or not _is_number(value)):
        raise ValueError(
            f"{where}: column {column!r} holds {value!r}; it must be a text or a finite number "
            f"(the {field}): fill it, or drop the row"
        )
    if not (text := str(value).strip()):
        raise ValueError(f"{where}: column {column!r} is empty (the {field}): fill it or drop it")
    return text


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
