"""The commands of `ospruner`: each calls one function of the package and prints what it found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from .fields import Fields, LazyGroup, fields_of, with_fields

console = Console()
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


JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        help="Write every number to this file too.",
        dir_okay=False,
        callback=_in_a_folder,
    ),
]
Base = Annotated[str | None, typer.Option(help="The base, if it is no longer where labels say.")]
Device = Annotated[str | None, typer.Option(help="Torch device; default: the best.")]
States = Annotated[
    Path | None,
    typer.Option(
        help="Folder that keeps the trunk's states, for the next command on these labels.",
        file_okay=False,
    ),
]
Out = Annotated[
    Path, typer.Option(help="Folder of the run; a stopped run continues.", file_okay=False)
]
Revision = Annotated[str | None, typer.Option(help="Commit, branch or tag on the Hub.")]
MAKE, USE, SHARE = "Make a policy", "Use it", "Share and look"

LABEL = Fields(
    "ospruner.train.labels.label:LabelConfig",
    shown=(
        *("engine", "limit", "split", "task", "samples", "max_thinking_tokens", "answer"),
        *("format", "seed", "revision", "urls", "allow_code"),
    ),
    hidden=("base", "dataset", "out"),
)
IMPORT = Fields(
    LABEL.where,
    shown=("engine", "limit", "task", "max_thinking_tokens", "revision", "urls", "allow_code"),
    hidden=LABEL.hidden,
)
TRAIN = Fields(
    "ospruner.train.config:StopConfig",
    shown=(
        *("method", "head", "prices", "tuning", "layers", "num_train_epochs", "learning_rate"),
        *("batch_size", "limit", "base", "states", "seed"),
    ),
    hidden=("output_dir",),
)
COMPARING = Fields("ospruner.cli.comparing:Comparing")
PLAN = Fields("ospruner.doctor.plan:Workload")


@app.command(rich_help_panel=MAKE)
def demo(
    out: Annotated[
        Path | None, typer.Option(help="Folder; default: runs/demo.", file_okay=False)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The one-minute version.")] = False,
    full: Annotated[bool, typer.Option("--full", help="The proof: 3 seeds, an hour.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of problems, sampling and training.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Do the whole job on the embedded reasoner: label, train, test, save, load, generate."""
    from ospruner.demo.demo import FULL, QUICK, STANDARD, run_demo

    if quick and full:
        raise typer.BadParameter("--quick and --full exclude each other; give one of them.")
    size = QUICK if quick else FULL if full else STANDARD
    default = "runs/demo" if size is STANDARD else f"runs/demo-{size.name}"
    run_demo(out or Path(default), size, seed, console, json_file)


@app.command(rich_help_panel=MAKE)
@with_fields(LABEL)
def label(
    context: typer.Context,
    base: Annotated[str, typer.Option(help="The reasoning model: a folder or a Hub id.")],
    dataset: Annotated[
        str, typer.Option(help="gsm8k, math500, aime, deepscaler, ..., a file, or a Hub id.")
    ],
    out: Out,
    json_file: JsonFile = None,
) -> None:
    """Sample traces of problems, force and grade the answer after every step."""
    from ospruner.train.labels.label import LabelConfig, run_label

    given = fields_of(context, LABEL, base=base, dataset=dataset, out=str(out))
    with _stoppable(out), _bars("") as bars:
        run_label(LabelConfig(**given), bars)
    _print_labels(out, json_file)


@labels_app.command("import")
@with_fields(IMPORT)
def labels_import(
    context: typer.Context,
    file: Annotated[str, typer.Argument(help="Traces: .jsonl, .jsonl.gz or .parquet.")],
    base: Annotated[str, typer.Option(help="The model that answers: a folder or a Hub id.")],
    out: Out,
    json_file: JsonFile = None,
) -> None:
    """Label traces that others made: force and grade the answer after every step."""
    from ospruner.train.labels.label import import_traces

    with _stoppable(out), _bars("") as bars:
        import_traces(base, file, out=out, progress=bars, **fields_of(context, IMPORT))
    _print_labels(out, json_file)


