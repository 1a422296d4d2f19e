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
from ospruner.eval.results import RESULTS_FILE, Results
from ospruner.eval.table import TraceTable
from ospruner.rules import StopRule


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
    """Labelled traces whose steps end there; columns that are not given say nothing."""
    traces = len(ends)
    ids = columns.get("problem_id", [f"p{n}" for n in range(traces)])
    filled: dict[str, list[Any]] = {
        "problem_id": ids,
        "problem": [f"What is {one}?" for one in ids],
        "family": [""] * traces,
        "step_ends": ends,
        "forced_correct": [[0.0] * len(one) for one in ends],
        "matches_final": [[True] * len(one) for one in ends],
        "forced_answer_tokens": [[1] * len(one) for one in ends],
        "natural_correct": [1.0] * traces,
        "ended": ["natural"] * traces,
    }
    return Dataset.from_dict(filled | columns)


def outcome(
    rng: np.random.Generator, accuracy: float, tokens: float, full: np.ndarray[Any, Any]
) -> Outcome:
    n = len(full)
    correct = (rng.random(n) < accuracy).astype(np.float64)
    known: dict[str, Any] = dict.fromkeys(("truncated", "probe_tokens", "rethought"), np.zeros(n))
    known |= dict.fromkeys(("answer_tokens", "stopped_answer"), np.full(n, 5.0))
    known["tokens"] = rng.integers(int(tokens * 0.7), int(tokens * 1.3) + 2, n)
    return Outcome.against(full, correct=correct, stopped=np.ones(n), **known)


def make_evaluation(
    model: str = "DeepSeek-R1-Distill-Qwen-7B",
    benchmark: str = "GSM8K",
    answer: str = "forced",
    mode: str = "replay",
    seed: int = 0,
) -> Report:
    rng = np.random.default_rng(seed)
    right = (rng.random(120) < 0.8).astype(np.float64)
    full = outcome(rng, 0.8, 400, right)
    nothing = np.zeros(len(right))
    full = replace(full, correct=right, helped=nothing, harmed=nothing)
    made = [
        Rule(method, outcome(rng, accuracy, tokens, right), parameter, name)
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
    return Report(
        settings={"model": model, "benchmark": benchmark, "answer": answer, "mode": mode},
        rules=[Rule(FULL, full), *made],
        limits=[Rule(ORACLE, outcome(rng, 0.9, 80, right))],
        problem_index=np.arange(120) // 2,
        natural_correct=right,
    )


def make_results(prices: Sequence[float] = (), **settings: Any) -> Results:
    return replace(make_evaluation(**settings), prices=prices).results


def save_comparison(folder: Path, prices: Sequence[float] = (), **settings: Any) -> None:
    """What a comparison leaves in its folder, but for the picture."""
    folder.mkdir()
    make_results(prices, **settings).save(folder / RESULTS_FILE)
