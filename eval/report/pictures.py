"""Pictures: Pareto fronts and training dynamics.

One colour and marker a method throughout (Okabe and Ito's palette), thin lines, no colour that
grey print would lose: markers and line styles say everything twice.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ospruner.durable import read_checked

from ..methods import EVERY_PRICE, FRONTIER, FULL, LIMIT, ORACLE
from ..table import FloatArray
from ..text import penalty_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

__all__ = [
    "FAINT",
    "INK",
    "MUTED",
    "assign_styles",
    "draw_pareto",
    "front",
    "furnish",
    "label_points",
    "save_dynamics",
    "save_frontiers",
    "save_panels",
    "save_pareto",
]

INK, MUTED, FAINT = "#1a1a1a", "#6b6b6b", "#d9d9d9"
# Okabe and Ito's palette, told apart with every common colour vision; markers say it twice.
FRONTIER_COLOUR = "#0072B2"
STYLES = (
    ("#D55E00", "s"),
    ("#009E73", "^"),
    ("#CC79A7", "D"),
    ("#E69F00", "v"),
    ("#56B4E9", "P"),
    ("#8C6D31", "X"),
    ("#882255", "<"),
)
_LIMIT_MARKERS = ("D", "s", "^")

# Labels: offsets in points and directions, the best first (a frontier rises to the right).
_DISTANCES = (6.0, 9.0, 13.0, 18.0)
_DIRECTIONS = ((1, -1), (-1, 1), (1, 0), (0, 1), (0, -1), (-1, 0), (1, 1), (-1, -1))
_HORIZONTAL = {1: "left", 0: "center", -1: "right"}
_VERTICAL = {1: "bottom", 0: "center", -1: "top"}


def save_pareto(frame: pd.DataFrame, path: str | Path, *, title: str = "") -> None:
    """Draws rules and limits on the same traces into a file (PNG, or what its suffix says).

    Args:
        frame: see `draw_pareto`.
        path: the file to write.
        title: above the picture.

    Raises:
        ValueError: no results.
    """
    figure = _figure(7.2, 4.8, 200)
    axes = figure.add_subplot()
    draw_pareto(axes, frame)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    _finish(figure, handles, title)
    taken = label_points(axes, frame[frame["method"] == FRONTIER], FRONTIER_COLOUR)
    for method, rows in frame.groupby("method", sort=False):
        if method != FRONTIER:
            ends = rows.sort_values("tokens").iloc[[0, -1]].drop_duplicates()
            label_points(axes, ends, MUTED, 7, taken)
    _save(figure, [Path(path)])


def assign_styles(methods: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each method that has no look of its own, in order of appearance."""
    plain, limits = itertools.cycle(STYLES), itertools.cycle(_LIMIT_MARKERS)
    styles: dict[str, tuple[str, str]] = {}
    for method in dict.fromkeys(methods):
        if method.startswith(LIMIT):
            styles[method] = (MUTED, next(limits))
        elif method not in (FRONTIER, FULL) and not method.startswith(ORACLE):
            styles[method] = next(plain)
    return styles


