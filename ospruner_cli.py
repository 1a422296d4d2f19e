"""The one command, `ospruner`. Only wiring: a sub-command calls one function."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

if TYPE_CHECKING:
    from ospruner.eval.online.evaluation import Evaluation

app = typer.Typer(
    name="ospruner",
    help="Stop reasoning models at the right paragraph.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
toy_app = typer.Typer(help="The embedded reasoner: train it again, check it.", no_args_is_help=True)
app.add_typer(toy_app, name="toy")
labels_app = typer.Typer(
    help="Import labelled traces, grade them again, look at them.", no_args_is_help=True
)
app.add_typer(labels_app, name="labels")
eval_app = typer.Typer(help="Compare stopping rules.", no_args_is_help=True)
app.add_typer(eval_app, name="eval")
publish_app = typer.Typer(help="Put policies and labels on the Hub.", no_args_is_help=True)
app.add_typer(publish_app, name="publish")

console = Console()


def _in_a_folder(file: Path | None) -> Path | None:
    """Makes the folder of a file that is written after the work, before it."""
    if file is not None:
        try:
            file.absolute().parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise typer.BadParameter(f"{file} cannot be written ({error}).") from error
    return file


# Options that several commands share.
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        help="Write every number to this file too.",
        dir_okay=False,
        callback=_in_a_folder,
    ),
]
Format = Annotated[
    str | None, typer.Option("--format", help="deepseek-r1, qwen3, harmony, plain or a .json file.")
]
Revision = Annotated[
    str | None, typer.Option(help="Commit, branch or tag of the base or policy on the Hub.")
]
# of those that label
Engine = Annotated[
    str | None,
    typer.Option(
        help="transformers, vllm, sglang or openai; default: vllm with a GPU, else transformers."
    ),
]
Urls = Annotated[list[str] | None, typer.Option(help="A server of the engine. Repeatable.")]
EngineBatch = Annotated[
    int | None, typer.Option(help="Rows or requests at once; default: the engine's.")
]
Dtype = Annotated[str, typer.Option(help="auto (float32 on a CPU), float32, bfloat16 or float16.")]
Device = Annotated[
    str | None, typer.Option(help="Torch device that computes in this process; default: the best.")
]
ForceBase = Annotated[
    str | None,
    typer.Option(metavar="REASON", help="Take another base than the labels'; kept in the record."),
]
TaskName = Annotated[
    str,
    typer.Option(help="math, choice, exact, code, generated or FILE.py; settings: name:key=value."),
]
AllowCode = Annotated[
    bool,
    typer.Option("--allow-code", help="Run programs that the model wrote, locked in; see docs."),
]
AcrossTasks = Annotated[
    bool, typer.Option("--across-tasks", help="Take policies that were trained on another task.")
]
ThinkingCap = Annotated[int, typer.Option(help="Cap on a trace's thinking tokens.")]
WindDown = Annotated[
    str | None,
    typer.Option(help="A sentence forced before the closing: 'I have what I need, so:'."),
]
EngineArgs = Annotated[
    list[str] | None,
    typer.Option(
        "--engine-arg", help="An argument of the engine: tensor_parallel_size=2. Repeatable."
    ),
]
StepStride = Annotated[
    int, typer.Option(help="Label every k-th step; policies trained on them decide there alone.")
]
Chunk = Annotated[
    int, typer.Option(help="Traces begun and not yet written; a kill loses at most these.")
]
RetryFailed = Annotated[
    bool, typer.Option("--retry-failed", help="Try the traces again that an error ended.")
]
# of those that evaluate
BaseName = Annotated[str | None, typer.Option(help="Name of the base in tables.")]
ProblemsName = Annotated[str | None, typer.Option(help="Name of the problems in tables.")]
Penalties = Annotated[str, typer.Option("--lambdas", help="Also print rewards at these λ.")]
Charge = Annotated[
    str, typer.Option(help="What AES and rewards count: thinking (tokens, the paper) or compute.")
]
Differences = Annotated[
    bool, typer.Option("--differences", help="Also show paired differences between methods.")
]
Domain = Annotated[
    str | None,
    typer.Option(help="Take the price that policies of every price chose for this domain."),
]
LengthPenalty = Annotated[
    str,
    typer.Option(
        "--length-penalty",
        help="Prices of a token for policies of every price: 5e-5,1e-4, or frontier for 31.",
    ),
]
# of those that publish
HubBase = Annotated[
    str | None, typer.Option(help="The base's id on the Hub, if it was a local folder.")
]
HubBaseRevision = Annotated[
    str | None, typer.Option(help="The base's commit, branch or tag; its commit is pinned.")
]
Private = Annotated[bool, typer.Option("--private", help="Make a private repository.")]
Collection = Annotated[
    str | None, typer.Option(help="Title or slug of a collection; auto: the base's family.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Write the exact folder, send nothing.")]
DryRunFolder = Annotated[
    Path | None, typer.Option(help="Where a dry run writes; default: runs/publish/NAME.")
]


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(help="Folder of the run; a stopped run continues.", file_okay=False)
    ] = Path("runs/demo"),
    quick: Annotated[bool, typer.Option("--quick", help="The one-minute version.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="The proof: 3 seeds, two to three hours.")
    ] = False,
    differences: Differences = False,
    json_file: JsonFile = None,
    seed: Annotated[int, typer.Option(help="Seed of problems, sampling and training.")] = 0,
) -> None:
    """Do the whole job on the embedded reasoner: label, train, test, save, load, generate."""
    from ospruner.train.toy.demo import FULL, QUICK, STANDARD, run_demo

    if quick and full:
        raise typer.BadParameter("--quick and --full exclude each other; give one of them.")
    size = QUICK if quick else FULL if full else STANDARD
    run_demo(_folder(out, size.name), size, seed, console, json_file, differences=differences)


@app.command("train")
def train_command(
    labels: Annotated[
        list[str],
        typer.Option(help="Folder or Hub id of labelled traces. Repeatable: a mix of domains."),
    ],
    out: Annotated[
        Path, typer.Option(help="Folder of the run; a stopped run continues.", file_okay=False)
    ],
    base: Annotated[
        str | None, typer.Option(help="The base, if it is no longer where the labels say.")
    ] = None,
    force_base: ForceBase = None,
    method: Annotated[
        str,
        typer.Option(
            help="os-pruner, or a baseline: probe, convergence, final-answer, terminator, lynx, "
            "thought-calibration, flashthink."
        ),
    ] = "os-pruner",
    verifier: Annotated[
        str, typer.Option(help="FlashThink's model, any causal LM; default: Qwen2.5-7B-Instruct.")
    ] = "",
    head: Annotated[
        str, typer.Option(help="fixed: a policy for each lambda; price: one for every lambda.")
    ] = "fixed",
    lambdas: Annotated[
        str,
        typer.Option(
            help="auto, r1, gpt-oss, drpo, or falling numbers: 1e-4,5e-5,0. Head price: LOW,HIGH."
        ),
    ] = "auto",
    validation: Annotated[
        list[str] | None,
        typer.Option(help="Labels of other problems; default: hold problems out. Repeatable."),
    ] = None,
    held_out: Annotated[
        int | None, typer.Option(help="Problems of a domain held out: 500, or a fifth of few.")
    ] = None,
    epochs: Annotated[int, typer.Option(help="Passes over the traces for each lambda.")] = 1,
    first_epochs: Annotated[
        int | None, typer.Option(help="Passes for the first lambda; default: as for the others.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Traces in each optimiser step.")] = 32,
    learning_rate: Annotated[
        float, typer.Option(help="AdamW's learning rate of the tuned layers.")
    ] = 1e-5,
    head_learning_rate: Annotated[
        float | None, typer.Option(help="The linear head's learning rate; default: the same.")
    ] = None,
    final_learning_rate_share: Annotated[
        float, typer.Option(help="Share of both rates left at each lambda's end; 1 keeps them.")
    ] = 1.0,
    swa_share: Annotated[
        float, typer.Option(help="Average the weights over this last share of each lambda's steps.")
    ] = 0.0,
    entropy_bonus: Annotated[
        float | None,
        typer.Option(
            help="Reward per nat of the stopping time's entropy; default: 0, head price: 0.01."
        ),
    ] = None,
    auxiliary_weight: Annotated[
        float,
        typer.Option(help="Weight of auxiliary losses: the tail also learns how answers went."),
    ] = 0.0,
    auxiliary_targets: Annotated[
        str, typer.Option(help="What they tell: some of repeats,run,distinct,confidence.")
    ] = "repeats,run,distinct,confidence",
    trial_every: Annotated[
        int,
        typer.Option(help="Force a trial answer at every k-th step; the head reads how they went."),
    ] = 0,
    layers: Annotated[
        int | None,
        typer.Option(help="Layers of the base that the policy copies; default: the method's."),
    ] = None,
    tuning: Annotated[
        str, typer.Option(help="layers, queries, attention, lora or head.")
    ] = "layers",
    lora_rank: Annotated[int, typer.Option(help="Rank of the adapters, with --tuning lora.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of weights, batches and held-out problems.")] = 0,
    limit: Annotated[int | None, typer.Option(help="Only the first N traces of a domain.")] = None,
    multi: Annotated[
        bool, typer.Option("--multi", help="Every lambda and baseline on one pass of the trunk.")
    ] = False,
    validate_every: Annotated[
        int, typer.Option(help="Optimiser steps between points of the dynamics picture.")
    ] = 0,
    checkpoint_every: Annotated[
        int, typer.Option(help="Optimiser steps between checkpoints; 0: one each epoch.")
    ] = 0,
    precision: Annotated[
        str, typer.Option(help="The tail's: float32, bfloat16, or auto: bfloat16 on CUDA.")
    ] = "auto",
    micro_batch_tokens: Annotated[
        int, typer.Option(help="Tokens at once; a larger batch is taken in parts, with one step.")
    ] = 16_384,
    max_gradient_norm: Annotated[
        float, typer.Option(help="Clip gradients to this 2-norm; 0: never, as in the paper.")
    ] = 0.0,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Less memory, a third more time.")
    ] = False,
    cache_gib: Annotated[
        float, typer.Option(help="Memory for the trunk's states; if larger, compute them anew.")
    ] = 2.0,
    cache_on_disk: Annotated[
        bool,
        typer.Option(
            "--cache-on-disk", help="Keep larger states in files; the base leaves the GPU."
        ),
    ] = False,
    shard: Annotated[
        bool, typer.Option("--shard", help="Under accelerate launch: FSDP2 instead of DDP.")
    ] = False,
    tracker: Annotated[
        str | None, typer.Option(help="tensorboard, wandb or trackio; none is needed.")
    ] = None,
    max_ungraded: Annotated[
        float,
        typer.Option(help="Refuse labels with a greater share of answers that nobody could grade."),
    ] = 0.1,
    json_file: JsonFile = None,
) -> None:
    """Train policies on labelled traces: one run anneals through all lambdas."""
    from modeling_ospruner.common.progress import PhaseBars, silent
    from ospruner.train.from_labels import settings_for, train_from_labels
    from ospruner.train.loop import print_stages
    from ospruner.train.processes import open_processes
    from ospruner.train.settings import POLICY_LAYERS

    settings = settings_for(
        lambdas,
        method=method,
        head=head,
        epochs_per_stage=epochs,
        first_stage_epochs=first_epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        head_learning_rate=head_learning_rate,
        final_learning_rate_share=final_learning_rate_share,
        swa_share=swa_share,
        entropy_bonus=entropy_bonus,
        auxiliary_weight=auxiliary_weight,
        auxiliary_targets=auxiliary_targets.split(","),
        trial_every=trial_every,
        num_policy_layers=POLICY_LAYERS.get(method, 2) if layers is None else layers,
        tuning=tuning,
        lora_rank=lora_rank,
        verifier=verifier,
        seed=seed,
        validate_every=validate_every,
        checkpoint_every=checkpoint_every,
        precision=precision,
        micro_batch_tokens=micro_batch_tokens,
        max_gradient_norm=max_gradient_norm,
        gradient_checkpointing=gradient_checkpointing,
        cache_limit_bytes=_bytes(cache_gib),
        cache_on_disk=cache_on_disk,
    )
    processes = open_processes(out, tracker, shard)
    console.quiet = not processes.main
    with PhaseBars(console) as bars:
        stages = train_from_labels(
            labels,
            out,
            settings,
            multi=multi,
            base=base,
            force_base=force_base,
            validation=validation,
            held_out=held_out,
            split_seed=seed,
            limit=limit,
            max_ungraded=max_ungraded,
            progress=bars if processes.main else silent,
            say=console.print,
            processes=processes,
        )
    processes.end()
    if processes.main:
        print_stages(stages, console, json_file)


@app.command("label")
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
    from modeling_ospruner.common.progress import PhaseBars
    from modeling_ospruner.engines.opening import EngineOptions, parse_engine_args
    from ospruner.eval.problems.registry import parse_task
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
    from modeling_ospruner.common.progress import PhaseBars
    from modeling_ospruner.engines.opening import EngineOptions, parse_engine_args
    from ospruner.eval.problems.registry import parse_task
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
    from modeling_ospruner.common.progress import PhaseBars
    from ospruner.train.labels.looking import print_regrade
    from ospruner.train.labels.regrading import regrade

    with PhaseBars(console) as bars:
        changes = regrade(folder, bars, allow_code)
    print_regrade(changes, console, json_file)


@app.command("calibrate")
def calibrate_command(
    policy: Annotated[
        str, typer.Argument(help="A policy's folder; or a rule's family, such as entropy.")
    ],
    labels: Annotated[
        str, typer.Option(help="Labels that the policy was neither trained nor chosen on.")
    ],
    max_loss: Annotated[float, typer.Option(help="Accuracy that may be lost, such as 0.02.")],
    confidence: Annotated[float, typer.Option(help="How surely not more is lost.")] = 0.95,
    mode: Annotated[
        str, typer.Option(help="threshold; or sample, of a policy of every price: it draws.")
    ] = "threshold",
    values: Annotated[
        str | None,
        typer.Option(
            help="Thresholds, prices, or a rule's parameters, from careful to bold: .9,.8,.7"
        ),
    ] = None,
    validation: Annotated[
        str | None, typer.Option(help="Other labels, from which the losses' variance is guessed.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="The base, if it is no longer where the labels say.")
    ] = None,
    device: Device = None,
    seed: Annotated[int, typer.Option(help="Seed of the order of problems.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Promise that stopping loses at most so much accuracy, and store the promise in the policy."""
    import json
    from dataclasses import asdict

    from modeling_ospruner.common.durable import replace_file
    from modeling_ospruner.common.progress import PhaseBars
    from ospruner.eval.rules.families import FAMILIES
    from ospruner.train.replay_labels import calibrate_policy, calibrate_rule

    tried = tuple(_number(text) for text in values.split(",")) if values else None
    if policy in FAMILIES and not Path(policy).is_dir():
        if mode != "threshold":
            raise typer.BadParameter(f"--mode is {mode!r}; a rule such as {policy} does not draw.")
        if tried is None:
            raise typer.BadParameter(f"{policy} is a rule: give its --values, careful to bold.")
        found = calibrate_rule(policy, tried, labels, max_loss, confidence, seed=seed)
    else:
        with PhaseBars(console, "calibrate") as bars:
            found = calibrate_policy(
                policy, labels, max_loss, confidence, mode=mode, values=tried,  # type: ignore[arg-type]  # checked
                validation=validation, base=base, device=device, seed=seed, progress=bars,
            )  # fmt: skip
    console.print(found.told(max_loss, confidence), highlight=False)
    if json_file is not None:
        facts = {
            "max_loss": max_loss,
            "confidence": confidence,
            "mode": mode,
            "seed": seed,
            **asdict(found),
        }
        replace_file(json_file, (json.dumps(facts) + "\n").encode())
    if found.value is None:
        raise typer.Exit(1)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    policy: Annotated[str, typer.Argument(help="A policy, as a folder or Hub id.")],
    engine: Annotated[str, typer.Option(help="vllm or sglang.")] = "vllm",
    mode: Annotated[str | None, typer.Option(help="sample or threshold.")] = None,
    threshold: Annotated[float | None, typer.Option(help="For mode threshold, in [0, 1].")] = None,
    max_loss: Annotated[
        float | None, typer.Option(help="What `ospruner calibrate` promised, such as 0.02.")
    ] = None,
    length_penalty: Annotated[
        float | None, typer.Option(help="Price of a token; default: the policy's own.")
    ] = None,
    domain: Domain = None,
    answer: Annotated[str | None, typer.Option(help="forced, free, or tools.")] = None,
    wind_down: WindDown = None,
    min_thinking_tokens: Annotated[
        int | None, typer.Option(help="No stop before so many tokens.")
    ] = None,
    max_thinking_tokens: Annotated[
        int | None, typer.Option(help="Stop at the first step end from here on.")
    ] = None,
    control: Annotated[
        float, typer.Option(help="Share of requests that never stop, to measure savings against.")
    ] = 0.0,
    opt_in: Annotated[
        bool, typer.Option("--opt-in", help="Stop only requests that say stop_policy.")
    ] = False,
    engine_arg: EngineArgs = None,
) -> None:
    """Serve a policy: an OpenAI-compatible server; further options are the engine's own."""
    from modeling_ospruner.engines.opening import parse_engine_args
    from modeling_ospruner.sglang_plugin import launching
    from modeling_ospruner.vllm_plugin import server

    if engine not in ("vllm", "sglang"):
        raise typer.BadParameter(f"--engine is {engine!r}; it must be vllm or sglang.")
    given = {
        "stop_mode": mode,
        "stop_threshold": threshold,
        "stop_max_loss": max_loss,
        "stop_length_penalty": length_penalty,
        "stop_domain": domain,
        "stop_answer": answer,
        "stop_wind_down": wind_down,
        "min_thinking_tokens": min_thinking_tokens,
        "max_thinking_tokens": max_thinking_tokens,
        "stop_control": control,
    }
    defaults = {key: value for key, value in given.items() if value is not None}
    settings, args = {"stop_policy": not opt_in, **defaults}, parse_engine_args(engine_arg or ())
    if engine == "sglang":
        launching.serve(policy, settings, [*launching.sglang_options(args), *context.args])
    server.serve(policy, settings, [*server.vllm_options(args), *context.args])


