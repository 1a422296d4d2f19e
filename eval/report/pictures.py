"""Pictures, as figures that `savefig` writes: methods over their lengths, and training dynamics.

One colour and marker a method throughout (Okabe and Ito's palette), thin lines, no colour that
grey print would lose: markers and line styles say everything twice.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from ospruner.durable import read_checked

from ..methods import EVERY_PRICE, FRONTIER, FULL, LIMIT, ORACLE
from ..results import ENDS, price_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, FAINT = "#1a1a1a", "#6b6b6b", "#d9d9d9"
# Of the palette, told apart with every common colour vision.
FRONTIER_COLOUR = "#0072B2"
STYLES = (
    *(("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#E69F00", "v")),
    *(("#56B4E9", "P"), ("#8C6D31", "X"), ("#882255", "<")),
)
LIMIT_MARKERS = ("D", "s", "^")
TOKENS, PERCENT = "thinking tokens per trace", "accuracy, %"
COLUMNS = 2  # panels side by side
OURS = {FRONTIER, EVERY_PRICE}
OPERATING = 0.05  # accuracy below the full trace's at which nobody would operate


def draw_pareto(panels: Mapping[str, pd.DataFrame], title: str = "") -> Figure:
    """Accuracy against thinking tokens where somebody would operate, and small beside it all of it.

    That range is from 5 points below the full trace's accuracy up. Each method is a line through
    its settings, on its 95 % band: those on its `frontier`, where validation has chosen one. A
    panel is of results on the same traces, as `Results.frame`, under its heading.
    """
    wide = min(COLUMNS, len(panels))
    high = -(-len(panels) // wide)
    figure = _figure(*((8.2, 5.4) if len(panels) == 1 else (5.4 * wide, 3.9 * high)))
    grid = figure.subplots(high, 2 * wide, squeeze=False, width_ratios=[3, 1] * wide)
    pairs = grid.reshape(-1, 2)
    for axes in pairs[len(panels) :].flat:
        axes.set_visible(False)
    styles = assign_styles([name for frame in panels.values() for name in frame["method"]])
    for (axes, everything), (heading, frame) in zip(pairs, panels.items(), strict=False):
        plot_results(axes, frame, styles)
        furnish(axes, TOKENS, PERCENT)
        axes.set_title(heading, loc="left", fontsize=10, color=INK)
        least = frame["accuracy"].iloc[0] - OPERATING
        near = frame[(frame["accuracy"] >= least) & ~frame["method"].str.startswith(ORACLE)]
        room = 0.05 * (near["tokens"].max() - near["tokens"].min()) or 1.0
        axes.set_xlim(max(0.0, near["tokens"].min() - room), near["tokens"].max() + room)
        most = near["accuracy"].max()
        axes.set_ylim(100 * least, 100 * (most + 0.25 * (most - least)))
        plot_results(everything, frame, styles, small=True)
        (left, right), (low, top) = axes.get_xlim(), axes.get_ylim()
        corners = (left, right, right, left), (low, low, top, top)
        everything.fill(*corners, color=FAINT, alpha=0.6, zorder=0)
        everything.set_title("all of it", loc="left", fontsize=7, color=MUTED)
        everything.set(box_aspect=0.9, anchor="S")
    _finish(figure, title)
    return figure


def assign_styles(methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """How each method's line and markers are drawn; beyond the palette it comes again, dashed."""
    plain, limits = itertools.count(), itertools.cycle(LIMIT_MARKERS)
    styles: dict[str, dict[str, Any]] = {}
    for method in dict.fromkeys(methods):
        look: dict[str, Any] = {"lw": 1.1, "ms": 3.5, "mec": "white", "mew": 0.5, "zorder": 3}
        if method == FULL:
            look |= {"ls": "none", "marker": "o", "ms": 7, "color": INK}
        elif method.startswith((ORACLE, LIMIT)):
            star = method.startswith(ORACLE)
            look |= {"marker": "*", "ms": 10} if star else {"marker": next(limits), "ms": 5}
            look |= {"ls": "none", "color": MUTED, "mec": MUTED}
            look |= {"mfc": MUTED if method == ORACLE else "white"}  # hollow: its variants, too
        elif method in OURS and not OURS.intersection(styles):
            look |= {"marker": "o", "color": FRONTIER_COLOUR, "lw": 2.0, "zorder": 4}
        else:
            again, place = divmod(next(plain), len(STYLES))
            colour, marker = STYLES[place]
            look |= {"marker": marker, "color": colour, "ls": (0, (4, 2)) if again else "-"}
        styles[method] = look
    return styles


