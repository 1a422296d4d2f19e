"""Pictures, as figures that `savefig` writes: Pareto fronts, whole methods, training dynamics.

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
import pandas as pd

from ospruner.durable import read_checked

from ..methods import EVERY_PRICE, FRONTIER, FULL, LIMIT, ORACLE
from ..table import FloatArray
from ..text import price_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

__all__ = [
    "FAINT",
    "INK",
    "MUTED",
    "assign_styles",
    "draw_dynamics",
    "draw_frontiers",
    "draw_pareto",
    "draw_rounds",
    "front",
    "furnish",
    "label_points",
    "plot_results",
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
LIMIT_MARKERS = ("D", "s", "^")
TOKENS, PERCENT = "thinking tokens per trace", "accuracy, %"
COLUMNS = 3  # panels side by side
MANY = 6  # settings of a method, from which on the first and last alone are labelled

# Labels: distances in points and directions, the best first (a frontier rises to the right).
DISTANCES, SPACE = (6.0, 9.0, 13.0, 18.0), 4.0
DIRECTIONS = ((1, -1), (-1, 1), (1, 0), (0, 1), (0, -1), (-1, 0), (1, 1), (-1, -1))


def draw_pareto(panels: Mapping[str, pd.DataFrame], title: str = "") -> Figure:
    """Accuracy against thinking tokens, one panel a benchmark, methods alike in all.

    Args:
        panels: heading -> results on the same traces, as `Results.frame`.
        title: above the picture.

    Raises:
        ValueError: no panels, or one without results.
    """
    if not panels or any(frame.empty for frame in panels.values()):
        raise ValueError("panels lacks results: there is nothing to draw")
    wide = min(COLUMNS, len(panels))
    high = -(-len(panels) // wide)
    figure = _figure(*((7.2, 4.8) if len(panels) == 1 else (4.4 * wide, 3.9 * high)))
    grid = list(figure.subplots(high, wide, squeeze=False).flat)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    styles = assign_styles([name for frame in panels.values() for name in frame["method"]])
    for axes, (heading, frame) in zip(grid, panels.items(), strict=False):
        plot_results(axes, frame, styles)
        reached = front(frame[~frame["method"].str.startswith(ORACLE)])  # hindsight, nobody has
        axes.plot(
            reached["tokens"], 100 * reached["accuracy"], "-", color=MUTED, lw=3.2, alpha=0.28,
            zorder=1.5, label="front of all methods",
        )  # fmt: skip
        axes.set_title(heading, loc="left", fontsize=10, color=INK)
    _finish(figure, title)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # it is final: labels find their places in pixels
    for axes, frame in zip(grid, panels.values(), strict=False):
        ours = frame["method"] == FRONTIER
        others = [
            rows if len(rows) < MANY else rows.sort_values("tokens").iloc[[0, -1]]
            for _, rows in frame[~ours & (frame["method"] != FULL)].groupby("method", sort=False)
        ]
        label_points(axes, [(frame[ours], FRONTIER_COLOUR), *((rows, MUTED) for rows in others)])
    return figure


def assign_styles(methods: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each method that has no look of its own, in order of appearance."""
    plain, limits = itertools.cycle(STYLES), itertools.cycle(LIMIT_MARKERS)
    styles: dict[str, tuple[str, str]] = {}
    for method in dict.fromkeys(methods):
        if method.startswith(LIMIT):
            styles[method] = (MUTED, next(limits))
        elif method not in (FRONTIER, FULL) and not method.startswith(ORACLE):
            styles[method] = next(plain)
    return styles


def plot_results(axes: Axes, frame: pd.DataFrame, styles: Mapping[str, tuple[str, str]]) -> None:
    """Accuracy against thinking tokens: the frontier joined, all others as points.

    Methods named FRONTIER (joined, on its 95 % band), FULL (its accuracy as a line across) and
    ORACLE (a star) have looks of their own, and those of LIMIT are hollow; any other method has
    its style, and EVERY_PRICE is joined, too. What is `chosen` is ringed.

    Args:
        axes: where to draw.
        frame: results on the same traces, as `Results.frame`.
        styles: of `assign_styles`.
    """
    for method, unsorted in frame.groupby("method", sort=False):
        name, rows = str(method), unsorted.sort_values("tokens", kind="stable")
        x, y = rows["tokens"], 100 * rows["accuracy"]
        if name == FRONTIER:
            ends = 100 * rows["accuracy_low"], 100 * rows["accuracy_high"]
            axes.fill_between(x, *ends, color=FRONTIER_COLOUR, alpha=0.10, lw=0, zorder=0)
        elif name == FULL:
            axes.axhline(y.iloc[0], color=MUTED, lw=0.8, ls=(0, (4, 3)), zorder=1)
        axes.plot(x, y, label=name, **{"zorder": 3, **_look(name, styles)})
    ringed = frame[frame["chosen"].astype(bool)]
    if len(ringed):
        axes.plot(
            ringed["tokens"], 100 * ringed["accuracy"], "o", ms=12, mfc="none", mec=INK, mew=1.2,
            label="chosen on validation", zorder=5,
        )  # fmt: skip
    furnish(axes, TOKENS, PERCENT)
    axes.margins(x=0.1, y=0.12)
    axes.set_xlim(left=max(0.0, axes.get_xlim()[0]))


