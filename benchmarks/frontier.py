"""Frontiers of a finished `ospruner demo`: areas, gaps to the oracle, and how far seeds spread.

    ospruner demo --full
    OMP_NUM_THREADS=1 python benchmarks/frontier.py --run runs/demo-full [--json FILE]

Every rule of every method is replayed on the validation and test traces of the run. Each method's
thresholds are quantiles of its own signal on validation, 64 for each where the signal takes so many
values, from "at once" to "never". Intervals resample problems and, for
trained methods, training seeds; in each resample a method chooses its rules again. Differences are
paired. The estimate of what is possible without hindsight is fitted on the validation traces
(`ospruner.eval.frontier.causal`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from timing import environment, print_last_line
from transformers import PreTrainedModel

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.common.durable import read_checked_line
from modeling_ospruner.common.results_file import Results
from modeling_ospruner.common.text import penalty_name
from ospruner.eval.frontier.areas import Family, frontiers
from ospruner.eval.frontier.causal import CAUSAL, Known, causal_family
from ospruner.eval.frontier.grids import policy_grid, rule_grid
from ospruner.eval.methods import METHOD_NAMES
from ospruner.eval.replay import Outcome, pool, replay
from ospruner.eval.rules.families import FAMILIES, parse_rule
from ospruner.eval.rules.replayed import replay_rule
from ospruner.eval.table import FloatArray, TraceTable
from ospruner.train.fresh import StageResult, predict
from ospruner.train.from_labels import Labels, load_labels
from ospruner.train.toy.demo import STEEP_RUN
from ospruner.train.toy.shipped import Reasoner
from ospruner.train.trunk import LabelledTraces

RULES = ("entropy", "confidence", "agreement", "budget")
CAUSAL_PENALTIES = (5e-3, 1e-3)  # for its area, beside those asked for
BAR_POINTS = -0.5  # of accuracy, in percent: the lower bound of each difference of areas
SPREAD_BARS = {"accuracy_points": 1.0, "tokens_percent": 5.0}  # over the seeds, at the most
SHIFTS = np.arange(-8.0, 9.0)  # of stop logits, by which a policy is made longer or shorter


class Splits:
    """The validation and test traces of a demo, and its base."""

    def __init__(self, run: Path) -> None:
        self.labels: dict[str, Labels] = {}
        self.traces: dict[str, LabelledTraces] = {}
        for split in ("validation", "test"):
            found = load_labels(run / "labels" / split)
            self.labels[split] = found
            self.traces[split] = LabelledTraces.from_dataset(found.traces)
        reasoner = Reasoner()
        self.base: PreTrainedModel = reasoner.model
        self.suffix_tokens = len(reasoner.token_format.forced_suffix())

    def probabilities(self, stage: StageResult) -> dict[str, Any]:
        """Stop probabilities (N, T) on both splits; training has kept those on validation."""
        # The demo does not store those on test; a second look at its frontier need not wait.
        stored = stage.path.with_name(f"{stage.name}.test.npy")
        if not stored.is_file():
            model = OSPrunerForCausalLM.from_base(self.base, stage.path)
            np.save(stored, predict(model, self.traces["test"]))
        return {"validation": stage.validation_probabilities(), "test": np.load(stored)}

    def rule(self, text: str) -> dict[str, Outcome]:
        """A training-free rule on both splits."""
        rule = parse_rule(text).rule
        return {
            split: replay_rule(self.labels[split].traces, traces.table, rule, self.suffix_tokens)
            for split, traces in self.traces.items()
        }


def trained(
    splits: Splits, runs: Sequence[Path], method: str
) -> tuple[Family, dict[str, dict[str, float]]]:
    """A trained method's family, and how far each policy's outcomes on test spread."""
    names = [STEEP_RUN, method] if method == "os-pruner" else [method]
    folders = [name for name in names if (runs[0] / name).is_dir()]
    stages = [[stage for name in folders for stage in stages_of(run / name)] for run in runs]
    validation: list[list[Outcome]] = []
    test: list[list[Outcome]] = []
    spreads: dict[str, dict[str, float]] = {}
    for position, stage in enumerate(stages[0]):
        found = [splits.probabilities(of_seed[position]) for of_seed in stages]
        modes: list[float | None] = [None]
        if method != "os-pruner":
            on_validation = np.stack([pi["validation"] for pi in found])
            modes = [*policy_grid(splits.traces["validation"].table, on_validation)]
        for threshold in modes:
            both = {
                split: [
                    replay(
                        splits.traces[split].table,
                        pi[split],
                        "sample" if threshold is None else "threshold",
                        threshold,
                    )
                    for pi in found
                ]
                for split in ("validation", "test")
            }
            validation.append(both["validation"])
            test.append(both["test"])
            if threshold is None:
                spreads[stage.name] = spread(both["test"], stage.length_penalty) | valley(
                    splits.traces["test"].table, [pi["test"] for pi in found], stage.length_penalty
                )
    return Family(METHOD_NAMES[method], validation, test), spreads


def known(splits: Splits, run: Path) -> tuple[Known, Known]:
    """What is known at the steps of both splits, the words of one seed's policies included."""
    stages = [
        stage for name in METHOD_NAMES if (run / name).is_dir() for stage in stages_of(run / name)
    ]
    said = [splits.probabilities(stage) for stage in stages]
    validation, test = (
        Known.of_labels(
            splits.labels[split].traces, splits.traces[split].table, [pi[split] for pi in said]
        )
        for split in ("validation", "test")
    )
    return validation, test


