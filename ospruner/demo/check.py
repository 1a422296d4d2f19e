"""The gates of an embedded reasoner, `ospruner toy check`: does it reason, and does it overthink?

Measured on labelled traces of fresh problems (never seen in the reasoner's training): the answer
forced after each paragraph tells where thinking helps, where it repairs and where it is waste. The
mixed reasoner is measured on each of its domains.
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

from ospruner.durable import replace_file
from ospruner.engines.interface import ForkRequest
from ospruner.eval.problems.problem import Problem
from ospruner.progress import PhaseBars

from .domains import DOMAINS, draw_domain
from .fallible_reasoner import BACKWARDS, RECHECKS
from .shipped import MAX_ANSWER_TOKENS, MIXED_SHIPPED, Reasoner

RANGES: dict[str, dict[str, tuple[float, float]]] = {
    "choice": {
        "full": (0.60, 0.97),
        "unthinking": (0.15, 0.60),
        "never": (0.0, 0.30),
        "first": (0.10, 0.60),
        "paragraphs": (5.0, 30.0),
    },
    "generated": {
        "full": (0.60, 0.97),
        "unthinking": (0.0, 0.25),
        "never": (0.02, 0.30),
        "paragraphs": (5.0, 30.0),
    },
}
"""Where a domain's gates differ from those of mathematics: chance finds two letters in five."""


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
    domain: str = "math",
) -> list[Gate]:
    """Measure every gate.

    Args:
        rows: Labelled traces of distinct problems (`ospruner.eval.schema.FEATURES`).
        unthinking_correct: For each row, what the answer forced without thinking is worth.
        decode: Turns token ids into text.
        domain: Whose problems; see `RANGES`.
    """
    ranges = RANGES.get(domain, {})
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
        Gate("accuracy of the full trace (forced answer)", full, *ranges.get("full", (0.60, 0.90))),
        Gate("forced minus natural accuracy", full - natural, -0.015, 0.015),
        Gate(
            "accuracy without thinking",
            float(np.mean(unthinking_correct)),
            *ranges.get("unthinking", (0.0, 0.15)),
        ),
        Gate(
            "never right at any step",
            float(np.mean([not r.any() for r in right])),
            *ranges.get("never", (0.05, 0.30)),
        ),
        Gate("repaired per broken by rechecks", repaired / max(broken, 1), 1.0 + 1e-9, np.inf),
        Gate(
            "first right answer, share of the length",
            float(np.mean(first)),
            *ranges.get("first", (0.30, 0.60)),
        ),
        Gate(
            "paragraphs a trace",
            float(np.mean([len(r) for r in right])),
            *ranges.get("paragraphs", (8.0, 30.0)),
        ),
        Gate("traces that finish", finished, 0.99, 1.0),
    ]


@dataclass(frozen=True)
class Family:
    """What the traces of one family of problems are like: shares, and mean thinking tokens."""

    family: str
    traces: int
    first_right: float
    full_right: float
    never_right: float
    tokens: float


Measured = dict[str, tuple[list[Gate], list[Family]]]
"""By domain."""


def run_check(
    folder: Path | None,
    limit: int,
    seed: int,
    console: Console,
    json_file: Path | None,
    mixed: bool = False,
    write_card: bool = False,
) -> bool:
    """Measure and print the gates on fresh problems; returns whether all passed.

    Args:
        folder: Folder of the reasoner; None for the shipped one.
        limit: Problems to measure on, of each domain.
        seed: Seed of the problems (of the `validation` split) and of the sampling.
        console: Where to print.
        json_file: Where to write the numbers too.
        mixed: Whether it knows every domain; else it knows mathematics.
        write_card: Whether to put the tables into its README.md, under `SCORES`.

    Raises:
        ValueError: `limit` is below 1, or the card has no such heading.
        MissingPackageError: `mixed` needs reasoning-gym.
    """
    if limit < 1:
        raise ValueError(f"limit is {limit}; give at least 1 problem")
    reasoner = Reasoner(folder or (MIXED_SHIPPED if mixed else None))
    card = reasoner.folder / "README.md"
    if write_card and SCORES not in (card.read_text("utf-8") if card.is_file() else ""):
        raise ValueError(f"{card} has no line {SCORES!r}, under which the tables go: write one")
    domains = list(DOMAINS) if mixed else ["math"]
    problems = {domain: draw_domain(domain, "validation", limit, seed) for domain in domains}
    measured: Measured = {
        domain: _check_domain(reasoner, domain, given, seed, console)
        for domain, given in problems.items()
    }
    if json_file is not None:
        numbers = {
            domain: {gate.name: gate.value for gate in found}
            for domain, (found, _) in measured.items()
        }
        told = numbers if mixed else numbers["math"]
        json_file.write_text(json.dumps({"limit": limit, "seed": seed, "gates": told}, indent=2))
    if write_card:
        command = f"ospruner toy check{' --mixed' * mixed} --limit {limit} --seed {seed}"
        text = card.read_text("utf-8")
        replace_file(card, scored_card(text, measured, command).encode())
    return all(gate.passed for found, _ in measured.values() for gate in found)