def draw_pareto(
    axes: Axes, frame: pd.DataFrame, styles: Mapping[str, tuple[str, str]] | None = None
) -> None:
    """Draws accuracy against thinking tokens: the frontier joined, all others as points.

    Methods named FRONTIER (joined, on its 95 % band), FULL (its accuracy as a line across) and
    ORACLE (a star) have looks of their own, and those of LIMIT are hollow; any other method gets
    a colour and a marker, and EVERY_PRICE is joined, too. A legend and `label_points` are the
    caller's, as several panels may share them.

    Args:
        axes: where to draw.
        frame: as `Results.frame`; what is `chosen` is ringed.
        styles: of `assign_styles`, where several pictures share one legend; None for this one's.

    Raises:
        ValueError: no results.
    """
    if frame.empty:
        raise ValueError("results is empty: there is nothing to draw")
    styles = assign_styles(frame["method"].tolist()) if styles is None else styles
    for method, unsorted in frame.groupby("method", sort=False):
        name, rows = str(method), unsorted.sort_values("tokens", kind="stable")
        x, y = rows["tokens"], 100 * rows["accuracy"]
        look: dict[str, Any] = {"label": name, "zorder": 3}
        if name == FRONTIER:
            ends = 100 * rows["accuracy_low"], 100 * rows["accuracy_high"]
            axes.fill_between(x, *ends, color=FRONTIER_COLOUR, alpha=0.10, lw=0, zorder=0)
            look |= {"ls": "-", "lw": 1.8, "marker": "o", "ms": 5.5, "color": FRONTIER_COLOUR}
            look |= {"mec": "white", "mew": 0.8, "zorder": 4}
        elif name == FULL:
            axes.axhline(y.iloc[0], color=MUTED, lw=0.8, ls=(0, (4, 3)), zorder=1)
            look |= {"ls": "none", "marker": "o", "ms": 7, "color": INK}
        elif name.startswith(ORACLE):
            look |= {"ls": "none", "marker": "*", "ms": 11, "color": MUTED, "mew": 0.9}
            look |= {"mfc": MUTED if name == ORACLE else "white"}  # hollow: its variants
        else:
            colour, marker = styles[name]
            fill, edge = ("white", colour) if name.startswith(LIMIT) else (colour, "white")
            joined = name == EVERY_PRICE  # a frontier, too
            look |= {"ls": "-" if joined else "none", "lw": 1.4, "marker": marker}
            look |= {"color": colour, "ms": 4.0 if joined else 5.5, "mfc": fill, "mec": edge}
        axes.plot(x, y, **look)
    ringed = frame[frame["chosen"].fillna(False).astype(bool)]
    if len(ringed):
        axes.plot(
            ringed["tokens"], 100 * ringed["accuracy"], "o", ms=12, mfc="none", mec=INK, mew=1.2,
            label="chosen on validation", zorder=5,
        )  # fmt: skip
    furnish(axes, "thinking tokens per trace", "accuracy, %")
    axes.margins(x=0.1, y=0.12)
    axes.set_xlim(left=max(0.0, axes.get_xlim()[0]))


def save_frontiers(points: Mapping[str, FloatArray], path: str | Path, *, title: str = "") -> None:
    """Draws whole methods as lines of accuracy over thinking tokens, and writes a file.

    Args:
        points: (P, 2) tokens and accuracy of each method, by length; the first is drawn in front.
        path: the file to write, PNG or what its suffix says.
        title: above the picture.

    Raises:
        ValueError: no methods.
    """
    if not points:
        raise ValueError("points is empty: there is nothing to draw")
    figure = _figure(7.2, 5.4, 200)
    axes = figure.add_subplot()
    for number, (name, of_method) in enumerate(points.items()):
        looks = (FRONTIER_COLOUR, "o"), *STYLES
        colour, marker = looks[number and (number - 1) % len(STYLES) + 1]
        axes.plot(
            of_method[:, 0], 100 * of_method[:, 1], lw=1.2 if number else 2.0, marker=marker,
            ms=3.0, color=colour, label=name, zorder=3 if number else 4,
            # Beyond the palette the same colours come again, dashed.
            ls="-" if number <= len(STYLES) else (0, (4, 2)),
        )  # fmt: skip
    furnish(axes, "thinking tokens per trace", "accuracy, %")
    _finish(figure, dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True)), title)
    _save(figure, [Path(path)])


