"""Commands that fit policies: `train` and `calibrate`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import Device, JsonFile, States, console


def train_command(
    labels: Annotated[
        list[str],
        typer.Option(help="Folder or Hub id of labelled traces. Repeatable: a mix of tasks."),
    ],
    out: Annotated[
        Path, typer.Option(help="Folder of the run; a stopped run continues.", file_okay=False)
    ],
    validation: Annotated[
        list[str] | None,
        typer.Option(help="Labels of other problems; default: hold problems out. Repeatable."),
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="The base, if it is no longer where the labels say.")
    ] = None,
    method: Annotated[
        str,
        typer.Option(help="os-pruner; a baseline: probe, convergence, final-answer, flashthink."),
    ] = "os-pruner",
    head: Annotated[
        str, typer.Option(help="price: one policy for every price; fixed: one for each.")
    ] = "price",
    prices: Annotated[
        str,
        typer.Option(
            help="auto; head price: LOW,HIGH; head fixed: r1, gpt-oss, drpo, or 1e-4,5e-5,0."
        ),
    ] = "auto",
    tuning: Annotated[str, typer.Option(help="queries or layers.")] = "queries",
    layers: Annotated[
        int, typer.Option(help="Layers of the base that the policy copies; 0: a head alone.")
    ] = 2,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the traces, for each price of head fixed.")
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Of the tuned layers; by the base's width.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Traces in each optimiser step.")] = 32,
    states: States = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, batches and held-out problems.")] = 0,
    more: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other field of StopConfig, as field=value. Repeatable."),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Train a policy on labelled traces; defaults follow from the labels and the base."""
    import json

    from rich.table import Table

    from ospruner.progress import PhaseBars, silent
    from ospruner.train.config import StopConfig
    from ospruner.train.trainer import StopTrainer

    fields = {
        "base": base, "method": method, "head": head, "prices": prices, "tuning": tuning,
        "layers": layers, "num_train_epochs": epochs, "learning_rate": learning_rate,
        "batch_size": batch_size, "states": states and str(states), "seed": seed,
        "disable_tqdm": True,
    }  # fmt: skip
    config = StopConfig(str(out), **fields | _more_fields(more or ()))  # type: ignore[arg-type]
    console.quiet = not config.should_save
    with PhaseBars(console) as bars:
        trainer = StopTrainer(
            config, labels, validation, progress=bars if config.should_save else silent
        )
        trainer.train()
    table = Table(title="On the validation traces")
    for heading in ("policy", "price", "accuracy %", "thinking tokens", "reduction %"):
        table.add_column(heading)
    full = trainer.policies[0]
    table.add_row(
        "full trace", "", f"{100 * full.full_accuracy:.1f}", f"{full.full_tokens:.0f}", ""
    )
    for policy in trainer.policies:
        table.add_row(
            policy.path.name,
            f"{policy.price:g}" if policy.method == "os-pruner" else "",
            f"{100 * policy.accuracy:.1f}",
            f"{policy.tokens:.0f}",
            f"{100 * (1 - policy.tokens / policy.full_tokens):.1f}",
        )
    console.print(table)
    for policy in trainer.policies:
        if policy.warning:
            console.print(f"[yellow]Warning:[/yellow] {policy.path.name} {policy.warning}.")
        console.print(f"Policy: {policy.path}", soft_wrap=True)
    if json_file is not None:
        told = [vars(policy) | {"path": str(policy.path)} for policy in trainer.policies]
        json_file.write_text(json.dumps(told, indent=2) + "\n", "utf-8")


def _more_fields(texts: Sequence[str]) -> dict[str, Any]:
    """What --set says: each value as JSON, or else as text."""
    import json

    from ospruner.train.config import StopConfig

    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in StopConfig.__dataclass_fields__:
            raise typer.BadParameter(f"--set {text!r}: write field=value, a field of StopConfig")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


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