SCORES = "## What it scores"


def scored_card(card: str, measured: Measured, command: str) -> str:
    """The card with these tables under its heading `SCORES`, in place of what stands there."""
    before, _, after = card.partition(SCORES)
    _, heading, rest = after.partition("\n## ")
    lines = [
        f"Printed by `{command}`, on problems of the `validation` split, at temperature 0.6 and",
        "top-p 0.95. A gate that fails says so.",
        "",
        "| gate | " + " | ".join(measured) + " |",
        "|---|" + "---|" * len(measured),
    ]
    for gates_of in zip(*(found for found, _ in measured.values()), strict=True):
        told = [f"{one.value:.3f} ({allowed(one)}{failed(one)})" for one in gates_of]
        lines.append(f"| {gates_of[0].name} | " + " | ".join(told) + " |")
    lines += [
        "",
        "| family | traces | right after the first step | right at the end | never right |"
        " thinking tokens |",
        "|---|---|---|---|---|---|",
    ]
    for domain, (_, families) in measured.items():
        lines += [
            f"| {domain}: {one.family} | {one.traces} | {one.first_right:.3f} | "
            f"{one.full_right:.3f} | {one.never_right:.3f} | {one.tokens:.0f} |"
            for one in families
        ]
    return before + SCORES + "\n\n" + "\n".join(lines) + "\n" + heading + rest


def allowed(gate: Gate) -> str:
    """The range of a gate, as tables show it."""
    return f"{gate.low:.3g} to {gate.high:.3g}" if gate.high < np.inf else f"> {gate.low:.3g}"


def failed(gate: Gate) -> str:
    """What a card adds to a gate that failed."""
    return "" if gate.passed else ": FAILED"


def _check_domain(
    reasoner: Reasoner, domain: str, problems: Sequence[Problem], seed: int, console: Console
) -> tuple[list[Gate], list[Family]]:
    """Label the problems, measure and print the gates and families of one domain."""
    task = DOMAINS[domain]
    with TemporaryDirectory() as scratch, PhaseBars(console, f"check {domain}") as bars:
        rows = reasoner.label(problems, Path(scratch) / "labels", seed, bars, task).to_list()
        answers = reasoner.engine.fork(
            [ForkRequest(row["prompt_ids"], row["trace_ids"], [0]) for row in rows],
            reasoner.token_format.forced_suffix("forced"),
            MAX_ANSWER_TOKENS,
            reasoner.token_format.box_state,
        )
    decode = reasoner.tokenizer.decode
    of_id = {problem.id: problem for problem in problems}
    asked = [
        (task.read_forced(str(decode(forks[0].ids))) or "", of_id[row["problem_id"]])
        for forks, row in zip(answers, rows, strict=True)
    ]
    unthinking = [grade.value or 0.0 for grade in task.grade_many(asked)]
    measured = gates(rows, unthinking, lambda ids: str(decode(ids)), domain)
    title = f"{reasoner.folder.name}, {domain}: {len(rows)} problems"
    table = Table(title=f"{title}, T=0.6, top-p 0.95, seed {seed}")
    for heading in ("gate", "measured", "allowed", ""):
        table.add_column(heading, justify="left" if heading == "gate" else "right")
    for gate in measured:
        verdict = "ok" if gate.passed else "FAILED"
        table.add_row(gate.name, f"{gate.value:.3f}", allowed(gate), verdict)
    console.print(table)
    families = _families(rows)
    table = Table(title="by family")
    for heading in ("family", "traces", "first step right", "full", "never right", "tokens"):
        table.add_column(heading, justify="left" if heading == "family" else "right")
    for one in families:
        shares = (one.first_right, one.full_right, one.never_right)
        cells = (*(f"{share:.3f}" for share in shares), f"{one.tokens:.0f}")
        table.add_row(one.family, str(one.traces), *cells)
    console.print(table)
    return measured, families


def _families(rows: Sequence[Mapping[str, Any]]) -> list[Family]:
    found = []
    for family in sorted({row["family"] for row in rows}):
        chosen = [row for row in rows if row["family"] == family]
        grades = [[grade == 1 for grade in row["forced_correct"]] for row in chosen]
        found.append(
            Family(
                family,
                len(chosen),
                float(np.mean([g[0] for g in grades])),
                float(np.mean([g[-1] for g in grades])),
                float(np.mean([not any(g) for g in grades])),
                float(np.mean([row["step_ends"][-1] for row in chosen])),
            )
        )
    return found
