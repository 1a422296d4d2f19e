"""What a label folder says: counts, accuracy along the traces, first right answers, step counts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from ospruner.eval.table import FloatArray, TraceTable
from ospruner.hub_cards.labels import PICTURE

from .label_folder import MANIFEST, read_labels, read_manifest
from .regrade import Regraded

__all__ = [
    "FRACTIONS",
    "print_regrade",
    "print_run",
    "print_stats",
    "print_stopped",
    "stats_of",
    "summary_of",
]

FRACTIONS = np.arange(1, 21) / 20
"""Shares of a trace's tokens at which the forced answers' accuracy is taken."""


def stats_of(path: str | Path) -> dict[str, Any]:
    """Every number that `ospruner labels stats` prints, JSON-ready.

    Args:
        path: the label folder.

    Returns:
        Counts; accuracies; `accuracy_by_fraction` at `FRACTIONS`, of the answer forced at the
        last step within that share of the trace (an earlier one counts as wrong);
        `first_right_fraction` quantiles over the traces with a right answer; quantiles of steps
        and tokens; and the token costs.

    Raises:
        ValueError: there are no labels.
    """
    table = TraceTable.from_dataset(read_labels(path))
    first = first_right_fractions(table)
    natural = table.natural_correct[~np.isnan(table.natural_correct)]
    found = first[~np.isnan(first)]
    return {
        **summary_of(path),
        "natural_accuracy": float(natural.mean()) if len(natural) else None,
        "ever_right": float((~np.isnan(first)).mean()),
        "right_then_wrong": float(((table.full_correct < 0.5) & ~np.isnan(first)).mean()),
        "fractions": FRACTIONS.tolist(),
        "accuracy_by_fraction": accuracy_by_fraction(table).tolist(),
        "first_right_fraction": _quantiles(found) if len(found) else None,
        "steps_per_trace": _quantiles(table.num_steps),
        "tokens_per_trace": _quantiles(table.full_tokens),
        "answer_tokens_per_step": float(table.answer_tokens[table.mask].mean()),
    }


def summary_of(path: str | Path) -> dict[str, Any]:
    """Counts, accuracy at the end and token costs, also of labels without a single verdict.

    Raises:
        ValueError: there are no labels.
    """
    dataset, manifest = read_labels(path), read_manifest(path)
    reasons = Counter(why for row in dataset["ungraded_reasons"] for why in row if why is not None)
    grades = dataset["forced_correct"]
    costs = ("computed_tokens", "unique_tokens", "padding_tokens")
    return {
        "traces": len(dataset),
        "problems": len(set(dataset["problem_id"])),
        "steps": sum(map(len, grades)),
        "dropped_traces": len(manifest["dropped"]),
        "capped_traces": list(dataset["ended"]).count("cap"),
        "ungraded_steps": sum(row.count(None) for row in grades),
        "ungraded_reasons": dict(reasons),
        "full_accuracy": sum(row[-1] or 0.0 for row in grades) / len(dataset),
        **{name: manifest[name] for name in costs},
        "sampling_computed_tokens": manifest["sampling_computed_tokens"],
        "sampling_unique_tokens": manifest["sampling_unique_tokens"],
    }


def accuracy_by_fraction(table: TraceTable) -> FloatArray:
    """Mean correctness (F,) of the answer forced at the last step within each of `FRACTIONS`."""
    limits = FRACTIONS[:, None] * table.full_tokens  # (F, N)
    steps = ((table.lengths <= limits[..., None] + 1e-9) & table.mask).sum(-1)  # (F, N)
    rows = np.arange(len(table))
    right = np.where(steps > 0, table.correct[rows, np.maximum(steps, 1) - 1], 0.0)
    mean: FloatArray = right.mean(axis=1)
    return mean


def first_right_fractions(table: TraceTable) -> FloatArray:
    """(N,) share of its tokens after which a trace's forced answer is first right; NaN: never."""
    right = (table.correct >= 0.5) & table.mask
    first = right.argmax(axis=1)
    share = table.lengths[np.arange(len(table)), first] / table.full_tokens
    return np.where(right.any(axis=1), share, np.nan)


def print_stats(
    path: Path, picture: Path | None, console: Console, json_file: Path | None
) -> dict[str, Any]:
    """Prints and draws the statistics of a label folder.

    Args:
        path: the label folder.
        picture: where to draw; None for the folder itself, whose picture is published with it.
        console: where to print.
        json_file: where to write the numbers too.

    Raises:
        ValueError: there are no labels.
    """
    from .label_picture import draw_stats

    stats = stats_of(path)
    picture = picture or path / PICTURE
    draw_stats(TraceTable.from_dataset(read_labels(path)), stats, picture)
    table = Table(title=str(path), title_justify="left", show_header=False)
    for name, value in _lines(stats):
        table.add_row(name, value)
    console.print(table)
    console.print(f"Picture: {picture}")
    _write(stats, json_file)
    return stats


