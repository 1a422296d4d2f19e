from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox
from rich.console import Console
from rich.table import Table

from ospruner.eval.methods import FRONTIER, FULL, ORACLE
from ospruner.eval.metrics import AES_RELATIVE, Estimate
from ospruner.eval.report.pictures import draw_pareto, label_points, save_pareto
from ospruner.eval.report.terminal import (
    differences_table,
    load_results,
    parameter_text,
    penalty_text,
    results_table,
    save_results,
)
from ospruner.eval.results import Result
from ospruner.eval.table import FloatArray


def make_result(
    method: str,
    accuracy: float,
    tokens: float,
    parameter: float | None = None,
    parameter_name: str = "",
) -> Result:
    def around(value: float, half: float) -> Estimate:
        return Estimate(value, value - half, value + half)

    return Result(
        method=method,
        parameter=parameter,
        parameter_name=parameter_name,
        accuracy=around(accuracy, 0.02),
        tokens=around(tokens, 5),
        reduction=around(1 - tokens / 200, 0.01),
        aes=around(1 - tokens / 200 + 3 * (accuracy - 0.6), 0.05),
        answer_tokens=around(6, 0.1),
        helped=around(0.1, 0.01),
        harmed=around(0.05, 0.01),
        truncated=around(0.0, 0.0),
        probe_tokens=around(0.0, 0.0),
        generated_tokens=around(tokens + 6, 5),
        total_reduction=around(1 - tokens / 200, 0.01),
        time_ratio=Estimate(math.nan, math.nan, math.nan),
        tokens_per_second=Estimate(math.nan, math.nan, math.nan),
        rewards=((0.001, around(accuracy - 0.001 * tokens, 0.02)),),
        aes_label="absolute, α=1, β=3, γ=5",
        traces=1500,
        problems=1500,
    )


def frontier(step: float = 12.0) -> list[Result]:
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
LIMITS = [make_result(ORACLE, 0.8, 50), make_result(f"{ORACLE}, no loss", 0.62, 45)]


def render(table: Table, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, no_color=True)
    console.print(table)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (5e-5, "5e-5"), (1e-4, "1e-4"), (2.5e-4, "2.5e-4"), (9.9999e-5, "1e-4"), (1, "1e0")],
)
def test_penalty_text(value: float, text: str) -> None:
    assert penalty_text(value) == text


def test_parameter_text() -> None:
    texts = [parameter_text(result) for result in (RESULTS[0], RESULTS[1], *RESULTS[9:])]
    assert texts == ["", "λ=5e-3", "≥.70", "≥.80", "≥.90", "110 tokens"]
    assert parameter_text(make_result("s", 0.5, 9, 4, "step")) == "step 4"
    assert parameter_text(make_result("s", 0.5, 9, 1.0, "threshold")) == "≥1.00"


def test_results_table_holds_every_number() -> None:
    text = render(results_table(RESULTS, LIMITS, title="Test"), 120)
    lines = text.splitlines()
    row = next(line for line in lines if "fixed budget" in line)
    for part in ("110 tokens", "59.0 [57.0, 61.0]", "110 [105, 115]", "45.0 [44.0, 46.0]"):
        assert part in row
    assert "0.42 [0.37, 0.47]" in row
    assert "1,500 traces of 1,500 problems" in text
    assert "AES absolute, α=1, β=3, γ=5" in text
    oracle = next(i for i, line in enumerate(lines) if ORACLE in line)
    assert not lines[oracle - 1].strip()  # limits stand apart
    assert max(map(len, lines)) <= 120


def test_stacked_table_fits_80_columns() -> None:
    text = render(results_table(RESULTS, LIMITS, stacked=True), 80)
    assert "[57.0, 61.0]" in text
    assert "λ=5e-3" in text
    assert "…" not in text


def test_results_table_refuses_mixed_scores_and_nothing() -> None:
    other = replace(RESULTS[1], aes_label=AES_RELATIVE.label)
    with pytest.raises(ValueError, match="results of one variant"):
        results_table([RESULTS[0], other])
    with pytest.raises(ValueError, match="there are no results"):
        results_table([])


