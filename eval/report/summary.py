"""An evaluation as `Results`, and these as tables: the same for terminal, page and paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console

from ..compute import flops_scale
from ..evaluation import Evaluation
from ..intervals import bootstrap_interval
from ..methods import ORACLE
from ..metrics import AES_ABSOLUTE, AesVariant
from ..results import Results, best_rows, prices_of
from .tables import INTERVALS, MAIN, Column, Table

__all__ = [
    "cost_tables",
    "differences_table",
    "frontier_tables",
    "never_right",
    "print_results",
    "results_of",
    "results_table",
    "told",
]

COSTS = (
    Column("wrong to\nright %", "helped", 100, 1),
    Column("right to\nwrong %", "harmed", 100, 1),
    Column("answer\ntokens", "answer_tokens", digits=1),
    Column("probe\ntokens", "probe_tokens", digits=1),
    Column("cut at\ncap %", "truncated", 100, 1),
)
ANSWERS = (
    Column("answer after\nstop", "answer_after_stop", digits=1),
    Column("after own\nend", "answer_after_end", digits=1),
    Column("thinks\non %", "rethought", 100, 1),
)
SAVED = Column("all tokens\nsaved %", "total_reduction", 100, 1)
TIME = (Column("time over\nfull", "time_ratio", digits=2), Column("tokens/s", "tokens_per_second"))
DIFFERENCES = (
    Column("accuracy,\npoints", "accuracy", 100, 1, signed=True),
    Column("thinking\ntokens", "tokens", digits=1, signed=True),
    Column("saved,\npoints", "reduction", 100, 1, signed=True),
    Column("AES", "aes", digits=2, signed=True),
)
PRICES_A_TABLE = 4  # in 80 columns


def results_of(
    evaluation: Evaluation,
    *,
    variant: AesVariant = AES_ABSOLUTE,
    prices: Sequence[float] = (),
) -> Results:
    """Every number of an evaluation with its interval."""
    said, natural = evaluation.settings, evaluation.natural_correct
    setting = [said["model"], f"{said['answer']} answers", said["mode"]]
    if _of_probabilities(said):
        setting.append("probabilities of right answers")
    return Results(
        dataset=said["benchmark"],
        setting=", ".join(setting),
        frame=evaluation.frame(variant, prices),
        differences=evaluation.differences(variant),
        # One without a verdict counts as wrong.
        natural_accuracy=None
        if np.isnan(natural).all()
        else bootstrap_interval(np.nan_to_num(natural), evaluation.problem_index),
        about={"settings": said, **never_right(evaluation)},
    )


def _of_probabilities(settings: Mapping[str, Any]) -> bool:
    """Whether the labels are probabilities of right answers, so that accuracy is their mean."""
    task = settings.get("label_settings", {}).get("task", {})
    return bool(task.get("labels") == "probability")


def never_right(evaluation: Evaluation) -> dict[str, Any]:
    """How much of what rules save is of traces that are right at no step, where that is known.

    Args:
        evaluation: with the hindsight oracle among its limits, which is right wherever a trace
            ever is.

    Returns:
        Under "never_right", or nothing: the share of such "traces", of the full traces' "tokens",
        and under "saved" of each rule's savings, None where it saves nothing.
    """
    oracle = next((rule.outcome for rule in evaluation.limits if rule.method == ORACLE), None)
    if oracle is None or _of_probabilities(evaluation.settings):
        return {}
    never, full = oracle.correct < 0.5, evaluation.full.tokens
    saved = {rule.name: full - rule.outcome.tokens for rule in evaluation.rules[1:]}
    found = {
        "traces": float(never.mean()),
        "tokens": float(full[never].sum() / full.sum()),
        "saved": {
            name: float(one[never].sum() / one.sum()) if one.sum() > 0 else None
            for name, one in saved.items()
        },
    }
    return {"never_right": found}


def told(results: Results) -> list[str]:
    """What is to be known beside the tables: natural answers, probabilities, hopeless traces."""
    lines = []
    if (natural := results.natural_accuracy) is not None:
        lines.append(
            f"The model's own answers after its own end: {natural.text(100, 1)} % right (never "
            "mixed with forced ones)."
        )
    if _of_probabilities(results.about.get("settings", {})):
        lines.append("Accuracy is the mean probability of the right answer.")
    if found := results.about.get("never_right"):
        best = best_rows(results.frame)
        names = (best["method"] + " " + best["setting"]).str.strip()
        saved: Mapping[str, float | None] = found["saved"]
        shares = [f"{name} {100 * x:.0f} %" for name in names if (x := saved.get(name)) is not None]
        lines.append(
            f"{100 * found['traces']:.1f} % of the traces are right at no step; they are "
            f"{100 * found['tokens']:.0f} % of the thinking tokens"
            + (f", and of the tokens that are saved: {', '.join(shares)}" if shares else "")
            + "."
        )
    return lines


def print_results(results: Results, console: Console) -> None:
    """The results, their costs, and whole methods where they were compared."""
    console.print(results_table(results.frame, f"{results.dataset}: {results.setting}"))
    for table in cost_tables(results.frame):
        console.print(table)
    for line in told(results):
        console.print(line)
    for table in frontier_tables(results) if len(results.frontiers) else ():
        console.print(table)


def price_columns(frame: pd.DataFrame, kind: str, scale: float, digits: int) -> list[Column]:
    """A column for each price at which a frame has numbers: "reward" or "gap"."""
    before = "reward\n" if kind == "reward" else ""
    names = prices_of(frame, kind).values()
    return [Column(f"{before}price={one.partition('@')[2]}", one, scale, digits) for one in names]


def results_table(frame: pd.DataFrame, title: str = "") -> Table:
    """The main numbers of a comparison: rules, the highest AES bold, and limits below a line.

    Raises:
        ValueError: results of different AES variants.
    """
    if len(variants := frame["aes_label"].unique()) != 1:
        raise ValueError(f"a table shows results of one AES, these are of {sorted(variants)}")
    columns, first = list(MAIN), frame.iloc[0]
    if not frame["flops"].isna().all():
        scale, unit = flops_scale(float(frame["flops"].max()))
        columns.append(Column(f"compute\n{unit}", "flops", 1 / scale, 1, narrow=True))
    scores = frame["aes"].where(frame["kind"] == "rule")
    return Table.of(
        frame,
        columns,
        caption=f"{first['traces']:,} traces of {first['problems']:,} problems; {INTERVALS}; AES "
        f"{first['aes_label']}",
        title=title,
        bold=None if scores.isna().all() else int(scores.argmax()),
        line_after=int((frame["kind"] == "rule").sum()) - 1,
    )


def cost_tables(frame: pd.DataFrame) -> list[Table]:
    """What the main table leaves out of the rules, within 80 columns.

    Returns:
        Help and harm, answers, probes and caps; answers after a stop and after the trace's own end,
        where both are known; rewards at each price, and time where measured.
    """
    rules = frame[frame["kind"] == "rule"]
    timed = not rules["time_ratio"].isna().all()
    columns = [SAVED, *price_columns(rules, "reward", 1, 3), *(TIME if timed else ())]
    caption = "" if timed else "Wall-clock: not measured in this mode"
    title = "Rewards and time" if timed else "Rewards"
    tables = [Table.of(rules, COSTS, title="Changed answers and further tokens")]
    if "answer_after_end" in rules and rules["answer_after_stop"].notna().any():
        told = "An answer that thinks on opens or closes a thinking again, or begins with a doubt"
        tables.append(Table.of(rules, ANSWERS, caption=told, title="Thinking after the cut"))
    return [*tables, Table.of(rules, columns, caption=caption, title=title)]


def differences_table(frame: pd.DataFrame) -> Table:
    """Paired differences of one rule to others, of `Results.differences`."""
    return Table.of(
        frame,
        DIFFERENCES,
        frame["other"].tolist(),
        caption=f"{frame['rule'].iloc[0]} less each other method at its best AES, paired; "
        f"{INTERVALS}. Operating points and differences are of the same traces, and training seeds "
        "are in the intervals only where several were evaluated: an interval without 0 does not "
        "prove the sign.",
    )


def frontier_tables(results: Results) -> list[Table]:
    """Areas, the first method's lead over each other, and the shares of the oracle's gap."""
    frame = results.frontiers
    methods = frame["method"].tolist()
    left_out = results.about.get("left_out") or {}
    lead = Column(f"{methods[0]}'s less it, points", "lead", 100, 2, signed=True)
    tables = [
        Table.of(
            frame,
            (Column("area, %", "area", 100, 2), lead),
            methods,
            caption="\n".join(f"left out: {name} ({why})" for name, why in left_out.items()),
            title=f"{results.dataset}: {results.setting}",
        )
    ]
    gaps = price_columns(frame, "gap", 100, 1)
    for start in range(0, len(gaps), PRICES_A_TABLE):
        first = {"caption": INTERVALS, "title": "Share of the oracle's gap closed, %"}
        part = gaps[start : start + PRICES_A_TABLE]
        tables.append(Table.of(frame, part, methods, **({} if start else first)))
    return tables
