"""The commands of `ospruner`: each calls one function of the package and prints what it found."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from .fields import Fields, LazyGroup, arg, opt, with_fields

console = Console(markup=False)  # paths and names may hold brackets
app = typer.Typer(
    name="ospruner",
    cls=LazyGroup,
    help="Stop reasoning models at the right paragraph.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    add_completion=False,
)
labels_app = typer.Typer(
    cls=LazyGroup, help="Import labelled traces, grade them again.", no_args_is_help=True
)


def _in_a_folder(file: Path | None) -> Path | None:
    """Makes the folder of a file that is written after the work, before it."""
    if file is not None:
        try:
            file.absolute().parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise typer.BadParameter(f"{file} cannot be written ({error}).") from error
    return file


_JSON = opt("Write every number to this file too.", "--json", callback=_in_a_folder, dir_okay=False)
JsonFile = Annotated[Path | None, _JSON]
Out = Annotated[Path, opt("Folder of the run; a stopped run continues.", file_okay=False)]
Revision = Annotated[str | None, opt("Commit, branch or tag on the Hub.")]
ShippedOr = Annotated[
    str | None, arg("A policy, as a folder or Hub id; default: a small one that ships.")
]
MAKE, USE, SHARE = "Make a policy", "Use it", "Share it"

LABEL = Fields(
    "ospruner.train.labels.label:LabelConfig",
    "engine limit split task samples max_thinking_tokens answer format template_arg seed revision "
    "urls",
    hidden="base dataset out",
)
MAKING = Fields(LABEL.where, hidden=f"{LABEL.hidden} limit")
IMPORT = Fields(
    LABEL.where, "engine limit task max_thinking_tokens revision urls", hidden=LABEL.hidden
)
TRAIN = Fields(
    "ospruner.train.config:StopConfig",
    "method head prices tuning layers num_train_epochs learning_rate batch_size limit base states "
    "seed",
    hidden="output_dir",
)
COMPARING = Fields(
    "ospruner.cli.settings:Comparing",
    "choose_on prices online samples seed across_tasks base device states limit",
)
CALIBRATING = Fields("ospruner.cli.settings:Calibrating", None)
SERVING = Fields("ospruner.cli.settings:Serving", None)
RELEASE = Fields("ospruner.hub_cards.publish:Release", None, hidden="repo")
PLAN = Fields("ospruner.doctor.plan:Workload")


@app.command(rich_help_panel=MAKE)
@with_fields(PLAN)
def doctor(
    subject: Annotated[str | None, arg("A base, as a folder or Hub id; optional.")] = None,
    plan: Annotated[bool, opt("What labelling, training and serving will need.", "--plan")] = False,
    revision: Revision = None,
    format_name: Annotated[
        str | None, opt("deepseek-r1, qwen3, harmony, plain, a .json.", "--format")
    ] = None,
    json_file: JsonFile = None,
    **given: Any,
) -> None:
    """Step 0: check a base before you begin; status 1 if something is wrong."""
    if plan:
        from transformers import AutoConfig

        from ospruner.doctor.plan import Workload, plan_for

        if subject is None:
            raise typer.BadParameter("--plan needs a base: ospruner doctor BASE --plan")
        config = AutoConfig.from_pretrained(subject, revision=revision)
        found: Any = plan_for(config, Workload(**given))
    else:
        from ospruner.doctor.examination import examine

        if given:
            raise typer.BadParameter(f"{', '.join(given)}: fields of --plan; say that, too.")
        found = examine(subject, revision, format_name)
    found.show(console)
    _write(found.to_dict(), json_file)
    if not found.fine:
        raise typer.Exit(1)


@app.command(rich_help_panel=MAKE)
def demo(
    out: Annotated[Path | None, opt("Folder; default: runs/demo.", file_okay=False)] = None,
    quick: Annotated[bool, opt("The one-minute version.", "--quick")] = False,
    full: Annotated[bool, opt("The proof: 3 seeds, hours.", "--full")] = False,
    seed: Annotated[int, opt("Seed of problems, sampling and training.")] = 0,
) -> None:
    """Do the whole job on the embedded reasoner: label, train, test, save, load, generate."""
    from ospruner.demo.demo import FULL, QUICK, STANDARD, run_demo

    if quick and full:
        raise typer.BadParameter("--quick and --full exclude each other; give one of them.")
    size = QUICK if quick else FULL if full else STANDARD
    default = "runs/demo" if size is STANDARD else f"runs/demo-{size.name}"
    run_demo(out or Path(default), size, seed, console)


@app.command(rich_help_panel=MAKE)
@with_fields(MAKING)
def make(
    base: Annotated[str, arg("The reasoning model: a folder or a Hub id.")],
    dataset: Annotated[str, opt("As for `ospruner label`.")],
    out: Out,
    max_loss: Annotated[float, opt("Accuracy that may be lost.")] = 0.02,
    hours: Annotated[float | None, opt("Begin no round that would exceed them.")] = None,
    problems: Annotated[int | None, opt("Label so many at the most.")] = None,
    labels: Annotated[Path | None, opt("Labels that you have: they come first.")] = None,
    **given: Any,
) -> None:
    """Make a policy with as few labels as it takes: examine, label in rounds, train, promise.

    What may be lost is told by `ospruner calibrate --help`. Status 1 where no promise is kept.
    """
    from ospruner.rounds import make

    given |= {"max_loss": max_loss, "hours": hours, "problems": problems, "labels": labels}
    with _stoppable(out / "labels"), _bars("make") as bars:
        tell = partial(console.print, highlight=False)
        made = make(base, dataset, out=out, progress=bars, tell=tell, **given)
    console.print(f"No further round: {made.why}. {made.promise}", highlight=False)
    promised = f" --max-loss {max_loss:g}" if made.promised else ""
    for line in (
        f"Policy and card: {made.policy}; report: {made.report}; curve: {out / 'curve.png'}",
        f"ospruner serve {made.policy}{promised}",
        f"ospruner publish {made.policy} ORG/NAME --dry-run",
    ):
        console.print(line, highlight=False, soft_wrap=True)
    if not made.promised:
        raise typer.Exit(1)


@app.command(rich_help_panel=MAKE)
@with_fields(LABEL)
def label(
    base: Annotated[str, opt("The reasoning model: a folder or a Hub id.")],
    dataset: Annotated[str, opt("gsm8k, math500, aime, deepscaler, ..., a file, or a Hub id.")],
    out: Out,
    json_file: JsonFile = None,
    **given: Any,
) -> None:
    """Sample traces of problems, force and grade the answer after every step."""
    from ospruner.train.labels.label import LabelConfig, run_label

    config = LabelConfig(base=base, dataset=dataset, out=str(out), **given)
    with _stoppable(out), _bars() as bars:
        run_label(config, bars)
    _print_labels(out, json_file)


@labels_app.command("import")
@with_fields(IMPORT)
def labels_import(
    file: Annotated[str, arg("Traces: .jsonl, .jsonl.gz or .parquet.")],
    base: Annotated[str, opt("The model that answers: a folder or a Hub id.")],
    out: Out,
    json_file: JsonFile = None,
    **given: Any,
) -> None:
    """Label traces that others made: force and grade the answer after every step."""
    from ospruner.train.labels.label import import_traces

    with _stoppable(out), _bars() as bars:
        import_traces(base, file, out=out, progress=bars, **given)
    _print_labels(out, json_file)


@labels_app.command("regrade")
def labels_regrade(
    folder: Annotated[Path, arg("Folder of labels.")], json_file: JsonFile = None
) -> None:
    """Grade the stored answers again; nothing is generated."""
    from ospruner.train.labels.label import regrade
    from ospruner.train.labels.statistics import told_regraded

    with _bars() as bars:
        said, numbers = told_regraded(regrade(folder, bars))
    console.print(said, highlight=False)
    _write(numbers, json_file)


@app.command(rich_help_panel=MAKE)
@with_fields(TRAIN)
def train(
    labels: Annotated[list[str], opt("Folder or Hub id. Repeatable: a mix.")],
    out: Out,
    validation: Annotated[
        list[str] | None, opt("Labels of other problems; default: hold some out.")
    ] = None,
    json_file: JsonFile = None,
    **given: Any,
) -> None:
    """Train a policy on labelled traces; defaults follow from the labels and the base."""
    from ospruner.hub_cards.cards import told_default
    from ospruner.train.config import StopConfig
    from ospruner.train.trainer import StopTrainer

    config = StopConfig(str(out), **{"disable_tqdm": True, **given})
    console.quiet = not config.should_save  # of several processes the first speaks
    with _bars() as bars:
        trainer = StopTrainer(config, labels, validation, progress=bars)
        trainer.train()
    full = trainer.policies[0]
    table = Table("policy", "price", "accuracy %", "thinking tokens", "saved %")
    table.title = "On the validation traces"
    table.add_row("full trace", "", f"{100 * full.full_accuracy:.1f}", f"{full.full_tokens:.0f}")
    for policy in trainer.policies:
        price = f"{policy.price:g}" if policy.method == "os-pruner" else ""
        saved = f"{100 * (1 - policy.tokens / policy.full_tokens):.1f}"
        accuracy = f"{100 * policy.accuracy:.1f}"
        table.add_row(policy.path.name, price, accuracy, f"{policy.tokens:.0f}", saved)
    console.print(table)
    if said := told_default(trainer.policies[0].path):
        console.print(said)
    for policy in trainer.policies:
        if policy.warning:
            console.print(Text("Warning:", "yellow"), f"{policy.path.name} {policy.warning}.")
        console.print(f"Policy: {policy.path}", soft_wrap=True)
    _write([vars(one) | {"path": str(one.path)} for one in trainer.policies], json_file)


@app.command(rich_help_panel=MAKE)
@with_fields(COMPARING)
def compare(
    labels: Annotated[
        str | None, arg("Labels to measure on; without methods, a folder of earlier comparisons.")
    ] = None,
    methods: Annotated[
        list[str] | None, arg("Policies, and rules: budget:400, deer:.95, deer; rules: all.")
    ] = None,
    out: Annotated[Path | None, opt("Folder for numbers, picture, page.", file_okay=False)] = None,
    paper: Annotated[bool, opt("Alone: the paper's Table 1.", "--paper")] = False,
    json_file: JsonFile = None,
    **said: Any,
) -> None:
    """Compare policies and rules on labels, exactly; or by generating."""
    from ospruner.comparing import compare
    from ospruner.eval.methods import parse_prices
    from ospruner.eval.metrics import AesVariant
    from ospruner.eval.report.paper import print_table_1
    from ospruner.eval.report.summary import tables_of, told, write_report
    from ospruner.eval.report.tables import best_aes_table, grid_frame
    from ospruner.eval.results import find_results

    earlier = labels is not None and any(Path(labels).rglob("results.json"))
    if paper:
        if labels is not None:
            raise typer.BadParameter("--paper stands alone: reports have its numbers anyway.")
        _write(print_table_1(console), json_file)
        return
    if labels is None:
        raise typer.BadParameter("name labels and methods, or a folder of comparisons.")
    if not methods and earlier:
        if said:
            raise typer.BadParameter(f"{', '.join(said)}: said of labels and methods, not here.")
        comparisons = list(find_results(labels).values())
        for _, of_answer in grid_frame(comparisons).groupby("answer"):
            console.print(best_aes_table(of_answer).markdown(), markup=False, soft_wrap=True)
        _write([one.to_dict() for one in comparisons], json_file)
        for path in write_report(labels, out=out):
            console.print(f"Wrote {path}", soft_wrap=True)
        return
    target = out or Path("runs/compare")
    said["prices"] = parse_prices(said.get("prices", ""))
    said["rewards_at"] = parse_prices(said.get("rewards_at", "")) or None
    said["variant"] = AesVariant(charge=said.pop("charge", "thinking"))
    if said.get("online"):
        said["out"] = target
    with _bars("compare") as bars:
        report = compare(labels, methods or [], progress=bars, **said)
    report.save(target)
    for one in (*tables_of(report.results), *told(report.results)):
        console.print(one)
    if json_file is not None:
        report.results.save(json_file)
    page = write_report(target)[0]
    console.print(f"Numbers: {target / 'results.json'}; page: {page}", soft_wrap=True)


@app.command(rich_help_panel=MAKE)
@with_fields(CALIBRATING)
def calibrate(
    policy: Annotated[str, arg("A policy's folder; or a rule, such as deer.")],
    labels: Annotated[str, opt("Labels that nothing was trained or chosen on.")],
    max_loss: Annotated[float, opt("Accuracy that may be lost, such as 0.02.")],
    json_file: JsonFile = None,
    **given: Any,
) -> None:
    """Promise that stopping loses at most so much accuracy, and store the promise in the policy.

    The loss is against the answer forced at the full trace's end; how often the base's own answer
    there is right is told beside it.
    """
    from ospruner.calibrating import calibrate
    from ospruner.hub_cards.cards import told_default

    said = {"confidence": 0.95, "mode": "threshold", **given}
    values, efforts = said.pop("values", None), said.pop("efforts", None)
    tried = tuple(map(_value, values.split(","))) if values else None
    said["efforts"] = None if efforts is None else _by_effort(efforts)
    with _bars("calibrate") as bars:
        found = calibrate(policy, labels, max_loss, values=tried, progress=bars, **said)
    console.print(found.told(max_loss, said["confidence"]), highlight=False)
    if found.efforts is not None:
        columns = ("effort", "price", "threshold", "thinking tokens", "of the full traces' %")
        table = Table(*columns, "points lost", title="What a server takes for reasoning_effort")
        for name, one in found.efforts.items():
            settings = ("" if one[key] is None else f"{one[key]:g}" for key in columns[1:3])
            share, loss = 100 * one["share"], 100 * one["loss"]
            table.add_row(name, *settings, f"{one['tokens']:.0f}", f"{share:.0f}", f"{loss:.1f}")
        console.print(table)
    if default := told_default(Path(policy)):
        console.print(f"{default} stop_policy={{'max_loss': {max_loss:g}}} uses the promise.")
    kept = {name: said[name] for name in ("confidence", "mode")}
    _write({"max_loss": max_loss, **kept, **asdict(found)}, json_file)
    if found.value is None:
        raise typer.Exit(1)


@app.command(
    rich_help_panel=USE, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
@with_fields(SERVING)
def serve(
    context: typer.Context,
    policy: ShippedOr = None,
    engine: Annotated[str, opt("vllm or sglang.")] = "vllm",
    opt_in: Annotated[bool, opt("Stop only requests that say stop_policy.", "--opt-in")] = False,
    **given: Any,
) -> None:
    """Serve a policy: an OpenAI-compatible server; further options are the engine's own."""
    settings: dict[str, Any] = {"stop_policy": not opt_in}
    if policy is None:
        from ospruner.demo import POLICY

        policy = str(POLICY)
    for name, value in given.items():
        key = name if name.endswith("_tokens") else f"stop_{name}"
        settings[key] = _by_effort(value) if name == "efforts" else value
    from ospruner.serving import launch

    launch.serve(engine, policy, settings, context.args)


