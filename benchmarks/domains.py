"""Policies across domains, on the mixed reasoner: trained on one, tested on another; and rules.

    OMP_NUM_THREADS=1 python benchmarks/domains.py [--quick] [--reasoner DIR]

Traces of three domains (mathematics, choice, chain_sum of reasoning-gym) are labelled by their
tasks. A policy of every price is trained on each, one on all of them together, and one on as many
traces in all as a single domain has. Each is replayed on each domain's test traces, in mode
"sample", at several prices: accuracy less price times thinking tokens, with paired intervals
against the domain's own policy. Then LearnStop's claim: on each domain, the areas under the
frontiers of scalar rules against that of the domain's policy; thresholds are chosen on validation.
A killed run continues. What is printed is Markdown; `--show FILE` prints it of a finished one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from timing import environment, print_last_line

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.demo.domains import DOMAINS, draw_domain
from ospruner.demo.problems import Split
from ospruner.demo.shipped import MIXED_SHIPPED, Reasoner
from ospruner.eval.metrics import paired_difference
from ospruner.eval.replay import Outcome, replay, replay_full
from ospruner.eval.results_file import Estimate
from ospruner.eval.table import FloatArray
from ospruner.eval.text import penalty_name
from ospruner.progress import PhaseBars
from ospruner.train.comparing.frontier_labels import frontier_of_labels
from ospruner.train.fresh import predict_outputs
from ospruner.train.from_labels import load_labelled_base, load_labels, train_from_labels
from ospruner.train.settings import TrainSettings
from ospruner.train.tail import no_denormals
from ospruner.train.traces import LabelledTraces

MIX, THIRD = "all three", "a third of each"
PRICES = (2e-4, 1e-3, 5e-3)
PRICE_RANGE = (5e-5, 1e-2)
RULES = ("learnstop", "entropy", "confidence", "agreement", "budget")
GAP_PRICE = 1e-3


@dataclass(frozen=True)
class Size:
    """How many problems of each domain, passes over the training traces, traces a batch."""

    train: int
    validation: int
    test: int
    epochs: int
    batch: int = 32


SIZES = {"full": Size(1000, 300, 600, 8), "quick": Size(12, 6, 8, 1, batch=4)}


def settings(size: Size, seed: int) -> TrainSettings:
    """The optimiser's settings of the demo, but for what is tuned."""
    return TrainSettings(
        head="price",
        price_range=PRICE_RANGE,
        tuning="queries",
        epochs_per_stage=size.epochs,
        batch_size=size.batch,
        learning_rate=5e-4,
        head_learning_rate=3e-3,
        swa_share=0.5,
        entropy_bonus=0.01,
        seed=seed,
    )


def label(reasoner: Reasoner, run: Path, size: Size, seed: int, console: Console) -> None:
    """Labels the traces of each domain and split."""
    splits: dict[Split, int] = {
        "train": size.train,
        "validation": size.validation,
        "test": size.test,
    }
    for domain, task in DOMAINS.items():
        for split, count in splits.items():
            problems = draw_domain(domain, split, count, seed)
            with PhaseBars(console, f"{domain}, {split}") as bars:
                reasoner.label(problems, run / "labels" / domain / split, seed, bars, task)


