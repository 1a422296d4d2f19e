"""The gates of the embedded reasoner, `ospruner toy check`: does it reason, and does it overthink?

Measured on labelled traces of fresh problems (never seen in the reasoner's training): the answer
forced after each paragraph tells where thinking helps, where it repairs and where it is waste.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from modeling_ospruner.common.progress import PhaseBars
from modeling_ospruner.engines.interface import ForkRequest
from ospruner.eval.grading.boxed import grade, read_box

from .fallible_reasoner import BACKWARDS, RECHECKS
from .shipped import MAX_ANSWER_TOKENS, Reasoner, draw_split


@dataclass(frozen=True)
class Gate:
    """One measured property of the reasoner and the range it must lie in.

    Attributes:
        name: What is measured.
        value: The measurement.
        low: Least value allowed.
        high: Greatest value allowed.
    """

    name: str
    value: float
    low: float
    high: float

    @property
    def passed(self) -> bool:
        """Whether the value lies within the range."""
        return self.low <= self.value <= self.high


def first_recheck(paragraphs: Sequence[str]) -> int | None:
    """Index of the first paragraph that announces a check; None where none does."""
    phrases = (*RECHECKS, *BACKWARDS)
    return next(
        (i for i, text in enumerate(paragraphs) if text.strip() in phrases),
        None,
    )


def repairs_and_breaks(
    rows: Sequence[Mapping[str, Any]], decode: Callable[[list[int]], str]
) -> tuple[int, int]:
    """Count wrong answers repaired and right ones broken between the first recheck and the end.

    Args:
        rows: Labelled traces.
        decode: Turns token ids into text.
    """
    repaired = broken = 0
    for row in rows:
        starts = [0, *row["step_ends"][:-1]]
        spans = zip(starts, row["step_ends"], strict=True)
        index = first_recheck([decode(row["trace_ids"][a:b]) for a, b in spans])
        if not index:
            continue
        before, after = row["forced_correct"][index - 1], row["forced_correct"][-1]
        repaired += before == 0 and after == 1
        broken += before == 1 and after == 0
    return repaired, broken


def gates(
    rows: Sequence[Mapping[str, Any]],
    unthinking_correct: Sequence[float],
    decode: Callable[[list[int]], str],
) -> list[Gate]:
    """Measure every gate.

    Args:
        rows: Labelled traces of distinct problems (`ospruner.eval.schema.FEATURES`).
        unthinking_correct: For each row, whether the answer forced without thinking is right.
        decode: Turns token ids into text.
    """
    right = [np.array([c == 1 for c in row["forced_correct"]]) for row in rows]
    full = float(np.mean([r[-1] for r in right]))
    natural = float(np.mean([row["natural_correct"] == 1 for row in rows]))
    first = [
        row["step_ends"][int(r.argmax())] / row["step_ends"][-1]
        for row, r in zip(rows, right, strict=True)
        if r.any()
    ]
    repaired, broken = repairs_and_breaks(rows, decode)
    finished = float(np.mean([row["ended"] == "natural" for row in rows]))
    return [
        Gate("accuracy of the full trace (forced answer)", full, 0.60, 0.90),
        Gate("forced minus natural accuracy", full - natural, -0.015, 0.015),
        Gate("accuracy without thinking", float(np.mean(unthinking_correct)), 0.0, 0.15),
        Gate("never right at any step", float(np.mean([not r.any() for r in right])), 0.05, 0.30),
        Gate("repaired per broken by rechecks", repaired / max(broken, 1), 1.0 + 1e-9, np.inf),
        Gate("first right answer, share of the length", float(np.mean(first)), 0.30, 0.60),
        Gate("paragraphs a trace", float(np.mean([len(r) for r in right])), 8.0, 30.0),
        Gate("traces that finish", finished, 0.99, 1.0),
    ]


def run_check(
    folder: Path | None, limit: int, seed: int, console: Console, json_file: Path | None
) -> bool:
    """Measure and print the gates on fresh problems; returns whether all passed.

    Args:
        folder: Folder of the reasoner; None for the shipped one.
        limit: Problems to measure on.
        seed: Seed of the problems (of the `validation` split) and of the sampling.
        console: Where to print.
        json_file: Where to write the numbers too.

    Raises:
        ValueError: `limit` is below 1.
    """
    if limit < 1:
        raise ValueError(f"limit is {limit}; give at least 1 problem")
    reasoner = Reasoner(folder)
    problems = draw_split("validation", limit, seed)
    with TemporaryDirectory() as scratch, PhaseBars(console, "check") as bars:
        rows = reasoner.label(problems, Path(scratch) / "labels", seed, bars).to_list()
        answers = reasoner.engine.fork(
            [ForkRequest(row["prompt_ids"], row["trace_ids"], [0]) for row in rows],
            reasoner.token_format.forced_suffix("forced"),
            MAX_ANSWER_TOKENS,
            reasoner.token_format.box_state,
        )
    decode = reasoner.tokenizer.decode
    unthinking = [
        float(grade(read_box(str(decode(forks[0].ids))), row["answer"]) or 0.0)
        for forks, row in zip(answers, rows, strict=True)
    ]
    measured = gates(rows, unthinking, lambda ids: str(decode(ids)))
    table = Table(
        title=f"{reasoner.folder.name}: {len(rows)} problems, T=0.6, top-p 0.95, seed {seed}"
    )
    for heading in ("gate", "measured", "allowed", ""):
        table.add_column(heading, justify="left" if heading == "gate" else "right")
    for gate in measured:
        allowed = (
            f"{gate.low:.3g} to {gate.high:.3g}" if gate.high < np.inf else f"> {gate.low:.3g}"
        )
        table.add_row(gate.name, f"{gate.value:.3f}", allowed, "ok" if gate.passed else "FAILED")
    console.print(table)
    console.print(_families(rows))
    if json_file is not None:
        numbers = {gate.name: gate.value for gate in measured}
        json_file.write_text(json.dumps({"limit": limit, "seed": seed, "gates": numbers}, indent=2))
    return all(gate.passed for gate in measured)


def _families(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="by family")
    for heading in ("family", "traces", "first step right", "full", "never right", "tokens"):
        table.add_column(heading, justify="left" if heading == "family" else "right")
    for family in sorted({row["family"] for row in rows}):
        chosen = [row for row in rows if row["family"] == family]
        grades = [[grade == 1 for grade in row["forced_correct"]] for row in chosen]
        table.add_row(
            family,
            str(len(chosen)),
            f"{np.mean([g[0] for g in grades]):.3f}",
            f"{np.mean([g[-1] for g in grades]):.3f}",
            f"{np.mean([not any(g) for g in grades]):.3f}",
            f"{np.mean([row['step_ends'][-1] for row in chosen]):.0f}",
        )
    return table