def _look(name: str, styles: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """How a method's line and markers are drawn."""
    if name == FRONTIER:
        look: dict[str, Any] = {"ls": "-", "lw": 1.8, "marker": "o", "ms": 5.5, "zorder": 4}
        return look | {"color": FRONTIER_COLOUR, "mec": "white", "mew": 0.8}
    if name == FULL:
        return {"ls": "none", "marker": "o", "ms": 7, "color": INK}
    if name.startswith(ORACLE):
        look = {"ls": "none", "marker": "*", "ms": 11, "color": MUTED, "mew": 0.9}
        return look | {"mfc": MUTED if name == ORACLE else "white"}  # hollow: its variants
    colour, marker = styles[name]
    fill, edge = ("white", colour) if name.startswith(LIMIT) else (colour, "white")
    joined = name == EVERY_PRICE  # a frontier, too
    look = {"ls": "-" if joined else "none", "lw": 1.4, "ms": 4.0 if joined else 5.5}
    return look | {"marker": marker, "color": colour, "mfc": fill, "mec": edge}


def furnish(axes: Axes, x_name: str, y_name: str) -> None:
    """Names the axes, and takes away what is not needed to read them."""
    axes.set_xlabel(x_name, fontsize=9.5, color=INK)
    axes.set_ylabel(y_name, fontsize=9.5, color=INK)
    axes.grid(axis="y", color=FAINT, lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(colors=MUTED, labelsize=8.5)


def label_points(axes: Axes, groups: Sequence[tuple[pd.DataFrame, str]], size: float = 7.5) -> None:
    """Writes each result's setting beside its point, where nothing else stands.

    Places are tried from near to far, eight directions each; a label that fits nowhere is left
    out: a crowded picture is better short of a label than unreadable.

    Args:
        axes: a drawn picture; its limits must be final, as free places are found in pixels.
        groups: results to label, all drawn on `axes`, and their colour; the first choose first.
        size: of the text, in points.
    """
    from matplotlib.patheffects import Normal, Stroke

    figure = axes.get_figure(root=True)
    assert figure is not None
    scale, inside = figure.dpi / 72.0, axes.get_window_extent()  # pixels a point
    points, drawn = [], []  # (P, 2) pixels: of markers; of all that labels must not touch
    for line in axes.get_lines():
        path = line.get_transform().transform_path(line.get_path())
        joined = line.get_linestyle() != "None"
        drawn.append(np.asarray((path.interpolated(200) if joined else path).vertices))
        if line.get_marker() not in ("None", None):
            points.append(np.asarray(path.vertices))
    taken: list[Any] = []  # boxes of labels
    rows = ((row, colour) for of, colour in groups for row in of.sort_values("tokens").itertuples())
    for row, colour in rows:
        point = (row.tokens, 100 * row.accuracy)
        own: FloatArray = axes.transData.transform(point)
        label = axes.annotate(
            row.setting, point, xytext=(0, 0), textcoords="offset points", fontsize=size,
            color=colour, zorder=6,
            path_effects=[Stroke(linewidth=2.5, foreground="white"), Normal()],
        )  # fmt: skip
        for away, (x, y) in itertools.product(DISTANCES if row.setting else (), DIRECTIONS):
            reach = away if 0 in (x, y) else 0.7 * away
            label.set_position((reach * x, reach * y))
            label.set(ha=("center", "left", "right")[x], va=("center", "bottom", "top")[y])
            box = label.get_window_extent()
            fits = bool(np.all(box.min >= inside.min) and np.all(box.max <= inside.max))
            fits = fits and not box.padded(2.2 * scale).count_overlaps(taken)
            room = box.padded(SPACE * scale)
            fits = fits and not any(room.count_contains(of_line) for of_line in drawn)
            # A reader takes it for the label of the nearest point.
            if fits and _gaps(box, np.concatenate(points)).min() >= _gaps(box, own) - 0.5:
                taken.append(box)
                break
        else:
            label.remove()


def _gaps(box: Bbox, points: FloatArray) -> FloatArray:
    """Pixels from points (..., 2) to a box."""
    outside = np.maximum(np.maximum(box.min - points, points - box.max), 0.0)
    return np.hypot(outside[..., 0], outside[..., 1])


def front(frame: pd.DataFrame) -> pd.DataFrame:
    """The results that no other beats in both tokens and accuracy, by rising tokens."""
    order = frame.sort_values(["tokens", "accuracy"], ascending=[True, False])
    before = order["accuracy"].cummax().shift(fill_value=-np.inf)
    return order[order["accuracy"] > before]


def draw_frontiers(points: Mapping[str, FloatArray], title: str = "") -> Figure:
    """Whole methods as lines of accuracy over thinking tokens.

    Args:
        points: (P, 2) tokens and accuracy of each method, by length; the first is drawn in front.
        title: above the picture.
    """
    figure = _figure(7.2, 5.4)
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
    furnish(axes, TOKENS, PERCENT)
    _finish(figure, title)
    return figure


def draw_dynamics(run_folder: str | Path, title: str = "") -> Figure:
    """Validation accuracy and length in the course of a training run (the paper's Figure 1).

    Drawn over optimiser steps: where the run validated (`eval_strategy`), and at each stage's end.

    Args:
        run_folder: a folder of `ospruner train`, of a finished run.
        title: above the picture.

    Raises:
        ValueError: the folder holds no finished run.
    """
    stages, log, every_price = _read_log(Path(run_folder))
    figure = _figure(7.2, 4.8)
    upper, lower = figure.subplots(2, 1, sharex=True)
    for axes, key, scale, name in (
        (upper, "accuracy", 100, PERCENT),
        (lower, "tokens", 1, "thinking tokens"),
    ):
        full = scale * stages[f"full_{key}"].iloc[0]
        axes.axhline(full, color=INK, lw=1.0, ls=(0, (1, 2)), label="full trace")
        axes.plot(
            log["step"], scale * log[key], "-", marker="o" if len(log) < 40 else "", ms=5.5,
            color=FRONTIER_COLOUR, lw=1.8, mec="white", mew=0.8, zorder=3,
            label="policy on validation",
        )  # fmt: skip
        for end in stages["step"].iloc[:-1]:
            axes.axvline(end, color=MUTED, lw=0.8, ls=(0, (5, 3)), zorder=0, label="price annealed")
        furnish(axes, "optimiser steps" if axes is lower else "", name)
        axes.set_xlim(0, stages["step"].iloc[-1] * 1.04)
        axes.margins(y=0.2)
    for stage in stages.itertuples():
        said = f"price={price_name(stage.price)}"
        if every_price:
            said = f"every price, drawn at price={price_name(log['price'].iloc[-1])}"
        upper.annotate(
            said, (stage.step - stages["step"].iloc[0] / 2, 1.0), xytext=(0, 3), ha="center",
            xycoords=("data", "axes fraction"), textcoords="offset points", fontsize=7,
            color=MUTED, rotation=0 if len(stages) < 10 else 45,
        )  # fmt: skip
    _finish(figure, title)
    return figure


def _read_log(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame, bool]:
    """A run's stages, "step" being their ends; its validations; whether it is of every price."""
    if not (folder / "trainer_state.json").is_file():
        raise ValueError(f"{folder} has no trainer_state.json: give the folder of a finished run")
    way_out = "the policies beside it are whole; only the picture of their training is lost"
    record = read_checked(folder / "run.json", way_out)
    if not record.get("policies"):
        raise ValueError(f"{folder} has no finished stage: nothing to draw yet")
    state = json.loads((folder / "trainer_state.json").read_text("utf-8"))
    stages = pd.DataFrame(record["policies"].values())
    stages["step"] = state["max_steps"] / len(stages) * (stages.index + 1)
    log = pd.DataFrame(state["log_history"]).rename(columns=lambda n: n.removeprefix("eval_"))
    log = log.reindex(columns=["step", "price", "accuracy", "tokens"]).dropna()
    every_price = record["settings"]["head"] == "price"
    if log.empty or not every_price:  # whose end is told at another price
        log = pd.concat([log, stages[log.columns]])
    return stages, log.sort_values("step", kind="stable"), every_price


def draw_rounds(rounds: Sequence[Mapping[str, float]], title: str) -> Figure:
    """What each round of labels saved at the promise, and what twice as many were expected to.

    Args:
        rounds: "problems", and the shares "saved", "frontier" and "expected" of each.
        title: above the picture.
    """
    figure = _figure(6.4, 4.0)
    axes = figure.add_subplot()
    sizes = [one["problems"] for one in rounds]
    colours = [colour for colour, _ in STYLES]
    for name, label, marker, colour, places in (
        ("saved", "at the promise", "o-", FRONTIER_COLOUR, sizes),
        ("expected", "forecast, at the promise", "v:", colours[0], [2 * size for size in sizes]),
        ("frontier", "measured, without a promise", "s--", MUTED, sizes),
    ):
        shares = [100 * one[name] for one in rounds]
        axes.plot(places, shares, marker, color=colour, label=label, lw=1.2, ms=4)
    axes.set_xscale("log", base=2)
    axes.set_xticks([*sizes, 2 * sizes[-1]], [f"{size:,}" for size in (*sizes, 2 * sizes[-1])])
    furnish(axes, "labelled problems", "thinking tokens saved, %")
    _finish(figure, title)
    return figure


def _figure(width: float, height: float) -> Figure:
    # An own canvas: pyplot's global state and window system are never touched.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _finish(figure: Figure, title: str) -> None:
    """Title, and one legend for all panels."""
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=INK)
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    columns = max(1, min(len(handles), int(figure.get_figwidth() // 1.9)))
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=columns,
        frameon=False, fontsize=8, labelcolor=INK,
    )  # fmt: skip
