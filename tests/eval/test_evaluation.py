from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ospruner.eval.evaluation import Evaluation, find_evaluations
from ospruner.eval.report.summary import differences_of, parse_lambdas, save_evaluation
from ospruner.eval.results import Results, best_rows

from .evaluations import make_evaluation


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    evaluation = make_evaluation(with_views=True)
    evaluation.save(tmp_path)
    again = Evaluation.load(tmp_path)
    assert again.settings == evaluation.settings
    assert again.problem_ids == evaluation.problem_ids
    assert again.traces == evaluation.traces
    assert len(again.rules) == len(evaluation.rules)
    assert len(again.limits) == len(evaluation.limits)
    for one, other in zip(
        [*again.rules, *again.limits], [*evaluation.rules, *evaluation.limits], strict=True
    ):
        assert (one.method, one.parameter) == (other.method, other.parameter)
        np.testing.assert_array_equal(one.outcome.columns(), other.outcome.columns())
    evaluation.save(tmp_path)  # the same settings: replaced


def test_a_folder_of_other_settings_is_refused(tmp_path: Path) -> None:
    make_evaluation().save(tmp_path)
    with pytest.raises(ValueError, match="other settings.*'GSM8K' there, 'AIME' asked for"):
        make_evaluation(benchmark="AIME").save(tmp_path)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="other files .thesis.tex. and no evaluation"):
        make_evaluation().save(tmp_path)
    with pytest.raises(ValueError, match="holds no evaluation"):
        find_evaluations(tmp_path)


def test_another_version_is_refused(tmp_path: Path) -> None:
    make_evaluation().save(tmp_path)
    path = tmp_path / "evaluation.json"
    path.write_text(path.read_text().replace('"format_version": 2', '"format_version": 9'))
    with pytest.raises(ValueError, match="format_version 9; this version of ospruner reads 2"):
        Evaluation.load(tmp_path)


def test_the_same_evaluation_twice_is_refused(tmp_path: Path) -> None:
    make_evaluation().save(tmp_path / "a")
    make_evaluation(seed=1).save(tmp_path / "b")
    with pytest.raises(ValueError, match="both hold DeepSeek-R1-Distill-Qwen-7B, GSM8K"):
        find_evaluations(tmp_path)


def test_an_evaluation_has_a_name_and_a_full_trace() -> None:
    good = make_evaluation()
    with pytest.raises(ValueError, match="settings lacks .'model'."):
        make_evaluation(model="")
    with pytest.raises(ValueError, match="rules is empty"):
        Evaluation({**good.settings}, [], [], [], good.problem_index, [], good.natural_correct)


def test_the_numbers_are_written_with_their_intervals(tmp_path: Path) -> None:
    evaluation = make_evaluation()
    saved = save_evaluation(evaluation, tmp_path, prices=[1e-4])
    path = tmp_path / "results.json"
    assert Results.read(path).to_dict() == saved.to_dict()
    content = json.loads(path.read_text())
    results = evaluation.results(prices=[1e-4])[0]
    assert content["natural_accuracy"]["value"] == pytest.approx(results[0].accuracy.value)
    assert content["about"]["settings"] == evaluation.settings
    first = content["results"][1]
    assert first["accuracy"]["low"] < first["accuracy"]["value"] < first["accuracy"]["high"]
    (penalty, reward), = first["rewards"]  # fmt: skip
    assert penalty == 1e-4
    expected = first["accuracy"]["value"] - 1e-4 * first["tokens"]["value"]
    assert reward["value"] == pytest.approx(expected)
    assert first["time_ratio"]["value"] is None  # not measured


def test_differences_are_to_the_best_row_of_each_other_method() -> None:
    evaluation = make_evaluation()
    results = evaluation.results()[0]
    best = best_rows(results)
    assert set(best) == {"full trace", "OS-Pruner", "probe", "fixed budget"}
    ours = [r.aes.value for r in results if r.method == "OS-Pruner"]
    assert results[best["OS-Pruner"]].aes.value == max(ours)
    differences = differences_of(evaluation, results)
    assert len(differences) == 3
    against_full = next(one for one in differences if one.other == "full trace")
    chosen = results[best["OS-Pruner"]]
    assert against_full.rule == chosen.name
    assert against_full.reduction.value == pytest.approx(chosen.reduction.value)


def test_lambdas_are_numbers() -> None:
    assert parse_lambdas("1e-4, 5e-5") == (1e-4, 5e-5)
    assert parse_lambdas("") == ()
    for bad in ("a", "-1", "nan"):
        with pytest.raises(ValueError, match="give numbers >= 0 such as 1e-4,5e-5"):
            parse_lambdas(bad)
