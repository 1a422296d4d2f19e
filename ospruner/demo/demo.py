"""`ospruner demo`: the whole job on the embedded reasoner, from sampling to pruned generation."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.calibrating import PRICE_THRESHOLD, calibrate
from ospruner.durable import replace_file
from ospruner.eval.arithmetic import ModelWork
from ospruner.eval.compute import Compute
from ospruner.eval.report.pictures import save_pareto
from ospruner.eval.report.terminal import differences_table, results_table
from ospruner.eval.results import RESULTS_FILE, Results
from ospruner.eval.table import TraceTable
from ospruner.hub_cards.cards import CARD_FILE, License, policy_card
from ospruner.progress import PhaseBars, Progress, silent
from ospruner.provenance import hash_files, provenance, read_provenance
from ospruner.train.config import StopConfig
from ospruner.train.label_sets import load_labels
from ospruner.train.policies import SavedPolicy, new_policy
from ospruner.train.predicting import predict_outputs
from ospruner.train.tail import no_denormals
from ospruner.train.traces import LabelledTraces
from ospruner.train.trainer import StopTrainer

from .comparison import (
    MIN_PROBLEMS,
    Comparison,
    Predictions,
    Promised,
    compare_methods,
    promised_result,
)
from .fresh_process import generate_side_by_side
from .jobs import Job, Workers
from .problems import Split
from .shipped import Reasoner, draw_split

CONFIDENCE = 0.95
SHOWN_EVERY = 6  # of the frontier's 31 prices, in the printed table
METHODS = ("os-pruner", "probe", "convergence")
SPLITS: tuple[Split, ...] = ("train", "test", "validation")  # the longest first
STATES = "states"
"""Folder of what the base computes on the labels, kept while the demo runs."""


@dataclass(frozen=True)
class DemoSize:
    """How much the demo does.

    Attributes:
        name: What the size is called.
        train: Problems whose traces policies are trained on.
        validation: Problems on which price and thresholds are chosen, and the promise is made.
        test: Problems that are looked at once, at the end.
        seeds: Training runs of each method; their outcomes are pooled.
        epochs: Passes over the training traces, for OS-Pruner and each baseline alike.
        max_loss: What `calibrate` shall promise on the validation traces, as a share.
    """

    name: str
    train: int
    validation: int
    test: int
    seeds: int
    epochs: int
    max_loss: float


QUICK = DemoSize("quick", train=96, validation=48, test=64, seeds=1, epochs=6, max_loss=0.1)
STANDARD = DemoSize(
    "standard", train=1200, validation=800, test=500, seeds=1, epochs=8, max_loss=0.03
)
FULL = DemoSize("full", train=12000, validation=1500, test=6000, seeds=3, epochs=8, max_loss=0.02)
PRICE_RANGE = (5e-5, 1e-2)


def train_config(out_dir: Path, size: DemoSize, seed: int, method: str = "os-pruner") -> StopConfig:
    """A training run of the demo in its folder."""
    own = {"prices": list(PRICE_RANGE)} if method == "os-pruner" else {}
    return StopConfig(
        str(out_dir / "policies" / f"seed{seed}" / method),
        method=method,
        num_train_epochs=size.epochs,
        learning_rate=5e-4,
        head_learning_rate=3e-3,
        states=str(out_dir / STATES),
        seed=seed,
        disable_tqdm=True,
        use_cpu=True,
        **own,  # type: ignore[arg-type]
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
    processes: int | None = None,
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
        processes: How many label and train side by side; None for one a core, and at least one a
            split, for three at once on two cores end sooner than two and then one. The numbers do
            not depend on it.

    Raises:
        ValueError: `out_dir` holds another run's files.
    """
    started = time.monotonic()
    reasoner = Reasoner(reasoner_folder)
    _claim(out_dir, size, seed, reasoner)
    count = processes or max(os.cpu_count() or 1, len(SPLITS))
    with Workers(count) as workers:
        traces = _label_splits(reasoner, out_dir, size, seed, console, workers)
        runs = _train_all(out_dir, size, seed, console, workers)
    predictions = _predict_all(reasoner, runs, traces, console)
    compute = _compute(reasoner, traces["test"])
    comparison = compare_methods(
        traces["validation"].table, traces["test"].table, predictions, compute
    )
    policy = _save_policy(reasoner, runs, comparison, out_dir, seed)
    paid = compute.charge_tail(
        compute.charge(traces["test"].table), predictions[0].layers, queries=True
    )
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
    results.save(policy / RESULTS_FILE)
    card = policy_card(policy, name="OS-Pruner demo policy", license=License("apache-2.0"))
    card.save(policy / CARD_FILE)
    generate_side_by_side(policy, out_dir, seed, console)
    for path in (out_dir / RESULTS_FILE, json_file):
        if path is not None:
            results.save(path)
    shutil.rmtree(out_dir / STATES)
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