def furnish(axes: Axes, x_name: str, y_name: str) -> None:
    """Names the axes, and takes away what is not needed to read them."""
    axes.set_xlabel(x_name, fontsize=9.5, color=INK)
    axes.set_ylabel(y_name, fontsize=9.5, color=INK)
    axes.grid(axis="y", color=FAINT, lw=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(MUTED)
    axes.tick_params(colors=MUTED, labelsize=8.5)


def label_points(
    axes: Axes,
    frame: pd.DataFrame,
    colour: str,
    size: float = 8,
    taken: list[Bbox] | None = None,
) -> list[Bbox]:
    """Writes each result's setting beside its point, where nothing else stands.

    Places are tried from near to far, eight directions each; a label that fits nowhere is left
    out: a crowded picture is better short of a label than unreadable.

    Args:
        axes: a drawn picture; its limits must be final, as free places are found in pixels.
        frame: the results to label, all drawn on `axes`.
        colour: of the text.
        size: of the text, in points.
        taken: what earlier labels on `axes` found taken; None lays the figure out anew.

    Returns:
        What is taken now, in pixels.
    """
    from matplotlib.patheffects import Normal, Stroke

    figure = axes.get_figure(root=True)
    assert figure is not None
    scale = figure.dpi / 72.0  # pixels a point
    if taken is None:
        figure.draw_without_rendering()
        taken = list(_drawn_boxes(axes, scale))
    inside = axes.get_window_extent()
    marked = [line for line in axes.get_lines() if line.get_marker() not in ("None", None)]
    drawn = [axes.transData.transform(np.asarray(line.get_xydata())) for line in marked]
    points: FloatArray = np.concatenate(drawn)  # (P, 2)

    def gaps(box: Bbox, of: FloatArray) -> FloatArray:
        """Pixels from points (..., 2) to a box."""
        outside = np.maximum(np.maximum(box.min - of, of - box.max), 0.0)
        return np.hypot(outside[..., 0], outside[..., 1])

    for row in frame.sort_values("tokens").itertuples():
        point = (row.tokens, 100 * row.accuracy)
        pixel = axes.transData.transform(point)
        for away, (right, up) in itertools.product(_DISTANCES if row.setting else (), _DIRECTIONS):
            reach = away if 0 in (right, up) else 0.7 * away
            look: dict[str, Any] = {"ha": _HORIZONTAL[right], "va": _VERTICAL[up], "zorder": 6}
            label = axes.annotate(
                row.setting, point, xytext=(right * reach, up * reach),
                textcoords="offset points", fontsize=size, color=colour,
                path_effects=[Stroke(linewidth=2.5, foreground="white"), Normal()], **look,
            )  # fmt: skip
            box = label.get_window_extent()
            spaced = box.padded(2.2 * scale)
            fits = inside.containsx(box.x0) and inside.containsx(box.x1)
            fits = fits and inside.containsy(box.y0) and inside.containsy(box.y1)
            fits = fits and not any(spaced.overlaps(other) for other in taken)
            # A reader takes it for the label of the nearest point.
            if fits and gaps(box, points).min() >= gaps(box, pixel) - 0.5:
                taken.append(box)
                break
            label.remove()
    return taken


def _drawn_boxes(axes: Axes, scale: float) -> Iterator[Bbox]:
    """What labels must not touch: markers, and lines as strings of small boxes, in pixels."""
    from matplotlib.transforms import Bbox

    for line in axes.get_lines():
        pixels = line.get_transform().transform(np.asarray(line.get_xydata(), np.float64))
        if line.get_marker() not in ("None", None):
            half = scale * line.get_markersize() / 2
            yield from (Bbox([[x - half, y - half], [x + half, y + half]]) for x, y in pixels)
        if line.get_linestyle() == "None":
            continue
        for start, end in itertools.pairwise(pixels):
            count = max(2, int(np.hypot(*(end - start)) / (2 * scale)))
            for x, y in start + np.linspace(0, 1, count)[:, None] * (end - start):
                yield Bbox([[x - scale, y - scale], [x + scale, y + scale]])


def front(frame: pd.DataFrame) -> pd.DataFrame:
    """The results that no other beats in both tokens and accuracy, by rising tokens."""
    order = frame.sort_values(["tokens", "accuracy"], ascending=[True, False])
    before = order["accuracy"].cummax().shift(fill_value=-np.inf)
    return order[order["accuracy"] > before]


def save_panels(
    panels: Mapping[str, pd.DataFrame],
    paths: Sequence[Path],
    *,
    title: str = "",
    columns: int = 3,
) -> None:
    """Accuracy against thinking tokens, one panel a benchmark, methods alike in all.

    Args:
        panels: heading -> results on the same traces, as `Results.frame`.
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
    grid = list(figure.subplots(high, wide, squeeze=False).flat)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    handles: dict[str, Any] = {}
    styles = assign_styles([name for frame in panels.values() for name in frame["method"]])
    for axes, (heading, frame) in zip(grid, panels.items(), strict=False):
        draw_pareto(axes, frame, styles)
        reached = front(frame[~frame["method"].str.startswith(ORACLE)])  # hindsight, nobody has
        axes.plot(
            reached["tokens"], 100 * reached["accuracy"], "-", color=MUTED, lw=3.2, alpha=0.28,
            zorder=1.5, label="front of all methods",
        )  # fmt: skip
        axes.set_title(heading, loc="left", fontsize=10, color=INK)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    _finish(figure, handles, title)
    figure.draw_without_rendering()  # labels find their places in pixels
    for axes, frame in zip(grid, panels.values(), strict=False):
        ours = frame["method"] == FRONTIER
        taken = list(_drawn_boxes(axes, figure.dpi / 72.0))
        label_points(axes, frame[ours], FRONTIER_COLOUR, 7.5, taken)
        label_points(axes, frame[~ours & (frame["method"] != FULL)], MUTED, 6.5, taken)
    _save(figure, paths)


def save_dynamics(run_folder: str | Path, paths: Sequence[Path], *, title: str = "") -> None:
    """Validation accuracy and length in the course of a training run (the paper's Figure 1).

    Drawn over optimiser steps: where the run validated (`eval_strategy`), and at each stage's end.

    Args:
        run_folder: a folder of `ospruner train`, of a finished run.
        paths: the files to write.
        title: above the picture.

    Raises:
        ValueError: the folder holds no finished run.
    """
    stages, ends, points, unit = _read_log(Path(run_folder))
    if not stages:
        raise ValueError(f"{run_folder} has no finished stage: nothing to draw yet")
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
            _stage_label(stage, points),
            ((start + end) / 2, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 3),
            textcoords="offset points", ha="center", fontsize=7, color=MUTED,
            rotation=0 if len(stages) < 10 else 45,
        )  # fmt: skip
    handles = dict(zip(*reversed(upper.get_legend_handles_labels()), strict=True))
    _finish(figure, handles, title)
    _save(figure, paths)


def _stage_label(
    stage: Mapping[str, Any], points: Sequence[tuple[float, Mapping[str, Any]]]
) -> str:
    """The price of a stage; of one for every price, the one at which it is drawn."""
    if stage["every_price"]:
        return f"every λ, drawn at λ={penalty_name(points[-1][1]['price'])}"
    return f"λ={penalty_name(stage['price'])}"


def _read_log(
    folder: Path,
) -> tuple[list[dict[str, Any]], list[float], list[tuple[float, dict[str, Any]]], str]:
    """The stages' validation results, where each ends, the points to draw, and the unit of both."""
    if not (folder / "trainer_state.json").is_file():
        raise ValueError(f"{folder} has no trainer_state.json: give the folder of a finished run")
    way_out = "the policies beside it are whole; only the picture of their training is lost"
    record = read_checked(folder / "run.json", way_out)
    every = record["settings"]["head"] == "price"
    stages = [one | {"every_price": every} for one in record.get("policies", {}).values()]
    state = json.loads((folder / "trainer_state.json").read_text("utf-8"))
    length = state["max_steps"] / max(len(stages), 1)
    ends = [length * (number + 1) for number in range(len(stages))]
    points = [
        (float(e["step"]), {name: e[f"eval_{name}"] for name in ("price", "accuracy", "tokens")})
        for e in state["log_history"]
        if "eval_price" in e
    ]
    if not (points and every):  # whose end is told at another price
        points += zip(ends, stages, strict=True)
    return stages, ends, sorted(points, key=lambda point: point[0]), "optimiser steps"


def _figure(width: float, height: float, dpi: int = 160) -> Figure:
    # An own canvas: pyplot's global state and window system are never touched.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
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