def print_run(path: Path, console: Console, json_file: Path | None) -> None:
    """Prints what a label run made, in a few lines."""
    stats = summary_of(path)
    console.print(
        f"{stats['traces']} traces of {stats['problems']} problems, {stats['steps']} labelled "
        f"steps; right at the end {100 * stats['full_accuracy']:.1f} %, ungraded "
        f"{stats['ungraded_steps']}, cut at the cap {stats['capped_traces']}, dropped "
        f"{stats['dropped_traces']}"
    )
    console.print(
        f"Tokens of the forks: {stats['computed_tokens']:,} computed, {stats['unique_tokens']:,} "
        f"unique ({_ratio(stats):.3f}). In {path}; look: ospruner labels stats {path}"
    )
    excluded = read_manifest(path).get("source", {}).get("excluded")
    if excluded:
        console.print(f"{excluded['overlaps']} problems were dropped as overlaps.")
    _write(stats, json_file)


def print_stopped(path: Path, console: Console) -> None:
    """Says what an interrupted run has left."""
    traces = read_manifest(path)["traces"] if (path / MANIFEST).is_file() else 0
    console.print(f"Stopped: {traces} labelled traces in {path}; the same command goes on.")


def print_regrade(result: Regraded, console: Console, json_file: Path | None) -> None:
    """Prints what grading again changed."""
    changed = {f"{was} -> {now}": count for (was, now), count in sorted(result.changed.items())}
    total = sum(changed.values())
    detail = "".join(f"; {name}: {count}" for name, count in changed.items())
    console.print(f"{result.steps} forced answers graded, {total} grades changed{detail}")
    for reason, count in sorted(result.ungraded.items()):
        console.print(f"without a verdict, {reason}: {count}")
    numbers = {"steps": result.steps, "changed": changed, "ungraded": dict(result.ungraded)}
    _write(numbers, json_file)


def _lines(stats: dict[str, Any]) -> list[tuple[str, str]]:
    def percent(value: float | None) -> str:
        return "none" if value is None else f"{100 * value:.1f} %"

    def spread(values: dict[str, float] | None, scale: float = 1, unit: str = "") -> str:
        if values is None:
            return "none"
        low, middle, high = (scale * values[q] for q in ("0.1", "0.5", "0.9"))
        return f"{middle:.0f}{unit} (10 % below {low:.0f}, 10 % above {high:.0f})"

    curve = dict(zip(stats["fractions"], stats["accuracy_by_fraction"], strict=True))
    reasons = ", ".join(f"{why}: {n}" for why, n in sorted(stats["ungraded_reasons"].items()))
    return [
        ("traces", f"{stats['traces']} of {stats['problems']} problems"),
        ("labelled steps", f"{stats['steps']}, a trace {spread(stats['steps_per_trace'])}"),
        ("thinking tokens a trace", spread(stats["tokens_per_trace"])),
        ("right, forced at the end", percent(stats["full_accuracy"])),
        ("right, natural answer", percent(stats["natural_accuracy"])),
        (
            "right when forced at a share of the trace",
            ", ".join(f"{f:.0%}: {percent(curve[f])}" for f in (0.25, 0.5, 0.75, 1.0)),
        ),
        ("right at some step", percent(stats["ever_right"])),
        ("right at some step, wrong at the end", percent(stats["right_then_wrong"])),
        ("first right at a share of", spread(stats["first_right_fraction"], 100, " %")),
        ("answer tokens a step", f"{stats['answer_tokens_per_step']:.1f}"),
        ("cut at the cap", str(stats["capped_traces"])),
        ("dropped", str(stats["dropped_traces"])),
        ("steps without a verdict", f"{stats['ungraded_steps']} {reasons}".strip()),
        (
            "tokens of the forks",
            f"{stats['computed_tokens']:,} computed, {stats['unique_tokens']:,} unique: "
            f"{_ratio(stats):.3f}",
        ),
    ]


def _ratio(stats: dict[str, Any]) -> float:
    return float(stats["computed_tokens"] / max(1, stats["unique_tokens"]))


def _quantiles(values: Any) -> dict[str, float]:
    return {str(q): float(np.quantile(values, q)) for q in (0.1, 0.5, 0.9)}


def _write(numbers: dict[str, Any], json_file: Path | None) -> None:
    if json_file is not None:
        json_file.write_text(json.dumps(numbers, indent=2) + "\n", "utf-8")