@app.command(rich_help_panel=USE)
def saved(url: Annotated[str, arg("A server of `ospruner serve`.")]) -> None:
    """Print what a server has saved so far, by its control group."""
    from ospruner.serving.saved import saved_by

    print(saved_by(url))


@app.command("app", rich_help_panel=USE)
def app_command(
    policy: ShippedOr = None,
    url: Annotated[
        str | None, opt("Ask a server of `ospruner serve` instead of a policy here.")
    ] = None,
    revision: Revision = None,
    host: Annotated[str | None, opt("Address to listen at; default: this machine alone.")] = None,
    port: Annotated[int | None, opt("Default: the first free one from 7860.")] = None,
    browser: Annotated[bool, opt("Open a browser, too.", "--browser")] = False,
) -> None:
    """Open a page that shows the base's answer and the stopped one, side by side."""
    from ospruner.app.web import open_app

    if policy is None and url is None:
        if revision is not None:
            raise typer.BadParameter(f"--revision is {revision!r} without a policy: name it, too.")
        from ospruner.demo import POLICY

        policy = str(POLICY)
    open_app(policy, url, revision, host=host, port=port, in_browser=browser)


@app.command(
    "lm-eval",
    rich_help_panel=USE,
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
)
def lm_eval_command(arguments: Annotated[list[str] | None, arg("lm_eval's own.")] = None) -> None:
    """lm-evaluation-harness's own command line, with the model `ospruner` in it."""
    from ospruner.optional import needed

    needed("lm_eval", "`ospruner lm-eval`", "pip install 'ospruner[eval]'")
    from ospruner.eval.harness.lm_harness import run

    run(arguments or [])


