"""A whole label run, as `ospruner label` starts it: problems, base and engine by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from modeling_ospruner.reasoning_format import PRESETS, ReasoningFormat, TokenFormat, guess
from modeling_ospruner.serving.open_engine import (
    ENGINES,
    EngineOptions,
    known_revision,
    load_tokenizer,
    open_engine,
)
from ospruner.eval.benchmarks import Columns, Problem
from ospruner.eval.overlaps import drop_overlaps
from ospruner.eval.problem_sources import Loaded, load_source
from ospruner.eval.schema import LabelSettings

from .label_folder import check_folder, read_manifest
from .labels import label
from .progress import Progress, silent

__all__ = ["ProblemOptions", "load_run_problems", "read_format", "run_label"]


@dataclass(frozen=True)
class ProblemOptions:
    """Which problems a run labels.

    Attributes:
        dataset: a benchmark's name, a file, or a dataset of the Hub; see `load_source`.
        files: a benchmark's rows from files.
        split: of the benchmark or dataset.
        columns: where the fields of a problem stand.
        revision: of the Hub's dataset.
        limit: only the first so many, after overlaps are dropped.
        exclude: benchmarks or files whose problems are dropped, such as those of the evaluation.
    """

    dataset: str
    files: Sequence[str] = ()
    split: str | None = None
    columns: Columns = field(default_factory=dict)
    revision: str | None = None
    limit: int | None = None
    exclude: Sequence[str] = ()


def load_run_problems(options: ProblemOptions) -> Loaded:
    """The problems of a run, without those of `exclude`; how many were dropped is in `source`.

    Raises:
        FileNotFoundError, ValueError: see `load_source`; or nothing is left.
    """
    if options.limit is not None and options.limit < 1:
        raise ValueError(f"limit is {options.limit}; it must be at least 1")
    loaded = load_source(
        options.dataset,
        files=options.files,
        split=options.split,
        columns=options.columns,
        revision=options.revision,
        limit=None if options.exclude else options.limit,
    )
    if not options.exclude:
        return loaded
    others: list[Problem] = []
    for name in options.exclude:
        others += load_source(name).problems
    problems, dropped = drop_overlaps(loaded.problems, others)
    if not problems:
        raise ValueError(f"all {len(dropped)} problems are also in {', '.join(options.exclude)}")
    source = loaded.source | {
        "excluded": {"by": list(options.exclude), "overlaps": len(dropped), "ids": dropped}
    }
    return Loaded(problems[: options.limit], source)


def read_format(name: str | None, tokenizer: PreTrainedTokenizerBase) -> TokenFormat:
    """The reasoning format of a base.

    Args:
        name: a preset's name, a JSON file with a format's literals, or None for the one that
            fits the tokenizer's markers.
        tokenizer: the base's.

    Raises:
        ValueError: no such preset, or a format that does not fit the tokenizer.
    """
    if name is None:
        return TokenFormat.compile(guess(tokenizer), tokenizer)
    if name in PRESETS:
        return TokenFormat.compile(PRESETS[name], tokenizer)
    if not name.endswith(".json"):
        raise ValueError(
            f"format is {name!r}; it must be one of {', '.join(PRESETS)}, or a .json file with "
            "the literals of a ReasoningFormat"
        )
    literals = json.loads(Path(name).read_text("utf-8"))
    return TokenFormat.compile(ReasoningFormat.from_dict(literals), tokenizer)


def run_label(
    problems: ProblemOptions,
    engine_name: str,
    engine_options: EngineOptions,
    settings: Mapping[str, Any],
    out_dir: str | Path,
    *,
    format_name: str | None = None,
    chunk_traces: int = 128,
    progress: Progress = silent,
) -> tuple[Dataset, dict[str, Any]]:
    """Labels problems with a base. Whatever can be refused is refused before the engine starts.

    Args:
        problems: which problems.
        engine_name: one of `modeling_ospruner.serving.open_engine.ENGINES`.
        engine_options: which base, and how it is run.
        settings: fields of `LabelSettings`, but for the base and its format.
        out_dir: the label folder.
        format_name: see `read_format`.
        chunk_traces: traces committed together; a kill loses at most these.
        progress: called with phases "sample", "fork" and "grade", in traces.

    Returns:
        The labelled traces, and the folder's manifest.

    Raises:
        FileNotFoundError, ValueError, MissingPackageError: naming what is wrong.
    """
    if engine_name not in ENGINES:
        raise ValueError(f"engine is {engine_name!r}; it must be one of {', '.join(ENGINES)}")
    loaded = load_run_problems(problems)
    tokenizer = load_tokenizer(engine_options.base, engine_options.revision)
    fmt = read_format(format_name, tokenizer)
    wanted = LabelSettings(
        base_model=engine_options.base,
        base_revision=known_revision(engine_options.base, engine_options.revision),
        reasoning_format=fmt.format.to_dict(),
        **settings,
    )
    check_folder(out_dir, wanted)
    engine = open_engine(engine_name, tokenizer, engine_options)
    dataset = label(
        loaded.problems,
        engine,
        tokenizer,
        fmt,
        wanted,
        out_dir,
        chunk_traces=chunk_traces,
        source=loaded.source | {"engine": engine_name},
        progress=progress,
    )
    return dataset, read_manifest(out_dir)