def stages_of(run: Path) -> list[StageResult]:
    """The policies that a finished run has saved, in order."""
    lines = (run / "log.jsonl").read_bytes().splitlines()
    entries = [read_checked_line(line, f"{run}/log.jsonl", "train again") for line in lines]
    found = [entry["validation"] for entry in entries if "validation" in entry]
    return [StageResult.from_dict(values, run) for values in found]


def untrained(splits: Splits) -> tuple[list[Family], dict[str, str]]:
    """The rules that need no training, as families, and why any of them is left out."""
    labels, table = splits.labels["validation"].traces, splits.traces["validation"].table
    families, left_out = [], {}
    for family in RULES:
        name = FAMILIES[family].method
        try:
            grid = rule_grid(family, labels, table)
            outcomes = [splits.rule(f"{family}:{value!r}") for value in grid]
        except ValueError as error:
            left_out[name] = str(error)
            continue
        families.append(
            Family(name, [o["validation"] for o in outcomes], [o["test"] for o in outcomes])
        )
    return families, left_out


def measure(run: Path, penalties: Sequence[float]) -> Results:
    """All numbers of a demo's run."""
    splits = Splits(run)
    runs = sorted((run / "policies").glob("seed*"))
    if not runs:
        raise SystemExit(f"{run} has no policies/seed*: give the folder of an `ospruner demo`")
    ours, spreads = trained(splits, runs, "os-pruner")
    baselines = [m for m in METHOD_NAMES if m != "os-pruner" and (runs[0] / m).is_dir()]
    free, left_out = untrained(splits)
    families = [ours, *(trained(splits, runs, m)[0] for m in baselines), *free]
    validation, test = (splits.traces[split].table for split in ("validation", "test"))
    possible = causal_family(*known(splits, runs[0]), sorted({*penalties, *CAUSAL_PENALTIES}))
    found = frontiers(families, validation, test, penalties, [possible])
    return Results(
        dataset="embedded reasoner, test problems",
        setting=f"replay of {len(test)} traces, {len(runs)} training seed{'s' * (len(runs) > 1)}",
        frontiers=found,
        about={
            "seeds": len(runs),
            "test_traces": len(test),
            "left_out": left_out,
            "seed_spread": spreads,
            **environment(),
        },
    )


def spread(outcomes: Sequence[Outcome], length_penalty: float) -> dict[str, float]:
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
        "reward_points": float(np.ptp(accuracy - 100 * length_penalty * tokens)),
    }


