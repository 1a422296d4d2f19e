"""Frontiers of a finished `ospruner demo`: areas, gaps to the oracle, and how far seeds spread.

    ospruner demo --full
    python benchmarks/frontier.py --run runs/demo-full [--anneal] [--json FILE]

With `--anneal` a policy is annealed for each of four prices with the demo's seeds, on the same
labels, and stands beside the one of every price: half as many passes a price, twice as many in all.
A killed run continues. Other baselines join in where each seed's folder holds them, in folders
named as `ospruner train --method`.

It is what `ospruner compare` does for any labels, and how far seeds spread. Every rule of every
method is replayed on the validation and test traces of the run. Each method's thresholds are
quantiles of its own signal on validation, 64 for each where the signal takes so many values, from
"at once" to "never". Intervals resample problems and, for trained methods, training seeds; in each
resample a method chooses its rules again. Differences are paired.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import timing
from rich.console import Console

from ospruner.comparing import Judged, compare
from ospruner.demo import REASONER
from ospruner.demo.demo import DemoSize, size_and_seed, train_config
from ospruner.eval.methods import (
    FRONTIER,
    METHOD_NAMES,
    PolicyUse,
    parse_policies,
    parse_prices,
    price_grid,
)
from ospruner.eval.replay import Outcome, replay
from ospruner.eval.report.summary import frontier_tables
from ospruner.eval.results import Results, price_name
from ospruner.eval.table import FloatArray
from ospruner.progress import PhaseBars, Progress
from ospruner.train.config import StopConfig
from ospruner.train.trainer import StopTrainer
from ospruner.workers import Job, Workers

ANNEALED = "OS-Pruner, annealed"
ANNEALED_RUNS = {"annealed-steep": (5e-3,), "annealed": (1e-3, 5e-4, 2e-4)}
"""A high price has a run of its own: annealing that starts with it keeps its early stops."""
SPREAD_BARS = {"accuracy_points": 1.0, "tokens_percent": 5.0}  # over the seeds, at the most

Spreads = dict[str, dict[str, float]]


def anneal(run: Path) -> None:
    """Trains the annealed policies of all seeds, side by side, unless they are there."""
    size, first = size_and_seed(run)
    seeds = range(first, first + size.seeds)
    jobs: dict[str, Job] = {
        f"{name}, seed {seed}": partial(anneal_one, run, size, seed, name)
        for seed, name in itertools.product(seeds, reversed(ANNEALED_RUNS))
    }
    with PhaseBars(Console()) as bars, Workers(os.cpu_count() or 1) as workers:
        workers.run(jobs, bars)


def anneal_one(run: Path, size: DemoSize, seed: int, name: str, *, progress: Progress) -> None:
    """A job: one annealed run."""
    config = train_config(run, size, seed)
    config = StopConfig(
        str(run / "policies" / f"seed{seed}" / name),
        head="fixed",
        prices=list(ANNEALED_RUNS[name]),
        num_train_epochs=size.epochs // 2,
        learning_rate=config.learning_rate,
        head_learning_rate=config.head_learning_rate,
        entropy_bonus=config.entropy_bonus,
        states=config.states,
        seed=seed,
        disable_tqdm=True,
        use_cpu=True,
    )
    labels = (run / "labels" / split for split in ("train", "validation"))
    StopTrainer(config, *labels, progress=progress).train()


def annealed_spreads(test: Judged, seeds: Sequence[Sequence[PolicyUse]]) -> Spreads:
    """How far the outcomes on test of the seeds of one policy a price spread."""
    found = {}
    for of_price in zip(*seeds, strict=True):
        said = [test.predicted(one.path) for one in of_price]
        outcomes = [replay(test.split.table, one.probabilities()) for one in said]
        price = of_price[0].price
        found[f"price{price_name(price)}"] = spread(outcomes, price)
    return found


def every_price_spreads(test: Judged, paths: Sequence[str]) -> Spreads:
    """The same of one policy of every price, at every fifth of them.

    Raises:
        SystemExit: its tokens do not fall with the price, which the head makes sure of.
    """
    said = [test.predicted(path) for path in paths]
    assert said[0].prices is not None
    grid = price_grid(said[0].prices)
    outcomes = [[replay(test.split.table, one.probabilities(p)) for one in said] for p in grid]
    for tokens in np.transpose([[one.mean_tokens for one in seeds] for seeds in outcomes]):
        if (np.diff(tokens) > 0).any():
            raise SystemExit(f"{paths[0]}: tokens rise with the price: {tokens.tolist()}")
    each = zip(grid[::5], outcomes[::5], strict=True)
    return {f"price {price_name(price)}": spread(seeds, price) for price, seeds in each}


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


def measure(run: Path, prices: Sequence[float]) -> Results:
    """All numbers of a demo's run."""
    seeds = sorted((run / "policies").glob("seed*"))
    if not seeds:
        raise SystemExit(f"{run} has no policies/seed*: give the folder of an `ospruner demo`")
    methods = [name for name in METHOD_NAMES if (seeds[0] / name).is_dir()]
    folders = [name for name in ANNEALED_RUNS if (seeds[0] / name).is_dir()]
    labels, base = run / "labels", str(REASONER)
    test = Judged(str(labels / "test"), base, states=run / "states")
    ours = [use.path for seed in seeds for use in parse_policies([str(seed / "os-pruner")])]
    spreads = every_price_spreads(test, ours)
    if folders:
        named = [[str(seed / name) for name in folders] for seed in seeds]
        spreads |= annealed_spreads(test, [parse_policies(names) for names in named])
    policies = [str(seed / name) for name in (*methods, *folders) for seed in seeds]
    found = compare(
        str(labels / "test"),
        [*policies, "rules"],
        base=base,
        states=run / "states",
        choose_on=str(labels / "validation"),
        train=str(labels / "train"),
        rewards_at=prices,
        prices=(),
    )
    return Results(
        dataset="embedded reasoner, test problems",
        setting=f"replay of {len(test.traces)} traces, {len(seeds)} training "
        f"seed{'s' * (len(seeds) > 1)}",
        frontiers=found.frontiers.replace({"method": {FRONTIER: ANNEALED}}),
        about=timing.environment()
        | {
            "seeds": len(seeds),
            "test_traces": len(test.traces),
            "left_out": found.results.about["left_out"],
            "seed_spread": spreads,
        },
    )


def report(results: Results) -> None:
    """Prints the numbers, and which of the bars hold."""
    console = Console()
    for table in frontier_tables(results):
        console.print(table)
    if results.about["seeds"] == 1:
        print("\none training seed: nothing is known of the spread over seeds")
        return
    frame = pd.DataFrame(results.about["seed_spread"]).T
    held = (frame[list(SPREAD_BARS)] <= pd.Series(SPREAD_BARS)).all(axis=1)
    print("\nspread over the seeds")
    print(frame.round(2).assign(bars=held.map({True: "hold", False: "DO NOT HOLD"})).to_string())


def main() -> None:
    """Measures, prints tables, and the numbers as one JSON object."""
    parser = timing.options(__doc__)
    parser.add_argument("--run", type=Path, default=Path("runs/demo-full"), help="a demo's folder")
    parser.add_argument("--prices", default="5e-4,2e-4,1e-4", help="of the gaps to the oracle")
    parser.add_argument("--anneal", action="store_true", help="train annealed policies, too")
    args = timing.parse(parser)
    if args.anneal:
        anneal(args.run)
    results = measure(args.run, parse_prices(args.prices) or ())
    report(results)
    timing.print_json(results.to_dict(), args.json)


if __name__ == "__main__":
    main()