def test_differences_table() -> None:
    difference = {
        "accuracy": Estimate(0.012, -0.001, 0.02),
        "tokens": Estimate(-17.2, -19, -15),
        "reduction": Estimate(0.078, 0.069, 0.086),
        "aes": Estimate(-0.001, -0.004, math.nan),
    }
    text = render(differences_table({"OS-Pruner - probe": difference}), 120)
    assert "+1.2 [-0.1, +2.0]" in text
    assert "-17.2 [-19.0, -15.0]" in text
    assert "+7.8 [+6.9, +8.6]" in text
    assert "+0.00 [+0.00, –]" in text  # no minus zero, no "nan"


def test_results_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    odd = replace(RESULTS[1], aes=Estimate(math.nan, math.nan, math.nan))
    save_results(path, [*RESULTS, odd], {"seed": 3})
    results, about = load_results(path)
    assert results[:-1] == RESULTS
    assert math.isnan(results[-1].aes.low)
    assert about == {"seed": 3}
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]
    json.loads(path.read_text("utf-8"), parse_constant=lambda name: pytest.fail(name))
    path.write_text("[]")
    with pytest.raises(ValueError, match="is not a results file"):
        load_results(path)


@pytest.mark.parametrize("step", [12.0, 3.0, 0.5])
def test_labels_overlap_neither_each_other_nor_points(step: float) -> None:
    """From a comfortable frontier to one squeezed into four tokens, where labels are left out."""
    figure = Figure(figsize=(7.2, 4.8), dpi=200)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    results = [RESULTS[0], *frontier(step), *RESULTS[9:]]
    draw_pareto(axes, results)
    label_points(axes, frontier(step), "black")
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in axes.texts]  # without their leaders
    assert len(boxes) >= (8 if step == 12.0 else 1)
    names = [text.get_text() for text in axes.texts]
    assert len(set(names)) == len(names)
    assert set(names) <= {parameter_text(result) for result in frontier()}
    inside = axes.get_window_extent()
    points = {
        r: axes.transData.transform((r.tokens.value, 100 * r.accuracy.value)) for r in results
    }
    by_name = {parameter_text(result): result for result in frontier(step)}
    for i, (box, text) in enumerate(zip(boxes, axes.texts, strict=True)):
        assert not any(box.overlaps(other) for other in boxes[:i])
        assert not any(box.contains(x, y) for x, y in points.values())
        assert inside.x0 <= box.x0
        assert box.x1 <= inside.x1
        has_leader = isinstance(text, Annotation) and text.arrow_patch is not None
        if not has_leader:  # the nearest point is the label's own
            nearest = min(points, key=lambda r: gap(box, points[r]))
            assert gap(box, points[nearest]) >= gap(box, points[by_name[text.get_text()]]) - 1.0


def gap(box: Bbox, point: FloatArray) -> float:
    """Pixels from a point to a box."""
    x, y = point
    return math.hypot(max(box.x0 - x, 0.0, x - box.x1), max(box.y0 - y, 0.0, y - box.y1))


def test_save_pareto(tmp_path: Path) -> None:
    path = tmp_path / "pareto.png"
    save_pareto([*RESULTS, *LIMITS], path, title="Test", chosen=RESULTS[4])
    picture = imread(path)
    assert picture.shape[:2] == (960, 1440)
    blue = np.abs(picture[..., :3] - np.array([0, 0x72, 0xB2]) / 255).max(axis=2) < 0.01
    assert blue.sum() > 2000  # the frontier
    assert (picture[..., :3] > 0.99).all(axis=2).mean() > 0.8  # dark on light
    with pytest.raises(ValueError, match="results is empty"):
        save_pareto([], path)


def test_every_method_has_a_mark_of_its_own() -> None:
    axes = Figure().add_subplot()
    draw_pareto(axes, [make_result(f"m{i}", 0.5, 10 + i) for i in range(6)])
    marks = [(line.get_color(), line.get_marker()) for line in axes.get_lines()]
    assert len({colour for colour, _ in marks}) == len({marker for _, marker in marks}) == 6
    assert axes.get_legend_handles_labels()[1] == [f"m{i}" for i in range(6)]
