"""`ospruner demo`: the whole job on the embedded reasoner, from sampling to pruned generation."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.common.durable import replace_file
from modeling_ospruner.common.progress import PhaseBars
from modeling_ospruner.common.results_file import RESULTS_FILE, Results
from modeling_ospruner.common.text import penalty_name
from modeling_ospruner.doctor.arithmetic import ModelWork
from ospruner.eval.compute import Compute
from ospruner.eval.report.pictures import save_pareto
from ospruner.eval.report.terminal import differences_table, results_table
from ospruner.eval.schema import LabelSettings
from ospruner.eval.table import TraceTable
from ospruner.hub_cards.facts import hash_files, provenance, read_provenance
from ospruner.hub_cards.render import write_policy_card

from ..fresh import predict, predict_outputs
from ..loop import StageResult, train
from ..replay_labels import PRICE_THRESHOLD, calibrate_policy
from ..settings import TrainSettings
from ..tail import no_denormals
from ..traces import LabelledTraces
from .comparison import (
    MIN_PROBLEMS,
    Comparison,
    Predictions,
    Promised,
    compare_methods,
    promised_result,
)
from .fresh_process import generate_side_by_side
from .problems import Split
from .shipped import Reasoner, draw_split

STEEP_RUN = "os-pruner-steep"
CONFIDENCE = 0.95
SHOWN_EVERY = 6  # of the frontier's 31 prices, in the printed table
BASELINES: tuple[Literal["probe", "convergence"], ...] = ("probe", "convergence")


@dataclass(frozen=True)
class DemoSize:
    """How much the demo does.

    Attributes:
        name: What the size is called.
        train: Problems whose traces policies are trained on.
        validation: Problems on which lambda and thresholds are chosen.
        test: Problems that are looked at once, at the end.
        seeds: Training runs of each method; their outcomes are pooled.
        steep_penalties: Lambdas above those, for the short end of the frontier, in reward a
            thinking token. They are a run of their own: annealing that starts with one of them
            stays with its early stops (docs/training.md).
        length_penalties: The annealed lambdas.
        not_chosen: How many of all these, the highest, are shown, but not chosen from.
        epochs_per_stage: Passes over the training traces for each lambda, or for all at once.
        baseline_epochs: Passes for each baseline, which would overfit with as many in all.
        swa_share: Share of a stage's last steps whose weights are averaged, at constant learning
            rates; 0 keeps the last weights, at rates that fall to a tenth.
        entropy_bonus: Of OS-Pruner's policies, in reward a nat.
        price_range: Low and high of the prices of one policy of every price, which then takes the
            place of the annealed and the steep ones; () for these.
        max_loss: What `calibrate` shall promise of it on the validation traces, as a share.
        layers: Layers of the base that policies copy.
    """

    name: str
    train: int
    validation: int
    test: int
    seeds: int
    steep_penalties: tuple[float, ...]
    length_penalties: tuple[float, ...]
    not_chosen: int
    epochs_per_stage: int
    baseline_epochs: int
    swa_share: float = 0.0
    entropy_bonus: float = 0.0
    price_range: tuple[float, ...] = ()
    max_loss: float = 0.0
    layers: int = 2


PRICE_RANGE = (5e-5, 1e-2)
QUICK = DemoSize(
    "quick",
    train=96,
    validation=48,
    test=64,
    seeds=1,
    steep_penalties=(),
    length_penalties=(),
    not_chosen=0,
    epochs_per_stage=6,
    baseline_epochs=4,
    swa_share=0.5,
    entropy_bonus=0.01,
    price_range=PRICE_RANGE,
    max_loss=0.1,
    layers=1,
)
STANDARD = dataclasses.replace(
    QUICK,
    name="standard",
    train=1200,
    validation=600,
    test=500,
    epochs_per_stage=8,
    max_loss=0.03,
)
FULL = DemoSize(
    "full",
    train=12000,
    validation=1500,
    test=6000,
    seeds=3,
    steep_penalties=(5e-3,),
    length_penalties=(1e-3, 5e-4, 2e-4),
    not_chosen=2,
    epochs_per_stage=4,
    baseline_epochs=2,
    swa_share=0.5,
    entropy_bonus=0.01,
)


def train_settings(size: DemoSize, seed: int, length_penalties: Sequence[float]) -> TrainSettings:
    """The toy's optimiser settings (the paper's learning rate is for 7B models)."""
    return TrainSettings(
        head="price" if size.price_range else "fixed",
        price_range=size.price_range,
        length_penalties=length_penalties,
        num_policy_layers=size.layers,
        epochs_per_stage=size.epochs_per_stage,
        batch_size=32,
        learning_rate=5e-4,
        head_learning_rate=3e-3,
        final_learning_rate_share=1.0 if size.swa_share else 0.1,
        swa_share=size.swa_share,
        entropy_bonus=size.entropy_bonus,
        seed=seed,
    )


@no_denormals()
def run_demo(
    out_dir: Path,
    size: DemoSize,
    seed: int,
    console: Console,
    json_file: Path | None = None,
    reasoner_folder: Path | None = None,
    differences: bool = False,
) -> Comparison:
    """Label, train, choose, test, save, load in a fresh process, generate.

    Args:
        out_dir: Folder of the run; a stopped run continues, one of other settings is refused.
        size: How much to do.
        seed: Seed of problems, sampling and training.
        console: Where to draw bars and print.
        json_file: Where to write every number too.
        reasoner_folder: Another embedded reasoner; None for the shipped one.
        differences: Print the paired differences too.

    Raises:
        ValueError: `out_dir` holds another run's files.
    """
    started = time.monotonic()
    reasoner = Reasoner(reasoner_folder)
    _claim(out_dir, size, seed, reasoner)
    traces = _label_splits(reasoner, out_dir, size, seed, console)
    runs = _train_all(reasoner, traces, out_dir, size, seed, console)
    predictions = _predict_all(reasoner, runs, traces, size, console)
    compute = _compute(reasoner, traces["test"])
    comparison = compare_methods(
        traces["validation"].table, traces["test"].table, predictions, compute
    )
    policy = _save_policy(reasoner, runs, comparison, out_dir, seed)
    if size.price_range:
        paid = compute.charge_tail(compute.charge(traces["test"].table), size.layers)
        comparison = _promise(comparison, policy, predictions, paid, out_dir, size)
    picture = out_dir / "pareto.png"
    save_pareto(
        comparison.drawn,
        picture,
        title="Embedded reasoner, test problems",
        chosen=comparison.chosen,
    )
    seeds = f"{size.seeds} training seed" + "s pooled" * (size.seeds > 1)
    results = comparison.to_results(f"replay, {seeds}", _how(policy, size, seed))
    _print(comparison, results, size, picture, differences, console)
    shutil.copyfile(picture, policy / "pareto.png")
    write_policy_card(policy, name="OS-Pruner demo policy", license="apache-2.0", results=results)
    generate_side_by_side(policy, out_dir, seed, console)
    for path in (out_dir / RESULTS_FILE, json_file):
        if path is not None:
            results.save(path)
    minutes = (time.monotonic() - started) / 60
    console.print(f"Policy: {policy}; numbers: {out_dir / RESULTS_FILE}; {minutes:.1f} minutes.")
    return comparison


def _claim(out_dir: Path, size: DemoSize, seed: int, reasoner: Reasoner) -> None:
    """Make the folder this run's, or refuse it."""
    claim = out_dir / "demo.json"
    identity = {"demo": vars(size) | {"seed": seed, "reasoner": _hash_folder(reasoner.folder)}}
    identity = json.loads(json.dumps(identity))
    if claim.is_file():
        there = json.loads(claim.read_text())
        if there != identity:
            raise ValueError(
                f"{out_dir} holds a demo of other settings ({there}; asked for: {identity}): "
                "choose another --out, or delete it"
            )
    elif out_dir.exists() and any(out_dir.iterdir()):
        raise ValueError(
            f"{out_dir} is not empty and holds no demo: choose another --out, or empty it"
        )
    out_dir.mkdir(parents=True, exist_ok=True)
    replace_file(claim, json.dumps(identity, indent=2).encode())


