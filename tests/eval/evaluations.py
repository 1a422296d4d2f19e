"""Small evaluations for tests: no model, no text."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset

from ospruner.eval.evaluation import Report, Rule
from ospruner.eval.measured import Split, measure
from ospruner.eval.methods import FRONTIER, FULL, ORACLE
from ospruner.eval.replay import Outcome
from ospruner.eval.results import RESULTS_FILE
from ospruner.eval.table import TraceTable
from ospruner.rules import StopRule

from ..label_rows import label_row


def tabled(mask: Any, per_problem: int = 1, **columns: Any) -> TraceTable:
    """A table of these steps (N, T), which hold nothing but what is given."""
    traces = len(mask)
    empty = dict.fromkeys(("lengths", "answer_tokens"), np.zeros(mask.shape, np.int64))
    values = {
        "problem_ids": [f"p{i}" for i in range(traces // per_problem)],
        "problem_index": np.arange(traces) // per_problem,
        **empty,
        "correct": np.zeros(mask.shape),
        "matches_final": np.zeros_like(mask),
        "mask": mask,
        "num_steps": mask.sum(axis=1),
        "natural_correct": np.full(traces, np.nan),
        "capped": np.zeros(traces, bool),
        "families": [""] * traces,
    }
    return TraceTable(**{**values, **columns})


def graded(grades: Any, per_problem: int = 1) -> TraceTable:
    """Traces whose steps have these grades (N, T), and take 10 tokens each."""
    correct = np.array(grades, np.float64)
    lengths = np.broadcast_to(10 * np.arange(1, correct.shape[1] + 1), correct.shape)
    known: dict[str, Any] = {"lengths": lengths, "correct": correct, "per_problem": per_problem}
    return tabled(np.ones(correct.shape, bool), **known)


def make_table(seed: int, traces: int = 40, steps: int = 8, per_problem: int = 1) -> TraceTable:
    """Traces of 1 to `steps` steps, each right or wrong by chance."""
    rng = np.random.default_rng(seed)
    mask = np.arange(steps) < rng.integers(1, steps + 1, traces)[:, None]
    lengths = np.where(mask, rng.integers(1, 30, mask.shape).cumsum(axis=1), 0)
    return tabled(
        mask,
        per_problem,
        lengths=np.maximum.accumulate(lengths, axis=1),
        correct=((rng.random(mask.shape) < 0.5) & mask).astype(np.float64),
        answer_tokens=rng.integers(1, 9, mask.shape) * mask,
    )


def replay_rule(split: Split, rule: StopRule) -> Outcome:
    """What a rule does on labelled traces."""
    return measure(split, rule.family, rule).outcome(split.table, rule)


def dataset_of(ends: list[list[int]], **columns: list[Any]) -> Dataset:
    """Labelled traces whose steps end there; what is not given is as `label_row` has it."""
    rows = []
    for n, one in enumerate(ends):
        told = {name: values[n] for name, values in columns.items()}
        told = {"problem_id": f"p{n}", "step_ends": one} | told
        rows.append(label_row(steps=len(one), problem=f"What is {told['problem_id']}?", **told))
    return Dataset.from_list(rows)


def make_evaluation(seed: int = 0, prices: Sequence[float] = (), **settings: str) -> Report:
    """Rules that by chance are right so often and think so long; two traces a problem."""
    rng = np.random.default_rng(seed)
    right = (rng.random(120) < 0.8).astype(np.float64)

    def outcome(accuracy: float, tokens: float) -> Outcome:
        known: dict[str, Any] = {"correct": (rng.random(120) < accuracy).astype(np.float64)}
        known |= dict.fromkeys(("truncated", "probe_tokens", "rethought"), np.zeros(120))
        known |= dict.fromkeys(("answer_tokens", "stopped_answer"), np.full(120, 5.0))
        known["tokens"] = rng.integers(int(tokens * 0.7), int(tokens * 1.3) + 2, 120)
        return Outcome.against(right, stopped=np.ones(120), **known)

    nothing = np.zeros(120)
    full = replace(outcome(0.8, 400), correct=right, helped=nothing, harmed=nothing)
    made = [
        Rule(method, outcome(accuracy, tokens), parameter, name)
        for method, parameter, name, accuracy, tokens in (
            (FRONTIER, 1e-4, "price", 0.7, 120),
            (FRONTIER, 5e-5, "price", 0.76, 180),
            (FRONTIER, 1e-5, "price", 0.79, 240),
            (FRONTIER, 0.0, "price", 0.8, 300),
            ("probe", 0.7, "threshold", 0.7, 220),
            ("probe", 0.9, "threshold", 0.79, 350),
            ("fixed budget", 200.0, "tokens", 0.7, 200),
        )
    ]
    usual = {"model": "DeepSeek-R1-Distill-Qwen-7B", "benchmark": "GSM8K"}
    return Report(
        settings={**usual, "answer": "forced", "mode": "replay", **settings},
        rules=[Rule(FULL, full), *made],
        limits=[Rule(ORACLE, outcome(0.9, 80))],
        problem_index=np.arange(120) // 2,
        natural_correct=right,
        prices=prices,
    )


def save_comparison(folder: Path, **settings: Any) -> None:
    """What a comparison leaves in its folder, but for the picture."""
    folder.mkdir()
    make_evaluation(**settings).results.save(folder / RESULTS_FILE)
