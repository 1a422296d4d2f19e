"""The gates of the embedded reasoner: does it reason, and does it overthink?

`python -m ospruner.demo.check [FOLDER]` labels fresh problems (never seen in the reasoner's
training): the answer forced after each paragraph tells where thinking helps, where it repairs and
where it is waste.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

from ospruner.engines.interface import ForkRequest
from ospruner.eval.problems.task import Math
from ospruner.progress import PhaseBars

from .fallible_reasoner import BACKWARDS, RECHECKS
from .shipped import MAX_ANSWER_TOKENS, Reasoner, draw_split

Rows = Sequence[Mapping[str, Any]]
"""Labelled traces of distinct problems (`ospruner.train.labels.features.FEATURES`)."""
Decode = Callable[[list[int]], str]


class Gate(NamedTuple):
    """One measured property of the reasoner and the range that it must lie in."""

    name: str
    value: float
    low: float
    high: float

    @property
    def passed(self) -> bool:
        """Whether the value lies within the range, ends included."""
        return self.low <= self.value <= self.high


def repairs_and_breaks(rows: Rows, decode: Decode) -> tuple[int, int]:
    """Wrong answers repaired, and right ones broken, between the first recheck and the end."""
    repaired = broken = 0
    for row in rows:
        spans = zip([0, *row["step_ends"][:-1]], row["step_ends"], strict=True)
        paragraphs = [decode(row["trace_ids"][a:b]).strip() for a, b in spans]
        checks = [i for i, text in enumerate(paragraphs) if text in (*RECHECKS, *BACKWARDS)]
        if not checks or not checks[0]:
            continue
        before, after = row["forced_correct"][checks[0] - 1], row["forced_correct"][-1]
        repaired += before == 0 and after == 1
        broken += before == 1 and after == 0
    return repaired, broken


def gates(rows: Rows, unthinking_correct: Sequence[float], decode: Decode) -> list[Gate]:
    """Measures every gate; `unthinking_correct` grades each row's answer without thinking."""
    right = [np.array([c == 1 for c in row["forced_correct"]]) for row in rows]
    full = float(np.mean([r[-1] for r in right]))
    natural = float(np.mean([row["natural_correct"] == 1 for row in rows]))
    first = [
        row["step_ends"][int(r.argmax())] / row["step_ends"][-1]
        for row, r in zip(rows, right, strict=True)
        if r.any()
    ]
    repaired, broken = repairs_and_breaks(rows, decode)
    measured = (
        ("accuracy of the full trace (forced answer)", full, 0.60, 0.90),
        ("forced minus natural accuracy", full - natural, -0.015, 0.015),
        ("accuracy without thinking", np.mean(unthinking_correct), 0.0, 0.15),
        ("never right at any step", np.mean([not r.any() for r in right]), 0.05, 0.30),
        ("repaired per broken by rechecks", repaired / max(broken, 1), 1.0 + 1e-9, np.inf),
        ("first right answer, share of the length", np.mean(first), 0.30, 0.60),
        ("paragraphs a trace", np.mean([len(r) for r in right]), 8.0, 30.0),
        ("traces that finish", np.mean([row["ended"] == "natural" for row in rows]), 0.99, 1.0),
    )
    return [Gate(name, float(value), low, high) for name, value, low, high in measured]


def run_check(folder: Path | None, limit: int, seed: int, console: Console) -> list[Gate]:
    """Measures and prints the gates on fresh problems.

    Args:
        folder: Of the reasoner; None for the shipped one.
        limit: Problems to measure on.
        seed: Of the problems (of the `validation` split) and of the sampling.
        console: Where to print.

    Raises:
        ValueError: `limit` is below 1.
        FileNotFoundError: The folder holds no reasoner.
    """
    if limit < 1:
        raise ValueError(f"limit is {limit}; give at least 1 problem")
    reasoner, task = Reasoner(folder), Math()
    fmt, decode = reasoner.token_format, reasoner.tokenizer.decode
    problems = {one.id: one for one in draw_split("validation", limit, seed)}
    with TemporaryDirectory() as scratch, PhaseBars(console, "check") as bars:
        labels = reasoner.label([*problems.values()], Path(scratch) / "labels", seed, bars)
        rows = labels.to_list()
        answers = reasoner.engine.fork(
            [ForkRequest(row["prompt_ids"], row["trace_ids"], [0]) for row in rows],
            fmt.forced_suffix("forced"),
            MAX_ANSWER_TOKENS,
            fmt.box_state,
        )
    asked = [
        (task.read_forced(str(decode(forks[0].ids))) or "", problems[row["problem_id"]])
        for forks, row in zip(answers, rows, strict=True)
    ]
    unthinking = [grade.value or 0.0 for grade in task.grade_many(asked)]
    found = gates(rows, unthinking, lambda ids: str(decode(ids)))
    table = Table("gate", "measured", "allowed", "")
    table.title = f"{len(rows)} problems, T=0.6, top-p 0.95, seed {seed}"
    for gate in found:
        allowed = f"{gate.low:.3g} to {gate.high:.3g}"
        table.add_row(gate.name, f"{gate.value:.3f}", allowed, "ok" if gate.passed else "FAILED")
    console.print(table, by_family(rows), sep="\n")
    return found


def by_family(rows: Rows) -> Table:
    """Where thinking helps, family by family."""
    frame = pd.DataFrame(
        {
            "family": row["family"],
            "first step right": row["forced_correct"][0] == 1,
            "full": row["forced_correct"][-1] == 1,
            "never right": 1 not in row["forced_correct"],
            "tokens": row["step_ends"][-1],
        }
        for row in rows
    )
    table = Table("family", "traces", *frame.columns[1:])
    for family, group in frame.groupby("family"):
        *shares, tokens = group.drop(columns="family").mean()
        table.add_row(str(family), str(len(group)), *(f"{x:.3f}" for x in shares), f"{tokens:.0f}")
    return table


def main() -> None:
    """Measures an embedded reasoner against its gates; status 1 if one fails."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="Default: the shipped reasoner.")
    parser.add_argument("--limit", type=int, default=1000, help="Fresh problems to measure on.")
    parser.add_argument("--seed", type=int, default=1, help="Of the problems and the sampling.")
    asked = parser.parse_args()
    found = run_check(asked.folder, asked.limit, asked.seed, Console())
    raise SystemExit(not all(gate.passed for gate in found))


if __name__ == "__main__":
    main()
