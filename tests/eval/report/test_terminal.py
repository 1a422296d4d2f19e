from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from rich.console import Console
from rich.table import Table

from ospruner.eval.methods import FRONTIER, FULL, ORACLE
from ospruner.eval.metrics import AES_RELATIVE
from ospruner.eval.report.pictures import draw_pareto, label_points, save_pareto
from ospruner.eval.report.terminal import differences_table, frontier_tables, results_table
from ospruner.eval.results import Estimate, Results, frame_of
from ospruner.eval.table import FloatArray

from ...made_results import make_result


def frontier(step: float = 12.0) -> list[dict[str, Any]]:
    penalties = [5e-3, 2e-3, 1e-3, 5e-4, 2e-4, 1e-4, 5e-5, 0.0]
    return [
        make_result(FRONTIER, 0.62 - 0.14 * 0.55**i, 40 + step * i, penalty, "λ")
        for i, penalty in enumerate(penalties)
    ]


RESULTS = [
    make_result(FULL, 0.60, 200),
    *frontier(),
    *(make_result("probe", 0.5 + t / 10, 150 * t, t, "threshold") for t in (0.7, 0.8, 0.9)),
    make_result("fixed budget", 0.59, 110, 110, "tokens"),
]
LIMITS = [
    make_result(ORACLE, 0.8, 50, kind="limit"),
    make_result(f"{ORACLE}, no loss", 0.62, 45, kind="limit"),
]


def render(table: Table, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, no_color=True)
    console.print(table)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_results_table_holds_every_number_in_80_columns() -> None:
    asymmetric = RESULTS[-1] | Estimate(0.42, 0.37, 0.49).spread("aes")
    frame = frame_of([*RESULTS[:-1], asymmetric, *LIMITS])
    text = render(results_table(frame, title="Test"), 80)
    lines = text.splitlines()
    row = next(line for line in lines if "fixed budget" in line)
    # One line a rule; ± is the wider half of an interval.
    for part in ("fixed budget 110 tokens", "59.0 ±2.0", "110 ±5", "45.0 ±1.0", "0.42 ±0.07"):
        assert part in row
    for result in (*RESULTS, *LIMITS):
        name = f"{result['method']} {result['setting']}".strip()
        assert sum(name in line for line in lines) >= 1
    assert len(lines) <= len(RESULTS) + len(LIMITS) + 9
    assert "1,500 traces of 1,500 problems" in text
    assert "AES absolute, α=1, β=3, γ=5" in text.replace("\n", " ")
    oracle = next(i for i, line in enumerate(lines) if ORACLE in line)
    assert not lines[oracle - 1].strip()  # limits stand apart
    assert "…" not in text
    assert max(map(len, lines)) <= 80


def test_the_longest_names_of_the_demo_fit_80_columns() -> None:
    wide = make_result("convergence (1 point)", 0.5, 1234, 0.95, "threshold")
    wide |= Estimate(-1.25, -1.5, -1.1).spread("aes")
    long = [RESULTS[0], wide, make_result("fixed budget", 0.5, 1234, 12000, "tokens")]
    lines = render(results_table(frame_of([*long, *LIMITS])), 80).splitlines()
    assert any("convergence (1 point) ≥.95" in line and "-1.25 ±0.25" in line for line in lines)
    assert any("fixed budget 12000 tokens" in line and "1,234 ±5" in line for line in lines)


def test_results_table_refuses_mixed_scores_and_nothing() -> None:
    other = RESULTS[1] | {"aes_label": AES_RELATIVE.label}
    with pytest.raises(ValueError, match="results of one variant"):
        results_table(frame_of([RESULTS[0], other]))
    with pytest.raises(ValueError, match="there are no results"):
        results_table(frame_of(RESULTS)[:0])


def test_differences_table() -> None:
    difference = {
        "rule": "OS-Pruner λ=5e-5",
        "other": "convergence (1 point) ≥.95",
        **Estimate(0.012, -0.001, 0.02).spread("accuracy"),
        **Estimate(-17.2, -19, -15).spread("tokens"),
        **Estimate(0.078, 0.069, 0.086).spread("reduction"),
        **Estimate(-0.001, -0.004, math.nan).spread("aes"),
    }
    text = render(differences_table(frame_of([difference], "differences")), 80)
    row = next(line for line in text.splitlines() if "convergence (1 point) ≥.95" in line)
    assert "+1.2 ±1.3" in row
    assert "-17.2 ±2.2" in row
    assert "+7.8 ±0.9" in row
    assert "+0.00 ±–" in row  # no minus zero, no "nan"
    assert "OS-Pruner λ=5e-5 less each other" in text
    assert "training seeds are in the intervals only where" in " ".join(text.split())


