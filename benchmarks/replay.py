"""Replay of drawn traces: how long exact outcomes and their intervals take, beside sampled ones.

    OMP_NUM_THREADS=1 python benchmarks/replay.py [--quick] [--limit N] [--json FILE] [--seed N]

Times the exact expectation of one policy that draws its stops, 64 sampled runs of the same policy
(what replay saves), five thresholds, and the table of all six with bootstrap intervals by problem.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from timing import environment, print_last_line, timed

from ospruner.eval.intervals import Rule, summarise
from ospruner.eval.replay import replay, replay_at, replay_full
from ospruner.eval.table import TraceTable

THRESHOLDS = (0.7, 0.75, 0.8, 0.85, 0.9)
SAMPLES = 64


def draw_table(traces: int, steps: int, seed: int) -> tuple[TraceTable, np.ndarray]:
    """Traces of up to `steps` steps (half of them shorter), and stop probabilities (N, T)."""
    draw = np.random.default_rng(seed)
    num_steps = np.where(draw.random(traces) < 0.5, steps, draw.integers(1, steps + 1, traces))
    mask = np.arange(steps) < num_steps[:, None]
    lengths = np.cumsum(draw.integers(20, 100, (traces, steps)) * mask, axis=1)
    right_from = draw.integers(0, 2 * steps, traces)
    correct = ((np.arange(steps) >= right_from[:, None]) & mask).astype(np.float64)
    table = TraceTable(
        problem_ids=[str(i) for i in range(traces)],
        problem_index=np.arange(traces),
        lengths=lengths,
        correct=correct,
        matches_final=mask,
        answer_tokens=np.where(mask, 5, 0),
        mask=mask,
        num_steps=num_steps,
        natural_correct=np.full(traces, np.nan),
        natural_answer_tokens=np.zeros(traces, np.int64),
        capped=np.zeros(traces, bool),
        families=["drawn"] * traces,
        ungraded=np.zeros(traces, np.int64),
    )
    return table, draw.beta(0.3, 3.0, (traces, steps))


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="1,000 traces of 50 steps")
    parser.add_argument("--limit", type=int, help="traces (default: 10,000)")
    parser.add_argument("--steps", type=int, help="steps of the longest (default: 100)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="also write the last line there")
    args = parser.parse_args()
    traces = args.limit or (1_000 if args.quick else 10_000)
    steps = args.steps or (50 if args.quick else 100)
    table, probabilities = draw_table(traces, steps, args.seed)
    rules = []

    def exact() -> None:
        rules.append(Rule("policy", replay(table, probabilities, mode="sample"), None, ""))

    def thresholds() -> None:
        for value in THRESHOLDS:
            outcome = replay(table, probabilities, mode="threshold", threshold=value)
            rules.append(Rule("threshold", outcome, value, "threshold"))

    def sampled() -> None:
        draw = np.random.default_rng(args.seed)
        for _ in range(SAMPLES):
            stops = (draw.random(probabilities.shape) < probabilities) | (
                np.arange(steps) >= table.num_steps[:, None] - 1
            )
            replay_at(table, stops.argmax(axis=1))

    def intervals() -> None:
        summarise(rules, replay_full(table), table.problem_index)

    result: dict[str, Any] = {"traces": traces, "steps": steps, "seed": args.seed}
    print(f"{traces:,} traces of up to {steps} steps\n{environment()}\n")
    for name, call in (
        ("exact", exact),
        ("thresholds", thresholds),
        ("intervals", intervals),
        ("sampled", sampled),
    ):
        result[f"{name}_seconds"] = timed(call).wall_seconds
    names = {
        "exact": "a policy that draws, exactly",
        "sampled": f"the same by {SAMPLES} sampled runs",
        "thresholds": f"{len(THRESHOLDS)} thresholds",
        "intervals": "all of them with 95 % intervals",
    }
    for key, text in names.items():
        print(f"{text:36}{result[f'{key}_seconds']:8.2f} s")
    result["sampled_over_exact"] = result["sampled_seconds"] / result["exact_seconds"]
    print(f"{'sampled over exact':36}{result['sampled_over_exact']:8.1f}")
    print_last_line(result, args.json)


if __name__ == "__main__":
    main()
