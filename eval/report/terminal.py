"""Results as terminal tables of 80 columns, one rule a row."""

from __future__ import annotations

import pandas as pd
from rich.table import Table as RichTable

from ..results import Results
from .tables import Column, Table, compute_column, price_columns

__all__ = [
    "COSTS",
    "DIFFERENCES",
    "DIFFERENCES_CAPTION",
    "MAIN",
    "SAVED",
    "TIME",
    "costs_tables",
    "differences_table",
    "frontier_tables",
    "results_table",
]

MAIN = (
    Column("accuracy %", "accuracy", 100, 1),
    Column("thinking\ntokens", "tokens"),
    Column("saved %", "reduction", 100, 1),
    Column("AES", "aes", digits=2),
)
COSTS = (
    Column("wrong to\nright %", "helped", 100, 1),
    Column("right to\nwrong %", "harmed", 100, 1),
    Column("answer\ntokens", "answer_tokens", digits=1),
    Column("probe\ntokens", "probe_tokens", digits=1),
    Column("cut at\ncap %", "truncated", 100, 1),
)
SAVED = (Column("all tokens\nsaved %", "total_reduction", 100, 1),)
TIME = (Column("time over\nfull", "time_ratio", digits=2), Column("tokens/s", "tokens_per_second"))
DIFFERENCES = (
    Column("accuracy,\npoints", "accuracy", 100, 1, signed=True),
    Column("thinking\ntokens", "tokens", digits=1, signed=True),
    Column("saved,\npoints", "reduction", 100, 1, signed=True),
    Column("AES", "aes", digits=2, signed=True),
)
DIFFERENCES_CAPTION = (
    "Operating points and differences are of the same traces, and training seeds are in the "
    "intervals only where several were evaluated: an interval without 0 does not prove the sign."
)
_PRICES_A_TABLE = 4  # in 80 columns
_HALF = "± wider half of the 95 % interval by problem"


def results_table(frame: pd.DataFrame, *, title: str = "") -> RichTable:
    """The results, one rule a row, every number with its 95 % interval by problem.

    Args:
        frame: rules, in the order to show them, of which the highest AES is bold, and limits, shown
            below a line; see `Results`.
        title: above the table.

    Raises:
        ValueError: no results, or results of different AES variants.
    """
    labels = set(frame["aes_label"])
    if len(labels) != 1:
        raise ValueError(
            f"the results use these AES: {sorted(labels) or 'none, for there are no results'}; "
            "a table shows results of one variant"
        )
    frame = frame.reset_index(drop=True)
    first = frame.iloc[0]
    caption = (
        f"{first.traces:,} traces of {first.problems:,} problems; {_HALF}; AES {first.aes_label}"
    )
    # Operations without their interval, which results.json holds: names need the width.
    frame[["flops_low", "flops_high"]] = float("nan")
    table = Table.of(frame, (*MAIN, *compute_column(frame)), caption=caption, corner="method")
    rules = frame["kind"] == "rule"
    scores = frame["aes"][rules]
    best = None if scores.isna().all() else int(scores.fillna(-float("inf")).argmax())
    return table.rich(title, best, -1 if rules.all() else int(rules.sum()) - 1)


def costs_tables(results: Results) -> tuple[RichTable, RichTable]:
    """What the main table leaves out, within 80 columns.

    Returns:
        Help and harm, answers, probes and caps; rewards at each price, and time where measured.
    """
    frame = results.rules
    costs = Table.of(frame, COSTS, corner="method")
    timed = not frame["time_ratio"].isna().all()
    columns = [*SAVED, *price_columns(frame, "reward", 1, 3), *(TIME if timed else ())]
    caption = "" if timed else "Wall-clock: not measured in this mode"
    rewards = Table.of(frame, columns, caption=caption, corner="method")
    return (
        costs.rich("Changed answers and further tokens"),
        rewards.rich("Rewards and time" if timed else "Rewards"),
    )


def differences_table(differences: pd.DataFrame) -> RichTable:
    """Paired differences of one rule to others, one a row."""
    table = Table.of(
        differences,
        DIFFERENCES,
        differences["other"].tolist(),
        caption=f"{_HALF}. {DIFFERENCES_CAPTION}",
        corner="method",
    )
    return table.rich(f"{differences['rule'][0]} less each other, paired")


def frontier_tables(results: Results) -> list[RichTable]:
    """Areas, the first method's lead over each other, and the shares of the oracle's gap."""
    frame = results.frontiers
    methods = frame["method"].tolist()
    left_out = results.about.get("left_out") or {}
    areas = Table.of(
        frame,
        (
            Column("area, %", "area", 100, 2),
            Column(f"{methods[0]}'s less it, points", "lead", 100, 2, signed=True),
        ),
        methods,
        caption="\n".join(f"left out: {name} ({why})" for name, why in left_out.items()),
        corner="method",
    )
    tables = [areas.rich(f"{results.dataset}: {results.setting}")]
    gaps = price_columns(frame, "gap", 100, 1)
    for start in range(0, len(gaps), _PRICES_A_TABLE):
        part = Table.of(
            frame,
            gaps[start : start + _PRICES_A_TABLE],
            methods,
            caption="" if start else _HALF,
            corner="method",
        )
        tables.append(part.rich("" if start else "Share of the oracle's gap closed, %"))
    return tables
