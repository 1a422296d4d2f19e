"""The paper's tables from ours: what is picked, marked and averaged, and how it is written."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace

import numpy as np
import pytest

from ospruner.eval.evaluation import Evaluation
from ospruner.eval.report.tables import (
    AVERAGE,
    Table,
    best_aes_table,
    by_domain,
    chosen_parameters,
    full_table,
)
from ospruner.eval.results import Estimate

from ..evaluations import make_evaluation

MODEL = "DeepSeek-R1-Distill-Qwen-7B"
TWO = [make_evaluation(benchmark=name, seed=i) for i, name in enumerate(("GSM8K", "MATH-500"))]


def groups(table: Table) -> list[str]:
    return list(dict.fromkeys(table.numbers.columns.get_level_values(0)))


def heads(table: Table) -> list[str]:
    return [column.head for column in table.columns]


def charged(evaluation: Evaluation) -> Evaluation:
    """The same, where each thinking token takes a thousand operations."""
    rules = [
        replace(rule, outcome=replace(rule.outcome, flops=1000 * rule.outcome.tokens))
        for rule in evaluation.rules
    ]
    return replace(evaluation, rules=rules)


def test_best_rows_are_chosen_per_benchmark_and_averaged() -> None:
    table = best_aes_table(TWO)
    assert groups(table) == ["GSM8K", "MATH-500", AVERAGE]
    methods = ["full trace", "OS-Pruner", "probe", "fixed budget"]
    assert list(table.numbers.index) == [(MODEL, method) for method in methods]
    ours = table.numbers.loc[(MODEL, "OS-Pruner")]
    for one in TWO:
        scores = one.frame().query("method == 'OS-Pruner'")["aes"]
        assert ours[one.settings["benchmark"], "aes"] == scores.max()
    singles, mean = [ours["GSM8K"], ours["MATH-500"]], ours[AVERAGE]
    assert mean["aes"] == pytest.approx(np.mean([one["aes"] for one in singles]))
    down = np.hypot(*(one["aes"] - one["aes_low"] for one in singles)) / 2
    assert mean["aes_low"] == pytest.approx(mean["aes"] - down), "independent benchmarks"
    assert "on these very traces" in table.caption


def test_evaluations_of_several_tasks_stand_by_task() -> None:
    quiz = make_evaluation(benchmark="ARC", seed=2)
    replayed = {"label_settings": {"task": {"name": "choice"}}}
    generated = {"task": {"name": "choice", "force": "answer"}}
    for told in (replayed, generated):
        asked = replace(quiz, settings=quiz.settings | told)
        table = best_aes_table([TWO[0], asked, TWO[1]])
        assert groups(table) == ["math: GSM8K", "math: MATH-500", "choice: ARC", AVERAGE]
        assert groups(best_aes_table([asked])) == ["ARC"], "a mean of one would say nothing"
        pairs = by_domain([TWO[0], asked, TWO[1]])
        assert [name for name, _ in pairs] == ["math", "math", "choice"]


def test_the_best_is_marked_and_neither_compute_nor_the_full_trace_competes() -> None:
    """As shown, so that ties share a mark."""
    twin = replace(TWO[0].rules[-1], method="twin")
    one = charged(replace(TWO[0], rules=[*TWO[0].rules, twin]))
    table = best_aes_table([one, charged(TWO[1])])
    shown, marks = table.texts("none"), table.marks()
    assert heads(table) == ["Acc", "Len", "AES", "Comp"]
    for place, (_, name) in enumerate(shown.columns):
        column = [float(text.replace("–", "nan")) for text in shown.iloc[:, place]]
        found = marks.iloc[:, place].tolist()
        assert found[0] == ""
        if name == "flops_ratio":
            assert set(found) == {""}
            continue
        ranked = sorted({x for x in column[1:] if x == x}, reverse=name != "tokens")
        for value, mark in zip(column[1:], found[1:], strict=True):
            assert mark == {ranked[0]: "best", ranked[1]: "second"}.get(value, "")
    budget, other = ((MODEL, name) for name in ("fixed budget", "twin"))
    assert marks.loc[budget]["GSM8K"].equals(marks.loc[other]["GSM8K"])
    assert set(marks.loc[other][AVERAGE]) == {""}, "MATH-500 lacks the row"


def test_compute_stands_beside_where_it_was_counted() -> None:
    """In percent of the full trace's operations."""
    table = best_aes_table([charged(one) for one in TWO])
    assert "Comp: all that was computed, in % of the full trace's operations" in table.caption
    assert (table.numbers.loc[(MODEL, "full trace")].xs("flops_ratio", level=1) == 1).all()
    results = charged(TWO[0]).frame().query("method == 'OS-Pruner'")
    best = results.loc[results["aes"].idxmax()]
    ours = table.numbers.loc[(MODEL, "OS-Pruner")]["GSM8K", "flops_ratio"]
    assert ours == best["flops_ratio"]
    assert heads(full_table([charged(one) for one in TWO], MODEL))[-1] == "Comp"
    assert "Comp" not in full_table(TWO, MODEL).caption


