"""The picture of a label folder: accuracy along the traces, first right answers, step counts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ospruner.eval.table import TraceTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_stats"]

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

    from .label_stats import first_right_fractions

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