def valley(
    table: TraceTable, probabilities: Sequence[FloatArray], length_penalty: float
) -> dict[str, float]:
    """How closely lambda tells a policy's length, seen by shifting the seeds' stop logits.

    `indifferent_tokens_percent` is the width of the range of mean tokens, the seeds pooled, whose
    reward is within one standard error (paired, by problem) of the best shift's. Beyond what data
    can tell, seeds may differ; `equal_tokens_accuracy_points` is the accuracy's spread once each
    seed is shifted to the length that all have on average.
    """
    by_seed = [[replay(table, shifted(pi, shift)) for shift in SHIFTS] for pi in probabilities]
    pooled = [pool(list(outcomes)) for outcomes in zip(*by_seed, strict=True)]
    rewards = np.array([o.correct - length_penalty * o.tokens for o in pooled])  # (shifts, N)
    lost = rewards[rewards.mean(1).argmax()] - rewards
    near = lost.mean(1) <= lost.std(1) / len(table) ** 0.5
    tokens = np.array([outcome.mean_tokens for outcome in pooled])
    length = tokens[SHIFTS == 0].item()
    accuracy = [
        np.interp(length, [o.mean_tokens for o in seed[::-1]], [o.accuracy for o in seed[::-1]])
        for seed in by_seed  # a higher shift stops earlier
    ]
    return {
        "indifferent_tokens_percent": float(100 * np.ptp(tokens[near]) / length),
        "equal_tokens_accuracy_points": float(100 * np.ptp(accuracy)),
    }


def shifted(probabilities: FloatArray, shift: float) -> FloatArray:
    """Probabilities whose logits are `shift` higher."""
    odds = float(np.exp(shift))
    return probabilities * odds / (1 - probabilities + probabilities * odds)


def report(results: Results) -> None:
    """Prints the numbers, and which of the bars hold."""
    print(f"{results.dataset}: {results.setting}")
    for name, why in results.about["left_out"].items():
        print(f"left out: {name} ({why})")
    print(f"\n{'area under the frontier, %':33}{'':8}OS-Pruner's less it, points")
    for one in results.frontiers:
        text = "   fitted on validation" if one.method == CAUSAL else ""
        if one.lead is not None:
            held = one.lead.value > 0 and 100 * one.lead.low >= BAR_POINTS
            text = one.lead.text(100, 2, signed=True) + ("   holds" if held else "   DOES NOT HOLD")
        print(f"{one.method:33}{100 * one.area.value:8.2f}   {text}")
    penalties = [penalty for penalty, _ in results.frontiers[0].gap_closed]
    print(
        f"\n{'share of the oracle gap closed, %':34}"
        + "".join(f"{'λ=' + penalty_name(p):>22}" for p in penalties)
    )
    for one in results.frontiers:
        cells = "".join(f"{share.text(100, 1):>22}" for _, share in one.gap_closed)
        print(f"{one.method:34}{cells}")
    columns = {
        "accuracy_points": "accuracy, points",
        "accuracy_standard_error": "its s.e.",
        "tokens_percent": "tokens, %",
        "reward_points": "reward, points",
        "indifferent_tokens_percent": "tokens within 1 s.e.",
        "equal_tokens_accuracy_points": "acc. at = tokens",
    }
    print(f"\n{'spread over the seeds':22}" + "".join(f"{c:>22}" for c in columns.values()))
    for name, values in results.about["seed_spread"].items():
        held = all(values[key] <= bar for key, bar in SPREAD_BARS.items())
        cells = "".join(f"{values[key]:22.2f}" for key in columns)
        print(f"{name:22}{cells}   {'holds' if held else 'DOES NOT HOLD'}")


def main() -> None:
    """Measures, prints tables, and the numbers as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--run", type=Path, default=Path("runs/demo-full"), help="a demo's folder")
    parser.add_argument("--lambdas", default="5e-4,2e-4,1e-4", help="of the gaps to the oracle")
    parser.add_argument("--json", metavar="FILE", help="also write the last line there")
    args = parser.parse_args()
    results = measure(args.run, [float(x) for x in args.lambdas.split(",")])
    report(results)
    print_last_line(results.to_dict(), args.json)


if __name__ == "__main__":
    main()
