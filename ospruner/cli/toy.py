"""Commands of the embedded reasoner: `demo` and `toy`."""

from pathlib import Path
from typing import Annotated

import typer

from .options import Differences, JsonFile, console

toy_app = typer.Typer(help="The embedded reasoner: train it again, check it.", no_args_is_help=True)


def demo(
    out: Annotated[
        Path, typer.Option(help="Folder of the run; a stopped run continues.", file_okay=False)
    ] = Path("runs/demo"),
    quick: Annotated[bool, typer.Option("--quick", help="The one-minute version.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="The proof: 3 seeds, about 75 minutes on two cores.")
    ] = False,
    differences: Differences = False,
    json_file: JsonFile = None,
    seed: Annotated[int, typer.Option(help="Seed of problems, sampling and training.")] = 0,
    processes: Annotated[
        int | None,
        typer.Option(
            min=1, help="That label and train side by side; by default one a core, at least three."
        ),
    ] = None,
) -> None:
    """Do the whole job on the embedded reasoner: label, train, test, save, load, generate."""
    from ospruner.demo.demo import FULL, QUICK, STANDARD, run_demo

    if quick and full:
        raise typer.BadParameter("--quick and --full exclude each other; give one of them.")
    size = QUICK if quick else FULL if full else STANDARD
    run_demo(
        _folder(out, size.name),
        size,
        seed,
        console,
        json_file,
        differences=differences,
        processes=processes,
    )


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
    from ospruner.demo.recipe import recipe_for, train_reasoner
    from ospruner.progress import PhaseBars

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
    from ospruner.demo.check import run_check

    if not run_check(reasoner, limit, seed, console, json_file, mixed, write_card):
        raise typer.Exit(1)


def _folder(out: Path, name: str) -> Path:
    return out if out != Path("runs/demo") or name == "standard" else Path(f"runs/demo-{name}")