@labels_app.command("regrade")
def labels_regrade(
    folder: Annotated[Path, typer.Argument(help="Folder of labels.")],
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Run programs that the model wrote, locked in.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Grade the stored answers again; nothing is generated."""
    from ospruner.train.labels.label import regrade
    from ospruner.train.labels.summary import told_regraded

    with _bars("") as bars:
        said, numbers = told_regraded(regrade(folder, bars, allow_code))
    console.print(said, markup=False, highlight=False)
    _write(numbers, json_file)


@app.command(rich_help_panel=MAKE)
@with_fields(TRAIN)
def train(
    context: typer.Context,
    labels: Annotated[list[str], typer.Option(help="Folder or Hub id. Repeatable: a mix.")],
    out: Out,
    validation: Annotated[
        list[str] | None, typer.Option(help="Labels of other problems; default: hold some out.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Train a policy on labelled traces; defaults follow from the labels and the base."""
    from ospruner.progress import silent
    from ospruner.train.config import StopConfig
    from ospruner.train.trainer import StopTrainer

    given = {"disable_tqdm": True, **fields_of(context, TRAIN)}
    config = StopConfig(str(out), **given)
    console.quiet = not config.should_save  # of several processes the first speaks
    with _bars("") as bars:
        told = bars if config.should_save else silent
        trainer = StopTrainer(config, labels, validation, progress=told)
        trainer.train()
    found = [vars(policy) | {"path": str(policy.path)} for policy in trainer.policies]
    table = Table(title="On the validation traces")
    for heading in ("policy", "price", "accuracy %", "thinking tokens", "saved %"):
        table.add_column(heading)
    full = trainer.policies[0]
    table.add_row(
        "full trace", "", f"{100 * full.full_accuracy:.1f}", f"{full.full_tokens:.0f}", ""
    )
    for policy in trainer.policies:
        price = f"{policy.price:g}" if policy.method == "os-pruner" else ""
        saved = f"{100 * (1 - policy.tokens / policy.full_tokens):.1f}"
        accuracy = f"{100 * policy.accuracy:.1f}"
        table.add_row(policy.path.name, price, accuracy, f"{policy.tokens:.0f}", saved)
    console.print(table)
    for policy in trainer.policies:
        if policy.warning:
            console.print(f"[yellow]Warning:[/yellow] {policy.path.name} {policy.warning}.")
        console.print(f"Policy: {policy.path}", soft_wrap=True)
    _write(found, json_file)


@app.command(rich_help_panel=MAKE)
@with_fields(COMPARING)
def compare(
    context: typer.Context,
    labels: Annotated[
        str | None,
        typer.Argument(
            help="Labels to measure on; without methods, a folder of earlier comparisons."
        ),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Argument(help="Policies, and rules: budget:400, deer:.95, deer; rules: all."),
    ] = None,
    choose_on: Annotated[
        str | None, typer.Option(help="Labels of other problems, on which choices are made.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for numbers, picture, page.", file_okay=False)
    ] = None,
    prices: Annotated[
        str, typer.Option(help="Of a token, for policies of every price: 5e-5,1e-4, or all.")
    ] = "",
    online: Annotated[
        bool, typer.Option("--online", help="Generate on the labels' problems; a run continues.")
    ] = False,
    samples: Annotated[int, typer.Option(help="With --online: of each problem.")] = 16,
    seed: Annotated[int, typer.Option(help="With --online: of the sampling.")] = 0,
    paper: Annotated[
        bool, typer.Option("--paper", help="Without methods: beside the paper's numbers.")
    ] = False,
    across_tasks: Annotated[
        bool, typer.Option("--across-tasks", help="Take policies that were trained on others.")
    ] = False,
    base: Base = None,
    device: Device = None,
    states: States = None,
    limit: Annotated[int | None, typer.Option(help="Only the first N.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Compare policies and rules on labels, exactly; or by generating."""
    from ospruner.comparing import compare
    from ospruner.eval.methods import parse_prices
    from ospruner.eval.metrics import charged_variant
    from ospruner.eval.report.page import write_report
    from ospruner.eval.report.paper import print_comparison
    from ospruner.eval.report.summary import parse_lambdas, print_results

    said = fields_of(context, COMPARING)
    earlier = labels is not None and any(Path(labels).rglob("evaluation.json"))
    if not methods and (paper or earlier or labels is None):
        if labels is None and not paper:
            raise typer.BadParameter("name labels and methods, or a folder of comparisons.")
        names = {name: said.get(name) for name in ("model", "benchmark")}
        print_comparison(labels, console, paper=paper, json_file=json_file, **names)
        pages = [] if labels is None else write_report(labels, out=out, validation=choose_on)
        for path in pages:
            console.print(f"Wrote {path}", soft_wrap=True)
        return
    said["rewards_at"] = parse_lambdas(str(said.pop("rewards_at", ""))) or None
    variant = charged_variant(said.pop("charge", "thinking"))
    chosen = parse_prices({"all": "frontier"}.get(prices, prices))
    target = out or Path("runs/compare")
    with _bars("compare") as bars:
        report = compare(
            labels, methods or [], choose_on=choose_on, prices=chosen, base=base, limit=limit,
            across_tasks=across_tasks, device=device, states=states, variant=variant,
            online=online, samples=samples, seed=seed, out=target if online else None,
            progress=bars, **said,
        )  # fmt: skip
    report.save(target)
    print_results(report.results, console)
    if json_file is not None:
        report.results.save(json_file)
    page = write_report(target, variant=variant, prices=report.prices)[0]
    console.print(f"Numbers: {target / 'results.json'}; page: {page}", soft_wrap=True)


@app.command(rich_help_panel=MAKE)
def calibrate(
    policy: Annotated[str, typer.Argument(help="A policy's folder; or a rule, such as deer.")],
    labels: Annotated[str, typer.Option(help="Labels that nothing was trained or chosen on.")],
    max_loss: Annotated[float, typer.Option(help="Accuracy that may be lost, such as 0.02.")],
    confidence: Annotated[float, typer.Option(help="How surely not more is lost.")] = 0.95,
    mode: Annotated[
        str, typer.Option(help="threshold; or sample, of a policy of every price: it draws.")
    ] = "threshold",
    values: Annotated[
        str | None,
        typer.Option(help="Thresholds, prices, or a rule's, from careful to bold: .9,.8,.7"),
    ] = None,
    validation: Annotated[
        str | None, typer.Option(help="Labels from which the losses' variance is guessed.")
    ] = None,
    base: Base = None,
    device: Device = None,
    states: States = None,
    seed: Annotated[int, typer.Option(help="Seed of the order of problems.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Promise that stopping loses at most so much accuracy, and store the promise in the policy."""
    from dataclasses import asdict

    from ospruner.calibrating import calibrate, calibrate_rule
    from ospruner.rules import FAMILIES

    tried = tuple(_number(text) for text in values.split(",")) if values else None
    if policy in FAMILIES and not Path(policy).is_dir():
        if mode != "threshold":
            raise typer.BadParameter(f"--mode is {mode!r}; a rule such as {policy} does not draw.")
        if tried is None:
            raise typer.BadParameter(f"{policy} is a rule: give its --values, careful to bold.")
        found = calibrate_rule(policy, tried, labels, max_loss, confidence, seed=seed)
    else:
        with _bars("calibrate") as bars:
            found = calibrate(
                policy, labels, max_loss, confidence, mode=mode, values=tried,  # type: ignore[arg-type]  # checked
                validation=validation, base=base, device=device, states=states, seed=seed,
                progress=bars,
            )  # fmt: skip
    console.print(found.told(max_loss, confidence), highlight=False)
    said = {"max_loss": max_loss, "confidence": confidence, "mode": mode, "seed": seed}
    _write(said | asdict(found), json_file)
    if found.value is None:
        raise typer.Exit(1)


@app.command(
    rich_help_panel=USE,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def serve(
    context: typer.Context,
    policy: Annotated[str, typer.Argument(help="A policy, as a folder or Hub id.")],
    engine: Annotated[str, typer.Option(help="vllm or sglang.")] = "vllm",
    mode: Annotated[str | None, typer.Option(help="sample or threshold.")] = None,
    threshold: Annotated[float | None, typer.Option(help="For mode threshold, in [0, 1].")] = None,
    max_loss: Annotated[
        float | None, typer.Option(help="What `ospruner calibrate` promised, such as 0.02.")
    ] = None,
    price: Annotated[
        float | None, typer.Option(help="Of a token; default: the policy's own.")
    ] = None,
    answer: Annotated[str | None, typer.Option(help="forced, free, or tools.")] = None,
    wind_down: Annotated[
        str | None, typer.Option(help="A sentence forced before the closing.")
    ] = None,
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
) -> None:
    """Serve a policy: an OpenAI-compatible server; further options are the engine's own."""
    if engine not in ("vllm", "sglang"):
        raise typer.BadParameter(f"--engine is {engine!r}; it must be vllm or sglang.")
    given = {
        "stop_mode": mode,
        "stop_threshold": threshold,
        "stop_max_loss": max_loss,
        "stop_price": price,
        "stop_answer": answer,
        "stop_wind_down": wind_down,
        "min_thinking_tokens": min_thinking_tokens,
        "max_thinking_tokens": max_thinking_tokens,
        "stop_control": control,
    }
    defaults = {key: value for key, value in given.items() if value is not None}
    settings = {"stop_policy": not opt_in, **defaults}
    if engine == "sglang":
        from ospruner.serving.sglang.sglang_server import serve_sglang

        serve_sglang(policy, settings, context.args)
        return
    from ospruner.serving.vllm.vllm_server import serve_vllm

    serve_vllm(policy, settings, context.args)


@app.command("app", rich_help_panel=USE)
def app_command(
    policy: Annotated[
        str | None,
        typer.Argument(
            help="A policy, as a folder or Hub id; default: the demo's, made if need be."
        ),
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
    from ospruner.app.page import PIP_LINE, open_app, open_source
    from ospruner.optional import needed

    needed("gradio", "the page of `ospruner app`", PIP_LINE)
    if policy is None and url is None:
        if revision is not None:
            raise typer.BadParameter(f"--revision is {revision!r} without a policy: name it, too.")
        from ospruner.demo.demo import policy_at_hand

        policy = str(policy_at_hand(console))
    open_app(open_source(policy, url, revision), host, port, browser)


@app.command(
    "lm-eval",
    rich_help_panel=USE,
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
)
def lm_eval_command(
    arguments: Annotated[list[str] | None, typer.Argument(help="lm_eval's own.")] = None,
) -> None:
    """lm-evaluation-harness's own command line, with the model `ospruner` in it."""
    from ospruner.optional import needed

    needed("lm_eval", "`ospruner lm-eval`", "pip install 'ospruner[eval]'")
    from ospruner.eval.harness.lm_harness import run

    run(arguments or [])


@app.command(rich_help_panel=SHARE)
def publish(
    folder: Annotated[
        Path, typer.Argument(help="A policy's folder, or one of labels (or of train/, test/, ...).")
    ],
    repo: Annotated[str, typer.Argument(help="Where to: org/name.")],
    base: Annotated[
        str | None, typer.Option(help="The base's id on the Hub, if it was a local folder.")
    ] = None,
    base_revision: Annotated[
        str | None, typer.Option(help="The base's commit, branch or tag; its commit is pinned.")
    ] = None,
    license: Annotated[
        str | None, typer.Option(help="In the Hub's spelling; default: for a policy, the base's.")
    ] = None,
    labels: Annotated[
        list[str] | None,
        typer.Option(help="Of a policy: its labels' id on the Hub. Repeatable."),
    ] = None,
    problems: Annotated[
        str | None, typer.Option(help="Of labels: where the problems come from, and their licence.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a private repository.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write the exact folder, send nothing.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Where a dry run writes; default: runs/publish/NAME.")
    ] = None,
) -> None:
    """Put a policy or labels on the Hub in one commit: files, code, card, provenance."""
    from ospruner.hub_cards.publish import publish

    done = publish(
        folder, repo, private=private, dry_run=dry_run, out=out, base=base,
        base_revision=base_revision, license=license, labels=labels or (), problems=problems,
    )  # fmt: skip
    staged = done.staged
    table = Table(title=escape(repo), show_header=False, box=None, title_justify="left")
    table.add_column(overflow="fold")
    table.add_column(justify="right")
    for name, size in staged.sizes.items():
        table.add_row(escape(name), decimal(size))
    table.add_row("in all", decimal(sum(staged.sizes.values())))
    console.print(table)
    if staged.left_out:
        console.print(f"Not published: {escape(', '.join(staged.left_out))}")
    for remark in staged.remarks:
        console.print(f"[yellow]Note:[/yellow] {escape(remark)}")
    if done.url is None:
        said = f"Nothing was sent. The folder: {staged.path}"
    elif done.changed:
        said = f"Published {done.url} at commit {done.commit}"
    else:
        said = f"{done.url} holds exactly this already, at commit {done.commit}"
    console.print(said, soft_wrap=True)


@app.command(rich_help_panel=SHARE)
def verify(
    repo: Annotated[str, typer.Argument(help="Id of a policy on the Hub, or its folder.")],
    revision: Revision = None,
) -> None:
    """Check a published policy: code, hashes, base, probabilities; status 1 if one fails."""
    from ospruner.hub_cards.verify import verify

    checks = verify(repo, revision)
    table = Table(title=escape(repo), show_header=False)
    for check in checks:
        verdict = "[green]ok[/green]" if check.ok else "[red]NO[/red]"
        table.add_row(verdict, check.question, escape(check.detail))
    console.print(table)
    if not all(check.ok for check in checks):
        raise typer.Exit(1)


@app.command(rich_help_panel=SHARE)
@with_fields(PLAN)
def doctor(
    context: typer.Context,
    subject: Annotated[
        str | None, typer.Argument(help="A base or a policy, as a folder or Hub id; optional.")
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="What labelling, training and serving will need.")
    ] = False,
    revision: Revision = None,
    format_name: Annotated[
        str | None, typer.Option("--format", help="deepseek-r1, qwen3, harmony, plain, a .json.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Say what is understood of a base or a policy, and what is wrong (status 1)."""
    given = fields_of(context, PLAN)
    if plan:
        from ospruner.doctor.plan import Workload, run_plan

        if subject is None:
            raise typer.BadParameter("--plan needs a base: ospruner doctor BASE --plan")
        fine = run_plan(subject, revision, Workload(**given), console, json_file)
    else:
        from ospruner.doctor.examination import run_doctor

        if given:
            raise typer.BadParameter(f"{', '.join(given)}: fields of --plan; say that, too.")
        fine = run_doctor(subject, revision, format_name, console, json_file)
    if not fine:
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
        bool,
        typer.Option("--version", help="Print the version.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the console script; errors that a user can mend come without a traceback."""
    try:
        app()
    except (ValueError, OSError, FloatingPointError, MemoryError) as error:
        Console(stderr=True).print(f"[red]Error:[/red] {escape(str(error))}")
        raise SystemExit(1) from None


def _bars(name: str) -> Any:
    from ospruner.progress import PhaseBars

    return PhaseBars(console, name) if name else PhaseBars(console)


def _write(numbers: Any, file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps(numbers, indent=2) + "\n", "utf-8")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"--values: {text!r} is no number; write .9,.8,.7") from None


def _print_labels(out: Path, json_file: Path | None) -> None:
    from ospruner.train.labels.summary import stats_of, told

    stats = stats_of(out)
    console.print(told(out, stats), markup=False, highlight=False)
    _write(stats, json_file)


@contextmanager
def _stoppable(out: Path) -> Iterator[None]:
    """Says what is done when Ctrl-C ends a label run."""
    try:
        yield
    except KeyboardInterrupt:
        from ospruner.train.labels.summary import told_stopped

        console.print(told_stopped(out), markup=False, highlight=False)
        raise typer.Exit(130) from None
