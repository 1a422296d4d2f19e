"""Commands that compare stopping rules: `eval` and `lm-eval`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import (
    AcrossTasks,
    AllowCode,
    BaseName,
    Charge,
    Device,
    Differences,
    Dtype,
    EngineArgs,
    JsonFile,
    LengthPenalty,
    Penalties,
    ProblemsName,
    States,
    Urls,
    WindDown,
    console,
)

if TYPE_CHECKING:
    from ospruner.eval.online.evaluation import Evaluation

eval_app = typer.Typer(help="Compare stopping rules.", no_args_is_help=True)


@eval_app.command("replay")
def eval_replay(
    labels: Annotated[str, typer.Option(help="Folder or Hub id of labelled traces.")],
    out: Annotated[Path, typer.Option(help="Folder for the results.", file_okay=False)],
    policies: Annotated[
        list[str] | None,
        typer.Option(help="Policy, or folder of policies; @.7,.8 for thresholds. Repeatable."),
    ] = None,
    price: LengthPenalty = "",
    rules: Annotated[
        list[str] | None, typer.Option(help="budget:200, step:5, entropy:0.4, ... Repeatable.")
    ] = None,
    validation: Annotated[
        str | None, typer.Option(help="Labels on which to choose the best fixed budget and step.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="The base, if it is no longer where the labels say.")
    ] = None,
    across_tasks: AcrossTasks = False,
    device: Device = None,
    states: States = None,
    model: BaseName = None,
    name: ProblemsName = None,
    penalties: Penalties = "",
    charge: Charge = "thinking",
    differences: Differences = False,
    limit: Annotated[int | None, typer.Option(help="Only the first N traces.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Compute the exact expected accuracy and length of policies and rules on labelled traces."""
    from ospruner.comparing import compare
    from ospruner.eval.methods import parse_prices
    from ospruner.eval.metrics import charged_variant
    from ospruner.eval.report.summary import parse_lambdas
    from ospruner.progress import PhaseBars

    lambdas, variant = parse_lambdas(penalties), charged_variant(charge)  # refused before the work
    with PhaseBars(console, "replay") as bars:
        report = compare(
            labels, [*(policies or ()), *(rules or ())], choose_on=validation,
            prices=parse_prices(price), rewards_at=lambdas, variant=variant, base=base,
            across_tasks=across_tasks, model=model, benchmark=name, limit=limit, device=device,
            states=states, progress=bars,
        )  # fmt: skip
    _show(report.evaluation, out, lambdas, charge, differences, json_file)


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
    lambdas: Annotated[str, typer.Option(help="Prices of the gaps to the oracle.")] = "",
    train: Annotated[
        str | None, typer.Option(help="Labels to fit LearnStop on; default: the validation's.")
    ] = None,
    replicates: Annotated[int, typer.Option(help="Resamples of the intervals.")] = 2000,
    base: Annotated[
        str | None, typer.Option(help="The base, if it is no longer where the labels say.")
    ] = None,
    device: Device = None,
    states: States = None,
    json_file: JsonFile = None,
) -> None:
    """Compare whole methods: area under the frontier, gap to the oracle closed, intervals."""
    from ospruner.comparing import compare
    from ospruner.eval.report.summary import parse_lambdas
    from ospruner.eval.report.terminal import frontier_tables
    from ospruner.progress import PhaseBars

    penalties = parse_lambdas(lambdas) or None  # refused before the work
    names = {"all": ["rules"], "none": []}.get(rules, rules.split(","))
    with PhaseBars(console, "frontier") as bars:
        report = compare(
            labels, [*(policies or ()), *names], choose_on=validation, rewards_at=penalties,
            train=train, base=base, replicates=replicates, device=device, states=states,
            progress=bars, viewed=0,
        )  # fmt: skip
    report.save(out)
    for table in frontier_tables(report.results):
        console.print(table)
    if json_file is not None:
        report.results.save(json_file)
    console.print(f"Numbers and picture: {out / 'results.json'}, {out / 'pareto.png'}")


@eval_app.command("online")
def eval_online(
    dataset: Annotated[str, typer.Option(help="gsm8k, math500, aime, ..., a file, or a Hub id.")],
    out: Annotated[
        Path, typer.Option(help="Folder of the run; a stopped run continues.", file_okay=False)
    ],
    policies: Annotated[
        list[str] | None, typer.Option(help="As for replay. The base is what they pin. Repeatable.")
    ] = None,
    price: LengthPenalty = "",
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
    from ospruner.engines.opening import parse_engine_args
    from ospruner.eval.methods import parse_prices
    from ospruner.eval.metrics import charged_variant
    from ospruner.eval.online.command import OnlineRequest, run_online
    from ospruner.eval.online.settings import preset as preset_settings
    from ospruner.eval.report.summary import parse_lambdas
    from ospruner.progress import PhaseBars

    settings = preset_settings(
        preset, samples=samples, temperature=temperature, top_p=top_p, answer=answer, seed=seed,
        max_thinking_tokens=max_thinking_tokens, max_answer_tokens=max_answer_tokens,
        batch_problems=batch_problems,
    )  # fmt: skip
    request = OnlineRequest(
        dataset=dataset, policies=policies or (),
        prices=parse_prices(price), rules=rules or (),
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
        prices=parse_lambdas(penalties), differences=differences,
    )  # fmt: skip
    for path in written:
        console.print(f"Wrote {path}", soft_wrap=True)


def lm_eval_command(
    arguments: Annotated[list[str] | None, typer.Argument(help="lm_eval's own.")] = None,
) -> None:
    """lm-evaluation-harness's own command line, with the model `ospruner` in it."""
    from ospruner.optional import needed

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
    from ospruner.eval.metrics import charged_variant
    from ospruner.eval.report.summary import print_results, save_evaluation
    from ospruner.eval.results import RESULTS_FILE

    results = save_evaluation(evaluation, out, variant=charged_variant(charge), prices=lambdas)
    print_results(results, console, differences=differences)
    if json_file is not None:
        results.save(json_file)
    console.print(f"Numbers: {out / RESULTS_FILE}; page: ospruner eval report {out}")
