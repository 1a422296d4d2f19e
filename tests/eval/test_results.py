"""Frames of results and their file; evaluations and their folder; numbers and names as text."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from ospruner.eval.methods import parse_prices
from ospruner.eval.results import (
    Estimate,
    Results,
    best_rows,
    find_results,
    markdown_table,
    parameter_text,
    price_name,
)

from .evaluations import make_evaluation, save_comparison

MADE = make_evaluation().results  # whose operations and times were not measured
WHOLE = replace(MADE, frame=MADE.frame.assign(chosen=MADE.frame.index == 1))


def test_what_is_saved_is_read(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    for results in (MADE, WHOLE):  # the second in the place of the first
        results.save(path)
    found = Results.read(path)
    assert found.to_dict() == WHOLE.to_dict()
    for name in ("frame", "differences", "frontiers"):
        pd.testing.assert_frame_equal(vars(found)[name], vars(WHOLE)[name])
    assert found.natural_accuracy == WHOLE.natural_accuracy
    assert (found.chosen, len(found.limits)) == (1, 1)
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]
    content = json.loads(path.read_text("utf-8"), parse_constant=lambda name: pytest.fail(name))
    assert content["frame"][2]["flops"] is None
    assert Results(dataset="d", setting="s").chosen is None
    for about in ({"folder": tmp_path}, {"loss": math.inf}):
        with pytest.raises((TypeError, ValueError)):
            replace(WHOLE, about=about).save(path)
        assert json.loads(path.read_text("utf-8")) == content  # as it was


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ([], "holds a list; it must be an object"),
        ({}, "has format None and version None, this version of ospruner reads 'ospruner-results'"),
        (WHOLE.to_dict() | {"version": 9}, "version 9, .* version 2: make the results again"),
        (WHOLE.to_dict() | {"colour": "red"}, "no whole results .*colour"),
        ({k: v for k, v in WHOLE.to_dict().items() if k != "frame"}, "no whole results .*frame"),
        (WHOLE.to_dict() | {"frame": [{"method": "x"}]}, "frame has no .*'kind'"),
        ("{", "results.json is damaged: no JSON"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: Any, complaint: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    with pytest.raises(ValueError, match=complaint):
        Results.read(path)


def test_numbers_and_names_as_text() -> None:
    number = Estimate(0.7124, 0.7012, 0.7301)
    assert number.text(100, 1) == "71.2 [70.1, 73.0]"
    assert number.text(100, 1, half=True) == "71.2 ±1.8"  # the wider half
    assert Estimate(-0.0004, -0.004, math.nan).text(1, 2, signed=True) == "+0.00 [+0.00, –]"
    assert Estimate(12345.6, 12000, 12500).text(1, 0) == "12,346 [12,000, 12,500]"
    prices = (0.0, 2.5e-4, 0.05, 9.9999e-5, 9.99999999e-5, 10.0)
    assert " ".join(map(price_name, prices)) == "0 2.5e-4 5e-2 9.9999e-5 1e-4 1e1"
    for text, parameter, name in (
        *(("", None, ""), ("price=5e-3", 5e-3, "price"), ("≥.70", 0.7, "threshold")),
        *(("≥-∞", 1 - 2.0**31, "threshold"), ("≥∞", 2.0**31 - 1, "threshold")),
        *(("110 tokens", 110, "tokens"), ("step 4", 4, "step"), ("≤0.4 nats", 0.4, "nats")),
    ):
        assert parameter_text(parameter, name) == text
    lines = markdown_table(["method", "accuracy"], [["P(stop|h)", "77.0\n(half)"]]).splitlines()
    assert lines == ["| method | accuracy |", "| :-- | --: |", "| P(stop\\|h) | 77.0 (half) |"]


def test_a_comparisons_folder_is_its_own(tmp_path: Path) -> None:
    folder, report = tmp_path / "a", make_evaluation()
    for _ in range(2):  # the same settings: replaced
        report.save(folder)
    ((place, found),) = find_results(tmp_path).items()
    assert (place, found.name) == (folder, "DeepSeek-R1-Distill-Qwen-7B, GSM8K, forced, replay")
    assert found.to_dict() == report.results.to_dict()
    with pytest.raises(ValueError, match="other settings.*'AIME' here, 'GSM8K' there"):
        make_evaluation(benchmark="AIME").save(folder)
    save_comparison(tmp_path / "b", seed=1)
    with pytest.raises(ValueError, match="both hold DeepSeek-R1-Distill-Qwen-7B, GSM8K"):
        find_results(tmp_path)


def test_other_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="another run's files .thesis.tex."):
        make_evaluation().save(tmp_path)
    replace(WHOLE, about={}).save(tmp_path / "results.json")  # as training with a policy
    save_comparison(tmp_path / "policy")  # and the demo
    (tmp_path / "policy" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no comparison"):
        find_results(tmp_path)


def test_differences_are_of_the_best_row_of_a_method_to_that_of_each_other() -> None:
    best = best_rows(MADE.frame).set_index("method")
    assert best.index.tolist() == ["full trace", "OS-Pruner", "probe", "fixed budget"]
    ours = best.loc["OS-Pruner"]
    assert ours["aes"] == MADE.frame.query("method == 'OS-Pruner'")["aes"].max()
    differences = MADE.differences.set_index("other")
    assert differences["rule"]["full trace"] == f"OS-Pruner {ours['setting']}"
    assert differences["reduction"]["full trace"] == pytest.approx(ours["reduction"])
    assert MADE.natural_accuracy is not None
    assert MADE.natural_accuracy.value == pytest.approx(MADE.frame["accuracy"][0])


def test_prices_are_numbers() -> None:
    assert parse_prices("1e-4, 5e-5") == (1e-4, 5e-5)
    assert (parse_prices(""), parse_prices("all")) == (None, ())
    for bad in ("a", "-1", "nan"):
        with pytest.raises(ValueError, match="give one price"):
            parse_prices(bad)