def _hash_folder(folder: Path) -> str:
    return hash_files(sorted(path for path in folder.iterdir() if path.is_file()))


def _label_splits(
    reasoner: Reasoner, out_dir: Path, size: DemoSize, seed: int, console: Console
) -> dict[Split, LabelledTraces]:
    counts: dict[Split, int] = {
        "train": size.train,
        "validation": size.validation,
        "test": size.test,
    }
    traces = {}
    for split, count in counts.items():
        with PhaseBars(console, split) as bars:
            rows = reasoner.label(
                draw_split(split, count, seed), out_dir / "labels" / split, seed, bars
            )
        traces[split] = LabelledTraces.from_dataset(rows)
    return traces


def _train_all(
    reasoner: Reasoner,
    traces: dict[Split, LabelledTraces],
    out_dir: Path,
    size: DemoSize,
    seed: int,
    console: Console,
) -> list[dict[str, list[StageResult]]]:
    """For each seed, the policies of each method."""
    runs = []
    label_settings: LabelSettings = reasoner.label_settings(seed)
    for number in range(seed, seed + size.seeds):
        settings = train_settings(size, number, size.length_penalties)
        plans: list[tuple[str, TrainSettings]] = [("os-pruner", settings)]
        if size.steep_penalties:
            plans.insert(0, (STEEP_RUN, train_settings(size, number, size.steep_penalties)))
        for method in BASELINES:
            baseline = settings.baseline(method)
            plans.append(
                (method, dataclasses.replace(baseline, epochs_per_stage=size.baseline_epochs))
            )
        by_method: dict[str, list[StageResult]] = {}
        for name, chosen in plans:
            with PhaseBars(console, f"{name}, seed {number}") as bars:
                by_method.setdefault(chosen.method, []).extend(
                    train(
                        reasoner.model,
                        reasoner.tokenizer,
                        traces["train"],
                        traces["validation"],
                        chosen,
                        label_settings,
                        out_dir / "policies" / f"seed{number}" / name,
                        progress=bars,
                    )
                )
        runs.append(by_method)
    return runs


