import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from ospruner.durable import write_checked
from ospruner.eval.methods import FRONTIER, FULL
from ospruner.eval.report.pictures import assign_styles, draw_dynamics, draw_pareto, plot_results
from ospruner.eval.report.summary import told, write_report
from ospruner.eval.results import frame_of

from ...made_results import make_result
from ..evaluations import make_evaluation, save_comparison


def test_panels_are_drawn_side_by_side() -> None:
    names = ("GSM8K", "MATH-500", "AIME")
    panels = {name: make_evaluation(seed=i).frame for i, name in enumerate(names)}
    drawn = [axes for axes in draw_pareto(panels, "three").axes if axes.get_visible()]
    titles = [axes.get_title("left") for axes in drawn]
    assert titles == ["GSM8K", "all of it", "MATH-500", "all of it", "AIME", "all of it"]


def test_methods_are_lines_on_the_bands_of_their_accuracy() -> None:
    ours = [make_result(FRONTIER, 0.48 + 0.02 * i, 40 + 12 * i, i, "price") for i in range(8)]
    frame = frame_of([make_result(FULL, 0.6, 200), *ours, make_result("one", 0.5, 90)])
    on_frontier = [False, True, False, True, True, *[False] * 5]
    for rows in (frame, frame.assign(frontier=on_frontier)):
        axes = Figure().add_subplot()
        plot_results(axes, rows, assign_styles(rows["method"].tolist()))
        lines = {str(line.get_label()): line for line in axes.get_lines()}
        drawn = rows[rows["frontier"]] if "frontier" in rows else rows[rows["method"] == FRONTIER]
        np.testing.assert_allclose(np.asarray(lines[FRONTIER].get_xdata()), drawn["tokens"])
        (band,) = axes.collections  # of one setting alone there is none
        corners = np.concatenate([path.vertices for path in band.get_paths()])
        for end in ("accuracy_low", "accuracy_high"):
            points = np.column_stack([drawn["tokens"], 100 * drawn[end]])
            assert all((np.abs(corners - point) < 1e-9).all(axis=1).any() for point in points)
        assert len(np.atleast_1d(lines["one"].get_xdata())) == 1


def test_every_method_has_a_mark_of_its_own() -> None:
    names, axes = [f"m{i}" for i in range(9)], Figure().add_subplot()
    rows = [make_result(name, 0.5, 12, chosen=name == "m2") for name in names]
    plot_results(axes, frame_of(rows), assign_styles(names))
    *drawn, ring = axes.get_lines()
    assert [str(one.get_label()) for one in drawn] == names
    assert ring.get_label() == "chosen on validation"
    assert len({(x.get_color(), x.get_marker(), x.get_linestyle()) for x in drawn}) == len(names)


def finished_run(folder: Path, prices: Sequence[float], head: str = "fixed") -> None:
    """What a training run leaves, of ten steps a stage and a validation at every third."""
    told = {"accuracy": 0.6, "tokens": 99.0, "full_accuracy": 0.7, "full_tokens": 200.0}
    policies = {f"price{price}": {"price": price, **told} for price in prices}
    write_checked(folder / "run.json", {"settings": {"head": head}, "policies": policies})
    found = [
        {"step": step, "eval_price": 1e-3, "eval_accuracy": 0.5 + step / 100, "eval_tokens": 90.0}
        for step in range(3, 10 * len(prices), 3)
    ]
    state = {"max_steps": 10 * len(prices), "log_history": [{"loss": 1.0, "step": 1}, *found]}
    (folder / "trainer_state.json").write_text(json.dumps(state))


def test_dynamics_are_drawn_over_steps_of_a_finished_stage(tmp_path: Path) -> None:
    finished_run(tmp_path, [])
    with pytest.raises(ValueError, match="has no finished stage"):
        draw_dynamics(tmp_path)
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


def test_the_page_shows_what_stands_beside_it(tmp_path: Path) -> None:
    save_comparison(tmp_path / "gsm8k", prices=[1e-4])
    save_comparison(tmp_path / "math", benchmark="MATH-500", seed=1, prices=[1e-4])
    (tmp_path / "run").mkdir()
    finished_run(tmp_path / "run", [1e-4, 5e-5, 0.0])
    written = {path.name: path for path in write_report(tmp_path)}
    text = written["report.md"].read_text("utf-8")
    model = "DeepSeek-R1-Distill-Qwen-7B"
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert pictures == [f"pareto-{model}-forced.png", "dynamics-1.png"]
    for name in pictures:
        assert written[name].read_bytes().startswith(b"\x89PNG")
    for stem in ("best-aes-forced", f"full-{model}-forced"):
        assert written[f"{stem}.tex"].stat().st_size > 200
    rows = re.findall(r"^\| OS-Pruner price=5e-5 \| (.*) \|$", text, re.MULTILINE)
    assert rows
    for cells in (row.split(" | ") for row in rows):
        if len(cells) in (2, 4):  # rewards, main numbers
            assert all(re.fullmatch(r"\S+ \[-?[\d.]+, -?[\d.]+\]", cell) for cell in cells)
    assert "Measured beside published" in text
    assert "### Changed answers and further tokens" in text
    assert "| 59.3 |" in text  # the paper's reduction at lambda 5e-5 on GSM8K
    assert " of the traces are right at no step; " in text


def test_what_is_saved_on_hopeless_and_on_cut_traces_is_told() -> None:
    plain = make_evaluation()
    full, rule = plain.rules[:2]
    every_second = np.arange(len(plain)) % 2
    looped = replace(full.outcome, truncated=every_second.astype(np.float64))
    results = replace(plain, rules=[replace(full, outcome=looped), *plain.rules[1:]]).results
    tokens, hopeless = looped.tokens, plain.limits[0].outcome.correct < 0.5
    saved = tokens - rule.outcome.tokens
    for name, rows in (("never_right", hopeless), ("at_cap", every_second > 0)):
        found = results.about[name]
        assert found["traces"] == pytest.approx(rows.mean())
        assert found["tokens"] == pytest.approx(tokens[rows].sum() / tokens.sum())
        assert found["saved"][rule.name] == pytest.approx(saved[rows].sum() / saved.sum())
    never, cut = told(results)[1:]
    assert never.startswith(f"{100 * hopeless.mean():.1f} % of the traces are right at no step; ")
    assert cut.startswith("50.0 % of the traces are cut at their cap")
    assert "at_cap" not in plain.results.about
    assert "never_right" not in replace(plain, limits=[]).results.about
    assert not any("at no step" in one for one in told(replace(results, about={})))
