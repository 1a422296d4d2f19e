"""Where problems come from: benchmarks by name, datasets of the Hub, and local files.

The same problem in two sets is found by its normalised text, whatever its id.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ospruner.provenance import check_place

from .problem import (
    COLUMNS,
    Columns,
    Problem,
    Row,
    first_of,
    problems_from_rows,
    read_rows,
    text_key,
    text_key_1,
)


def drop_overlaps(
    problems: Sequence[Problem], others: Iterable[Problem]
) -> tuple[list[Problem], list[tuple[str, str]]]:
    """The problems that another set does not hold, and (dropped id, the other's id) of the rest."""
    known = {text_key(other.problem): other.id for other in others}
    twins = {p.id: known[key] for p in problems if (key := text_key(p.problem)) in known}
    return [problem for problem in problems if problem.id not in twins], list(twins.items())


Read = Callable[[Row], Row]


@dataclass(frozen=True)
class Benchmark:
    """A benchmark known by name."""

    # The datasets of the Hub that make it up: id, configuration (None: the default), and what is
    # put before the ids of its problems.
    parts: tuple[tuple[str, str | None, str], ...]
    splits: Mapping[str, str]  # our names -> the datasets' own; the first is the default
    columns: Columns = field(default_factory=dict)  # in its datasets and in files of ours
    read: Read = lambda row: row  # turns a row into one with plain fields
    task: str = "math"  # its name


@dataclass(frozen=True)
class Loaded:
    """Problems, and what is worth knowing about where they came from."""

    problems: list[Problem]
    # JSON-ready: dataset, split, files, and how many rows were left out and why.
    source: dict[str, Any] = field(default_factory=dict)


def _gsm8k_row(row: Row) -> Row:
    """GSM8K's answers are solutions that end with `#### 1,234`."""
    answer = str(row.get("answer") or "").rpartition("####")[2].strip()
    return {**row, "answer": re.sub(r"(?<=\d),(?=\d{3})", "", answer)}


def _math500_row(row: Row) -> Row:
    """`test/precalculus/807.json` -> `precalculus/807`."""
    if isinstance(name := row.get("unique_id"), str):
        row = {**row, "unique_id": name.removeprefix("test/").removesuffix(".json")}
    return row


def _deepscaler_row(row: Row) -> Row:
    """DeepScaleR has no ids: its problems are named by their text."""
    return row if row.get("id") is not None else {**row, "id": text_key_1(str(row.get("problem")))}


_AIME = Benchmark(
    (("HuggingFaceH4/aime_2024", None, "aime24/"), ("MathArena/aime_2025", None, "aime25/")),
    {"test": "train"},
    {"id": ("id", "problem_idx"), "family": ("family", "year")},
)
_ARC = Benchmark(
    (("allenai/ai2_arc", "ARC-Easy", "arc-easy/"),),
    {"test": "test", "train": "train", "validation": "validation"},
    task="choice",
)

BENCHMARKS: dict[str, Benchmark] = {
    "gsm8k": Benchmark(
        (("openai/gsm8k", "main", "gsm8k/{split}/"),),
        {"train": "train", "test": "test"},
        {"problem": ("problem", "question")},
        _gsm8k_row,
    ),
    "math500": Benchmark(
        (("HuggingFaceH4/MATH-500", None, "math500/"),),
        {"test": "test"},
        {"id": ("id", "unique_id"), "family": ("family", "subject")},
        _math500_row,
    ),
    "aime24": replace(_AIME, parts=_AIME.parts[:1]),
    "aime25": replace(_AIME, parts=_AIME.parts[1:]),
    "aime": _AIME,
    "deepscaler": Benchmark(
        (("agentica-org/DeepScaleR-Preview-Dataset", None, "deepscaler/"),),
        {"train": "train", "holdout": "train"},
        {"family": ("family", "subset")},
        _deepscaler_row,
    ),
    "arc-easy": _ARC,
    "arc-challenge": replace(_ARC, parts=(("allenai/ai2_arc", "ARC-Challenge", "arc-challenge/"),)),
    "mmlu": Benchmark(
        (("cais/mmlu", "all", "mmlu/{split}/"),),
        {"test": "test", "validation": "validation"},
        {"family": ("family", "subject")},
        task="choice",
    ),
}


def task_of(dataset: str) -> str:
    """The name of the task that a data set is of, where none is given."""
    return BENCHMARKS[dataset].task if dataset in BENCHMARKS else "math"


def load_source(
    dataset: str,
    *,
    files: Sequence[str | Path] = (),
    split: str | None = None,
    columns: Columns | None = None,
    limit: int | None = None,
    read: Read = lambda row: row,
) -> Loaded:
    """Loads problems by a benchmark's name, from a file, or from a dataset of the Hub.

    Args:
        dataset: a name of `BENCHMARKS`, a path to a `.jsonl`, `.jsonl.gz` or `.parquet` file, or
            the id of a dataset on the Hub (or a folder that `datasets` reads).
        files: for a benchmark's name: its rows from these files instead of the Hub, in our
            columns or in its dataset's.
        split: of the benchmark or dataset; the benchmark's first, or "train", where None. Of a
            benchmark a slice counts problems, as in `datasets`: "train[800:1000]". DeepScaleR has
            "train" and "holdout": 500 problems that are never trained on.
        columns: where the fields stand; see `problem.COLUMNS`.
        limit: keep only the first so many.
        read: turns a row into one with `problem` and `answer` (`Task.read_row`).

    Raises:
        FileNotFoundError: a file that does not exist.
        ValueError: an unknown name or split, or rows that are no problems.
    """
    columns = columns or {}
    if dataset in BENCHMARKS:
        found, about = _load_benchmark(dataset, files, split, columns, read)
        return Loaded(found[:limit], about)
    if files:
        raise ValueError(
            f"files are given for the dataset {dataset!r}; they go with the name of a benchmark "
            f"({', '.join(BENCHMARKS)}): give a file's path as the dataset itself"
        )
    source: dict[str, Any] = {"dataset": dataset}
    if dataset.endswith((".jsonl", ".jsonl.gz", ".parquet")) or Path(dataset).is_file():
        if split is not None:
            raise ValueError(f"split is {split!r}, but {dataset} is a file, which has no splits")
        rows: Iterable[Row] = read_rows(dataset)
    else:
        check_place("dataset", dataset)
        source["split"] = split or "train"
        rows = _hub_rows(dataset, None, source["split"])
    found = problems_from_rows(map(read, rows), limit=limit, columns=columns, source=dataset)
    return Loaded(found, source)


# `text_key_1` of the 500 problems of DeepScaleR that are never trained on. The paper's own are
# unknown; these were drawn once, with seed 0, from AIME, MATH and a sample of the rest.
_HELD_OUT = Path(__file__).with_name("deepscaler_holdout.json")
_SLICED = re.compile(r"(?P<split>\w+)(?:\[(?P<start>-?\d*):(?P<stop>-?\d*)\])?")


def _load_benchmark(
    name: str, files: Sequence[str | Path], asked: str | None, columns: Columns, read: Read
) -> tuple[list[Problem], dict[str, Any]]:
    """See `load_source`; problems that have no answer, and copies, are left out."""
    benchmark = BENCHMARKS[name]
    default = next(iter(benchmark.splits))
    asked = asked or default
    found = _SLICED.fullmatch(asked)
    if found is None or (split := found["split"]) not in benchmark.splits:
        raise ValueError(
            f"{name} has the splits {list(benchmark.splits)}, or a slice such as "
            f"'{default}[:100]', not {asked!r}"
        )
    columns = {**COLUMNS, **benchmark.columns, **columns}
    left_out = {"without_answer": 0, "duplicates": 0}
    problems: list[Problem] = []
    seen: set[str] = set()
    sources: list[tuple[Iterable[Row], str, str]] = [
        (read_rows(file), f"{Path(file).name.partition('.')[0]}/", str(file)) for file in files
    ] or [
        (_hub_rows(hub_id, config, benchmark.splits[split]), prefix.format(split=split), hub_id)
        for hub_id, config, prefix in benchmark.parts
    ]
    for rows, prefix, where in sources:
        own = (read(benchmark.read(row)) for row in rows)
        usable = _usable(own, columns, seen, left_out)
        for problem in problems_from_rows(usable, columns=columns, source=where):
            named = problem.id if problem.id.startswith(name[:4]) else prefix + problem.id
            problems.append(replace(problem, id=named))
    if name == "deepscaler":
        held_out = set(json.loads(_HELD_OUT.read_text("utf-8"))["keys"])
        problems = [
            p for p in problems if (text_key_1(p.problem) in held_out) == (split == "holdout")
        ]
    chosen = problems[slice(*(int(end) if end else None for end in found.group("start", "stop")))]
    if not chosen:
        raise ValueError(f"{name} has {len(problems)} problems, and none of split {asked!r}")
    source: dict[str, Any] = {"dataset": name, "split": asked, "left_out": left_out}
    return chosen, source | ({"files": list(map(str, files))} if files else {})


def _hub_rows(hub_id: str, config: str | None, split: str) -> Iterable[Row]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        rows: Iterable[Row] = load_dataset(hub_id, config, split=split)
    except (DatasetsError, ConnectionError) as error:
        raise ValueError(
            f"{hub_id!r} is no dataset that can be loaded ({error}); give one of "
            f"{', '.join(BENCHMARKS)}, a .jsonl, .jsonl.gz or .parquet file, or a dataset's id on "
            "the Hub"
        ) from error
    return rows


def _usable(
    rows: Iterable[Row], columns: Columns, seen: set[str], left_out: dict[str, int]
) -> Iterator[Row]:
    """The first row of each problem that has an answer; those without an id get their number."""
    for number, row in enumerate(rows):
        answer, problem = (first_of(row, columns[name]) for name in ("answer", "problem"))
        if not str("" if answer is None else answer).strip() and any(
            name in row for name in columns["answer"]
        ):
            left_out["without_answer"] += 1
            continue
        own_id = first_of(row, columns["id"])
        row_id = str(number) if own_id is None else own_id
        # By both keys: the problems of labels from before the second are all still there.
        key, first = text_key(str(problem)), text_key_1(str(problem))
        if f"{first}-{key}" in seen:
            left_out["duplicates"] += 1
            continue
        row_id = f"{row_id}-{key}" if row_id == first and first in seen else row_id
        seen |= {first, f"{first}-{key}"}
        yield {**row, columns["id"][0]: row_id}
