"""Frontiers of a finished `ospruner demo`: areas, gaps to the oracle, and how far seeds spread.

    ospruner demo --full
    python benchmarks/frontier.py --run runs/demo-full [--anneal] [--json FILE]

With `--anneal` a policy is annealed for each of four prices with the demo's seeds, on the same
labels, and stands beside the one of every price: half as many passes a price, twice as many in all.
A killed run continues. Other baselines join in where each seed's folder holds them, in folders
named as `ospruner train --method`.

What `ospruner compare` does for any labels, by the same code, and how far seeds spread. Every
rule of every method is replayed on the validation and test traces of the run. Each method's
thresholds are quantiles of its own signal on validation, 64 for each where the signal takes so many
values, from "at once" to "never". Intervals resample problems and, for
trained methods, training seeds; in each resample a method chooses its rules again. Differences are
paired.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from timing import environment, print_last_line
from transformers import PreTrainedModel

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.demo.demo import STATES, DemoSize, claimed, train_config
from ospruner.demo.jobs import Job, Workers
from ospruner.demo.shipped import Reasoner
from ospruner.durable import read_checked
from ospruner.eval.compare import Said, compare
from ospruner.eval.learnstop import LEARN_STOP
from ospruner.eval.measured import Split
from ospruner.eval.methods import FRONTIER, METHOD_NAMES, parse_policies
from ospruner.eval.replay import Outcome, replay
from ospruner.eval.report.summary import frontier_tables
from ospruner.eval.results import Results
from ospruner.eval.table import FloatArray
from ospruner.eval.text import penalty_name
from ospruner.eval.thinking import thinking_entropies
from ospruner.progress import PhaseBars, Progress
from ospruner.rules import FAMILIES
from ospruner.train.config import StopConfig
from ospruner.train.label_sets import load_labels
from ospruner.train.policies import SavedPolicy
from ospruner.train.predicting import Predicted, predict_outputs
from ospruner.train.traces import LabelledTraces
from ospruner.train.trainer import StopTrainer

ANNEALED = "OS-Pruner, annealed"
ANNEALED_RUNS = {"annealed-steep": (5e-3,), "annealed": (1e-3, 5e-4, 2e-4)}
"""A high price has a run of its own: annealing that starts with it keeps its early stops."""
SPREAD_BARS = {"accuracy_points": 1.0, "tokens_percent": 5.0}  # over the seeds, at the most


Spreads = dict[str, dict[str, float]]
SplitName = Literal["train", "validation", "test"]


class Demo:
    """The traces of a demo, its base, and what its policies say."""

    def __init__(self, run: Path) -> None:
        reasoner = Reasoner()
        self.base: PreTrainedModel = reasoner.model
        self.traces: dict[str, LabelledTraces] = {}
        self.splits: dict[str, Split] = {}
        names: tuple[SplitName, ...] = ("train", "validation", "test")
        for name in names:
            dataset = load_labels(run / "labels" / name).traces
            self.traces[name] = LabelledTraces.from_dataset(dataset)
            self.traces[name].keep_states(run / STATES)
            table = self.traces[name].table
            entropies = None if name == "train" else thinking_entropies(self.base, dataset, table)
            self.splits[name] = Split(
                dataset,
                table,
                len(reasoner.token_format.forced_suffix()),
                lambda ids: str(reasoner.tokenizer.decode(ids)),
                thinking_entropy=partial(_given, entropies),
            )
        self._predicted: dict[tuple[str, str], Predicted] = {}

    def predicted(self, path: str, name: str) -> Predicted:
        """What a policy says on a split."""
        if (path, name) not in self._predicted:
            model = OSPrunerForCausalLM.from_base(self.base, path)
            self._predicted[path, name] = predict_outputs(model, self.traces[name])
        return self._predicted[path, name]

    def said(self, path: str, split: Split) -> Said:
        """The same as `compare` asks for it."""
        name = next(name for name, one in self.splits.items() if one is split)
        return Said(self.predicted(path, name).probabilities)


def _given(entropies: Any) -> Any:
    return entropies


def annealed_spreads(demo: Demo, stages: Sequence[Sequence[SavedPolicy]]) -> Spreads:
    """How far the outcomes on test of the seeds of one policy a price spread."""
    table, spreads = demo.splits["test"].table, {}
    for seeds in zip(*stages, strict=True):
        price = seeds[0].price
        said = [demo.predicted(str(one.path), "test").probabilities() for one in seeds]
        outcomes = [replay(table, pi) for pi in said]
        spreads[seeds[0].name] = spread(outcomes, price)
    return spreads


def anneal(run: Path) -> None:
    """Trains the annealed policies of all seeds, side by side, unless they are there."""
    size, first = claimed(run)
    jobs: dict[str, Job[None]] = {
        f"{name}, seed {seed}": partial(anneal_one, run, size, seed, name)
        for seed, name in itertools.product(
            range(first, first + size.seeds), reversed(ANNEALED_RUNS)
        )
    }
    with PhaseBars(Console()) as bars, Workers(os.cpu_count() or 1) as workers:
        workers.run(jobs, bars)


def anneal_one(run: Path, size: DemoSize, seed: int, name: str, *, progress: Progress) -> None:
    """A job: one annealed run."""
    config = train_config(run, size, seed)
    config = StopConfig(
        str(run / "policies" / f"seed{seed}" / name), head="fixed",
        prices=list(ANNEALED_RUNS[name]), num_train_epochs=size.epochs // 2,
        learning_rate=config.learning_rate, head_learning_rate=config.head_learning_rate,
        entropy_bonus=config.entropy_bonus, states=config.states, seed=seed, disable_tqdm=True,
        use_cpu=True,
    )  # fmt: skip
    labels = (run / "labels" / split for split in ("train", "validation"))
    StopTrainer(config, *labels, progress=progress).train()


def every_price_spreads(demo: Demo, paths: Sequence[str]) -> Spreads:
    """The same of one policy of every price, at every fifth of them.

    Raises:
        SystemExit: its tokens do not fall with the price, which the head makes sure of.
    """
    said = [demo.predicted(path, "test") for path in paths]
    prices = said[0].prices
    assert prices is not None
    table = demo.splits["test"].table
    outcomes = [[replay(table, one.probabilities(p)) for one in said] for p in prices.grid()]
    for tokens in np.transpose([[one.mean_tokens for one in seeds] for seeds in outcomes]):
        if (np.diff(tokens) > 0).any():
            raise SystemExit(f"{paths[0]}: tokens rise with the price: {tokens.tolist()}")
    return {
        f"price {penalty_name(price)}": spread(seeds, price)
        for price, seeds in list(zip(prices.grid(), outcomes, strict=True))[::5]
    }


def stages_of(run: Path) -> list[SavedPolicy]:
    """The policies that a finished run has saved, in order."""
    saved = read_checked(run / "run.json", "train again")["policies"]
    return [SavedPolicy(**values, path=run / name) for name, values in saved.items()]


def measure(run: Path, prices: Sequence[float]) -> Results:
    """All numbers of a demo's run."""
    demo = Demo(run)
    runs = sorted((run / "policies").glob("seed*"))
    if not runs:
        raise SystemExit(f"{run} has no policies/seed*: give the folder of an `ospruner demo`")
    paths = {
        method: [str(stages_of(seed / method)[0].path) for seed in runs]
        for method in METHOD_NAMES
        if (runs[0] / method).is_dir()
    }
    spreads = every_price_spreads(demo, paths["os-pruner"])
    uses = parse_policies(paths["os-pruner"], ())
    if folders := [name for name in ANNEALED_RUNS if (runs[0] / name).is_dir()]:
        stages = [[one for name in folders for one in stages_of(seed / name)] for seed in runs]
        spreads |= annealed_spreads(demo, stages)
        uses += parse_policies([str(one.path) for of_seed in stages for one in of_seed])
    uses += parse_policies(
        [path for name, of in paths.items() if name != "os-pruner" for path in of]
    )
    rules = [family for name, family in FAMILIES.items() if name != "step"]
    found = compare(
        demo.splits["test"],
        [*uses, *rules, LEARN_STOP],
        choose_on=demo.splits["validation"],
        predict=demo.said,
        train=demo.splits["train"],
        prices=prices,
    )
    return Results(
        dataset="embedded reasoner, test problems",
        setting=f"replay of {len(demo.traces['test'])} traces, {len(runs)} training "
        f"seed{'s' * (len(runs) > 1)}",
        frontiers=found.frontiers.replace({"method": {FRONTIER: ANNEALED}}),
        about={
            "seeds": len(runs),
            "test_traces": len(demo.traces["test"]),
            "left_out": found.left_out,
            "seed_spread": spreads,
            **environment(),
        },
    )


