"""Draws the pictures of README and of these pages from the JSON files of results: `make docs`.

Each picture is written twice, light and dark. A picture keeps a hash of the numbers that it shows:
`tests/project/test_site.py` compares it with the files.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from io import StringIO
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from tables import DOCS, OURS, REAL_SETS, content_of

from ospruner.eval.methods import EVERY_PRICE, ORACLE
from ospruner.eval.report.pictures import (
    FAINT,
    FRONTIER_COLOUR,
    INK,
    MUTED,
    STYLES,
    draw_pareto,
    furnish,
)
from ospruner.eval.results import ENDS, Results, price_name, prices_of

FOLDER = DOCS / "pictures"
# Colours that a dark page takes instead: paper and ink change places, dark hues grow lighter.
DARK = {
    "#ffffff": "#16181d",
    INK: "#ececec",
    MUTED: "#a8a8a8",
    FAINT: "#3a3d45",
    FRONTIER_COLOUR: "#4ba3e3",
    "#8C6D31": "#c2a15a",
    "#882255": "#d3739f",
}
Panels = Mapping[str, Any]  # heading -> what a JSON file holds


def points(panels: Panels) -> Figure:
    """Accuracy against thinking tokens of every rule, in a panel each.

    Rules that were chosen among others, such as "probe (AES)", are left out: these are there.
    """
    frames = {name: Results.from_dict(one).frame for name, one in panels.items()}
    chosen = r"\((?:paper|AES|1 point)\)"
    return draw_pareto(
        {name: frame[~frame["method"].str.contains(chosen)] for name, frame in frames.items()}
    )


def leads(panels: Panels) -> Figure:
    """How much larger OS-Pruner's area is than each other method's."""
    figure, grid = canvas(len(panels), 4.6)
    for axes, (heading, content) in zip(grid, panels.items(), strict=True):
        frame = Results.from_dict(content).frontiers
        others = frame[frame["lead"].notna() & (frame["method"] != ORACLE)].sort_values(
            "lead", ascending=False
        )
        lead, low, high = (100 * others[f"lead{end}"] for end in ENDS)
        places = np.arange(len(others))
        colours = [FRONTIER_COLOUR if name in OURS else INK for name in others["method"]]
        axes.hlines(places, low, high, color=colours, lw=1.6)
        axes.scatter(lead, places, c=colours, s=22, zorder=3)
        axes.axvline(0, color=MUTED, lw=1, ls=(0, (4, 3)))
        furnish(axes, "larger area of OS-Pruner, points", "")
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", color=FAINT, lw=0.6)
        axes.set_yticks(places, others["method"], color=INK, fontsize=8.5)
        title(axes, heading)
    return figure


def gaps(panels: Panels) -> Figure:
    """The share of the gap to the oracle that each method closes, over the price of a token."""
    figure, grid = canvas(len(panels), 4.2)
    for axes, (heading, content) in zip(grid, panels.items(), strict=True):
        frame = Results.from_dict(content).frontiers.set_index("method")
        prices = prices_of(frame, "gap")
        shares = 100 * frame[list(prices.values())]
        rivals = shares.drop(index=[name for name in (*OURS, ORACLE) if name in shares.index])
        best = list(dict.fromkeys(rivals.idxmax()))  # at one price or another
        for method, row in shares.iterrows():
            axes.plot(list(prices), row, **look(str(method), best))
        ends = [
            100 * frame.loc[EVERY_PRICE, [name + end for name in prices.values()]].astype(float)
            for end in ENDS[1:]
        ]
        axes.fill_between(list(prices), *ends, color=FRONTIER_COLOUR, alpha=0.13, lw=0)
        axes.set_xscale("log")
        furnish(axes, "price of a token", "gap to the oracle closed, %")
        axes.set_xticks(list(prices), [price_name(price) for price in prices])
        axes.minorticks_off()
        axes.set_ylim(bottom=max(axes.get_ylim()[0], -25))
        title(axes, heading)
        axes.legend(frameon=False, fontsize=8, labelcolor=INK, loc="upper left")
    return figure


def look(method: str, best: list[str]) -> dict[str, Any]:
    """How a method's line over prices is drawn: ours, the best rivals, and all others in grey."""
    if method == EVERY_PRICE:
        return {
            "color": FRONTIER_COLOUR,
            "lw": 2.2,
            "marker": "o",
            "ms": 5,
            "zorder": 5,
            "label": "OS-Pruner, 95 % band",
        }
    if method in best:
        colour, marker = STYLES[best.index(method) % len(STYLES)]
        return {"color": colour, "marker": marker, "lw": 1.3, "ms": 4, "zorder": 4, "label": method}
    return {"color": MUTED, "lw": 0.7, "alpha": 0.55, "zorder": 2}


