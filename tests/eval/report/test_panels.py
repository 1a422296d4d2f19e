from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from ospruner.durable import write_checked
from ospruner.eval.report.pictures import (
    assign_styles,
    draw_pareto,
    front,
    save_dynamics,
    save_panels,
)

from ..evaluations import make_evaluation


def test_the_front_is_what_no_other_beats() -> None:
    everything = make_evaluation().frame()[:-1]
    on_front = front(everything)
    tokens, accuracy = on_front["tokens"].tolist(), on_front["accuracy"].tolist()
    assert tokens == sorted(tokens)
    assert accuracy == sorted(accuracy)
    for one in everything.itertuples():
        if one.Index in on_front.index:
            assert not (
                everything[everything["tokens"] < one.tokens].accuracy >= one.accuracy
            ).any()
        else:
            fewer = on_front[on_front["tokens"] <= one.tokens]
            assert (fewer["accuracy"] >= one.accuracy).any()


def test_panels_are_drawn_side_by_side(tmp_path: Path) -> None:
    panels = {}
    for i, name in enumerate(("GSM8K", "MATH-500", "AIME", "other")):
        panels[name] = make_evaluation(benchmark=name, seed=i).frame()
    save_panels(panels, [tmp_path / "a.png", tmp_path / "a.svg"], title="four")
    height, width, _ = imread(tmp_path / "a.png").shape
    assert width > height
    text = (tmp_path / "a.svg").read_text()
    assert text.count('id="axes_') == 4
    with pytest.raises(ValueError, match="panels is empty"):
        save_panels({}, [tmp_path / "b.png"])


def test_methods_look_alike_in_all_panels() -> None:
    one, other = (make_evaluation(benchmark=n).frame()[:-1] for n in ("GSM8K", "AIME"))
    fewer = other[other["method"] != "probe"]
    styles = assign_styles([*fewer["method"], *one["method"]])
    assert len(set(styles.values())) == len(styles) == 2
    for frame in (one, fewer):
        axes = Figure().add_subplot()
        draw_pareto(axes, frame, styles)
        drawn = {line.get_label(): line for line in axes.get_lines()}
        assert drawn["fixed budget"].get_marker() == styles["fixed budget"][1]


def finished_run(folder: Path, prices: Sequence[float], head: str = "fixed") -> None:
    """What a training run leaves, of ten steps a stage and a validation at every third."""
    told = {"accuracy": 0.6, "tokens": 99.0, "full_accuracy": 0.7, "full_tokens": 200.0}
    record = {
        "settings": {"head": head},
        "policies": {f"lam{price}": {"price": price, **told} for price in prices},
    }
    write_checked(folder / "run.json", record)
    found = [
        {"step": step, "eval_price": 1e-3, "eval_accuracy": 0.5 + step / 100, "eval_tokens": 90.0}
        for step in range(3, 10 * len(prices), 3)
    ]
    state = {"max_steps": 10 * len(prices), "log_history": [{"loss": 1.0, "step": 1}, *found]}
    (folder / "trainer_state.json").write_text(json.dumps(state))


def test_dynamics_need_a_finished_stage(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no trainer_state\.json: give the folder of a fin"):
        save_dynamics(tmp_path, [tmp_path / "x.png"])
    finished_run(tmp_path, [])
    with pytest.raises(ValueError, match="has no finished stage"):
        save_dynamics(tmp_path, [tmp_path / "x.png"])
    record = tmp_path / "run.json"
    record.write_bytes(record.read_bytes().replace(b"fixed", b"price"))
    with pytest.raises(ValueError, match=r"run\.json is damaged"):
        save_dynamics(tmp_path, [tmp_path / "x.png"])


@pytest.mark.parametrize("head", ["fixed", "price"])
def test_dynamics_are_drawn_over_steps(head: str, tmp_path: Path) -> None:
    finished_run(tmp_path, [1e-3, 1e-4] if head == "fixed" else [1e-3], head)
    save_dynamics(tmp_path, [tmp_path / "d.svg"])
    drawn = (tmp_path / "d.svg").read_text()
    assert "optimiser steps" in drawn
    assert ("annealed" in drawn) == (head == "fixed")
    assert ("every" in drawn) == (head == "price")
