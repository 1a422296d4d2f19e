"""Where problems come from: benchmarks by name, datasets of the Hub, and local files.

The same problem in two sets is found by its normalised text, whatever its id.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .generated import GYM, gym_rows
from .problem import COLUMNS, Columns, Problem, problems_from_rows, read_rows

__all__ = [
    "BENCHMARKS",
    "Loaded",
    "drop_overlaps",
    "held_out_keys",
    "load_source",
    "normalised_text",
    "task_of",
    "text_key",
]


# LaTeX commands that change how a formula looks, not what it says.
_LOOKS = re.compile(r"\\(?:left|right|displaystyle|quad|qquad)(?![a-z])|\\[,;:!()\[\]]|\{,\}")
_NAMES = {"≤": "le", "≥": "ge", "≠": "ne", "×": "times", "÷": "div", "·": "cdot", "√": "sqrt",
          "∪": "cup", "∩": "cap", "∞": "infty", "π": "pi", "−": "-", "–": "-"}  # fmt: skip
_SAID_1 = re.compile(r"[^\W_]|(?<=\d)\.(?=\d)|[-+*/^_=<>|!%()]")
_SEPARATED = re.compile(r"(?<=\d)\}?\s*([,;:{]|\s)\s*\{?(?=\d)")


def normalised_text(text: str) -> str:
    r"""What a problem says: its letters, numbers, signs and symbols, in lower case.

    Copies of a problem differ in spacing, `$` and `\[`, braces, punctuation, `\dfrac`, and in how
    they write a sign (`≤`, `\le`, `\leq`) or thousands; but `1,2` is not `12`.
    """
    text = _plain(text)
    for sign, name in _NAMES.items():
        text = text.replace(sign, name)
    text = re.sub(r"\\(le|ge|ne)q(?![a-z])", r"\\\1", text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"(?<![\d,])(\d{1,3})((?:,\d{3})+)(?![\d,])", _joined, text)
    text = _SEPARATED.sub(lambda found: found[1] if found[1] in ",;:" else "~", text)
    said = re.findall(r"[^\W_]|(?<=\d)[.,;:](?=\d)|[-+*/^_=<>|!%()~]|[^\x00-\x7f\w\s]", text)
    return "".join(c for c in said if c.isascii() or c.isalnum() or unicodedata.category(c) == "Sm")


def _plain(text: str) -> str:
    text = _LOOKS.sub("", unicodedata.normalize("NFKC", text).lower())
    return re.sub(r"\\[dt]frac(?![a-z])", r"\\frac", text)


def _joined(thousands: re.Match[str]) -> str:
    return thousands[1] + thousands[2].replace(",", "")


def text_key(text: str) -> str:
    """A short name (16 hex digits) of a problem's normalised text: equal in all its copies."""
    return hashlib.blake2b(normalised_text(text).encode(), digest_size=8).hexdigest()


def text_key_1(text: str) -> str:
    """The first version of `text_key`, blind to many signs: it names held-out problems and ids."""
    text = re.sub(r"\\(?:left|right|displaystyle|quad|qquad)(?![a-z])|\\[,;:!()]", "",
                  unicodedata.normalize("NFKC", text).lower())  # fmt: skip
    said = "".join(_SAID_1.findall(re.sub(r"\\[dt]frac(?![a-z])", r"\\frac", text)))
    return hashlib.blake2b(said.encode(), digest_size=8).hexdigest()


def drop_overlaps(
    problems: Sequence[Problem], others: Iterable[Problem]
) -> tuple[list[Problem], list[tuple[str, str]]]:
    """Drops the problems that another set holds too.

    Args:
        problems: such as a training set.
        others: such as the problems that the result will be evaluated on.

    Returns:
        The problems left, and (dropped id, the other's id) of the rest.
    """
    known = {text_key(other.problem): other.id for other in others}
    kept, dropped = [], []
    for problem in problems:
        other = known.get(text_key(problem.problem))
        if other is None:
            kept.append(problem)
        else:
            dropped.append((problem.id, other))
    return kept, dropped