@pytest.mark.parametrize("step", [12.0, 3.0, 0.5])
def test_labels_overlap_neither_each_other_nor_points(step: float) -> None:
    """From a comfortable frontier to one squeezed into four tokens, where labels are left out."""
    figure = Figure(figsize=(7.2, 4.8), dpi=200)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    results = [RESULTS[0], *frontier(step), *RESULTS[9:]]
    draw_pareto(axes, frame_of(results))
    label_points(axes, frame_of(frontier(step)), "black")
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in axes.texts]
    assert len(boxes) >= (8 if step == 12.0 else 1)
    names = [text.get_text() for text in axes.texts]
    assert len(set(names)) == len(names)
    assert set(names) <= {result["setting"] for result in frontier()}
    inside = axes.get_window_extent()
    points = {
        (r["method"], r["setting"]): axes.transData.transform((r["tokens"], 100 * r["accuracy"]))
        for r in results
    }
    for i, (box, text) in enumerate(zip(boxes, axes.texts, strict=True)):
        assert not any(box.overlaps(other) for other in boxes[:i])
        assert not any(box.contains(x, y) for x, y in points.values())
        assert inside.x0 <= box.x0
        assert box.x1 <= inside.x1
        # The nearest point is the label's own.
        nearest = min(gap(box, point) for point in points.values())
        assert nearest >= gap(box, points[FRONTIER, text.get_text()]) - 1.0


def gap(box: Bbox, point: FloatArray) -> float:
    """Pixels from a point to a box."""
    x, y = point
    return math.hypot(max(box.x0 - x, 0.0, x - box.x1), max(box.y0 - y, 0.0, y - box.y1))


def test_save_pareto(tmp_path: Path) -> None:
    path = tmp_path / "pareto.png"
    frame = frame_of([*RESULTS, *LIMITS])
    save_pareto(frame.assign(chosen=frame.index == 4), path, title="Test")
    picture = imread(path)
    assert picture.shape[:2] == (960, 1440)
    blue = np.abs(picture[..., :3] - np.array([0, 0x72, 0xB2]) / 255).max(axis=2) < 0.01
    assert blue.sum() > 2000  # the frontier
    assert (picture[..., :3] > 0.99).all(axis=2).mean() > 0.8  # dark on light
    with pytest.raises(ValueError, match="results is empty"):
        save_pareto(frame[:0], path)


def test_every_method_has_a_mark_of_its_own() -> None:
    axes = Figure().add_subplot()
    draw_pareto(axes, frame_of([make_result(f"m{i}", 0.5, 10 + i) for i in range(6)]))
    marks = [(line.get_color(), line.get_marker()) for line in axes.get_lines()]
    assert len({colour for colour, _ in marks}) == len({marker for _, marker in marks}) == 6
    assert axes.get_legend_handles_labels()[1] == [f"m{i}" for i in range(6)]


@pytest.mark.parametrize("prices", [1, 4, 7])
def test_shares_of_the_gap_keep_their_methods_names_in_80_columns(prices: int) -> None:
    share = Estimate(-0.334, -0.969, 0.051)
    gaps = {
        name: x for k in range(1, 1 + prices) for name, x in share.spread(f"gap@1e-{k}").items()
    }
    names = ["OS-Pruner, one policy", "convergence", "Think Just Enough"]
    found = Results(
        dataset="d",
        setting="s",
        about={"left_out": {}},
        frontiers=frame_of(
            [
                {"method": name, **share.spread("area"), **share.spread("lead"), **gaps}
                for name in names
            ],
            "frontiers",
        ),
    )
    _, *tables = frontier_tables(found)
    lines = [line for table in tables for line in render(table, 80).splitlines()]
    for name in names:
        assert sum(line.strip().startswith(name) for line in lines) == len(tables)
    assert sum(line.count("-33.4 ±63.5") for line in lines) == prices * len(names)
    assert max(map(len, lines)) <= 80
