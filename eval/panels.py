"""Pictures of several panels: Pareto fronts, training dynamics, accuracy by difficulty.

One colour and marker a method throughout (Okabe and Ito's palette), thin lines, no colour that
grey print would lose: markers and line styles say everything twice.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .evaluation import Evaluation
from .metrics import Estimate, bootstrap_interval
from .picture import (
    FRONTIER,
    FRONTIER_COLOUR,
    FULL,
    INK,
    MUTED,
    ORACLE,
    STYLES,
    FreeSpace,
    assign_styles,
    draw_pareto,
    furnish,
    label_points,
)
from .report import parameter_text, penalty_text
from .results import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_front", "front", "save_difficulty", "save_dynamics", "save_panels"]


def front(results: Sequence[Result]) -> list[Result]:
    """The results that no other beats in both tokens and accuracy, by rising tokens."""
    order = sorted(results, key=lambda r: (r.charged_tokens, -r.accuracy.value))
    highest = itertools.accumulate((r.accuracy.value for r in order), max, initial=-np.inf)
    return [r for r, before in zip(order, highest, strict=False) if r.accuracy.value > before]


def draw_front(axes: Axes, results: Sequence[Result]) -> None:
    """The front of all methods as a line; hindsight, which nobody has, is left out."""
    points = front([r for r in results if not r.method.startswith(ORACLE)])
    axes.plot(
        [r.charged_tokens for r in points],
        [100 * r.accuracy.value for r in points],
        "-", color=MUTED, lw=3.2, alpha=0.28, zorder=1.5, label="front of all methods",
    )  # fmt: skip


def save_panels(
    panels: Mapping[str, Sequence[Result]],
    paths: Sequence[Path],
    *,
    title: str = "",
    columns: int = 3,
) -> None:
    """Accuracy against thinking tokens, one panel a benchmark, methods alike in all.

    Args:
        panels: heading -> results on the same traces.
        paths: the files to write (PNG, SVG, PDF by their suffixes).
        title: above the picture.
        columns: panels side by side.

    Raises:
        ValueError: no panels, or one without results.
    """
    if not panels:
        raise ValueError("panels is empty: there is nothing to draw")
    wide = min(columns, len(panels))
    high = -(-len(panels) // wide)
    figure = _figure(max(5.2, 4.4 * wide), 3.9 * high)
    grid = figure.subplots(high, wide, squeeze=False)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    handles: dict[str, Any] = {}
    styles = assign_styles([result for results in panels.values() for result in results])
    for axes, (heading, results) in zip(grid.flat, panels.items(), strict=False):
        draw_pareto(axes, results, styles=styles)
        draw_front(axes, results)
        axes.set_title(heading, loc="left", fontsize=10, color=INK)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    _finish(figure, handles, title)
    figure.draw_without_rendering()  # labels find their places in pixels
    for axes, results in zip(grid.flat, panels.values(), strict=False):
        space = FreeSpace(axes, figure.dpi / 72.0)
        ours = [r for r in results if r.method == FRONTIER]
        label_points(axes, ours, FRONTIER_COLOUR, 7.5, space)
        others = [r for r in results if r.method not in (FRONTIER, FULL) and parameter_text(r)]
        label_points(axes, others, MUTED, 6.5, space)
    _save(figure, paths)


def save_dynamics(run_folder: str | Path, paths: Sequence[Path], *, title: str = "") -> None:
    """Validation accuracy and length in the course of a training run (the paper's Figure 1).

    Drawn over optimiser steps where the run validated between the stages' ends
    (`ospruner train --validate-every`), else over epochs, a point a stage.

    Args:
        run_folder: a folder of `ospruner train`, with `log.jsonl`.
        paths: the files to write.
        title: above the picture.

    Raises:
        ValueError: the folder holds no training log, or one without a finished stage.
    """
    stages, ends, points, unit = _read_log(Path(run_folder))
    if not stages:
        raise ValueError(f"{run_folder} has no finished stage in log.jsonl: nothing to draw yet")
    figure = _figure(7.2, 4.8)
    upper, lower = figure.subplots(2, 1, sharex=True)
    marker = "o" if len(points) < 40 else ""
    for axes, key, full, scale, name in (
        (upper, "accuracy", "full_accuracy", 100, "accuracy, %"),
        (lower, "tokens", "full_tokens", 1, "thinking tokens"),
    ):
        values = [scale * point[key] for _, point in points]
        axes.axhline(scale * stages[0][full], color=INK, lw=1.0, ls=(0, (1, 2)), label="full trace")
        axes.plot(
            [x for x, _ in points], values, "-", marker=marker, color=FRONTIER_COLOUR, lw=1.8,
            ms=5.5, mec="white", mew=0.8, label="policy on validation", zorder=3,
        )  # fmt: skip
        for number, end in enumerate(ends[:-1]):
            label = "λ annealed" if number == 0 else None
            axes.axvline(end, color=MUTED, lw=0.8, ls=(0, (5, 3)), zorder=0, label=label)
        furnish(axes, unit if axes is lower else "", name)
        axes.set_xlim(0, ends[-1] * 1.04)
        axes.margins(y=0.2)
    for stage, start, end in zip(stages, [0, *ends[:-1]], ends, strict=True):
        upper.annotate(
            f"λ={penalty_text(stage['length_penalty'])}",
            ((start + end) / 2, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 3),
            textcoords="offset points", ha="center", fontsize=7, color=MUTED,
            rotation=0 if len(stages) < 10 else 45,
        )  # fmt: skip
    handles = dict(zip(*reversed(upper.get_legend_handles_labels()), strict=True))
    _finish(figure, handles, title)
    _save(figure, paths)


def save_difficulty(
    evaluation: Evaluation,
    rules: Sequence[int],
    paths: Sequence[Path],
    *,
    title: str = "",
    bins: int = 5,
) -> None:
    """Accuracy and share of tokens kept, by how hard a problem is for the base itself.

    Problems are ordered by the mean length of their full traces (what the base found hard, whether
    or not it was right) and cut into groups of equal size.

    Args:
        evaluation: the evaluation.
        rules: numbers of the rules to show beside the full trace.
        paths: the files to write.
        title: above the picture.
        bins: how many groups, at most.
    """
    groups = difficulty_groups(evaluation, bins)
    figure = _figure(8.6, 3.9)
    left, right = figure.subplots(1, 2)
    chosen = [0, *rules]
    styles = itertools.cycle([(FRONTIER_COLOUR, "o"), *STYLES])
    x = np.arange(len(groups))
    for place, number in enumerate(chosen):
        rule = evaluation.rules[number]
        colour, marker = (INK, "o") if number == 0 else next(styles)
        name = " ".join([rule.method, parameter_text(rule)]).strip()
        offset = (place - (len(chosen) - 1) / 2) * 0.12
        by_group = [
            (
                bootstrap_interval(rule.outcome.correct[rows], _renumbered(evaluation, rows)),
                bootstrap_interval(rule.outcome.tokens[rows], _renumbered(evaluation, rows)),
            )
            for rows in groups
        ]
        for axes, which, scale in ((left, 0, 100), (right, 1, 1)):
            numbers: list[Estimate] = [pair[which] for pair in by_group]
            y = np.array([scale * n.value for n in numbers])
            ends = np.array([[scale * n.low for n in numbers], [scale * n.high for n in numbers]])
            axes.errorbar(
                x + offset, y, yerr=np.abs(ends - y), fmt=f"-{marker}", color=colour, lw=1.2,
                ms=5, mec="white", mew=0.6, capsize=0, elinewidth=0.9, label=name,
            )  # fmt: skip
    lengths = [evaluation.full.tokens[rows].mean() for rows in groups]
    for axes, name in ((left, "accuracy, %"), (right, "thinking tokens")):
        furnish(axes, "mean tokens of the full traces, in groups of problems", name)
        axes.set_xticks(x, [f"{length:.0f}" for length in lengths])
    right.set_ylim(bottom=0)
    handles = dict(zip(*reversed(left.get_legend_handles_labels()), strict=True))
    _finish(figure, handles, title)
    _save(figure, paths)


def difficulty_groups(evaluation: Evaluation, bins: int = 5) -> list[Any]:
    """Row numbers of each group of problems, easiest first; groups differ by at most a problem.

    Raises:
        ValueError: bins < 1.
    """
    if bins < 1:
        raise ValueError(f"bins is {bins}; it must be at least 1")
    problems = len(evaluation.problem_ids)
    totals = np.bincount(evaluation.problem_index, evaluation.full.tokens, minlength=problems)
    counts = np.bincount(evaluation.problem_index, minlength=problems)
    order = np.argsort(totals / counts, kind="stable")
    return [
        np.flatnonzero(np.isin(evaluation.problem_index, part))
        for part in np.array_split(order, min(bins, problems))
    ]


def _renumbered(evaluation: Evaluation, rows: Any) -> Any:
    return np.unique(evaluation.problem_index[rows], return_inverse=True)[1]


def _read_log(
    folder: Path,
) -> tuple[list[dict[str, Any]], list[float], list[tuple[float, dict[str, Any]]], str]:
    """The stages' validation results, where each ends, the points to draw, and the unit of both."""
    log = folder / "log.jsonl"
    if not log.is_file():
        raise ValueError(f"{folder} has no log.jsonl: give the folder of a training run")
    entries = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    stages = {e["validation"]["name"]: e["validation"] for e in entries if "validation" in e}
    epochs = {e["stage"]: e for e in entries if "epoch" in e and e["stage"] in stages}
    between = [e["dynamics"] for e in entries if "dynamics" in e]
    if between:
        ends = [float(epochs[name]["steps"]) for name in stages]
        points = [(float(point["steps"]), point) for point in between]
    else:
        lengths = [epochs[name]["epoch"] + 1 if name in epochs else 1 for name in stages]
        ends, points = [float(end) for end in np.cumsum(lengths)], []
    points += zip(ends, stages.values(), strict=True)
    points = sorted((p for p in points if p[0] <= max(ends)), key=lambda p: p[0]) if ends else []
    return list(stages.values()), ends, points, "optimiser steps" if between else "epochs"


def _figure(width: float, height: float) -> Figure:
    # An own canvas: pyplot's global state and window system are never touched.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _finish(figure: Figure, handles: Mapping[str, Any], title: str) -> None:
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=INK)
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=max(1, min(len(handles), int(figure.get_figwidth() // 1.9))),
        frameon=False,
        fontsize=8,
        labelcolor=INK,
    )


def _save(figure: Figure, paths: Sequence[Path]) -> None:
    for path in paths:
        figure.savefig(path)