def claimed(out_dir: Path) -> tuple[DemoSize, int]:
    """Size and seed of the demo that a folder holds."""
    claim = json.loads((out_dir / "demo.json").read_text())["demo"]
    return DemoSize(**{f.name: claim[f.name] for f in dataclasses.fields(DemoSize)}), claim["seed"]


def _hash_folder(folder: Path) -> str:
    return hash_files(sorted(path for path in folder.iterdir() if path.is_file()))


def _label_splits(
    reasoner: Reasoner, out_dir: Path, size: DemoSize, seed: int, console: Console, workers: Workers
) -> dict[Split, LabelledTraces]:
    jobs: dict[str, Job[None]] = {
        split: partial(_label_split, reasoner.folder, out_dir, size, seed, split)
        for split in SPLITS
    }
    with PhaseBars(console) as bars:
        workers.run(jobs, bars)
    return {split: read_split(out_dir, split) for split in SPLITS}


def read_split(out_dir: Path, split: Split) -> LabelledTraces:
    """The labels of a demo's split, whose states are kept in its folder."""
    traces = LabelledTraces.from_dataset(load_labels(out_dir / "labels" / split).traces)
    traces.keep_states(out_dir / STATES)
    return traces


@no_denormals()
def _label_split(
    reasoner_folder: Path,
    out_dir: Path,
    size: DemoSize,
    seed: int,
    split: Split,
    *,
    progress: Progress,
) -> None:
    """A job: labels a split, and keeps what policies read of its traces."""
    reasoner = Reasoner(reasoner_folder)
    problems = draw_split(split, vars(size)[split], seed)
    reasoner.label(problems, out_dir / "labels" / split, seed, progress)
    keep_states(reasoner, out_dir, split, train_config(out_dir, size, seed), progress)


def keep_states(
    reasoner: Reasoner,
    out_dir: Path,
    split: Split,
    config: StopConfig,
    progress: Progress = silent,
) -> LabelledTraces:
    """A split, with what policies of this configuration read of its traces in the demo's folder."""
    model = new_policy(
        reasoner.model,
        reasoner.tokenizer,
        config,
        reasoner.label_settings(config.seed),
        PRICE_RANGE if config.every_price else None,
    )
    traces = read_split(out_dir, split)
    traces.cache_states(model, 0, progress)
    return traces


def _train_all(
    out_dir: Path, size: DemoSize, seed: int, console: Console, workers: Workers
) -> list[dict[str, SavedPolicy]]:
    """For each training seed, the policy of each method."""
    jobs: dict[str, Job[SavedPolicy]] = {
        f"{method}, seed {number}": partial(train_one, out_dir, size, number, method)
        for number in range(seed, seed + size.seeds)
        for method in METHODS
    }
    with PhaseBars(console) as bars:
        policies = list(workers.run(jobs, bars).values())
    each = len(METHODS)
    return [
        {policy.method: policy for policy in policies[start : start + each]}
        for start in range(0, len(policies), each)
    ]


