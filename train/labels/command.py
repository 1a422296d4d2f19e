"""A whole label run, as `ospruner label` starts it: problems, base and engine by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto import CONFIG_MAPPING

from modeling_ospruner.configuration_ospruner import max_positions
from modeling_ospruner.formats_ospruner import ReasoningFormat, TokenFormat, guess
from ospruner.engines.opening import (
    ENGINES,
    EngineOptions,
    known_revision,
    load_tokenizer,
    open_engine,
)
from ospruner.eval.problems.problem import Columns, Problem
from ospruner.eval.problems.registry import open_task
from ospruner.eval.problems.sources import Loaded, drop_overlaps, load_source
from ospruner.eval.problems.task import Task, prompt_token_ids
from ospruner.eval.schema import MATH_TASK, LabelSettings
from ospruner.progress import Progress, silent

from .folder import check_folder
from .importing import ImportedTraces, read_traces
from .making import label, labels_at_hand
from .on_ray import EngineWorker, RayOptions, label_with_ray
from .rows import OptionIds

__all__ = [
    "ProblemOptions",
    "load_run_problems",
    "parse_columns",
    "read_format",
    "run_import",
    "run_label",
]


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


def load_run_problems(options: ProblemOptions, task: Task | None = None) -> Loaded:
    """The problems of a run, without those of `exclude`; how many were dropped is in `source`.

    Args:
        options: which problems.
        task: reads their rows (`Task.read_row`); None takes these as they are.

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
        read=None if task is None else task.read_row,
    )
    if not options.exclude:
        return loaded
    others: list[Problem] = []
    for name in options.exclude:
        others += load_source(name, read=None if task is None else task.read_row).problems
    problems, dropped = drop_overlaps(loaded.problems, others)
    if not problems:
        raise ValueError(f"all {len(dropped)} problems are also in {', '.join(options.exclude)}")
    source = loaded.source | {
        "excluded": {"by": list(options.exclude), "overlaps": len(dropped), "ids": dropped}
    }
    return Loaded(problems[: options.limit], source)


def read_format(
    name: str | None,
    tokenizer: PreTrainedTokenizerBase,
    wind_down: str | None = None,
    task: Task | None = None,
) -> TokenFormat:
    """The reasoning format of a base.

    Args:
        name: a preset's name, a JSON file with a format's literals, or None for the one that
            fits the tokenizer's markers.
        tokenizer: the base's.
        wind_down: a sentence forced before the closing; None: the format's own.
        task: shapes the forced answer; None for the format's own, an open box.

    Raises:
        ValueError: no such preset, or a format that does not fit the tokenizer.
    """
    chosen = guess(tokenizer) if name is None else ReasoningFormat.named(name)
    if wind_down is not None:
        chosen = replace(chosen, wind_down=wind_down)
    if task is not None:
        chosen = task.shape(chosen)
    return TokenFormat.compile(chosen, tokenizer)


def run_label(
    problems: ProblemOptions,
    engine_name: str,
    engine_options: EngineOptions,
    settings: Mapping[str, Any],
    out_dir: str | Path,
    *,
    format_name: str | None = None,
    wind_down: str | None = None,
    chunk_traces: int = 128,
    ray: RayOptions | None = None,
    retry_failed: bool = False,
    allow_code: bool = False,
    progress: Progress = silent,
) -> Dataset:
    """Labels problems with a base. Whatever can be refused is refused before the engine starts.

    An engine is opened only where a trace is left to do.

    Args:
        problems: which problems.
        engine_name: one of `ospruner.engines.opening.ENGINES`.
        engine_options: which base, and how it is run.
        settings: fields of `LabelSettings`, but for the base and its format.
        out_dir: the label folder.
        format_name: see `read_format`.
        wind_down: likewise.
        chunk_traces: traces begun and not committed, at most: what a kill may lose.
        ray: spreads the run over a Ray cluster; its `chunk_traces` take the place of these.
        retry_failed: try those again that failed in an earlier run.
        allow_code: whether programs that the model wrote may be run, as the task `code` does.
        progress: called with phases "sample", "fork" and "grade", in traces.

    Returns:
        The labelled traces.

    Raises:
        FileNotFoundError, ValueError, MissingPackageError: naming what is wrong.
    """
    _check_engine(engine_name)
    task = open_task(settings.get("task", MATH_TASK), allow_code)
    if ray is not None and "allow_code" in vars(task):
        raise ValueError(
            f"--scale ray with the task {settings['task']['name']} would run the model's programs "
            "on every node: label on one machine"
        )
    task.check()
    loaded = load_run_problems(problems, task)
    tokenizer = load_tokenizer(engine_options.base, engine_options.revision)
    fmt = read_format(format_name, tokenizer, wind_down, task)
    wanted = _settings(engine_options, fmt, settings)
    check_folder(out_dir, wanted)
    OptionIds(task, tokenizer, fmt, wanted.answer).check(loaded.problems)
    _refuse_beyond_positions(loaded.problems, engine_options, tokenizer, fmt, wanted, task)
    done = labels_at_hand(loaded.problems, wanted, out_dir, retry_failed=retry_failed)
    if done is not None:
        return done
    if ray is not None:
        return label_with_ray(
            loaded.problems,
            EngineWorker(engine_name, engine_options, wanted),
            wanted,
            out_dir,
            ray,
            retry_failed=retry_failed,
            source=loaded.source | {"engine": engine_name, "scale": "ray"},
            progress=progress,
        )
    return label(
        loaded.problems,
        open_engine(engine_name, tokenizer, engine_options),
        tokenizer,
        fmt,
        wanted,
        out_dir,
        chunk_traces=chunk_traces,
        retry_failed=retry_failed,
        source=loaded.source | {"engine": engine_name},
        allow_code=allow_code,
        progress=progress,
    )