HOLDOUT_FILE = Path(__file__).with_name("deepscaler_holdout.json")
_FILE_ENDINGS = (".jsonl", ".jsonl.gz", ".parquet")


@dataclass(frozen=True)
class Part:
    """One dataset of the Hub that makes up a benchmark.

    Attributes:
        hub_id: its id.
        config: its configuration; None for the default.
        splits: our split name -> the dataset's.
        prefix: put before the ids of its problems.
    """

    hub_id: str
    config: str | None
    splits: Mapping[str, str]
    prefix: str


@dataclass(frozen=True)
class Benchmark:
    """A benchmark known by name.

    Attributes:
        parts: the datasets that make it up.
        columns: where the fields of a problem stand, in its datasets and in files of ours.
        read: turns a row into one with plain fields; given the row and its number.
    """

    parts: tuple[Part, ...]
    columns: Columns
    read: Callable[[dict[str, Any]], dict[str, Any]] = lambda row: row

    @property
    def splits(self) -> list[str]:
        """Names of its splits; the first is the default."""
        return list(self.parts[0].splits)


@dataclass(frozen=True)
class Loaded:
    """Problems, and what is worth knowing about where they came from.

    Attributes:
        problems: the problems.
        source: JSON-ready: dataset, split, revision or files, and how many rows were left out
            and why.
    """

    problems: list[Problem]
    source: dict[str, Any] = field(default_factory=dict)


def _gsm8k_row(row: dict[str, Any]) -> dict[str, Any]:
    """GSM8K's answers are solutions that end with `#### 1,234`."""
    answer = str(row.get("answer") or "").rpartition("####")[2].strip()
    return {**row, "answer": re.sub(r"(?<=\d),(?=\d{3})", "", answer)}


def _math500_row(row: dict[str, Any]) -> dict[str, Any]:
    """`test/precalculus/807.json` -> `precalculus/807`."""
    if isinstance(name := row.get("unique_id"), str):
        row = {**row, "unique_id": name.removeprefix("test/").removesuffix(".json")}
    return row


def _deepscaler_row(row: dict[str, Any]) -> dict[str, Any]:
    """DeepScaleR has no ids: its problems are named by their text."""
    return row if row.get("id") is not None else {**row, "id": text_key_1(str(row.get("problem")))}


def _arc(config: str) -> Part:
    splits = {"test": "test", "train": "train", "validation": "validation"}
    return Part("allenai/ai2_arc", config, splits, f"{config.lower()}/")


_AIME24 = Part("HuggingFaceH4/aime_2024", None, {"test": "train"}, "aime24/")
_AIME25 = Part("MathArena/aime_2025", None, {"test": "train"}, "aime25/")
_AIME_COLUMNS: Columns = {"id": ("id", "problem_idx"), "family": ("family", "year")}

BENCHMARKS: dict[str, Benchmark] = {
    "gsm8k": Benchmark(
        (Part("openai/gsm8k", "main", {"train": "train", "test": "test"}, "gsm8k/{split}/"),),
        {"problem": ("problem", "question")},
        _gsm8k_row,
    ),
    "math500": Benchmark(
        (Part("HuggingFaceH4/MATH-500", None, {"test": "test"}, "math500/"),),
        {"id": ("id", "unique_id"), "family": ("family", "subject")},
        _math500_row,
    ),
    "aime24": Benchmark((_AIME24,), _AIME_COLUMNS),
    "aime25": Benchmark((_AIME25,), _AIME_COLUMNS),
    "aime": Benchmark((_AIME24, _AIME25), _AIME_COLUMNS),
    "deepscaler": Benchmark(
        (
            Part(
                "agentica-org/DeepScaleR-Preview-Dataset",
                None,
                {"train": "train", "holdout": "train"},
                "deepscaler/",
            ),
        ),
        {"family": ("family", "subset")},
        _deepscaler_row,
    ),
    "arc-easy": Benchmark((_arc("ARC-Easy"),), {}),
    "arc-challenge": Benchmark((_arc("ARC-Challenge"),), {}),
    "mmlu": Benchmark(
        (Part("cais/mmlu", "all", {"test": "test", "validation": "validation"}, "mmlu/{split}/"),),
        {"family": ("family", "subject")},
    ),
    "humaneval": Benchmark(
        (Part("openai/openai_humaneval", None, {"test": "test"}, "humaneval/"),),
        {"id": ("id", "task_id")},
    ),
}