def train_one(
    out_dir: Path, size: DemoSize, seed: int, method: str, *, progress: Progress
) -> SavedPolicy:
    """A job: one training run."""
    labels = (out_dir / "labels" / split for split in ("train", "validation"))
    config = train_config(out_dir, size, seed, method)
    trainer = StopTrainer(config, *labels, progress=progress)
    trainer.train()
    return trainer.policies[0]


def _predict_all(
    reasoner: Reasoner,
    runs: Sequence[dict[str, SavedPolicy]],
    traces: Mapping[Split, LabelledTraces],
    console: Console,
) -> list[Predictions]:
    """Stop probabilities of every saved policy, loaded from its folder, on both other splits."""
    predictions = []
    with PhaseBars(console, "test") as bars:
        for number, method in enumerate(runs[0]):
            bars("policies", number * len(runs), len(runs[0]) * len(runs))
            policies = [OSPrunerForCausalLM.from_base(reasoner.model, s[method].path) for s in runs]
            validation, test = (
                [predict_outputs(policy, traces[split]) for policy in policies]
                for split in ("validation", "test")
            )
            known = policies[0].config.prices
            predictions += [
                Predictions(
                    method,
                    price or 0.0,
                    [said.probabilities(price) for said in validation],
                    [said.probabilities(price) for said in test],
                    layers=policies[0].config.num_policy_layers,
                )
                for price in ([None] if known is None else known.grid())
            ]
        bars("policies", len(runs[0]) * len(runs), len(runs[0]) * len(runs))
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
    found = calibrate(policy, labels, size.max_loss, CONFIDENCE, states=out_dir / STATES)
    rule = None
    if found.value is not None:
        pi = next(p.test[0] for p in predictions if p.price == found.value)
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
        "settings": vars(size),
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
    left_out = {
        result.name
        for place, result in enumerate(comparison.frontier)
        if place % SHOWN_EVERY and result != comparison.chosen
    }
    shown = [result for result in shown if result.name not in left_out]
    assert comparison.promised is not None
    if comparison.promised.rule is not None:
        shown = [*shown, comparison.promised.rule]
    console.print(results_table(shown, results.limits, title=title))
    console.print(
        "Of the classifiers' thresholds validation chose: (paper) among the paper's five, by AES; "
        "(1 point) the fewest tokens within 1 point of the full trace; (AES) the best AES."
    )
    console.print(
        f"One policy knows all {len(comparison.frontier)} prices λ of a token; the table shows "
        f"some, the picture and the file all. Validation chose {comparison.chosen.name} (best AES)."
    )
    console.print(f"Calibrated on validation: {comparison.promised.told}")
    if differences:
        console.print(differences_table(comparison.differences))
    bars = Table(title="What should hold", show_header=False)
    for claim, held, numbers in comparison.claims():
        bars.add_row(claim, numbers, "holds" if held else "DOES NOT HOLD")
    console.print(bars)
    if results.results[0].problems < MIN_PROBLEMS:
        console.print(
            f"{results.results[0].problems} test problems are too few to claim more: leave --quick "
            "out for that."
        )
    console.print(f"Pareto plot: {picture}")


def _save_policy(
    reasoner: Reasoner,
    runs: Sequence[dict[str, SavedPolicy]],
    comparison: Comparison,
    out_dir: Path,
    seed: int,
) -> Path:
    """Save the chosen policy as a repository folder with its provenance."""
    penalty = float(comparison.chosen.parameter or 0.0)
    folder = out_dir / "policy"
    model = OSPrunerForCausalLM.from_base(reasoner.model, runs[0]["os-pruner"].path)
    model.config.price = penalty
    model.save_pretrained(folder)
    provenance(
        folder,
        seed=seed,
        base_model=str(reasoner.folder),
        data_hash=_hash_folder(out_dir / "labels" / "train" / "data"),
        details={"price": penalty},
    )
    return folder
