"""How many passes a baseline should get: its validation curve, on the labels of a finished demo.

    ospruner demo --full
    python benchmarks/effort.py --run runs/demo-full [--seeds 1] [--json FILE]

Each baseline is trained anew with 1, 2, 4, ... passes, up to twice as many as OS-Pruner and the
baselines get in the demo, with the same rates, averaging, seeds and batches. Of each the command
prints, on the validation traces: the mean cross-entropy of its own labels, and the area under its
frontier, whose thresholds are chosen on one half of the problems and measured on the other, both
ways round. More passes hurt where the curve turns. The test traces are not read. A killed
run continues. `--show FILE` prints the table again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from timing import environment, print_last_line

from ospruner.demo.demo import (
    BASELINES,
    DemoSize,
    claimed,
    keep_states,
    read_split,
    train_one,
    train_settings,
)
from ospruner.demo.jobs import Job, Workers
from ospruner.demo.shipped import Reasoner
from ospruner.eval.frontier.areas import Family, areas
from ospruner.eval.frontier.grids import policy_grid
from ospruner.eval.replay import replay
from ospruner.eval.table import TraceTable, classifier_targets
from ospruner.eval.text import markdown_table
from ospruner.progress import PhaseBars
from ospruner.train.fresh import StageResult
from ospruner.train.settings import Baseline


def passes(size: DemoSize) -> list[int]:
    """1, 2, 4, ... and twice as many as all methods of the demo get."""
    most = 2 * size.epochs
    return sorted({size.epochs, most, *(2**k for k in range(most.bit_length()) if 2**k <= most)})


def cross_entropy(table: TraceTable, pi: npt.NDArray[np.floating[Any]], method: str) -> float:
    """Mean over steps of the negative log-probability of a classifier's own labels, in nats."""
    labels = classifier_targets(method, table.correct, table.matches_final, table.mask)[table.mask]
    said = np.clip(pi[table.mask].astype(np.float64), 1e-7, 1 - 1e-7)
    return float(-(labels * np.log(said) + (1 - labels) * np.log1p(-said)).mean())


def halved_area(table: TraceTable, seeds: Sequence[npt.NDArray[np.floating[Any]]]) -> float:
    """The area where thresholds are chosen on half of the problems and measured on the other."""
    found = []
    for part in (0, 1):
        first = table.problem_index % 2 == part
        halves = [(table.subset(rows), [pi[rows] for pi in seeds]) for rows in (first, ~first)]
        # A half may have fewer steps.
        halves = [(t, [pi[:, : t.mask.shape[1]] for pi in said]) for t, said in halves]
        grid = policy_grid(halves[0][0], np.stack(halves[0][1]))
        rules = [
            [[replay(t, pi, "threshold", value) for pi in said] for value in grid]
            for t, said in halves
        ]
        family = Family("", rules[0], rules[1])
        found.append(areas([family], halves[0][0], halves[1][0], 1)[0, 0])
    return float(np.mean(found))


def measure(
    run: Path, methods: Sequence[Baseline], seeds: int | None, console: Console
) -> list[dict[str, Any]]:
    """Trains what is missing; one entry for each baseline and number of passes."""
    (size, first), reasoner = claimed(run), Reasoner()
    for split in ("train", "validation"):
        keep_states(reasoner, run, split, train_settings(size, first))
    jobs: dict[str, Job[list[StageResult]]] = {}
    points = [(method, count) for method in methods for count in passes(size)]
    numbers = range(first, first + (seeds or size.seeds))
    for method, count in reversed(points):  # the longest first
        for seed in numbers:
            settings = train_settings(size, seed).baseline(method)
            settings = dataclasses.replace(settings, epochs_per_stage=count)
            folder = run / "effort" / f"{method}-{count}" / f"seed{seed}"
            if count == size.epochs:  # the demo's own
                folder = run / "policies" / f"seed{seed}" / method
            jobs[f"{method}, {count} passes, seed {seed}"] = partial(
                train_one, reasoner.folder, run, first, settings, folder
            )
    with PhaseBars(console) as bars, Workers(os.cpu_count() or 1) as workers:
        trained = workers.run(jobs, bars)
    table, found = read_split(run, "validation").table, []
    for method, count in points:
        said = [
            trained[f"{method}, {count} passes, seed {seed}"][0].validation_probabilities()
            for seed in numbers
        ]
        found.append(
            {
                "method": method,
                "passes": count,
                "seeds": len(said),
                "cross_entropy": float(np.mean([cross_entropy(table, pi, method) for pi in said])),
                "area": halved_area(table, said),
                "used": count == size.epochs,
            }
        )
    return found


def markdown(found: Sequence[Mapping[str, Any]]) -> str:
    """The curves; the best of each is marked, and what the demo uses."""
    rows = []
    for one in found:
        rivals = [other for other in found if other["method"] == one["method"]]
        best = {
            "lowest cross-entropy": one["cross_entropy"] == min(r["cross_entropy"] for r in rivals),
            "largest area": one["area"] == max(r["area"] for r in rivals),
            "the demo's": one["used"],
        }
        notes = ", ".join(note for note, holds in best.items() if holds)
        values = [f"{one['cross_entropy']:.4f}", f"{100 * one['area']:.2f}"]
        rows.append([one["method"], str(one["passes"]), *values, notes])
    return markdown_table(["baseline", "passes", "cross-entropy, nats", "area, %", "note"], rows)


def main() -> None:
    """Trains, prints the curves, and the numbers as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, default=Path("runs/demo-full"), help="a demo's folder")
    parser.add_argument("--json", metavar="FILE", help="also write the last line there")
    parser.add_argument("--seeds", type=int, help="by default as many as the demo")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the table of such a file")
    args = parser.parse_args()
    if args.show:
        print(markdown(json.loads(args.show.read_text())["curves"]))
        return
    found = measure(args.run, BASELINES, args.seeds, Console())
    print(markdown(found))
    print_last_line({"curves": found, **environment()}, args.json)


if __name__ == "__main__":
    main()