@app.command(rich_help_panel=SHARE)
@with_fields(RELEASE)
def publish(
    folder: Annotated[Path, arg("A policy's folder, or one of labels (or of train/, test/, ...).")],
    repo: Annotated[str, arg("Where to: org/name.")],
    private: Annotated[bool, opt("Make a private repository.", "--private")] = False,
    dry_run: Annotated[bool, opt("Write the exact folder, send nothing.", "--dry-run")] = False,
    out: Annotated[Path | None, opt("Where a dry run writes; default: runs/publish/NAME.")] = None,
    **release: Any,
) -> None:
    """Put a policy or labels on the Hub in one commit: files, code, card, provenance."""
    from ospruner.hub_cards.publish import publish

    done = publish(folder, repo, private=private, dry_run=dry_run, out=out, **release)
    table = Table(title=repo, show_header=False, box=None, title_justify="left")
    table.add_column(overflow="fold")
    table.add_column(justify="right")
    for name, size in done.sizes.items():
        table.add_row(name, decimal(size))
    table.add_row("in all", decimal(sum(done.sizes.values())))
    console.print(table)
    if done.left_out:
        console.print(f"Not published: {', '.join(done.left_out)}")
    for remark in done.remarks:
        console.print(Text("Note:", "yellow"), remark)
    if done.url is None:
        said = f"Nothing was sent. The folder: {done.path}"
    elif done.changed:
        said = f"Published {done.url} at commit {done.commit}"
    else:
        said = f"{done.url} holds exactly this already, at commit {done.commit}"
    console.print(said, soft_wrap=True)


