"""Results as a terminal table and as a JSON file; `picture` draws them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from ..metrics import Estimate
from ..results import Result, Rule

__all__ = [
    "differences_table",
    "load_results",
    "number_cell",
    "parameter_text",
    "results_table",
    "save_results",
]


def parameter_text(result: Result | Rule) -> str:
    """The parameter as tables and pictures write it: λ=5e-4, ≥.70, 110 tokens, step 4, or ""."""
    value = result.parameter
    if value is None:
        return ""
    if result.parameter_name == "λ":
        return f"λ={penalty_text(value)}"
    if result.parameter_name == "threshold":
        return f"≥{value:.2f}".replace("0.", ".", 1)
    if result.parameter_name == "step":
        return f"step {value:g}"
    if result.parameter_name == "nats":
        return f"≤{value:g} nats"
    return f"{value:g} {result.parameter_name}".rstrip()


def penalty_text(value: float) -> str:
    """A length penalty without needless digits: 0, 5e-5, 2.5e-4."""
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(value))
    mantissa = f"{value / 10**exponent:.3g}"
    if mantissa == "10":  # 9.999e-5
        mantissa, exponent = "1", exponent + 1
    return f"{mantissa}e{exponent}"


def results_table(
    results: Sequence[Result],
    limits: Sequence[Result] = (),
    *,
    title: str = "",
    stacked: bool = False,
) -> Table:
    """The results, one rule a row, every number with its 95 % interval by problem.

    Args:
        results: rules, in the order to show them; the highest AES is bold.
        limits: what no rule can reach, or none should need, shown below a line.
        title: above the table.
        stacked: intervals under their numbers: 80 columns suffice, where one line takes 105.

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
    table = Table(
        title=title or None,
        caption=(
            f"{first.traces:,} traces of {first.problems:,} problems; [95 % interval by problem]; "
            f"AES {first.aes_label}"
        ),
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
    )
    for name in ("method",) if stacked else ("method", "parameter"):
        table.add_column(name)
    for name in ("accuracy %", "thinking tokens", "reduction %", "AES"):
        table.add_column(
            name.replace(" ", "\n") if stacked else name, justify="right", no_wrap=True
        )
    best = max((r.aes.value for r in results), default=math.inf)
    for number, result in enumerate(everything):
        table.add_row(
            *_name_cells(result, stacked),
            number_cell(result.accuracy, 100, 1, stacked=stacked),
            number_cell(result.tokens, 1, 0 if result.tokens.value >= 100 else 1, stacked=stacked),
            number_cell(result.reduction, 100, 1, stacked=stacked),
            number_cell(result.aes, 1, 2, stacked=stacked),
            style="bold" if number < len(results) and result.aes.value == best else "",
            end_section=number == len(results) - 1 and bool(limits),
        )
    return table


def differences_table(
    differences: Mapping[str, Mapping[str, Estimate]], *, title: str = ""
) -> Table:
    """Paired differences (`results.compare`), one comparison a row.

    Args:
        differences: what is compared ("OS-Pruner - probe") -> its differences by name.
        title: above the table.
    """
    table = Table(
        title=title or None,
        caption="[95 % interval by problem]; an interval without 0 settles the sign",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("difference")
    for name in ("accuracy, points", "thinking tokens", "reduction, points", "AES"):
        table.add_column(name, justify="right")
    for name, by in differences.items():
        table.add_row(
            Text(name),
            number_cell(by["accuracy"], 100, 1, signed=True),
            number_cell(by["tokens"], 1, 1, signed=True),
            number_cell(by["reduction"], 100, 1, signed=True),
            number_cell(by["aes"], 1, 2, signed=True),
        )
    return table


def save_results(
    path: str | Path, results: Sequence[Result], about: Mapping[str, Any] | None = None
) -> None:
    """Writes the results as a JSON file, whole or not at all.

    Args:
        path: the file; its folder must exist.
        results: what to write.
        about: what else belongs to them (settings, provenance), JSON-ready.

    Raises:
        TypeError: `about` is not JSON-ready.
    """
    path = Path(path)
    content = {"about": dict(about or {}), "results": [result.to_dict() for result in results]}
    text = json.dumps(_without_nan(content), indent=2, allow_nan=False) + "\n"
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    unfinished.write_text(text, "utf-8")
    unfinished.replace(path)


def load_results(path: str | Path) -> tuple[list[Result], dict[str, Any]]:
    """Reads what `save_results` wrote: the results, and what else belongs to them.

    Raises:
        ValueError: the file is not one of ours.
    """
    content = json.loads(Path(path).read_text("utf-8"))
    if not isinstance(content, dict) or set(content) != {"about", "results"}:
        raise ValueError(f"{path} is not a results file: it lacks 'about' and 'results'")
    return [Result.from_dict(_with_nan(entry)) for entry in content["results"]], content["about"]


def _name_cells(result: Result, stacked: bool) -> list[Text]:
    method, parameter = Text(result.method), Text(parameter_text(result))
    if not stacked:
        return [method, parameter]
    return [Text("\n").join([method, parameter]) if parameter.plain else method]


def number_cell(
    number: Estimate, scale: float, digits: int, *, signed: bool = False, stacked: bool = False
) -> Text:
    """A number with its interval as a table's cell; – where there is none.

    Args:
        number: the number.
        scale: what to multiply it by, such as 100 for percent.
        digits: decimals.
        signed: with a + where it is positive.
        stacked: the interval on a line of its own.
    """
    sign = "+" if signed else ""
    value, low, high = (
        "–" if math.isnan(x) else f"{_plain_zero(x * scale, digits):{sign},.{digits}f}"
        for x in (number.value, number.low, number.high)
    )
    interval = (f"[{low}, {high}]", "dim")
    return Text.assemble(value, "\n" if stacked else " ", interval)


def _plain_zero(value: float, digits: int) -> float:
    """Rounded, with minus zero made zero."""
    return round(value, digits) + 0.0


def _without_nan(value: Any) -> Any:
    """NaN as null: JSON has none (an interval of a baseline that is never right)."""
    if isinstance(value, dict):
        return {key: _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(entry) for entry in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _with_nan(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: {key: math.nan if x is None else x for key, x in value.items()}
        if isinstance(value, dict)
        else value
        for name, value in entry.items()
    }
