"""Commands that fit policies: `train` and `calibrate`."""

from pathlib import Path
from typing import Annotated

import typer

from .options import Device, ForceBase, JsonFile, States, console


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
            help="os-pruner, or a baseline: probe, convergence, final-answer, flashthink."
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
        str, typer.Option(help="queries, layers, attention, lora or head.")
    ] = "queries",
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
    states: States = None,
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
    from ospruner.progress import PhaseBars, silent
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
            states=states,
            progress=bars if processes.main else silent,
            say=console.print,
            processes=processes,
        )
    processes.end()
    if processes.main:
        print_stages(stages, console, json_file)


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
    states: States = None,
    seed: Annotated[int, typer.Option(help="Seed of the order of problems.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Promise that stopping loses at most so much accuracy, and store the promise in the policy."""
    import json
    from dataclasses import asdict

    from ospruner.calibrating import calibrate, calibrate_rule
    from ospruner.durable import replace_file
    from ospruner.progress import PhaseBars
    from ospruner.rules import FAMILIES

    tried = tuple(_number(text) for text in values.split(",")) if values else None
    if policy in FAMILIES and not Path(policy).is_dir():
        if mode != "threshold":
            raise typer.BadParameter(f"--mode is {mode!r}; a rule such as {policy} does not draw.")
        if tried is None:
            raise typer.BadParameter(f"{policy} is a rule: give its --values, careful to bold.")
        found = calibrate_rule(policy, tried, labels, max_loss, confidence, seed=seed)
    else:
        with PhaseBars(console, "calibrate") as bars:
            found = calibrate(
                policy, labels, max_loss, confidence, mode=mode, values=tried,  # type: ignore[arg-type]  # checked
                validation=validation, base=base, device=device, states=states, seed=seed,
                progress=bars,
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


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"--values: {text!r} is no number; write .9,.8,.7") from None


def _bytes(gib: float) -> int:
    if not 0 <= gib < 2**30:
        raise typer.BadParameter(f"--cache-gib is {gib}; it must be a number of GiB, 0 or more.")
    return int(gib * 2**30)