@app.command(rich_help_panel=SHARE)
def verify(
    repo: Annotated[str, arg("Id of a policy on the Hub, or its folder.")],
    revision: Revision = None,
) -> None:
    """Check a published policy: code, hashes, base, probabilities; status 1 if one fails."""
    from ospruner.hub_cards.verify import verify

    checks = verify(repo, revision)
    table = Table(title=repo, show_header=False)
    for check in checks:
        verdict = Text("ok", "green") if check.ok else Text("NO", "red")
        table.add_row(verdict, check.question, check.detail)
    console.print(table)
    if not all(check.ok for check in checks):
        raise typer.Exit(1)


app.add_typer(labels_app, name="labels", rich_help_panel=MAKE)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(version("ospruner"))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, opt("Print the version.", "--version", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the console script; errors that a user can mend come without a traceback."""
    try:
        app()
    except (ValueError, OSError, FloatingPointError, MemoryError) as error:
        Console(stderr=True, markup=False).print(Text("Error:", "red"), str(error))
        raise SystemExit(1) from None


def _bars(name: str = "") -> Any:
    from ospruner.progress import PhaseBars

    return PhaseBars(console, name)


def _write(numbers: Any, file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps(numbers, indent=2) + "\n", "utf-8")


def _number(text: str, option: str = "--values", example: str = ".9,.8,.7") -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{option}: {text!r} is no number; write {example}") from None


def _value(text: str) -> float | tuple[float, float]:
    """A threshold or a price, or 0@.95: a price and a threshold."""
    first, at, threshold = text.partition("@")
    return (_number(first), _number(threshold)) if at else _number(first)


def _by_effort(text: str) -> dict[str, float]:
    """Numbers by effort; none for an empty text."""
    pairs = (one.partition("=") for one in text.split(",") if one)
    return {
        name.strip(): _number(number, "--efforts", "low=.5,medium=.7") for name, _, number in pairs
    }


def _print_labels(out: Path, json_file: Path | None) -> None:
    from ospruner.train.labels.statistics import stats_of, told

    stats = stats_of(out)
    console.print(told(out, stats), highlight=False)
    _write(stats, json_file)


@contextmanager
def _stoppable(out: Path) -> Iterator[None]:
    """Says what is done when Ctrl-C ends a label run."""
    try:
        yield
    except KeyboardInterrupt:
        from ospruner.train.labels.statistics import told_stopped

        console.print(told_stopped(out), highlight=False)
        raise typer.Exit(130) from None