def growth(panels: Panels) -> Figure:
    """How right answers are that are forced after a share of the trace, by set of problems."""
    figure, (axes,) = canvas(1, 3.8)
    ((_, content),) = panels.items()
    looks = ((FRONTIER_COLOUR, "o"), *STYLES)
    for (name, stats), (colour, marker) in zip(content["problems"].items(), looks, strict=False):
        share, right = (
            100 * np.asarray(stats[key]) for key in ("fractions", "accuracy_by_fraction")
        )
        axes.plot(share, right, color=colour, marker=marker, ms=3.5, lw=1.5, label=REAL_SETS[name])
    furnish(axes, "trace cut after, %", "right answers, %")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8.5, labelcolor=INK, loc="upper left")
    return figure


def canvas(panels: int, height: float) -> tuple[Figure, list[Axes]]:
    """A figure with its panels side by side."""
    figure = Figure(figsize=(7.2 if panels == 1 else 4.6 * panels, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(1, panels, squeeze=False).flat)


def title(axes: Axes, text: str) -> None:
    """A panel's heading."""
    axes.set_title(text, loc="left", fontsize=10, color=INK)


class Picture(NamedTuple):
    """A picture: how it is drawn, and from what, as `content_of` names it, by heading."""

    draw: Callable[[Panels], Figure]
    panels: Mapping[str, str]

    def contents(self) -> Panels:
        """What it is drawn from."""
        return {heading: content_of(name) for heading, name in self.panels.items()}

    @property
    def digest(self) -> str:
        """A hash of that."""
        return hashlib.sha256(json.dumps(self.contents(), sort_keys=True).encode()).hexdigest()


GSM8K, MATH, REASONER = "GSM8K, 300 problems", "MATH-500, 60 problems", "Embedded reasoner"
PICTURES = {
    "real-points": Picture(
        points, {GSM8K: "real-model.json:replay.gsm8k", MATH: "real-model.json:replay.math500"}
    ),
    "real-leads": Picture(
        leads, {GSM8K: "real-model.json:frontier.gsm8k", MATH: "real-model.json:frontier.math500"}
    ),
    "real-gaps": Picture(
        gaps, {GSM8K: "real-model.json:frontier.gsm8k", MATH: "real-model.json:frontier.math500"}
    ),
    "real-growth": Picture(growth, {"": "real-model.json"}),
    "reasoner-points": Picture(points, {REASONER: "demo-full.json"}),
    "reasoner-leads": Picture(leads, {REASONER: "frontier-full.json"}),
    "reasoner-gaps": Picture(gaps, {REASONER: "frontier-full.json"}),
}


def svg(picture: Picture) -> str:
    """The picture on light paper, the same text at every run."""
    with mpl.rc_context({"svg.hashsalt": "ospruner", "svg.image_inline": True}):
        written = StringIO()
        figure = picture.draw(picture.contents())
        figure.savefig(written, format="svg", metadata={"Date": None, "Source": picture.digest})
    return written.getvalue()


def darkened(text: str) -> str:
    """The same picture for a dark page."""
    colours = {light.lower(): dark for light, dark in DARK.items()}
    pattern = "|".join(colours)
    return re.sub(pattern, lambda found: colours[found[0].lower()], text, flags=re.IGNORECASE)


def main() -> None:
    """Writes all pictures."""
    for name, picture in PICTURES.items():
        text = svg(picture)
        (FOLDER / f"{name}.svg").write_text(text, "utf-8")
        (FOLDER / f"{name}-dark.svg").write_text(darkened(text), "utf-8")


if __name__ == "__main__":
    main()
