"""Commands that make and look at labels: `label` and `labels`."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

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

labels_app = typer.Typer(help="Import labelled traces, grade them again.", no_args_is_help=True)


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
    from ospruner.progress import PhaseBars
    from ospruner.train.labels.label import LabelConfig, run_label

    if scale not in (None, "ray"):
        raise typer.BadParameter(f"--scale is {scale!r}; it can only be ray.")
    if scale and actors < 1:
        raise ValueError(f"actors is {actors}; it must be 1 or more")
    config = LabelConfig(
        base=base, dataset=dataset, out=str(out), engine=engine or _default_engine(device),
        limit=limit, split=split, task=task, samples=samples, max_thinking_tokens=max_tokens,
        max_answer_tokens=answer_tokens, answer=answer_mode, seed=seed, temperature=temperature,
        top_p=top_p, top_k=top_k, step_stride=step_stride, prompt=prompt, files=tuple(file or ()),
        columns=columns, exclude=tuple(exclude or ()), format=reasoning_format,
        wind_down=wind_down, revision=revision, batch_size=batch_size, dtype=dtype, device=device,
        urls=tuple(url or ()), engine_args=tuple(engine_arg or ()), chunk=chunk,
        retry_failed=retry_failed, allow_code=allow_code, actors=actors if scale else 0,
        gpus_per_actor=gpus_per_actor,
    )  # fmt: skip
    with _stoppable(out), PhaseBars(console) as bars:
        run_label(config, bars)
    _print_run(out, json_file)


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
    from ospruner.progress import PhaseBars
    from ospruner.train.labels.label import import_traces

    with _stoppable(out), PhaseBars(console) as bars:
        import_traces(
            base, file, out=out, engine=engine or _default_engine(device), limit=limit,
            progress=bars, columns=columns, max_thinking_tokens=max_tokens,
            max_answer_tokens=answer_tokens, step_stride=step_stride, task=task,
            allow_code=allow_code, format=reasoning_format, revision=revision,
            batch_size=batch_size, dtype=dtype, device=device, urls=tuple(url or ()),
            engine_args=tuple(engine_arg or ()), chunk=chunk, retry_failed=retry_failed,
        )  # fmt: skip
    _print_run(out, json_file)


@labels_app.command("regrade")
def labels_regrade(
    folder: Annotated[Path, typer.Argument(help="Folder of labels.")],
    allow_code: AllowCode = False,
    json_file: JsonFile = None,
) -> None:
    """Grade the stored answers again; nothing is generated."""
    from ospruner.progress import PhaseBars
    from ospruner.train.labels.label import regrade
    from ospruner.train.labels.summary import told_regraded

    with PhaseBars(console) as bars:
        changes = regrade(folder, bars, allow_code)
    said, numbers = told_regraded(changes)
    console.print(said, markup=False, highlight=False)
    _write(numbers, json_file)


def _print_run(out: Path, json_file: Path | None) -> None:
    from ospruner.train.labels.summary import stats_of, told

    stats = stats_of(out)
    console.print(told(out, stats), markup=False, highlight=False)
    _write(stats, json_file)


def _write(numbers: dict[str, Any], json_file: Path | None) -> None:
    if json_file is not None:
        json_file.write_text(json.dumps(numbers, indent=2) + "\n", "utf-8")


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
        from ospruner.train.labels.summary import told_stopped

        console.print(told_stopped(out), markup=False, highlight=False)
        raise typer.Exit(130) from None