def _predict_all(
    reasoner: Reasoner,
    runs: Sequence[dict[str, list[StageResult]]],
    traces: Mapping[Split, LabelledTraces],
    size: DemoSize,
    console: Console,
) -> list[Predictions]:
    """Stop probabilities of every saved policy, loaded from its folder, on both other splits."""
    predictions = []
    validation, test = traces["validation"], traces["test"]
    with PhaseBars(console, "test") as bars:
        total = sum(len(stages) for by_method in runs for stages in by_method.values())
        done = 0
        for method in runs[0]:
            for position, stage in enumerate(runs[0][method]):
                stages = [by_method[method][position] for by_method in runs]
                policies = [OSPrunerForCausalLM.from_base(reasoner.model, s.path) for s in stages]
                prices = policies[0].config.prices
                if prices is None:
                    predictions.append(
                        Predictions(
                            method,
                            stage.length_penalty,
                            [s.validation_probabilities() for s in stages],
                            [predict(policy, test) for policy in policies],
                            eligible=method != "os-pruner" or position >= size.not_chosen,
                            layers=policies[0].config.num_policy_layers,
                        )
                    )
                else:  # each says everything in one pass
                    on_validation, on_test = (
                        [predict_outputs(p, t) for p in policies] for t in (validation, test)
                    )
                    predictions += [
                        Predictions(
                            method,
                            price,
                            [one.probabilities(price) for one in on_validation],
                            [one.probabilities(price) for one in on_test],
                            every_price=True,
                            layers=policies[0].config.num_policy_layers,
                        )
                        for price in prices.grid()
                    ]
                done += len(runs)
                bars("policies", done, total)
    return predictions


def _promise(
    comparison: Comparison,
    policy: Path,
    predictions: Sequence[Predictions],
    test: TraceTable,
    out_dir: Path,
    size: DemoSize,
) -> Comparison:
    """Calibrates the policy on the validation traces, and measures the promise on test.

    Nothing of the policy but its default price was chosen on the validation traces, and the
    calibration does not read that.
    """
    labels = out_dir / "labels" / "validation"
    found = calibrate_policy(policy, labels, size.max_loss, CONFIDENCE)
    rule = None
    if found.value is not None:
        pi = next(p.test[0] for p in predictions if p.length_penalty == found.value)
        rule = promised_result(test, pi, PRICE_THRESHOLD, found.value)
    promised = Promised(size.max_loss, found.told(size.max_loss, CONFIDENCE), rule)
    return dataclasses.replace(comparison, promised=promised)