def test_settings_chosen_on_validation_are_shown() -> None:
    chosen = chosen_parameters([make_evaluation(seed=7)])
    table = best_aes_table(TWO, chosen=chosen)
    frame = TWO[0].frame().set_index(["method", "setting"])
    expected = frame.loc[("OS-Pruner", chosen[MODEL, "OS-Pruner"])]
    assert table.numbers.loc[(MODEL, "OS-Pruner")]["GSM8K", "aes"] == expected["aes"]
    assert "chosen on validation" in table.caption
    with pytest.raises(ValueError, match="validation has no .* of other"):
        best_aes_table([make_evaluation(model="other")], chosen=chosen)


def test_csv_holds_every_number_with_its_interval() -> None:
    rows = list(csv.DictReader(io.StringIO(full_table(TWO, MODEL).csv())))
    assert len(rows) == 8
    row = {row["Method / Param"]: row for row in rows}["OS-Pruner λ=5e-5"]
    frame = TWO[0].frame()
    result = Estimate.of(frame[frame["parameter"] == 5e-5].iloc[0], "accuracy")
    for end, value in zip(("", " low", " high"), result, strict=True):
        assert float(row[f"GSM8K Acc{end}"]) == pytest.approx(100 * value)
    assert float(row["AVERAGE Acc low"]) < float(row["AVERAGE Acc"])


def test_markdown_has_one_cell_for_each_column() -> None:
    text = best_aes_table(TWO).markdown()
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert re.search(r"\*\*\d+\.\d \[\d+\.\d, \d+\.\d\]\*\*", text)
    assert "<u>" in text


def test_latex_is_whole() -> None:
    for table in (best_aes_table(TWO), full_table(TWO, MODEL)):
        text = table.latex()
        assert text.count("{") == text.count("}")
        assert r"\multicolumn{3}{c}{GSM8K}" in text
        assert r"\toprule" in text
        body = [line for line in text.splitlines() if line.endswith(r"\\") and "multi" not in line]
        assert len({line.count("&") for line in body}) == 1
        assert "%" not in text.replace(r"\%", "")
        assert f"tab:{table.name}" in text
    assert r"\textbf{" in best_aes_table(TWO).latex()
    assert r"$\lambda$=5e-5" in full_table(TWO, MODEL).latex()


def test_forced_and_free_are_never_mixed() -> None:
    free = make_evaluation(answer="free", seed=3)
    table = full_table([*TWO, free], MODEL, "free")
    assert groups(table) == ["GSM8K"]
    assert heads(table) == ["Acc", "CoT", "Ans", "CoT + Ans", "Red. %"]
    full = table.numbers.iloc[0]["GSM8K"]
    assert full["generated_tokens"] == pytest.approx(full["tokens"] + 5.0)
    assert full["generated_tokens_low"] < full["generated_tokens"] < full["generated_tokens_high"]
    with pytest.raises(ValueError, match="no evaluation with free answers"):
        best_aes_table(TWO, "free")
    with pytest.raises(ValueError, match="no evaluation of 'none' with forced answers"):
        full_table(TWO, "none")
