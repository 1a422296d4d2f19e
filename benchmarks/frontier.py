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

import itertools
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import timing
from rich.console import Console

from ospruner.comparing import compare
from ospruner.demo import REASONER
from ospruner.demo.demo import size_and_seed, train_config
from ospruner.eval.evaluation import Rule
from ospruner.eval.methods import EVERY_PRICE, FRONTIER, METHOD_NAMES, parse_prices
from ospruner.eval.replay import Outcome
from ospruner.eval.report.summary import frontier_tables
from ospruner.eval.results import Results, price_name
from ospruner.progress import PhaseBars
from ospruner.rounds import train_policy
from ospruner.train.config import StopConfig
from ospruner.workers import Job, Workers

ANNEALED = "OS-Pruner, annealed"
ANNEALED_RUNS = {"annealed-steep": (5e-3,), "annealed": (1e-3, 5e-4, 2e-4)}
"""A high price has a run of its own: annealing that starts with it keeps its early stops."""
SPREAD_BARS = {"accuracy_points": 1.0, "tokens_percent": 5.0}  # over the seeds, at the most


def anneal(run: Path) -> None:
    """Trains the annealed policies of all seeds, side by side, unless they are there."""
    size, first = size_and_seed(run)
    sides = [run / "labels" / split for split in ("train", "validation")]
    jobs: dict[str, Job] = {}
    seeds = range(first, first + size.seeds)
    for seed, name in itertools.product(seeds, reversed(ANNEALED_RUNS)):
        every_price, out = train_config(run, size, seed), run / "policies" / f"seed{seed}" / name
        same = ("learning_rate", "head_learning_rate", "states", "seed", "disable_tqdm", "use_cpu")
        own: dict[str, Any] = {one: getattr(every_price, one) for one in same}
        own |= {"prices": list(ANNEALED_RUNS[name]), "num_train_epochs": size.epochs // 2}
        config = StopConfig(str(out), head="fixed", **own)
        jobs[f"{name}, seed {seed}"] = partial(train_policy, config, *sides)
    with PhaseBars(Console()) as bars, Workers(os.cpu_count() or 1) as workers:
        workers.run(jobs, bars)


def spreads(rules: Sequence[Rule]) -> dict[str, dict[str, float]]:
    """How far seeds spread: of the policy of every price at every fifth, and of one a price."""
    every = [rule for rule in rules if rule.method == EVERY_PRICE]
    for seed in zip(*(rule.outcomes for rule in every), strict=True):
        tokens = [one.mean_tokens for one in seed]
        if tokens != sorted(tokens, reverse=True):  # which the head makes sure of
            raise SystemExit(f"tokens rise with the price: {tokens}")
    found = {f"price {price_name(rule.parameter or 0)}": spread(rule) for rule in every[::5]}
    annealed = [rule for rule in rules if rule.method == FRONTIER]
    return found | {f"price{price_name(rule.parameter or 0)}": spread(rule) for rule in annealed}


def spread(rule: Rule) -> dict[str, float]:
    """Largest less smallest over the seeds: accuracy and reward in points, tokens as a share.

    `accuracy_standard_error` is that of the difference between the two most unlike seeds, by
    problem: policies that are equally good spread by about so much on these problems.
    """
    accuracy = np.array([100 * outcome.accuracy for outcome in rule.outcomes])
    tokens = np.array([outcome.mean_tokens for outcome in rule.outcomes])
    ends: list[Outcome] = [rule.outcomes[int(k)] for k in (accuracy.argmin(), accuracy.argmax())]
    apart = ends[1].correct - ends[0].correct
    return {
        "accuracy_points": float(np.ptp(accuracy)),
        "accuracy_standard_error": float(100 * np.std(apart) / len(apart) ** 0.5),
        "tokens_percent": float(100 * np.ptp(tokens) / tokens.mean()),
        "reward_points": float(np.ptp(accuracy - 100 * (rule.parameter or 0) * tokens)),
    }


def measure(run: Path, prices: Sequence[float]) -> Results:
    """All numbers of a demo's run."""
    seeds = sorted((run / "policies").glob("seed*"))
    if not seeds:
        raise SystemExit(f"{run} has no policies/seed*: give the folder of an `ospruner demo`")
    names = [name for name in (*METHOD_NAMES, *ANNEALED_RUNS) if (seeds[0] / name).is_dir()]
    methods: list[Any] = [*(seed / name for name in names for seed in seeds), "rules"]
    labels = run / "labels"
    more: dict[str, Any] = {"base": str(REASONER), "states": run / "states", "prices": ()}
    more |= {"choose_on": labels / "validation", "train": labels / "train", "rewards_at": prices}
    found = compare(labels / "test", methods, **more)
    about: dict[str, Any] = {"seeds": len(seeds), "test_traces": len(found)}
    about |= {"left_out": found.results.about["left_out"], "seed_spread": spreads(found.rules)}
    return Results(
        dataset="embedded reasoner, test problems",
        setting=f"replay of {len(found)} traces, training seeds: {len(seeds)}",
        frontiers=found.frontiers.replace({"method": {FRONTIER: ANNEALED}}),
        about={**timing.environment(), **about},
    )


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
    for table in frontier_tables(results):
        Console().print(table)
    frame = pd.DataFrame(results.about["seed_spread"]).T
    held = (frame[list(SPREAD_BARS)] <= pd.Series(SPREAD_BARS)).all(axis=1)
    if results.about["seeds"] == 1:
        print("\none training seed: nothing is known of the spread over seeds")
    else:
        bars = held.map({True: "hold", False: "DO NOT HOLD"})
        print(f"\nspread over the seeds\n{frame.round(2).assign(bars=bars).to_string()}")
    timing.print_json(results.to_dict(), args.json)


if __name__ == "__main__":
    main()