def _how(policy: Path, size: DemoSize, seed: int) -> dict[str, Any]:
    """By which command, code and settings the numbers came about."""
    record = dataclasses.asdict(read_provenance(policy))
    names = ("command", "created_utc", "git_commit", "git_modified", "packages", "python")
    return {
        **{name: record[name] for name in (*names, "platform")},
        "seed": seed,
        "settings": json.loads(json.dumps(vars(size))),
    }


def _compute(reasoner: Reasoner, traces: LabelledTraces) -> Compute:
    """What the base computes on these traces' prompts."""
    return Compute(
        ModelWork.of_config(reasoner.model.config),
        traces.token_lengths - traces.table.full_tokens,
        len(reasoner.token_format.forced_suffix()),
    )


def _print(
    comparison: Comparison,
    results: Results,
    size: DemoSize,
    picture: Path,
    differences: bool,
    console: Console,
) -> None:
    title = f"{results.dataset}: {results.setting}"
    console.print()
    shown = results.results
    if comparison.every_price:
        left_out = {
            result.name
            for place, result in enumerate(comparison.frontier)
            if place % SHOWN_EVERY and result != comparison.chosen
        }
        shown = [result for result in shown if result.name not in left_out]
        if comparison.promised is not None and comparison.promised.rule is not None:
            shown = [*shown, comparison.promised.rule]
    console.print(results_table(shown, results.limits, title=title))
    console.print(
        "Of the classifiers' thresholds validation chose: (paper) among the paper's five, by AES; "
        "(1 point) the fewest tokens within 1 point of the full trace; (AES) the best AES."
    )
    if comparison.every_price:
        console.print(
            f"One policy knows all {len(comparison.frontier)} prices λ of a token; the table shows "
            f"some, the picture and the file all. Validation chose {comparison.chosen.name} "
            "(best AES)."
        )
        if comparison.promised is not None:
            console.print(f"Calibrated on validation: {comparison.promised.told}")
    else:
        penalties = (*size.steep_penalties, *size.length_penalties)[: size.not_chosen]
        highest = ", ".join(penalty_name(penalty) for penalty in penalties)
        console.print(f"λ = {highest}: the frontier's short end, shown, but not chosen from.")
        why = "fewest tokens within 1 point of the full trace"
        if not comparison.accurate:
            why = "best AES"
            console.print("No λ kept the accuracy within 1 point on validation.")
        console.print(f"Chosen on validation: {comparison.chosen.name} ({why}).")
    if differences:
        console.print(differences_table(comparison.differences))
    bars = Table(title="What should hold", show_header=False)
    for claim, held, numbers in comparison.claims():
        bars.add_row(claim, numbers, "holds" if held else "DOES NOT HOLD")
    console.print(bars)
    if comparison.every_price and results.results[0].problems < MIN_PROBLEMS:
        console.print(
            f"{results.results[0].problems} test problems are too few to claim more: leave --quick "
            "out for that."
        )
    console.print(f"Pareto plot: {picture}")


def _save_policy(
    reasoner: Reasoner,
    runs: Sequence[dict[str, list[StageResult]]],
    comparison: Comparison,
    out_dir: Path,
    seed: int,
) -> Path:
    """Save the chosen policy as a repository folder with its provenance."""
    penalty = float(comparison.chosen.parameter or 0.0)
    stages = runs[0]["os-pruner"]
    stage = next((s for s in stages if s.length_penalty == penalty), stages[0])
    folder = out_dir / "policy"
    model = OSPrunerForCausalLM.from_base(reasoner.model, stage.path)
    model.config.length_penalty = penalty
    model.save_pretrained(folder)
    provenance(
        folder,
        seed=seed,
        base_model=str(reasoner.folder),
        data_hash=_hash_folder(out_dir / "labels" / "train" / "data"),
        details={"length_penalty": penalty},
    )
    return folder