def run_import(
    file: str,
    engine_name: str,
    engine_options: EngineOptions,
    settings: Mapping[str, Any],
    out_dir: str | Path,
    *,
    columns: Columns | None = None,
    limit: int | None = None,
    format_name: str | None = None,
    chunk_traces: int = 128,
    retry_failed: bool = False,
    allow_code: bool = False,
    progress: Progress = silent,
) -> Dataset:
    """Labels traces that others made: their answers are forced by a base of yours.

    Args:
        file: the traces; see `label_import.read_traces`.
        engine_name: one of `ospruner.engines.opening.ENGINES`.
        engine_options: which base, and how it is run.
        settings: fields of `LabelSettings`, but for the base, its format and the file.
        out_dir: the label folder.
        columns: where the fields of a trace stand.
        limit: only the first so many traces.
        format_name: see `read_format`.
        chunk_traces: traces begun and not committed, at most.
        retry_failed: try those again that failed in an earlier run.
        allow_code: whether programs that the model wrote may be run, as the task `code` does.
        progress: called with phases "sample", "fork" and "grade", in traces.

    Raises:
        FileNotFoundError, ValueError, MissingPackageError: naming what is wrong.
    """
    _check_engine(engine_name)
    task = open_task(settings.get("task", MATH_TASK), allow_code)
    task.check()
    traces = read_traces(file, columns=columns, limit=limit)
    tokenizer = load_tokenizer(engine_options.base, engine_options.revision)
    fmt = read_format(format_name, tokenizer, task=task)
    samples = 1 + max(trace.key.sample_index for trace in traces)
    given = {**settings, "samples_per_problem": samples, "imported_from": Path(file).name}
    wanted = _settings(engine_options, fmt, given)
    check_folder(out_dir, wanted)
    OptionIds(task, tokenizer, fmt, wanted.answer).check([one.key.problem for one in traces])
    problems = {trace.key.problem.id: trace.key.problem for trace in traces}
    _refuse_beyond_positions(list(problems.values()), engine_options, tokenizer, fmt, wanted, task)
    keys = [trace.key for trace in traces]
    done = labels_at_hand(
        list(problems.values()), wanted, out_dir, traces=keys, retry_failed=retry_failed
    )
    if done is not None:
        return done
    engine = open_engine(engine_name, tokenizer, engine_options)
    return label(
        list(problems.values()),
        ImportedTraces(traces, engine, tokenizer),
        tokenizer,
        fmt,
        wanted,
        out_dir,
        chunk_traces=chunk_traces,
        traces=keys,
        retry_failed=retry_failed,
        source={"traces": Path(file).name, "engine": engine_name},
        allow_code=allow_code,
        progress=progress,
    )


def parse_columns(text: str) -> Columns:
    """Reads `problem=question,answer=final` as the command line gives it.

    Raises:
        ValueError: a part without "=".
    """
    parts = [part.partition("=") for part in text.split(",") if part.strip()]
    if bad := [name for name, sign, column in parts if not sign or not column.strip()]:
        raise ValueError(f"columns holds {bad}; write field=column, such as problem=question")
    return {name.strip(): (column.strip(),) for name, _, column in parts}


def _check_engine(name: str) -> None:
    if name not in ENGINES:
        raise ValueError(f"engine is {name!r}; it must be one of {', '.join(ENGINES)}")


def _refuse_beyond_positions(
    problems: Sequence[Problem],
    options: EngineOptions,
    tokenizer: PreTrainedTokenizerBase,
    fmt: TokenFormat,
    settings: LabelSettings,
    task: Task,
) -> None:
    """Refuses a run whose longest text would not fit into the base's positions."""
    fields, _ = PreTrainedConfig.get_config_dict(options.base, revision=options.revision)
    if fields.get("model_type") not in CONFIG_MAPPING:  # code of its own: asked for by its engine
        return
    limit = max_positions(AutoConfig.from_pretrained(options.base, revision=options.revision))
    if limit is None:
        return
    prompts = {
        p.id: len(prompt_token_ids(p.id, task.message(p, fmt.format), tokenizer, fmt))
        for p in problems
    }
    longest = max(prompts, key=lambda problem_id: prompts[problem_id])
    answer = len(fmt.forced_suffix(settings.answer)) + settings.max_answer_tokens
    room = limit - prompts[longest] - answer
    if settings.max_new_tokens <= room:
        return
    if room < 1:
        raise ValueError(
            f"the prompt of problem {longest!r} has {prompts[longest]} tokens and its answer takes "
            f"up to {answer} more, but the base {options.base!r} has {limit} positions "
            "(max_position_embeddings): drop the problem"
        )
    raise ValueError(
        f"max_new_tokens is {settings.max_new_tokens}, but beside the longest prompt (problem "
        f"{longest!r}, {prompts[longest]} tokens) and an answer ({answer}) the base "
        f"{options.base!r} has room for {room} thinking tokens in its {limit} positions "
        f"(max_position_embeddings): give --max-tokens {room} or fewer"
    )


def _settings(
    options: EngineOptions, fmt: TokenFormat, settings: Mapping[str, Any]
) -> LabelSettings:
    return LabelSettings(
        base_model=options.base,
        base_revision=known_revision(options.base, options.revision),
        reasoning_format=fmt.format.to_dict(),
        **settings,
    )