@app.command("app")
def app_command(
    policy: Annotated[
        str | None,
        typer.Argument(help="A policy, as a folder or Hub id; default: the embedded reasoner."),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Ask a server of `ospruner serve` instead of a policy here.")
    ] = None,
    revision: Revision = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen at; default: this machine alone.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Default: the first free one from 7860.")] = None,
    browser: Annotated[bool, typer.Option("--browser", help="Open a browser, too.")] = False,
) -> None:
    """Open a page that asks the base as it is and pruned, side by side."""
    from ospruner.train.toy.first_policy import run_app

    run_app(policy, url, revision, console, host=host, port=port, in_browser=browser)


class DoctorGroup(TyperGroup):
    """`ospruner doctor`: what is no command of its own (`plan`) is something to look at."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Puts `look` before what is neither a command nor --help."""
        if not args or args[0] not in (*self.commands, "--help"):
            args = ["look", *args]
        return super().parse_args(ctx, args)


doctor_app = typer.Typer(
    cls=DoctorGroup,
    help="Say what is understood of a base or a policy, what is wrong, and what a base will need.",
)
app.add_typer(doctor_app, name="doctor")


@doctor_app.command("plan")
def doctor_plan(
    base: Annotated[str, typer.Option(help="The base, a folder or Hub id; no weights are read.")],
    revision: Revision = None,
    gpu_gib: Annotated[float, typer.Option(help="Memory of each GPU.")] = 80.0,
    gpus: Annotated[int, typer.Option(help="How many GPUs; each holds a whole base.")] = 1,
    traces: Annotated[int, typer.Option(help="Labelled traces.")] = 40_000,
    mean_tokens: Annotated[int, typer.Option(help="Thinking tokens of a trace.")] = 5_000,
    max_tokens: Annotated[int, typer.Option(help="Thinking tokens of the longest.")] = 15_000,
    step_tokens: Annotated[int, typer.Option(help="Tokens of a step.")] = 40,
    streams: Annotated[int, typer.Option(help="Traces sampled at once on a GPU.")] = 32,
    label_tokens_per_second: Annotated[
        float, typer.Option(help="What one GPU writes, all streams together; an assumption.")
    ] = 2_500.0,
    tflops: Annotated[
        float, typer.Option(help="10^12 operations/s of one GPU in training; an assumption.")
    ] = 150.0,
    epochs: Annotated[int, typer.Option(help="Passes over the traces, all lambdas.")] = 8,
    layers: Annotated[int, typer.Option(help="Layers of the base that the policy copies.")] = 2,
    tuning: Annotated[str, typer.Option(help="layers or queries.")] = "layers",
    micro_batch_tokens: Annotated[int, typer.Option(help="As for train.")] = 16_384,
    json_file: JsonFile = None,
) -> None:
    """Say what labelling, training and serving will need; status 1 if one does not fit."""
    from modeling_ospruner.doctor.plan import Workload, run_plan

    work = Workload(
        gpu_gib=gpu_gib, gpus=gpus, traces=traces, mean_tokens=mean_tokens, max_tokens=max_tokens,
        step_tokens=step_tokens, streams=streams, label_tokens_per_second=label_tokens_per_second,
        tflops=tflops, epochs=epochs, num_policy_layers=layers, tuning=tuning,
        micro_batch_tokens=micro_batch_tokens,
    )  # fmt: skip
    if not run_plan(base, revision, work, console, json_file):
        raise typer.Exit(1)


