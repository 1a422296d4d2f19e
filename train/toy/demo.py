"""`ospruner demo`: the whole job on the embedded reasoner, from sampling to pruned generation."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.common.durable import replace_file
from modeling_ospruner.common.progress import PhaseBars
from modeling_ospruner.common.results_file import RESULTS_FILE, Results
from modeling_ospruner.common.text import penalty_name
from ospruner.eval.report.pictures import save_pareto
from ospruner.eval.report.terminal import differences_table, results_table
from ospruner.eval.schema import LabelSettings
from ospruner.hub_cards.facts import hash_files, provenance
from ospruner.hub_cards.render import write_policy_card

from ..fresh import predict
from ..loop import StageResult, train
from ..settings import TrainSettings
from ..tail import no_denormals
from ..trunk import LabelledTraces
from .comparison import Comparison, Predictions, compare_methods
from .fresh_process import generate_side_by_side
from .problems import Split
from .shipped import Reasoner, draw_split

STEEP_RUN = "os-pruner-steep"
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
        epochs_per_stage: Passes over the training traces for each lambda.
        baseline_epochs: Passes for each baseline, which would overfit with as many in all.
        swa_share: Share of a stage's last steps whose weights are averaged, at constant learning
            rates; 0 keeps the last weights, at rates that fall to a tenth.
        entropy_bonus: Of the annealed and the steep policies, in reward a nat.
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


STEEP_PENALTIES = (5e-3,)
LENGTH_PENALTIES = (1e-3, 5e-4, 2e-4, 1e-4, 5e-5, 2e-5, 0.0)
QUICK = DemoSize("quick", 96, 48, 64, 1, (), (2e-3, 1e-3, 5e-4), 1, 2, 4)
STANDARD = DemoSize("standard", 1200, 400, 500, 1, STEEP_PENALTIES, LENGTH_PENALTIES, 3, 2, 4)
FULL = DemoSize(
    "full",
    train=12000,
    validation=1500,
    test=6000,
    seeds=3,
    steep_penalties=STEEP_PENALTIES,
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
        length_penalties=length_penalties,
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
    comparison = compare_methods(
        traces["validation"].table,
        traces["test"].table,
        _predict_all(reasoner, runs, traces["test"], size.not_chosen, console),
    )
    picture = out_dir / "pareto.png"
    save_pareto(
        comparison.drawn,
        picture,
        title="Embedded reasoner, test problems",
        chosen=comparison.chosen,
    )
    seeds = f"{size.seeds} training seed" + "s pooled" * (size.seeds > 1)
    results = comparison.to_results(f"replay, {seeds}")
    _print(comparison, results, size, picture, differences, console)
    policy = _save_policy(reasoner, runs, results, out_dir, seed)
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
    test: LabelledTraces,
    not_chosen: int,
    console: Console,
) -> list[Predictions]:
    """Stop probabilities of every saved policy, loaded from its folder, on the test traces."""
    predictions = []
    with PhaseBars(console, "test") as bars:
        total = sum(len(stages) for by_method in runs for stages in by_method.values())
        for method in runs[0]:
            for position, stage in enumerate(runs[0][method]):
                stages = [by_method[method][position] for by_method in runs]
                policies = [OSPrunerForCausalLM.from_base(reasoner.model, s.path) for s in stages]
                predictions.append(
                    Predictions(
                        method,
                        stage.length_penalty,
                        [s.validation_probabilities() for s in stages],
                        [predict(policy, test) for policy in policies],
                        eligible=method != "os-pruner" or position >= not_chosen,
                    )
                )
                bars("policies", len(predictions) * len(runs), total)
    return predictions


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
    console.print(results_table(results.results, results.limits, title=title))
    console.print(
        "Of the classifiers' thresholds validation chose: (paper) among the paper's five, by AES; "
        "(1 point) the fewest tokens within 1 point of the full trace; (AES) the best AES."
    )
    penalties = (*size.steep_penalties, *size.length_penalties)[: size.not_chosen]
    highest = ", ".join(penalty_name(penalty) for penalty in penalties)
    console.print(f"λ = {highest}: the frontier's short end, shown, but not chosen from.")
    why = "fewest tokens within 1 point of the full trace" if comparison.accurate else "best AES"
    if not comparison.accurate:
        console.print("No λ kept the accuracy within 1 point on validation.")
    console.print(f"Chosen on validation: {comparison.chosen.name} ({why}).")
    if differences:
        console.print(differences_table(comparison.differences))
    bars = Table(title="What should hold", show_header=False)
    for claim, held, numbers in comparison.claims():
        bars.add_row(claim, numbers, "holds" if held else "DOES NOT HOLD")
    console.print(bars)
    console.print(f"Pareto plot: {picture}")


def _save_policy(
    reasoner: Reasoner,
    runs: Sequence[dict[str, list[StageResult]]],
    results: Results,
    out_dir: Path,
    seed: int,
) -> Path:
    """Save the chosen policy as a repository folder with card, results and provenance."""
    assert results.chosen is not None
    penalty = float(results.results[results.chosen].parameter or 0.0)
    stage = next(s for s in runs[0]["os-pruner"] if s.length_penalty == penalty)
    folder = out_dir / "policy"
    model = OSPrunerForCausalLM.from_base(reasoner.model, stage.path)
    model.save_pretrained(folder)
    provenance(
        folder,
        seed=seed,
        base_model=str(reasoner.folder),
        data_hash=_hash_folder(out_dir / "labels" / "train" / "data"),
        details={"length_penalty": penalty},
    )
    shutil.copyfile(out_dir / "pareto.png", folder / "pareto.png")
    write_policy_card(folder, name="OS-Pruner demo policy", license="apache-2.0", results=results)
    return folder
