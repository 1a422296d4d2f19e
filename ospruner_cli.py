"""The one command, `ospruner`. Only wiring: a sub-command calls one function."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from ospruner.eval.evaluation import Evaluation

app = typer.Typer(
    name="ospruner",
    help="Stop reasoning models at the right paragraph.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
toy_app = typer.Typer(help="The embedded reasoner: train it again, check it.", no_args_is_help=True)
app.add_typer(toy_app, name="toy")
eval_app = typer.Typer(help="Compare stopping rules.", no_args_is_help=True)
app.add_typer(eval_app, name="eval")
publish_app = typer.Typer(help="Put policies and labels on the Hub.", no_args_is_help=True)
app.add_typer(publish_app, name="publish")

console = Console()


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder of the run; a stopped run continues.")] = Path(
        "runs/demo"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="The one-minute version.")] = False,
    full: Annotated[bool, typer.Option("--full", help="The proof: 3 seeds, an hour.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write every number to this file too.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of problems, sampling and training.")] = 0,
) -> None:
    """Do the whole job on the embedded reasoner: label, train, test, save, load, generate."""
    from ospruner.train.toy.demo import FULL, QUICK, STANDARD, run_demo

    if quick and full:
        raise typer.BadParameter("--quick and --full exclude each other; give one of them.")
    size = QUICK if quick else FULL if full else STANDARD
    run_demo(_folder(out, size.name), size, seed, console, json_file)


@app.command("train")
def train_command(
    labels: Annotated[str, typer.Option(help="Folder or Hub id of labelled traces.")],
    out: Annotated[Path, typer.Option(help="Folder of the run; a stopped run continues.")],
    base: Annotated[
        str | None, typer.Option(help="The base, where it is not where the labels say.")
    ] = None,
    method: Annotated[
        str, typer.Option(help="os-pruner, or a baseline: probe, convergence.")
    ] = "os-pruner",
    lambdas: Annotated[
        str, typer.Option(help="auto, r1, gpt-oss, drpo, or falling numbers: 1e-4,5e-5,0.")
    ] = "auto",
    validation: Annotated[
        str | None, typer.Option(help="Labels of other problems; else problems are held out.")
    ] = None,
    held_out: Annotated[
        int | None, typer.Option(help="Problems held out: 500, or a fifth of few.")
    ] = None,
    epochs: Annotated[int, typer.Option(help="Passes over the traces for each lambda.")] = 1,
    batch_size: Annotated[int, typer.Option(help="Traces an optimiser step.")] = 32,
    learning_rate: Annotated[float, typer.Option(help="AdamW's, of the tuned layers.")] = 1e-5,
    head_learning_rate: Annotated[
        float | None, typer.Option(help="That of the linear head; the same where absent.")
    ] = None,
    layers: Annotated[int, typer.Option(help="Layers of the base that the policy copies.")] = 2,
    tuning: Annotated[str, typer.Option(help="layers, attention or head.")] = "layers",
    seed: Annotated[int, typer.Option(help="Seed of weights, batches and held-out problems.")] = 0,
    limit: Annotated[int | None, typer.Option(help="Only the first so many traces.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write each policy's results to this file.")
    ] = None,
) -> None:
    """Train policies on labelled traces: one run anneals through all lambdas."""
    from ospruner.train.from_labels import settings_for, train_from_labels
    from ospruner.train.stage_report import print_stages
    from ospruner.train.toy.bars import PhaseBars

    settings = settings_for(
        lambdas,
        method=method,
        epochs_per_stage=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        head_learning_rate=head_learning_rate,
        num_policy_layers=layers,
        tuning=tuning,
        seed=seed,
    )
    with PhaseBars(console) as bars:
        stages = train_from_labels(
            labels,
            out,
            settings,
            base=base,
            validation=validation,
            held_out=held_out,
            split_seed=seed,
            limit=limit,
            progress=bars,
        )
    print_stages(stages, console, json_file)


@toy_app.command("train")
def toy_train(
    out: Annotated[Path, typer.Option(help="Folder of the run; a stopped run continues.")] = Path(
        "runs/toy"
    ),
    tokens: Annotated[int, typer.Option(help="Tokens to train on.")] = 30_000_000,
    seed: Annotated[int, typer.Option(help="Seed of weights, problems and traces.")] = 0,
    device: Annotated[str, typer.Option(help="Torch device, cpu or cuda.")] = "cpu",
) -> None:
    """Train the embedded reasoner from scratch by the recipe that made the shipped weights."""
    from ospruner.train.toy.bars import PhaseBars
    from ospruner.train.toy.recipe import Recipe, train_reasoner

    with PhaseBars(console, "reasoner") as bars:
        train_reasoner(out, Recipe(tokens=tokens, seed=seed), bars, device)
    console.print(f"Saved in {out / 'reasoner'}; measure it: ospruner toy check --reasoner ...")


@toy_app.command("check")
def toy_check(
    limit: Annotated[int, typer.Option(help="Fresh problems to measure on.")] = 1000,
    reasoner: Annotated[
        Path | None, typer.Option(help="Folder of a reasoner; the shipped one where absent.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the problems and the sampling.")] = 1,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write every number to this file too.")
    ] = None,
) -> None:
    """Print the gates of the embedded reasoner; exit with status 1 where one fails."""
    from ospruner.train.toy.check import run_check

    if not run_check(reasoner, limit, seed, console, json_file):
        raise typer.Exit(1)


@eval_app.command("replay")
def eval_replay(
    labels: Annotated[str, typer.Option(help="Folder or Hub id of labelled traces.")],
    out: Annotated[Path, typer.Option(help="Folder for the results.")],
    policies: Annotated[
        list[str] | None,
        typer.Option(help="Policy, or folder of policies; @.7,.8 for thresholds. Repeatable."),
    ] = None,
    rules: Annotated[
        list[str] | None, typer.Option(help="budget:200, step:5, entropy:0.4, ... Repeatable.")
    ] = None,
    validation: Annotated[
        str | None, typer.Option(help="Labels on which to choose the best fixed budget and step.")
    ] = None,
    base: Annotated[str | None, typer.Option(help="The base, where it lies elsewhere now.")] = None,
    model: Annotated[str | None, typer.Option(help="What tables call the base.")] = None,
    name: Annotated[str | None, typer.Option(help="What tables call the problems.")] = None,
    penalties: Annotated[str, typer.Option("--lambdas", help="Rewards at these λ too.")] = "",
    limit: Annotated[int | None, typer.Option(help="Only the first so many traces.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write every number to this file too.")
    ] = None,
) -> None:
    """Expected accuracy and length of policies and rules on labelled traces, exactly."""
    from ospruner.train.replay_labels import replay_labels
    from ospruner.train.toy.bars import PhaseBars

    with PhaseBars(console, "replay") as bars:
        evaluation = replay_labels(
            labels, policies or (), rules or (), base=base, validation=validation, model=model,
            benchmark=name, limit=limit, progress=bars,
        )  # fmt: skip
    _show(evaluation, out, penalties, json_file)


def _show(evaluation: "Evaluation", out: Path, penalties: str, json_file: Path | None) -> None:
    """Print an evaluation and save it."""
    from ospruner.eval.summary import parse_lambdas, print_evaluation, save_evaluation

    lambdas = parse_lambdas(penalties)
    results = save_evaluation(evaluation, out, length_penalties=lambdas)
    print_evaluation(evaluation, console, length_penalties=lambdas)
    if json_file is not None:
        shutil.copyfile(results, json_file)
    console.print(f"Numbers: {results}; page: ospruner eval report {out}")


@publish_app.command("policy")
def publish_policy(
    folder: Annotated[Path, typer.Argument(help="Folder of the policy.")],
    repo: Annotated[
        str, typer.Option(help="org/name; org/ alone is named by base, method and lambda.")
    ],
    base: Annotated[
        str | None, typer.Option(help="The base's id on the Hub, where it was a local folder.")
    ] = None,
    base_revision: Annotated[
        str | None, typer.Option(help="Its commit, branch or tag; pinned by commit.")
    ] = None,
    license: Annotated[str | None, typer.Option(help="The base's, where absent.")] = None,
    labels: Annotated[
        list[str] | None, typer.Option(help="Id of the labels on the Hub; may be repeated.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a private repository.")] = False,
    collection: Annotated[
        str | None, typer.Option(help="Title or slug; auto for the base's family.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write the exact folder and send nothing.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Where a dry run writes: runs/publish/NAME where absent.")
    ] = None,
) -> None:
    """Publish a policy in one commit: weights, code, tokenizer, card, provenance."""
    from ospruner.hub_cards import commands
    from ospruner.hub_cards.policies import PolicyRelease

    release = PolicyRelease(repo, base, base_revision, license, labels or ())
    commands.publish_policy(
        folder,
        release,
        private=private,
        collection=collection,
        dry_run=dry_run,
        out=out,
        console=console,
    )


@app.command()
def verify(
    repo: Annotated[str, typer.Argument(help="Id of a policy on the Hub, or its folder.")],
    revision: Annotated[str | None, typer.Option(help="Commit, branch or tag.")] = None,
) -> None:
    """Check a published policy: code, hashes, base, probabilities; status 1 where one fails."""
    from ospruner.hub_cards import commands

    if not commands.verify(repo, revision, console):
        raise typer.Exit(1)


def _folder(out: Path, name: str) -> Path:
    return out if out != Path("runs/demo") or name == "standard" else Path(f"runs/demo-{name}")


def main() -> None:
    """Entry point of the console script; what a user can mend is said without a trace."""
    try:
        app()
    except (ValueError, OSError, FloatingPointError, MemoryError) as error:
        Console(stderr=True).print(f"[red]Error:[/red] {escape(str(error))}")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
