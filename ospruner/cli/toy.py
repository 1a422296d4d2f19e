"""The command `demo`."""

from pathlib import Path
from typing import Annotated

import typer

from .options import Differences, JsonFile, console


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


def _folder(out: Path, name: str) -> Path:
    return out if out != Path("runs/demo") or name == "standard" else Path(f"runs/demo-{name}")
