"""Commands that make and look at labels: `label` and `labels`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from .options import (
    AllowCode,
    Chunk,
    Device,
    Dtype,
    Engine,
    EngineArgs,
    EngineBatch,
    Format,
    JsonFile,
    RetryFailed,
    Revision,
    StepStride,
    TaskName,
    ThinkingCap,
    Urls,
    WindDown,
    console,
)

labels_app = typer.Typer(
    help="Import labelled traces, grade them again, look at them.", no_args_is_help=True
)


def label_command(
    base: Annotated[str, typer.Option(help="The reasoning model: a folder or a Hub id.")],
    dataset: Annotated[
        str,
        typer.Option(
            help="gsm8k, math500, aime, deepscaler, arc-easy, arc-challenge, mmlu, humaneval, "
            "reasoning-gym:FAMILY, a .jsonl[.gz] or .parquet file, or a Hub id."
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="Folder of the labels; a stopped run continues.", file_okay=False)
    ],
    engine: Engine = None,
    limit: Annotated[int | None, typer.Option(help="Only the first N problems.")] = None,
    split: Annotated[
        str | None, typer.Option(help="Split of the dataset; deepscaler has train and holdout.")
    ] = None,
    file: Annotated[
        list[str] | None, typer.Option(help="Read a benchmark's rows from a file, not the Hub.")
    ] = None,
    columns: Annotated[
        str, typer.Option(help="Names of the columns: problem=question,answer=final.")
    ] = "",
    exclude: Annotated[
        list[str] | None,
        typer.Option(help="Drop the problems that are also in this benchmark or file."),
    ] = None,
    answer_mode: Annotated[
        str, typer.Option(help="forced: closing and box prefix; free: closing only.")
    ] = "forced",
    samples: Annotated[int, typer.Option(help="Traces sampled for each problem.")] = 1,
    temperature: Annotated[
        float, typer.Option(help="Temperature of the traces; 0 is greedy.")
    ] = 0.6,
    top_p: Annotated[float, typer.Option(help="Nucleus (top-p) of the traces.")] = 0.95,
    top_k: Annotated[int, typer.Option(help="Top-k of the traces; 0 for none.")] = 0,
    max_tokens: ThinkingCap = 15_000,
    answer_tokens: Annotated[
        int | None,
        typer.Option(help="Cap on an answer; default: the task's (math: 32) forced, 512 free."),
    ] = None,
    step_stride: StepStride = 1,
    task: TaskName = "math",
    prompt: Annotated[
        str, typer.Option(help="default, concise, chain-of-draft or check.")
    ] = "default",
    allow_code: AllowCode = False,
    reasoning_format: Format = None,
    wind_down: WindDown = None,
    revision: Revision = None,
    batch_size: EngineBatch = None,
    dtype: Dtype = "auto",
    device: Device = None,
    url: Urls = None,
    engine_arg: EngineArgs = None,
    chunk: Chunk = 128,
    retry_failed: RetryFailed = False,
    scale: Annotated[
        str | None, typer.Option(help="ray: spread over a Ray cluster; see docs/scale.md.")
    ] = None,
    actors: Annotated[int, typer.Option(help="With --scale ray: how many engines.")] = 1,
    gpus_per_actor: Annotated[
        float, typer.Option(help="With --scale ray: GPUs of each engine.")
    ] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Sample traces of problems, force and grade the answer after every step."""
    from ospruner.engines.opening import EngineOptions, parse_engine_args
    from ospruner.eval.problems.registry import parse_task
    from ospruner.progress import PhaseBars
    from ospruner.train.labels.command import ProblemOptions, parse_columns, run_label
    from ospruner.train.labels.looking import print_run
    from ospruner.train.labels.on_ray import RayOptions

    if scale not in (None, "ray"):
        raise typer.BadParameter(f"--scale is {scale!r}; it can only be ray.")
    ray = RayOptions(actors, gpus_per_actor, chunk_traces=chunk) if scale else None
    problems = ProblemOptions(
        dataset, file or (), split, parse_columns(columns), limit=limit, exclude=exclude or ()
    )
    options = EngineOptions(
        base, revision, batch_size, dtype, device, tuple(url or ()),
        parse_engine_args(engine_arg or ()),
    )  # fmt: skip
    asks = parse_task(task, prompt, allow_code)
    settings = {
        "task": asks.settings,
        "answer": answer_mode,
        "samples_per_problem": samples,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "max_new_tokens": max_tokens,
        "max_answer_tokens": answer_tokens
        if answer_tokens is not None
        else (asks.max_answer_tokens if answer_mode == "forced" else 512),
        "step_stride": step_stride,
        "seed": seed,
    }
    with _stoppable(out), PhaseBars(console) as bars:
        run_label(
            problems,
            engine or _default_engine(device),
            options,
            settings,
            out,
            format_name=reasoning_format,
            wind_down=wind_down,
            chunk_traces=chunk,
            ray=ray,
            retry_failed=retry_failed,
            allow_code=allow_code,
            progress=bars,
        )
    print_run(out, console, json_file)