_CHOICES = ("arc-easy", "arc-challenge", "mmlu")


def task_of(dataset: str) -> str:
    """The name of the task that a data set is of, where none is given."""
    if dataset.startswith(GYM):
        return "generated"
    return "choice" if dataset in _CHOICES else "code" if dataset == "humaneval" else "math"


_SLICED = re.compile(r"(?P<split>\w+)\[(?P<start>-?\d*):(?P<stop>-?\d*)\]")


def load_source(
    dataset: str,
    *,
    files: Sequence[str | Path] = (),
    split: str | None = None,
    columns: Columns | None = None,
    revision: str | None = None,
    limit: int | None = None,
    read: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> Loaded:
    """Loads problems by a benchmark's name, from a file, or from a dataset of the Hub.

    Args:
        dataset: a name of `BENCHMARKS`, "reasoning-gym:..." (`generated.gym_rows`), a path to a
            `.jsonl`, `.jsonl.gz` or `.parquet` file, or the id of a dataset on the Hub (or a
            folder that `datasets` reads).
        files: for a benchmark's name: its rows from these files instead of the Hub, in our
            columns or in its dataset's.
        split: of the benchmark or dataset; the benchmark's first, or "train", where None.
            A slice counts problems, as in `datasets`: "train[800:1000]". DeepScaleR has "train"
            and "holdout": the 500 problems of `held_out_keys`.
        columns: where the fields stand; see `benchmarks.COLUMNS`.
        revision: of the Hub's dataset.
        limit: keep only the first so many.
        read: turns a row into one with `problem` and `answer` (`Task.read_row`).

    Raises:
        FileNotFoundError: a file that does not exist.
        ValueError: an unknown name or split, or rows that are no problems.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; it must be at least 1, or None for all problems")
    if dataset in BENCHMARKS:
        return _load_benchmark(dataset, files, split, columns or {}, revision, limit, read)
    if files:
        raise ValueError(
            f"files are given for the dataset {dataset!r}; they go with the name of a benchmark "
            f"({', '.join(BENCHMARKS)}): give a file's path as the dataset itself"
        )
    source: dict[str, Any] = {"dataset": dataset}
    rows: Iterable[Mapping[str, Any]]
    if dataset.startswith(GYM):
        if split is not None:
            raise ValueError(f"split is {split!r}, but {dataset} has none: give another seed")
        rows = gym_rows(dataset)
    elif dataset.endswith(_FILE_ENDINGS) or Path(dataset).is_file():
        if split is not None:
            raise ValueError(f"split is {split!r}, but {dataset} is a file, which has no splits")
        rows = read_rows(dataset)
    else:
        split = split or "train"
        rows = _hub_rows(dataset, None, split, revision)
        source |= {"split": split, "revision": revision}
    rows = rows if read is None else map(read, rows)
    problems = problems_from_rows(rows, limit=limit, columns=columns or COLUMNS, source=dataset)
    return Loaded(problems, source)


def held_out_keys() -> frozenset[str]:
    """`text_key_1` of the 500 DeepScaleR problems that are kept out of training.

    The paper's own are unknown; these were drawn once, with seed 0, from the AIME and MATH parts
    and a sample of the rest.
    """
    return frozenset(json.loads(HOLDOUT_FILE.read_text("utf-8"))["keys"])


def _load_benchmark(
    name: str,
    files: Sequence[str | Path],
    split: str | None,
    columns: Columns,
    revision: str | None,
    limit: int | None,
    read: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None,
) -> Loaded:
    benchmark = BENCHMARKS[name]
    asked = split or benchmark.splits[0]
    sliced = _SLICED.fullmatch(asked)
    split = sliced["split"] if sliced else asked
    if split not in benchmark.splits:
        raise ValueError(
            f"{name} has the splits {benchmark.splits}, or a slice such as "
            f"'{benchmark.splits[0]}[:100]', not {asked!r}"
        )
    columns = {**benchmark.columns, **columns}
    left_out = {"without_answer": 0, "duplicates": 0}
    problems: list[Problem] = []
    seen: set[str] = set()
    for rows, prefix, where in _sources(benchmark, files, split, revision):
        usable = _usable(map(_reader(benchmark, read), rows), columns, seen, left_out)
        for problem in problems_from_rows(usable, columns=columns, source=where):
            named = problem.id if problem.id.startswith(name[:4]) else prefix + problem.id
            problems.append(Problem(named, problem.problem, problem.answer, problem.family))
    if name == "deepscaler":
        held_out = held_out_keys()
        wanted = split == "holdout"
        problems = [p for p in problems if (text_key_1(p.problem) in held_out) == wanted]
        if not problems:
            raise ValueError(f"{name} holds no problem of its split {split!r}")
    if sliced:
        start, stop = (int(bound) if bound else None for bound in sliced.group("start", "stop"))
        count = len(problems)
        problems = problems[start:stop]
        if not problems:
            raise ValueError(f"the split {asked!r} is empty: {name} has {count} problems there")
    source: dict[str, Any] = {"dataset": name, "split": asked, "left_out": left_out}
    source |= {"files": [str(file) for file in files]} if files else {"revision": revision}
    return Loaded(problems[:limit], source)


def _sources(
    benchmark: Benchmark, files: Sequence[str | Path], split: str, revision: str | None
) -> Iterator[tuple[Iterable[Mapping[str, Any]], str, str]]:
    """Rows, the prefix of their ids, and what to call them."""
    if files:
        for file in files:
            stem = Path(file).name.partition(".")[0]
            yield read_rows(file), f"{stem}/", str(file)
        return
    for part in benchmark.parts:
        rows = _hub_rows(part.hub_id, part.config, part.splits[split], revision)
        yield rows, part.prefix.format(split=split), part.hub_id


def _reader(
    benchmark: Benchmark, read: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """The benchmark's own reading of a row, then the task's."""

    def reader(row: Mapping[str, Any]) -> dict[str, Any]:
        own = benchmark.read(dict(row))
        return own if read is None else dict(read(own))

    return reader


def _hub_rows(
    hub_id: str, config: str | None, split: str, revision: str | None
) -> Iterable[Mapping[str, Any]]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    try:
        rows: Iterable[Mapping[str, Any]] = load_dataset(
            hub_id, config, split=split, revision=revision
        )
    except (DatasetNotFoundError, ConnectionError) as error:
        raise ValueError(
            f"{hub_id!r} is no dataset that can be loaded ({error}); give one of "
            f"{', '.join(BENCHMARKS)}, a .jsonl, .jsonl.gz or .parquet file, or a dataset's id on "
            "the Hub"
        ) from error
    return rows


def _usable(
    rows: Iterable[dict[str, Any]], columns: Columns, seen: set[str], left_out: dict[str, int]
) -> Iterator[dict[str, Any]]:
    """The first row of each problem that has an answer; those without an id get their number."""
    fields = {name: columns.get(name, (name,)) for name in ("id", "problem", "answer")}
    for number, row in enumerate(rows):
        found = {name: [row[c] for c in names if c in row] for name, names in fields.items()}
        answer, problem = found["answer"], found["problem"]
        if answer and (answer[0] is None or not str(answer[0]).strip()):
            left_out["without_answer"] += 1
            continue
        row_id = next((value for value in found["id"] if value is not None), str(number))
        if problem:
            # By both keys: the problems of labels from before the second are all still there.
            key, first = text_key(str(problem[0])), text_key_1(str(problem[0]))
            if f"{first}-{key}" in seen:
                left_out["duplicates"] += 1
                continue
            row_id = f"{row_id}-{key}" if row_id == first and first in seen else row_id
            seen |= {first, f"{first}-{key}"}
        yield {**row, fields["id"][0]: row_id}