@doctor_app.command("drift")
def doctor_drift(
    policy: Annotated[str, typer.Argument(help="A calibrated policy, as a folder or Hub id.")],
    served: Annotated[
        str,
        typer.Option(help="A server's http://.../metrics, its text in a file, or records.jsonl."),
    ],
    max_loss: Annotated[
        float | None, typer.Option(help="Which promise, where there are several.")
    ] = None,
    revision: Revision = None,
    json_file: JsonFile = None,
) -> None:
    """Compare what a server sees with what a policy was calibrated on; status 1 if they differ."""
    from modeling_ospruner.doctor.drift import run_drift

    if not run_drift(policy, served, max_loss, console, revision, json_file):
        raise typer.Exit(1)


@doctor_app.command("look", hidden=True)
def doctor(
    subject: Annotated[
        str | None, typer.Argument(help="A base or a policy, as a folder or Hub id; optional.")
    ] = None,
    revision: Revision = None,
    reasoning_format: Format = None,
    json_file: JsonFile = None,
) -> None:
    """Print versions, what is understood of a base or a policy, and what is wrong (status 1)."""
    from modeling_ospruner.doctor.examination import run_doctor

    if not run_doctor(subject, revision, reasoning_format, console, json_file):
        raise typer.Exit(1)


@toy_app.command("train")
def toy_train(
    out: Annotated[
        Path, typer.Option(help="Folder of the run; a stopped run continues.", file_okay=False)
    ] = Path("runs/toy"),
    tokens: Annotated[
        int | None,
        typer.Option(help="Tokens to train on; by default 30 million, with --mixed 10 million."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, problems and traces.")] = 0,
    mixed: Annotated[
        bool,
        typer.Option("--mixed", help="Go on from the shipped one, on three domains of problems."),
    ] = False,
    device: Annotated[str, typer.Option(help="Torch device, cpu or cuda.")] = "cpu",
) -> None:
    """Train an embedded reasoner by the recipe that made the shipped weights."""
    from modeling_ospruner.common.progress import PhaseBars
    from ospruner.train.toy.recipe import recipe_for, train_reasoner

    with PhaseBars(console, "reasoner") as bars:
        train_reasoner(out, recipe_for(tokens, seed, mixed), bars, device)
    check = f"ospruner toy check{' --mixed' * mixed} --reasoner {out / 'reasoner'}"
    console.print(f"Saved in {out / 'reasoner'}; measure it: {check}")


@toy_app.command("check")
def toy_check(
    limit: Annotated[int, typer.Option(help="Fresh problems to measure on, a domain.")] = 1000,
    reasoner: Annotated[
        Path | None, typer.Option(help="Folder of a reasoner; default: the shipped one.")
    ] = None,
    mixed: Annotated[
        bool,
        typer.Option("--mixed", help="The mixed one, on each of its domains (reasoning-gym)."),
    ] = False,
    write_card: Annotated[
        bool, typer.Option("--write-card", help="Put the tables into the reasoner's README.md.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the problems and the sampling.")] = 1,
    json_file: JsonFile = None,
) -> None:
    """Measure the embedded reasoner against its gates; status 1 if one fails."""
    from ospruner.train.toy.check import run_check

    if not run_check(reasoner, limit, seed, console, json_file, mixed, write_card):
        raise typer.Exit(1)


@eval_app.command("replay")
def eval_replay(
    labels: Annotated[str, typer.Option(help="Folder or Hub id of labelled traces.")],
    out: Annotated[Path, typer.Option(help="Folder for the results.", file_okay=False)],
    policies: Annotated[
        list[str] | None,
        typer.Option(help="Policy, or folder of policies; @.7,.8 for thresholds. Repeatable."),
    ] = None,
    length_penalty: LengthPenalty = "",
    domain: Domain = None,
    rules: Annotated[
        list[str] | None, typer.Option(help="budget:200, step:5, entropy:0.4, ... Repeatable.")
    ] = None,
    validation: Annotated[
        str | None, typer.Option(help="Labels on which to choose the best fixed budget and step.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="The base, if it is no longer where the labels say.")
    ] = None,
    force_base: ForceBase = None,
    across_tasks: AcrossTasks = False,
    device: Device = None,
    model: BaseName = None,
    name: ProblemsName = None,
    penalties: Penalties = "",
    charge: Charge = "thinking",
    differences: Differences = False,
    limit: Annotated[int | None, typer.Option(help="Only the first N traces.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Compute the exact expected accuracy and length of policies and rules on labelled traces."""
    from modeling_ospruner.common.progress import PhaseBars
    from ospruner.eval.methods import parse_prices
    from ospruner.eval.metrics import charged_variant
    from ospruner.eval.report.summary import parse_lambdas
    from ospruner.train.replay_labels import replay_labels

    lambdas, _ = parse_lambdas(penalties), charged_variant(charge)  # refused before the work
    with PhaseBars(console, "replay") as bars:
        evaluation = replay_labels(
            labels, policies or (), rules or (),
            length_penalties=parse_prices(length_penalty), domain=domain, base=base,
            force_base=force_base, across_tasks=across_tasks, validation=validation, model=model,
            benchmark=name, limit=limit, device=device, progress=bars,
        )  # fmt: skip
    _show(evaluation, out, lambdas, charge, differences, json_file)


@eval_app.command("frontier")
def eval_frontier(
    labels: Annotated[str, typer.Argument(help="Folder or Hub id of labels to measure on.")],
    validation: Annotated[
        str, typer.Option(help="Labels of other problems, on which every choice is made.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for numbers and picture.", file_okay=False)],
    policies: Annotated[
        list[str] | None, typer.Option(help="Policy, or folder of policies. Repeatable.")
    ] = None,
    rules: Annotated[
        str, typer.Option(help="all, none, or families of rules: entropy,deer,learnstop.")
    ] = "all",
    lambdas: Annotated[str, typer.Option(help="Of the gaps to the oracle.")] = "5e-4,2e-4,1e-4",
    train: Annotated[
        str | None, typer.Option(help="Labels to fit LearnStop on; default: the validation's.")
    ] = None,
    estimate: Annotated[
        bool, typer.Option(help="Fit what is possible without hindsight, too.")
    ] = True,
    replicates: Annotated[int, typer.Option(help="Resamples of the intervals.")] = 2000,
    base: Annotated[
        str | None, typer.Option(help="The base, if it is no longer where the labels say.")
    ] = None,
    force_base: ForceBase = None,
    device: Device = None,
    json_file: JsonFile = None,
) -> None:
    """Compare whole methods: area under the frontier, gap to the oracle closed, intervals."""
    from modeling_ospruner.common.progress import PhaseBars
    from ospruner.eval.report.summary import parse_lambdas
    from ospruner.eval.report.terminal import frontier_tables
    from ospruner.train.comparing.frontier_labels import (
        frontier_of_labels,
        rules_named,
        save_found,
    )

    penalties, families = parse_lambdas(lambdas), rules_named(rules)  # refused before the work
    with PhaseBars(console, "frontier") as bars:
        found = frontier_of_labels(
            labels, validation, policies or (), families, length_penalties=penalties, train=train,
            base=base, force_base=force_base, estimate=estimate, replicates=replicates,
            device=device, progress=bars,
        )  # fmt: skip
    save_found(found, out)
    for table in frontier_tables(found.results):
        console.print(table)
    if json_file is not None:
        found.results.save(json_file)
    console.print(f"Numbers and picture: {out / 'frontier.json'}, {out / 'frontier.png'}")


@eval_app.command("online")
def eval_online(
    dataset: Annotated[str, typer.Option(help="gsm8k, math500, aime, ..., a file, or a Hub id.")],
    out: Annotated[
        Path, typer.Option(help="Folder of the run; a stopped run continues.", file_okay=False)
    ],
    policies: Annotated[
        list[str] | None, typer.Option(help="As for replay. The base is what they pin. Repeatable.")
    ] = None,
    length_penalty: LengthPenalty = "",
    domain: Domain = None,
    rules: Annotated[list[str] | None, typer.Option(help="As for replay. Repeatable.")] = None,
    base: Annotated[
        str | None, typer.Option(help="The base, if there is no policy or the base was moved.")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="transformers (wall-clock is measured), vllm, sglang or openai.")
    ] = "transformers",
    url: Urls = None,
    engine_arg: EngineArgs = None,
    dtype: Dtype = "auto",
    device: Device = None,
    preset: Annotated[
        str, typer.Option(help="The paper's sampling settings: deepseek-r1, drpo, gpt-oss.")
    ] = "deepseek-r1",
    samples: Annotated[int | None, typer.Option(help="k, the traces of each problem.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Temperature of the thinking.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Top-p of the thinking.")] = None,
    max_thinking_tokens: Annotated[
        int | None, typer.Option(help="Cap on a trace's thinking tokens.")
    ] = None,
    max_answer_tokens: Annotated[
        int | None, typer.Option(help="Cap on an answer's tokens.")
    ] = None,
    answer: Annotated[str, typer.Option(help="forced, or free (its ablation).")] = "forced",
    wind_down: WindDown = None,
    batch_problems: Annotated[int, typer.Option(help="Problems in one batch of generate.")] = 1,
    prompt: Annotated[
        str, typer.Option(help="default, concise, chain-of-draft or check.")
    ] = "default",
    task: Annotated[
        str | None,
        typer.Option(
            help="math, choice, exact, code, generated or FILE.py; default: the policies'."
        ),
    ] = None,
    allow_code: AllowCode = False,
    across_tasks: AcrossTasks = False,
    files: Annotated[
        list[str] | None, typer.Option(help="Local files of the benchmark's rows.")
    ] = None,
    model: BaseName = None,
    name: ProblemsName = None,
    penalties: Penalties = "",
    charge: Charge = "thinking",
    differences: Differences = False,
    limit: Annotated[int | None, typer.Option(help="Only the first N problems.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampling and of the policy's draws.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Generate with policies and rules: Pass@1 over k samples, lengths, wall-clock."""
    from modeling_ospruner.common.progress import PhaseBars
    from modeling_ospruner.engines.opening import parse_engine_args
    from ospruner.eval.methods import parse_prices
    from ospruner.eval.metrics import charged_variant
    from ospruner.eval.online.command import OnlineRequest, run_online
    from ospruner.eval.online.settings import preset as preset_settings
    from ospruner.eval.report.summary import parse_lambdas

    settings = preset_settings(
        preset, samples=samples, temperature=temperature, top_p=top_p, answer=answer, seed=seed,
        max_thinking_tokens=max_thinking_tokens, max_answer_tokens=max_answer_tokens,
        batch_problems=batch_problems,
    )  # fmt: skip
    request = OnlineRequest(
        dataset=dataset, policies=policies or (),
        length_penalties=parse_prices(length_penalty), domain=domain, rules=rules or (),
        base=base, engine=engine,
        engine_options={
            "urls": tuple(url or ()), "device": device, "dtype": dtype,
            "arguments": parse_engine_args(engine_arg or ()),
        },
        task=task, allow_code=allow_code, across_tasks=across_tasks, prompt=prompt,
        wind_down=wind_down, model=model, benchmark=name, files=files or (), limit=limit,
        settings=settings,
        answer_cap_given=max_answer_tokens is not None,
    )  # fmt: skip
    lambdas, _ = parse_lambdas(penalties), charged_variant(charge)  # refused before the work
    with PhaseBars(console, "online") as bars:
        evaluation = run_online(request, out, bars)
    _show(evaluation, out, lambdas, charge, differences, json_file)


@eval_app.command("report")
def eval_report(
    folder: Annotated[Path, typer.Argument(help="Folder of evaluations, at any depth.")],
    out: Annotated[
        Path | None, typer.Option(help="Where to write; default: the folder itself.")
    ] = None,
    validation: Annotated[
        Path | None, typer.Option(help="Evaluations on which to choose each method's parameter.")
    ] = None,
    dynamics: Annotated[
        list[Path] | None, typer.Option(help="Training runs to draw the dynamics of. Repeatable.")
    ] = None,
    penalties: Penalties = "",
    charge: Charge = "thinking",
    relative_aes: Annotated[
        bool, typer.Option("--printed-aes", help="AES by the paper's text, not by its tables.")
    ] = False,
    title: Annotated[str, typer.Option(help="Title of the page.")] = "Stopping rules compared",
    differences: Differences = False,
) -> None:
    """Write one HTML page, the paper's tables (markdown, CSV, LaTeX) and its pictures."""
    from ospruner.eval.metrics import charged_variant
    from ospruner.eval.report.page import write_report
    from ospruner.eval.report.summary import parse_lambdas

    written = write_report(
        folder, out=out, validation=validation, dynamics=dynamics or (), title=title,
        variant=charged_variant(charge, relative=relative_aes),
        length_penalties=parse_lambdas(penalties), differences=differences,
    )  # fmt: skip
    for path in written:
        console.print(f"Wrote {path}", soft_wrap=True)


@app.command("lm-eval", context_settings={"ignore_unknown_options": True, "help_option_names": []})
def lm_eval_command(
    arguments: Annotated[list[str] | None, typer.Argument(help="lm_eval's own.")] = None,
) -> None:
    """lm-evaluation-harness's own command line, with the model `ospruner` in it."""
    from modeling_ospruner.common.optional import needed

    needed("lm_eval", "`ospruner lm-eval`", "pip install 'ospruner[eval]'")
    from ospruner.eval.harness.lm_harness import run

    run(arguments or [])


@eval_app.command("compare")
def eval_compare(
    folder: Annotated[
        Path | None, typer.Argument(help="Folder of evaluations, at any depth.")
    ] = None,
    paper: Annotated[
        bool,
        typer.Option("--paper", help="Beside the paper's numbers; without a folder: its Table 1."),
    ] = False,
    model: Annotated[str | None, typer.Option(help="The paper's name of the model.")] = None,
    name: Annotated[str | None, typer.Option(help="The paper's name of the benchmark.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Print results of a folder side by side, or beside the paper's published ones."""
    from ospruner.eval.report.summary import print_comparison

    print_comparison(folder, console, paper=paper, model=model, benchmark=name, json_file=json_file)


def _show(
    evaluation: "Evaluation",
    out: Path,
    lambdas: Sequence[float],
    charge: str,
    differences: bool,
    json_file: Path | None,
) -> None:
    """Print an evaluation and save it."""
    from modeling_ospruner.common.results_file import RESULTS_FILE
    from ospruner.eval.metrics import charged_variant
    from ospruner.eval.report.summary import print_results, save_evaluation

    results = save_evaluation(
        evaluation, out, variant=charged_variant(charge), length_penalties=lambdas
    )
    print_results(results, console, differences=differences)
    if json_file is not None:
        results.save(json_file)
    console.print(f"Numbers: {out / RESULTS_FILE}; page: ospruner eval report {out}")


@publish_app.command("policy")
def publish_policy(
    folder: Annotated[Path, typer.Argument(help="Folder of the policy.")],
    repo: Annotated[
        str, typer.Option(help="org/name; org/ alone: a name made of base, method and lambda.")
    ],
    base: HubBase = None,
    base_revision: HubBaseRevision = None,
    license: Annotated[
        str | None, typer.Option(help="Licence of the policy; default: the base's.")
    ] = None,
    labels: Annotated[
        list[str] | None, typer.Option(help="Id of the labels on the Hub. Repeatable.")
    ] = None,
    benchmark: Annotated[
        str | None,
        typer.Option(
            help="Data set whose leaderboard on the Hub shows the results: org/name[:task]."
        ),
    ] = None,
    private: Private = False,
    collection: Collection = None,
    dry_run: DryRun = False,
    out: DryRunFolder = None,
) -> None:
    """Publish a policy in one commit: weights, code, tokenizer, card, provenance."""
    from ospruner.hub_cards import commands
    from ospruner.hub_cards.policies import PolicyRelease

    release = PolicyRelease(repo, base, base_revision, license, labels or (), benchmark)
    sending = commands.Sending(private, collection, dry_run, out)
    commands.publish_policy(folder, release, sending, console)


@publish_app.command("labels")
def publish_labels(
    folder: Annotated[
        Path, typer.Argument(help="Label folder, or one that holds train/, validation/, test/.")
    ],
    repo: Annotated[str, typer.Option(help="org/name; org/ alone: a name made of the base.")],
    base: HubBase = None,
    base_revision: HubBaseRevision = None,
    license: Annotated[str | None, typer.Option(help="Licence of the data set.")] = None,
    problems: Annotated[
        str | None, typer.Option(help="Where the problems come from, and their licence.")
    ] = None,
    private: Private = False,
    collection: Collection = None,
    dry_run: DryRun = False,
    out: DryRunFolder = None,
) -> None:
    """Publish labels in one commit: traces, prefixes, card, provenance."""
    from ospruner.eval.schema import COLUMNS, PREFIX_COLUMNS
    from ospruner.hub_cards import commands
    from ospruner.hub_cards.labels import LabelsRelease

    release = LabelsRelease(repo, base, base_revision, license, problems)
    sending = commands.Sending(private, collection, dry_run, out)
    meanings = {
        config: {name: what for name, (_, what) in columns.items()}
        for config, columns in (("default", COLUMNS), ("prefixes", PREFIX_COLUMNS))
    }
    commands.publish_labels(folder, release, meanings, sending, console)


@publish_app.command("space")
def publish_space(
    policy: Annotated[str, typer.Argument(help="Id of a published policy on the Hub.")],
    repo: Annotated[str, typer.Option(help="org/name of the Space; org/ alone: named by policy.")],
    revision: Annotated[
        str | None, typer.Option(help="The policy's commit, branch or tag; its commit is pinned.")
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(help="The Space's suggested hardware, such as a10g-small.")
    ] = None,
    private: Private = False,
    collection: Collection = None,
    dry_run: DryRun = False,
    out: DryRunFolder = None,
) -> None:
    """Publish the page of `ospruner app` for a policy as a Space, in one commit."""
    from ospruner.hub_cards import commands
    from ospruner.hub_cards.spaces import SpaceRelease

    release = SpaceRelease(repo, policy, revision, hardware)
    commands.publish_space(release, commands.Sending(private, collection, dry_run, out), console)


@app.command()
def verify(
    repo: Annotated[str, typer.Argument(help="Id of a policy on the Hub, or its folder.")],
    revision: Annotated[str | None, typer.Option(help="Commit, branch or tag.")] = None,
) -> None:
    """Check a published policy: code, hashes, base, probabilities; status 1 if one fails."""
    from ospruner.hub_cards import commands

    if not commands.verify(repo, revision, console):
        raise typer.Exit(1)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"--values: {text!r} is no number; write .9,.8,.7") from None


def _bytes(gib: float) -> int:
    if not 0 <= gib < 2**30:
        raise typer.BadParameter(f"--cache-gib is {gib}; it must be a number of GiB, 0 or more.")
    return int(gib * 2**30)


def _folder(out: Path, name: str) -> Path:
    return out if out != Path("runs/demo") or name == "standard" else Path(f"runs/demo-{name}")


def _default_engine(device: str | None) -> str:
    """The engine to label with where none is named; says which one and why."""
    from modeling_ospruner.engines.opening import default_engine

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


def main() -> None:
    """Entry point of the console script; errors that a user can mend come without a traceback."""
    try:
        app()
    except (ValueError, OSError, FloatingPointError, MemoryError) as error:
        Console(stderr=True).print(f"[red]Error:[/red] {escape(str(error))}")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