def spread(outcomes: Sequence[Outcome], price: float) -> dict[str, float]:
    """Largest less smallest over the seeds: accuracy and reward in points, tokens as a share.

    `accuracy_standard_error` is that of the difference between the two most unlike seeds, by
    problem: policies that are equally good spread by about so much on these problems.
    """
    accuracy = np.array([100 * outcome.accuracy for outcome in outcomes])
    tokens: FloatArray = np.array([outcome.mean_tokens for outcome in outcomes])
    least, most = (outcomes[int(k)].correct for k in (accuracy.argmin(), accuracy.argmax()))
    return {
        "accuracy_points": float(np.ptp(accuracy)),
        "accuracy_standard_error": float(100 * np.std(most - least) / len(most) ** 0.5),
        "tokens_percent": float(100 * np.ptp(tokens) / tokens.mean()),
        "reward_points": float(np.ptp(accuracy - 100 * price * tokens)),
    }


def report(results: Results) -> None:
    """Prints the numbers, and which of the bars hold."""
    console = Console()
    for table in frontier_tables(results):
        console.print(table)
    if results.about["seeds"] == 1:
        print("\none training seed: nothing is known of the spread over seeds")
        return
    columns = {
        "accuracy_points": "accuracy, points",
        "accuracy_standard_error": "its s.e.",
        "tokens_percent": "tokens, %",
        "reward_points": "reward, points",
    }
    print(f"\n{'spread over the seeds':22}" + "".join(f"{c:>22}" for c in columns.values()))
    for name, values in results.about["seed_spread"].items():
        held = all(values[key] <= bar for key, bar in SPREAD_BARS.items())
        cells = "".join(f"{values[key]:22.2f}" if key in values else f"{'':22}" for key in columns)
        print(f"{name:22}{cells}   {'holds' if held else 'DOES NOT HOLD'}")


def main() -> None:
    """Measures, prints tables, and the numbers as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, default=Path("runs/demo-full"), help="a demo's folder")
    parser.add_argument("--lambdas", default="5e-4,2e-4,1e-4", help="of the gaps to the oracle")
    parser.add_argument("--json", metavar="FILE", help="also write the last line there")
    parser.add_argument("--anneal", action="store_true", help="train annealed policies, too")
    args = parser.parse_args()
    if args.anneal:
        anneal(args.run)
    results = measure(args.run, [float(x) for x in args.lambdas.split(",")])
    report(results)
    print_last_line(results.to_dict(), args.json)


if __name__ == "__main__":
    main()
