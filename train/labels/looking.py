"""Looking at labels: counts, accuracy along the traces, first right answers, one trace."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from ospruner.engines.opening import load_tokenizer
from ospruner.eval.table import FloatArray, TraceTable

from .folder import MANIFEST, faults_of, read_labels, read_manifest
from .regrading import Regraded

PICTURE = "statistics.png"

__all__ = [
    "FRACTIONS",
    "draw_stats",
    "print_check",
    "print_regrade",
    "print_run",
    "print_stats",
    "print_stopped",
    "show_trace",
    "stats_of",
    "summary_of",
    "trace_text",
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
        "failed_traces": len(manifest["failed"]),
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


_SHOWN_ERRORS = 3


def print_run(path: Path, console: Console, json_file: Path | None) -> None:
    """Prints what a label run made, in a few lines."""
    stats = summary_of(path)
    console.print(
        f"{stats['traces']} traces of {stats['problems']} problems, {stats['steps']} labelled "
        f"steps; right at the end {100 * stats['full_accuracy']:.1f} %, ungraded "
        f"{stats['ungraded_steps']}, cut at the cap {stats['capped_traces']}, dropped "
        f"{stats['dropped_traces']}"
    )
    for problem, sample, error in read_manifest(path)["failed"][:_SHOWN_ERRORS]:
        console.print(f"Failed: trace {sample} of problem {problem}: {error}", highlight=False)
    if failed := stats["failed_traces"]:
        console.print(
            f"{failed} of {failed + stats['traces']} traces failed. If they are the long ones, the "
            "labels are biased: the same command with --retry-failed tries them again."
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


def print_check(path: Path, console: Console) -> bool:
    """Prints what of a label folder is not as it was written; whether all is.

    Raises:
        ValueError: it is no label folder, or none of its manifests can be read.
    """
    faults = faults_of(path)
    for fault in faults:
        console.print(fault, highlight=False)
    if not faults:
        manifest = read_manifest(path)
        console.print(
            f"All as written: {manifest['traces']} traces in {len(manifest['chunks'])} chunks."
        )
    return not faults


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
        ("failed", str(stats["failed_traces"])),
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


if TYPE_CHECKING:
    from matplotlib.axes import Axes


_INK, _MUTED, _FAINT = "#1a1a1a", "#6b6b6b", "#d9d9d9"
_BLUE, _ORANGE, _GREEN = "#0072B2", "#D55E00", "#009E73"  # Okabe and Ito
_BINS = 20


def draw_stats(table: TraceTable, stats: Mapping[str, Any], path: str | Path) -> None:
    """Draws three panels into a file (PNG, or what its suffix says).

    Args:
        table: the labelled traces.
        stats: their `label_stats.stats_of`.
        path: the file to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.4, 3.7), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    accuracy, first, steps = figure.subplots(1, 3)
    _draw_accuracy(accuracy, stats)
    found = first_right_fractions(table)
    _histogram(
        first,
        np.histogram(found[~np.isnan(found)], np.linspace(0, 1, _BINS + 1)),
        f"First right answer ({100 * stats['ever_right']:.0f} % of the traces have one)",
        "after this share of the trace's tokens",
    )
    counts = table.num_steps
    edges = np.arange(0.5, counts.max() + 1.5, max(1, int(counts.max()) // 40))
    _histogram(
        steps,
        np.histogram(counts, np.append(edges, edges[-1] + np.diff(edges[-2:]))),
        f"Labelled steps a trace (median {np.median(counts):.0f})",
        "steps",
    )
    figure.savefig(path)


def _draw_accuracy(axes: Axes, stats: Mapping[str, Any]) -> None:
    shares = 100 * np.asarray(stats["fractions"])
    axes.plot(shares, 100 * np.asarray(stats["accuracy_by_fraction"]), color=_BLUE, lw=2)
    levels = [(stats["full_accuracy"], "forced at the end", _BLUE)]
    if stats["natural_accuracy"] is not None:
        levels.append((stats["natural_accuracy"], "natural answer", _ORANGE))
    levels.append((stats["ever_right"], "right at some step", _GREEN))
    for level, name, colour in levels:
        axes.axhline(100 * level, color=colour, lw=1, ls="--", label=f"{name} {100 * level:.1f} %")
    axes.set_ylim(0, 100)
    axes.set_xlim(0, 100)
    axes.legend(loc="lower right", fontsize=7.5, frameon=False, labelcolor=_INK)
    _dress(axes, "Accuracy of forced answers", "share of the trace's tokens, %", "right, %")


def _histogram(axes: Axes, counts: tuple[Any, Any], title: str, label: str) -> None:
    heights, edges = counts
    axes.bar(edges[:-1], heights, np.diff(edges), align="edge", color=_BLUE, ec="white", lw=0.4)
    _dress(axes, title, label, "traces")


def _dress(axes: Axes, title: str, label: str, vertical: str) -> None:
    axes.set_title(title, loc="left", fontsize=9, color=_INK)
    axes.set_xlabel(label, fontsize=8.5, color=_MUTED)
    axes.set_ylabel(vertical, fontsize=8.5, color=_MUTED)
    axes.tick_params(labelsize=8, colors=_MUTED)
    axes.grid(axis="y", color=_FAINT, lw=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_FAINT)


_STYLES = {True: "green", False: "red", None: "yellow"}


def show_trace(path: str | Path, row: int, tokenizer: str | None, console: Console) -> None:
    """Prints a trace: problem, each labelled step with its forced answer, and a summary.

    Args:
        path: the label folder.
        row: number of the trace, from 0.
        tokenizer: folder or Hub id of the tokenizer; the base's where None.
        console: where to print.

    Raises:
        ValueError: no such folder, row or tokenizer.
    """
    traces = read_labels(path)
    if not 0 <= row < len(traces):
        raise ValueError(f"row is {row}; {path} holds the traces 0 .. {len(traces) - 1}")
    settings = read_manifest(path)["settings"]
    loaded = load_tokenizer(
        tokenizer or settings["base_model"], None if tokenizer else settings["base_revision"]
    )
    console.print(trace_text(traces[row], loaded), soft_wrap=True)


def trace_text(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Text:
    """A labelled trace as coloured text.

    A step is green where the answer forced at its end is right, red where it is wrong, and yellow
    where there is no verdict.

    Args:
        row: a labelled trace.
        tokenizer: the one its ids belong to.
    """
    steps = len(row["step_ends"])
    text = Text()
    text.append(f"{row['problem_id']}, sample {row['sample_index']}", "bold")
    text.append(f"\n{row['problem']}\n\n")
    start = 0
    for step, end in enumerate(row["step_ends"]):
        grade = row["forced_correct"][step]
        style = _STYLES[None if grade is None else grade >= 0.5]
        body = tokenizer.decode(row["trace_ids"][start:end], clean_up_tokenization_spaces=False)
        text.append(str(body).rstrip() + "\n", style)
        answer = row["forced_answers"][step] or "no answer"
        notes = [f"step {step + 1} of {steps}", f"{end} tokens", f"forced answer: {answer}"]
        logprob, reason = row["forced_logprob"][step], row["ungraded_reasons"][step]
        if logprob is not None:
            notes.append(f"log-probability {logprob:.2f}")
        if reason is not None:
            notes.append(f"not graded: {reason}")
        text.append("  [" + ", ".join(notes) + "]\n\n", f"dim {style}")
        start = end
    right = sum(grade is not None and grade >= 0.5 for grade in row["forced_correct"])
    text.append(
        f"reference {row['answer']}; {right} of {steps} forced answers right; natural answer "
        f"{row['natural_answer'] or 'none'}; ended: {row['ended']}",
        "bold",
    )
    return text
