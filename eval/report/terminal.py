"""Results as terminal tables of 80 columns, one rule a row."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from ..compute import flops_scale
from ..results import Difference, Estimate, Frontier, Result, Results
from ..text import penalty_name

__all__ = [
    "DIFFERENCES_CAPTION",
    "compute_heading",
    "counts_compute",
    "differences_table",
    "frontier_tables",
    "largest_flops",
    "number_cell",
    "results_table",
    "rules_table",
]

DIFFERENCES_CAPTION = (
    "Operating points and differences are of the same traces, and training seeds are in the "
    "intervals only where several were evaluated: an interval without 0 does not prove the sign."
)


_PRICES_A_TABLE = 4  # in 80 columns


def rules_table(title: str, caption: str, columns: Sequence[str]) -> Table:
    """An empty table whose rows are rules: a column of names, then numbers.

    Args:
        title: above it.
        caption: below it.
        columns: headings of the numbers; a line break splits one.
    """
    table = Table(
        title=title or None,
        caption=caption or None,
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("method", min_width=14)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def results_table(
    results: Sequence[Result], limits: Sequence[Result] = (), *, title: str = ""
) -> Table:
    """The results, one rule a row, every number with its 95 % interval by problem.

    Args:
        results: rules, in the order to show them; the highest AES is bold.
        limits: what no rule can reach, or none should need, shown below a line.
        title: above the table.

    Raises:
        ValueError: no results, or results of different AES variants.
    """
    everything = [*results, *limits]
    labels = {result.aes_label for result in everything}
    if len(labels) != 1:
        raise ValueError(
            f"the results use these AES: {sorted(labels) or 'none, for there are no results'}; "
            "a table shows results of one variant"
        )
    first = everything[0]
    table = rules_table(
        title,
        f"{first.traces:,} traces of {first.problems:,} problems; ± wider half of the 95 % "
        f"interval by problem; AES {first.aes_label}",
        ("accuracy %", "thinking\ntokens", "saved %", "AES", *compute_heading(everything, "\n")),
    )
    scale, _ = flops_scale(largest_flops(everything))
    best = max((r.aes.value for r in results), default=math.inf)
    for number, result in enumerate(everything):
        table.add_row(
            Text(result.name),
            number_cell(result.accuracy, 100, 1),
            number_cell(result.tokens, 1, 0 if result.tokens.value >= 100 else 1),
            number_cell(result.reduction, 100, 1),
            number_cell(result.aes, 1, 2),
            # Without its interval, which results.json holds: names need the width.
            *([f"{result.flops.value / scale:.1f}"] if counts_compute(everything) else []),
            style="bold" if number < len(results) and result.aes.value == best else "",
            end_section=number == len(results) - 1 and bool(limits),
        )
    return table


def differences_table(differences: Sequence[Difference]) -> Table:
    """Paired differences (`results.compare`) of one rule to others, one a row."""
    table = rules_table(
        f"{differences[0].rule} less each other, paired",
        f"± wider half of the 95 % interval by problem. {DIFFERENCES_CAPTION}",
        ("accuracy,\npoints", "thinking\ntokens", "saved,\npoints", "AES"),
    )
    for one in differences:
        table.add_row(
            Text(one.other),
            number_cell(one.accuracy, 100, 1, signed=True),
            number_cell(one.tokens, 1, 1, signed=True),
            number_cell(one.reduction, 100, 1, signed=True),
            number_cell(one.aes, 1, 2, signed=True),
        )
    return table


def counts_compute(results: Sequence[Result]) -> bool:
    """Whether operations were counted for any of the results."""
    return any(not math.isnan(result.flops.value) for result in results)


def largest_flops(results: Sequence[Result]) -> float:
    """The most operations of any of the results; 0 where none were counted."""
    return max((r.flops.value for r in results if not math.isnan(r.flops.value)), default=0.0)


def compute_heading(results: Sequence[Result], between: str = ", ") -> list[str]:
    """The heading of the column of operations with their unit; none where none were counted."""
    unit = flops_scale(largest_flops(results))[1]
    return [f"compute{between}{unit}"] if counts_compute(results) else []


def number_cell(number: Estimate, scale: float, digits: int, *, signed: bool = False) -> Text:
    """A number and the wider half of its interval as a table's cell.

    Args:
        number: the number.
        scale: what to multiply it by, such as 100 for percent.
        digits: decimals.
        signed: with a + where it is positive.
    """
    value, half = number.short_text(scale, digits, signed=signed).split(" ")
    return Text.assemble(value, " ", (half, "dim"))


def frontier_tables(results: Results, bar_points: float | None = None) -> list[Table]:
    """Areas, the first method's lead over each other, and the shares of the oracle's gap.

    Args:
        results: with `frontiers`, and what was left out in `about`.
        bar_points: where given, whether the lower end of each lead is at least so many points.
    """
    first = results.frontiers[0].method
    lead = f"{first}'s less it"
    left_out = "\n".join(f"left out: {k} ({why})" for k, why in results.about["left_out"].items())
    areas = rules_table(
        f"{results.dataset}: {results.setting}", left_out, ["area, %", f"{lead}, points"]
    )
    for one in results.frontiers:
        text = "" if one.lead is None else one.lead.text(100, 2, signed=True)
        if one.lead is not None and bar_points is not None:
            held = one.lead.value > 0 and 100 * one.lead.low >= bar_points
            text += "   holds" if held else "   DOES NOT HOLD"
        areas.add_row(one.method, one.area.text(100, 2), text)
    return [areas, *_gap_tables(results.frontiers)]


def _gap_tables(frontiers: Sequence[Frontier]) -> list[Table]:
    """The shares of the oracle's gap, as many prices beside each other as a terminal shows."""
    penalties = [penalty for penalty, _ in frontiers[0].gap_closed]
    tables = []
    for start in range(0, len(penalties), _PRICES_A_TABLE):
        part = slice(start, start + _PRICES_A_TABLE)
        table = rules_table(
            "Share of the oracle's gap closed, %" if start == 0 else "",
            "± wider half of the 95 % interval by problem" if start == 0 else "",
            [f"λ={penalty_name(p)}" for p in penalties[part]],
        )
        for one in frontiers:
            cells = (number_cell(share, 100, 1) for _, share in one.gap_closed[part])
            table.add_row(one.method, *cells)
        tables.append(table)
    return tables