def plot_results(
    axes: Axes, frame: pd.DataFrame, styles: Mapping[str, Mapping[str, Any]], small: bool = False
) -> None:
    """Accuracy against thinking tokens: each method's settings joined, on their 95 % band.

    The full trace's accuracy is a line across; what is `chosen` is ringed. `small` draws lines
    alone, for an overview.
    """
    for name, of_method in frame.groupby("method", sort=False):
        rows, look = of_method.sort_values("tokens", kind="stable"), dict(styles[str(name)])
        if "frontier" in rows and rows["frontier"].any():
            rows = rows[rows["frontier"].astype(bool)]
        x, y, low, high = (rows[one] for one in ("tokens", *(f"accuracy{end}" for end in ENDS)))
        if name == FULL:
            axes.axhline(100 * y.iloc[0], color=MUTED, lw=0.8, ls=(0, (4, 3)), zorder=1)
        elif len(rows) > 1 and not small:
            alpha = 0.16 if look["color"] == FRONTIER_COLOUR else 0.07
            band: dict[str, Any] = {"color": look["color"], "alpha": alpha, "lw": 0, "zorder": 0}
            axes.fill_between(x, 100 * low, 100 * high, **band)
        more = {"lw": 0.7 * look["lw"], "ms": 0.5 * look["ms"]} if small else {}
        axes.plot(x, 100 * y, label="" if small else name, **look | more)
    ringed = frame[frame["chosen"].astype(bool)]
    if small:
        axes.tick_params(colors=MUTED, labelsize=6, length=2)
        axes.spines[:].set(color=MUTED, lw=0.5)
    elif len(ringed):
        beside: dict[str, Any] = {"xytext": (7, -9), "textcoords": "offset points", "fontsize": 7}
        beside |= {"color": INK, "zorder": 6, "annotation_clip": True}
        for row in ringed[ringed["method"].isin(OURS)].itertuples():
            axes.annotate(row.setting, (row.tokens, 100 * row.accuracy), **beside)
        ring: dict[str, Any] = {"ms": 9, "mfc": "none", "mec": INK, "mew": 1.0, "zorder": 5}
        x, y = ringed["tokens"], 100 * ringed["accuracy"]
        axes.plot(x, y, "o", label="chosen on validation", **ring)


def furnish(axes: Axes, x_name: str, y_name: str) -> None:
    """Names the axes, and takes away what is not needed to read them."""
    axes.set_xlabel(x_name, fontsize=9.5, color=INK)
    axes.set_ylabel(y_name, fontsize=9.5, color=INK)
    axes.grid(axis="y", color=FAINT, lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(colors=MUTED, labelsize=8.5)


def draw_dynamics(run_folder: str | Path, title: str = "") -> Figure:
    """Validation accuracy and length in the course of a training run (the paper's Figure 1).

    Drawn over optimiser steps: where the run validated (`eval_strategy`), and at each stage's end.

    Raises:
        ValueError: the folder holds no finished run.
    """
    stages, log, every_price = _read_log(Path(run_folder))
    figure = _figure(7.2, 4.8)
    upper, lower = figure.subplots(2, 1, sharex=True)
    parts = (upper, "accuracy", 100, PERCENT), (lower, "tokens", 1, "thinking tokens")
    for axes, key, scale, name in parts:
        full = scale * stages[f"full_{key}"].iloc[0]
        axes.axhline(full, color=INK, lw=1.0, ls=(0, (1, 2)), label="full trace")
        look: dict[str, Any] = {"color": FRONTIER_COLOUR, "lw": 1.8, "mec": "white", "mew": 0.8}
        look |= {"marker": "o" if len(log) < 40 else "", "ms": 5.5, "zorder": 3}
        axes.plot(log["step"], scale * log[key], label="policy on validation", **look)
        for end in stages["step"].iloc[:-1]:
            axes.axvline(end, color=MUTED, lw=0.8, ls=(0, (5, 3)), zorder=0, label="price annealed")
        furnish(axes, "optimiser steps" if axes is lower else "", name)
        axes.set_xlim(0, stages["step"].iloc[-1] * 1.04)
        axes.margins(y=0.2)
    at: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
    at |= {"xytext": (0, 3), "ha": "center", "rotation": 0 if len(stages) < 10 else 45}
    for stage in stages.itertuples():
        said = f"price={price_name(stage.price)}"
        if every_price:
            said = f"every price, drawn at price={price_name(log['price'].iloc[-1])}"
        middle = stage.step - stages["step"].iloc[0] / 2
        upper.annotate(said, (middle, 1.0), fontsize=7, color=MUTED, **at)
    _finish(figure, title)
    return figure


def _read_log(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame, bool]:
    """A run's stages, "step" being their ends; its validations; whether it is of every price."""
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

    Of each are given its "problems", and the shares "saved", "frontier" and "expected".
    """
    figure, told = _figure(6.4, 4.0), pd.DataFrame(rounds)
    axes, sizes = figure.add_subplot(), told["problems"]
    for name, label, marker, colour, places in (
        ("saved", "at the promise", "o-", FRONTIER_COLOUR, sizes),
        ("expected", "forecast, at the promise", "v:", STYLES[0][0], 2 * sizes),
        ("frontier", "measured, without a promise", "s--", MUTED, sizes),
    ):
        axes.plot(places, 100 * told[name], marker, color=colour, label=label, lw=1.2, ms=4)
    axes.set_xscale("log", base=2)
    ticks = [*sizes, 2 * sizes.iloc[-1]]
    axes.set_xticks(ticks, [f"{size:,}" for size in ticks])
    furnish(axes, "labelled problems", "thinking tokens saved, %")
    _finish(figure, title)
    return figure


def _figure(width: float, height: float) -> Figure:
    # Not pyplot's: its global state and window system are never touched.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=200, layout="constrained")


def _finish(figure: Figure, title: str) -> None:
    """Title, and one legend for all panels."""
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=INK)
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    how: dict[str, Any] = {"loc": "outside lower center", "frameon": False, "fontsize": 8}
    columns = max(1, min(len(handles), int(figure.get_figwidth() // 1.9)))
    figure.legend(handles.values(), handles, ncols=columns, labelcolor=INK, **how)
