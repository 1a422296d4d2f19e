from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from ospruner.durable import write_checked
from ospruner.eval.methods import FRONTIER, FULL
from ospruner.eval.report.pictures import (
    assign_styles,
    draw_dynamics,
    draw_pareto,
    front,
    label_points,
    plot_results,
)
from ospruner.eval.results import frame_of
from ospruner.eval.table import FloatArray

from ...made_results import make_result
from ..evaluations import make_evaluation


def pixels(figure: Figure) -> FloatArray:
    """(H, W, 3) in [0, 1]."""
    assert isinstance(figure.canvas, FigureCanvasAgg)
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())[..., :3] / 255


def frontier(step: float) -> list[dict[str, Any]]:
    return [
        make_result(FRONTIER, 0.62 - 0.14 * 0.55**i, 40 + step * i, price, "price")
        for i, price in enumerate([5e-3, 2e-3, 1e-3, 5e-4, 2e-4, 1e-4, 5e-5, 0.0])
    ]


def test_the_front_is_what_no_other_beats() -> None:
    everything = make_evaluation().frame()
    everything = everything[everything["kind"] == "rule"]
    on_front = front(everything)
    tokens, accuracy = on_front["tokens"].tolist(), on_front["accuracy"].tolist()
    assert (tokens, accuracy) == (sorted(tokens), sorted(accuracy))
    for one in everything.itertuples():
        if one.Index in on_front.index:
            shorter = everything[everything["tokens"] < one.tokens]
            assert not (shorter.accuracy >= one.accuracy).any()
        else:
            fewer = on_front[on_front["tokens"] <= one.tokens]
            assert (fewer["accuracy"] >= one.accuracy).any()


def test_panels_are_drawn_side_by_side() -> None:
    panels = {
        name: make_evaluation(benchmark=name, seed=i).frame()
        for i, name in enumerate(("GSM8K", "MATH-500", "AIME", "other"))
    }
    figure = draw_pareto(panels, "four")
    assert [axes.get_title("left") for axes in figure.axes if axes.get_visible()] == list(panels)
    picture = pixels(figure)
    blue = np.abs(picture - np.array([0, 0x72, 0xB2]) / 255).max(axis=2) < 0.01
    assert blue.sum() > 2000  # the frontier
    assert (picture > 0.99).all(axis=2).mean() > 0.7  # dark on light
    for nothing in ({}, {"none": panels["AIME"].iloc[:0]}):
        with pytest.raises(ValueError, match="nothing to draw"):
            draw_pareto(nothing)


def test_every_method_has_a_mark_of_its_own_alike_in_all_panels() -> None:
    names = [f"m{i}" for i in range(6)]
    styles = assign_styles(names)
    for some in (names, names[::2]):
        axes = Figure().add_subplot()
        frame = frame_of(
            [make_result(name, 0.5, 10 + len(name), chosen=name == "m2") for name in some]
        )
        plot_results(axes, frame, styles)
        drawn = {str(line.get_label()): line for line in axes.get_lines()}
        assert [*some, "chosen on validation"] == list(drawn)
        marks = [(drawn[name].get_color(), drawn[name].get_marker()) for name in some]
        assert marks == [styles[name] for name in some]
        assert len({colour for colour, _ in marks}) == len({mark for _, mark in marks}) == len(some)


@pytest.mark.parametrize("step", [12.0, 3.0, 0.5])
def test_labels_overlap_neither_each_other_nor_points(step: float) -> None:
    """From a comfortable frontier to one squeezed into four tokens, where labels are left out."""
    figure = Figure(figsize=(7.2, 4.8), dpi=200)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    budget = make_result("fixed budget", 0.59, 110, 110, "tokens")
    results = [make_result(FULL, 0.60, 200), *frontier(step), budget]
    frame = frame_of(results)
    plot_results(axes, frame, assign_styles(frame["method"].tolist()))
    figure.draw_without_rendering()
    label_points(axes, [(frame_of(frontier(step)), "black")])
    boxes = [Text.get_window_extent(text) for text in axes.texts]
    assert len(boxes) >= (8 if step == 12.0 else 1)
    names = [text.get_text() for text in axes.texts]
    assert len(set(names)) == len(names)
    inside = axes.get_window_extent()
    of = {r["setting"]: (r["tokens"], 100 * r["accuracy"]) for r in results}
    points = {name: axes.transData.transform(point) for name, point in of.items()}
    for i, (box, name) in enumerate(zip(boxes, names, strict=True)):
        assert not any(box.overlaps(other) for other in boxes[:i])
        assert not any(box.contains(x, y) for x, y in points.values())
        assert inside.x0 <= box.x0
        assert box.x1 <= inside.x1
        # The nearest point is the label's own.
        assert min(gap(box, point) for point in points.values()) >= gap(box, points[name]) - 1.0


def gap(box: Bbox, point: FloatArray) -> float:
    """Pixels from a point to a box."""
    x, y = point
    return math.hypot(max(box.x0 - x, 0.0, x - box.x1), max(box.y0 - y, 0.0, y - box.y1))


def finished_run(folder: Path, prices: Sequence[float], head: str = "fixed") -> None:
    """What a training run leaves, of ten steps a stage and a validation at every third."""
    told = {"accuracy": 0.6, "tokens": 99.0, "full_accuracy": 0.7, "full_tokens": 200.0}
    record = {
        "settings": {"head": head},
        "policies": {f"price{price}": {"price": price, **told} for price in prices},
    }
    write_checked(folder / "run.json", record)
    found = [
        {"step": step, "eval_price": 1e-3, "eval_accuracy": 0.5 + step / 100, "eval_tokens": 90.0}
        for step in range(3, 10 * len(prices), 3)
    ]
    state = {"max_steps": 10 * len(prices), "log_history": [{"loss": 1.0, "step": 1}, *found]}
    (folder / "trainer_state.json").write_text(json.dumps(state))


def test_dynamics_need_a_finished_stage(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no trainer_state\.json"):
        draw_dynamics(tmp_path)
    finished_run(tmp_path, [])
    with pytest.raises(ValueError, match="has no finished stage"):
        draw_dynamics(tmp_path)
    record = tmp_path / "run.json"
    record.write_bytes(record.read_bytes().replace(b"fixed", b"price"))
    with pytest.raises(ValueError, match=r"run\.json is damaged"):
        draw_dynamics(tmp_path)


def test_dynamics_are_drawn_over_steps(tmp_path: Path) -> None:
    finished_run(tmp_path, [1e-3, 1e-4])
    upper, lower = draw_dynamics(tmp_path).axes
    assert [text.get_text() for text in upper.texts] == ["price=1e-3", "price=1e-4"]
    line = {str(line.get_label()): line for line in upper.get_lines()}["policy on validation"]
    assert np.asarray(line.get_xdata()).tolist() == [3, 6, 9, 10, 12, 15, 18, 20]
    assert np.asarray(line.get_ydata()).tolist()[-2:] == pytest.approx([68, 60])
    assert "price annealed" in upper.get_legend_handles_labels()[1]
    assert lower.get_xlabel() == "optimiser steps"
    finished_run(tmp_path, [1e-3], "price")
    upper, _ = draw_dynamics(tmp_path).axes
    assert upper.texts[0].get_text() == "every price, drawn at price=1e-3"
    assert "price annealed" not in upper.get_legend_handles_labels()[1]