@labels_app.command("stats")
def labels_stats(
    folder: Annotated[Path, typer.Argument(help="Folder of labels.")],
    picture: Annotated[
        Path | None,
        typer.Option(help="File of the picture; default: statistics.png in the folder."),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Print and draw what the labels say: accuracy along the trace, first right answer, steps."""
    from ospruner.train.labels.looking import print_stats

    print_stats(folder, picture, console, json_file)


@labels_app.command("show")
def labels_show(
    folder: Annotated[Path, typer.Argument(help="Folder of labels.")],
    row: Annotated[int, typer.Option(help="Number of the trace, from 0.")] = 0,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or Hub id; default: the base's.")
    ] = None,
) -> None:
    """Print a trace with its steps coloured by the grade of the answer forced there."""
    from ospruner.train.labels.looking import show_trace

    show_trace(folder, row, tokenizer, console)


@labels_app.command("import")
def labels_import(
    file: Annotated[str, typer.Argument(help="Traces: .jsonl, .jsonl.gz or .parquet.")],
    base: Annotated[str, typer.Option(help="The model that answers: a folder or a Hub id.")],
    out: Annotated[
        Path, typer.Option(help="Folder of the labels; a stopped run continues.", file_okay=False)
    ],
    engine: Engine = None,
    limit: Annotated[int | None, typer.Option(help="Only the first N traces.")] = None,
    columns: Annotated[
        str, typer.Option(help="Names of the columns: reasoning=cot,answer=gold.")
    ] = "",
    max_tokens: ThinkingCap = 15_000,
    answer_tokens: Annotated[
        int | None, typer.Option(help="Cap on a forced answer; default: the task's (math: 32).")
    ] = None,
    step_stride: StepStride = 1,
    task: TaskName = "math",
    allow_code: AllowCode = False,
    reasoning_format: Format = None,
    revision: Revision = None,
    batch_size: EngineBatch = None,
    dtype: Dtype = "auto",
    device: Device = None,
    url: Urls = None,
    engine_arg: EngineArgs = None,
    chunk: Chunk = 128,
    retry_failed: RetryFailed = False,
    json_file: JsonFile = None,
) -> None:
    """Label traces that others made: force and grade the answer after every step."""
    from ospruner.engines.opening import EngineOptions, parse_engine_args
    from ospruner.eval.problems.registry import parse_task
    from ospruner.progress import PhaseBars
    from ospruner.train.labels.command import parse_columns, run_import
    from ospruner.train.labels.looking import print_run

    options = EngineOptions(
        base, revision, batch_size, dtype, device, tuple(url or ()),
        parse_engine_args(engine_arg or ()),
    )  # fmt: skip
    asks = parse_task(task, allow_code=allow_code)
    settings = {
        "task": asks.settings,
        "max_new_tokens": max_tokens,
        "max_answer_tokens": asks.max_answer_tokens if answer_tokens is None else answer_tokens,
        "step_stride": step_stride,
    }
    with _stoppable(out), PhaseBars(console) as bars:
        run_import(
            file,
            engine or _default_engine(device),
            options,
            settings,
            out,
            columns=parse_columns(columns),
            limit=limit,
            format_name=reasoning_format,
            chunk_traces=chunk,
            retry_failed=retry_failed,
            allow_code=allow_code,
            progress=bars,
        )
    print_run(out, console, json_file)


@labels_app.command("check")
def labels_check(
    folder: Annotated[Path, typer.Argument(help="Folder of labels.")],
) -> None:
    """Compare every file with what was written; status 1, and what to do, where one differs."""
    from ospruner.train.labels.looking import print_check

    if not print_check(folder, console):
        raise typer.Exit(1)


@labels_app.command("regrade")
def labels_regrade(
    folder: Annotated[Path, typer.Argument(help="Folder of labels.")],
    allow_code: AllowCode = False,
    json_file: JsonFile = None,
) -> None:
    """Grade the stored answers again; nothing is generated."""
    from ospruner.progress import PhaseBars
    from ospruner.train.labels.looking import print_regrade
    from ospruner.train.labels.regrading import regrade

    with PhaseBars(console) as bars:
        changes = regrade(folder, bars, allow_code)
    print_regrade(changes, console, json_file)


def _default_engine(device: str | None) -> str:
    """The engine to label with where none is named; says which one and why."""
    from ospruner.engines.opening import default_engine

    engine, why = default_engine(device)
    console.print(f"Engine: {engine} ({why}).")
    return engine


@contextmanager
def _stoppable(out: Path) -> Iterator[None]:
    """Says what is done when Ctrl-C ends a label run."""
    try:
        yield
    except KeyboardInterrupt:
        from ospruner.train.labels.looking import print_stopped

        print_stopped(out, console)
        raise typer.Exit(130) from None