def policies(run: Path, size: Size, seed: int, console: Console) -> dict[str, Path]:
    """A policy of every price on each domain, on all, and on a third of each."""
    every = list(DOMAINS)
    plans: dict[str, tuple[list[str], int | None]] = {d: ([d], None) for d in every}
    plans |= {MIX: (every, None), THIRD: (every, max(1, size.train // len(every)))}
    found = {}
    for name, (domains, limit) in plans.items():
        folders = [run / "labels" / domain for domain in domains]
        with PhaseBars(console, f"trained on {name}") as bars:
            (stage,) = train_from_labels(
                [folder / "train" for folder in folders],
                run / "policies" / name.replace(" ", "-"),
                lambda table: settings(size, seed),
                validation=[folder / "validation" for folder in folders],
                limit=limit,
                progress=bars,
            )
        found[name] = stage.path
    return found


def rewards(outcome: Outcome, price: float) -> FloatArray:
    """(N,) of each trace, in points."""
    return 100 * (outcome.correct - price * outcome.tokens)


def crossed(run: Path, paths: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Each policy on each domain at each price; of each domain also the full trace."""
    labels = {domain: load_labels(run / "labels" / domain / "test") for domain in DOMAINS}
    base, _ = load_labelled_base(None, labels["math"])
    models = {name: OSPrunerForCausalLM.from_base(base, path) for name, path in paths.items()}
    found = []
    for domain in DOMAINS:
        test = LabelledTraces.from_dataset(labels[domain].traces)
        table = test.table
        said = {name: predict_outputs(model, test) for name, model in models.items()}
        for price in PRICES:
            outcomes = {"full trace": replay_full(table)}
            outcomes |= {
                name: replay(table, one.probabilities(price)) for name, one in said.items()
            }
            own = rewards(outcomes[domain], price)
            for name, outcome in outcomes.items():
                mine = rewards(outcome, price)
                less = paired_difference(mine, own, table.problem_index)
                found.append(
                    {
                        "trained_on": name,
                        "tested_on": domain,
                        "price": price,
                        "reward_points": float(mine.mean()),
                        "accuracy": float(outcome.correct.mean()),
                        "tokens": float(outcome.tokens.mean()),
                        "less_own": [less.value, less.low, less.high],
                    }
                )
    return found


def against_rules(run: Path, paths: Mapping[str, Path], console: Console) -> list[dict[str, Any]]:
    """On each domain the areas of its own policy and of scalar rules, in percent."""
    found = []
    for domain in DOMAINS:
        labels = run / "labels" / domain
        with PhaseBars(console, f"rules, {domain}") as bars:
            frontiers = frontier_of_labels(
                labels / "test",
                labels / "validation",
                [str(paths[domain])],
                RULES,
                length_penalties=(GAP_PRICE,),
                train=labels / "train",
                estimate=False,
                progress=bars,
            ).results.frontiers
        for one in frontiers:
            ((_, gap),) = one.gap_closed
            found.append(
                {
                    "tested_on": domain,
                    "method": one.method,
                    "area": _percent(one.area),
                    "lead": None if one.lead is None else _percent(one.lead),
                    "gap_closed": _percent(gap),
                }
            )
    return found


def _percent(value: Estimate) -> list[float]:
    return [100 * value.value, 100 * value.low, 100 * value.high]


def _interval(values: list[float] | None, digits: int = 1, sign: str = "") -> str:
    if values is None:
        return "–"
    value, low, high = (f"{one:{sign}.{digits}f}" for one in values)
    return f"{value} [{low}, {high}]"


def markdown(found: Mapping[str, Any]) -> str:
    """The tables of the page."""
    lines = []
    cells = {(one["trained_on"], one["tested_on"], one["price"]): one for one in found["crossed"]}
    domains = list(DOMAINS)
    lines += [
        "| λ | trained on | " + " | ".join(f"on {name}" for name in domains) + " |",
        "|---|---|" + "---|" * len(domains),
    ]
    for price in PRICES:
        for name in dict.fromkeys(trained for trained, _, _ in cells):
            row = []
            for domain in domains:
                one = cells[name, domain, price]
                less = "" if name == domain else f"; {_interval(one['less_own'], sign='+')}"
                row.append(f"{one['reward_points']:.1f}, {one['tokens']:.0f} tokens{less}")
            lines.append(f"| {penalty_name(price)} | {name} | " + " | ".join(row) + " |")
    lines += ["", "| on | method | area, % | the policy's lead | gap closed, % |"]
    lines.append("|---|---|---|---|---|")
    for one in found["rules"]:
        lead = _interval(one["lead"], 2, "+")
        lines.append(
            f"| {one['tested_on']} | {one['method']} | {_interval(one['area'], 2)} | {lead} | "
            f"{_interval(one['gap_closed'])} |"
        )
    return "\n".join(lines)


@no_denormals()
def measure(
    reasoner: Reasoner, run: Path, size_name: str, seed: int, console: Console
) -> dict[str, Any]:
    """Labels, trains and replays whatever is missing in the folder.

    Raises:
        SystemExit: the folder holds a run of other settings.
    """
    size = SIZES[size_name]
    claim, wanted = run / "domains.json", {"size": vars(size), "seed": seed}
    if claim.is_file() and json.loads(claim.read_text()) != wanted:
        raise SystemExit(f"{run} holds {claim.read_text()}, not {wanted}: give another --run")
    run.mkdir(parents=True, exist_ok=True)
    claim.write_text(json.dumps(wanted))
    label(reasoner, run, size, seed, console)
    paths = policies(run, size, seed, console)
    return {
        **wanted,
        "tuning": settings(size, seed).tuning,
        "crossed": crossed(run, paths),
        "rules": against_rules(run, paths, console),
    }


def main() -> None:
    """Measures, prints the tables, and the numbers as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--reasoner", type=Path, default=MIXED_SHIPPED, help="folder of a mixed reasoner"
    )
    parser.add_argument("--run", type=Path, default=Path("runs/domains"), help="folder of the run")
    parser.add_argument("--quick", action="store_true", help="a few traces, to see that it runs")
    parser.add_argument("--seed", type=int, default=0, help="of problems, sampling and training")
    parser.add_argument("--json", metavar="FILE", help="also write the last line there")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the tables of such a file")
    args = parser.parse_args()
    if args.show:
        print(markdown(json.loads(args.show.read_text())))
        return
    found = measure(
        Reasoner(args.reasoner), args.run, "quick" if args.quick else "full", args.seed, Console()
    )
    print(markdown(found))
    print_last_line({**found, **environment()}, args.json)


if __name__ == "__main__":
    main()
