from __future__ import annotations

import csv
import io
import re
from dataclasses import replace

import pytest

from ospruner.eval.online.evaluation import Evaluation
from ospruner.eval.report.tables import (
    AVERAGE,
    average,
    best_aes_table,
    by_domain,
    chosen_parameters,
    full_table,
)
from ospruner.eval.results import Estimate

from ..evaluations import make_evaluation

MODEL = "DeepSeek-R1-Distill-Qwen-7B"
THREE = [make_evaluation(benchmark=name, seed=i) for i, name in enumerate(("GSM8K", "MATH-500"))]


def test_best_rows_are_chosen_per_benchmark_and_averaged() -> None:
    table = best_aes_table(THREE)
    assert table.groups == ("GSM8K", "MATH-500", AVERAGE)
    heading, lines = table.sections[0]
    assert heading == MODEL
    assert [line.label for line in lines] == ["full trace", "OS-Pruner", "probe", "fixed budget"]
    ours = lines[1].cells
    for evaluation, cell in zip(THREE, ours, strict=False):
        assert cell is not None
        scores = [r.aes.value for r in evaluation.results()[0] if r.method == "OS-Pruner"]
        assert cell[2].estimate.value == max(scores)
    first, second, mean = ours
    assert first is not None
    assert second is not None
    assert mean is not None
    assert mean[2].estimate.value == pytest.approx(
        (first[2].estimate.value + second[2].estimate.value) / 2
    )
    assert "on these very traces" in table.caption


def test_evaluations_of_several_tasks_stand_by_task() -> None:
    quiz = make_evaluation(benchmark="ARC", seed=2)
    replayed = {"label_settings": {"task": {"name": "choice"}}}
    generated = {"task": {"name": "choice", "force": "answer"}}
    for told in (replayed, generated):
        asked = replace(quiz, settings=quiz.settings | told)
        table = best_aes_table([THREE[0], asked, THREE[1]])
        assert table.groups == ("math: GSM8K", "math: MATH-500", "choice: ARC", AVERAGE)
        assert best_aes_table([asked]).groups == ("ARC",)
        pairs = by_domain([THREE[0], asked, THREE[1]])
        assert [name for name, _ in pairs] == ["math", "math", "choice"]


def test_the_best_is_bold_and_the_second_underlined_and_the_full_trace_neither() -> None:
    table = best_aes_table(THREE)
    lines = table.sections[0][1]
    for g in range(3):
        for c, higher in enumerate((True, False, True)):
            cells = [line.cells[g] for line in lines]
            shown = [float(cell[c].text()) for cell in cells if cell is not None]
            marks = [cell[c].mark for cell in cells if cell is not None]
            assert marks[0] == ""
            ranked = sorted(set(shown[1:]), reverse=higher)
            for value, mark in zip(shown[1:], marks[1:], strict=True):
                expected = {ranked[0]: "best", ranked[1]: "second"}.get(value, "")
                assert mark == expected


def test_ties_as_printed_share_a_mark() -> None:
    evaluation = make_evaluation()
    twin = [*evaluation.rules, evaluation.rules[-1].__class__("twin", evaluation.rules[-1].outcome)]
    twins = evaluation.__class__(**{**vars(evaluation), "rules": twin})
    lines = {line.label: line.cells[0] for line in best_aes_table([twins]).sections[0][1]}
    budget, other = lines["fixed budget"], lines["twin"]
    assert budget is not None
    assert other is not None
    assert [n.mark for n in budget] == [n.mark for n in other]


def test_parameters_chosen_on_validation_are_shown() -> None:
    chosen = chosen_parameters([make_evaluation(seed=7)])
    table = best_aes_table(THREE, chosen=chosen)
    parameter = chosen[MODEL, "OS-Pruner"]
    cell = table.sections[0][1][1].cells[0]
    assert cell is not None
    expected = next(
        r for r in THREE[0].results()[0] if (r.method, r.parameter) == ("OS-Pruner", parameter)
    )
    assert cell[0].estimate == expected.accuracy
    assert "chosen on validation" in table.caption
    with pytest.raises(ValueError, match="validation has no full trace of other"):
        best_aes_table([make_evaluation(model="other")], chosen=chosen)


def test_csv_holds_every_number_with_its_interval() -> None:
    rows = list(csv.DictReader(io.StringIO(full_table(THREE, MODEL).csv())))
    assert len(rows) == 8
    by = {row["Method / Param"]: row for row in rows}
    row = by["OS-Pruner λ=5e-5"]
    result = next(r for r in THREE[0].results()[0] if r.parameter == 5e-5)
    for end, value in zip(("", " low", " high"), vars(result.accuracy).values(), strict=True):
        assert float(row[f"GSM8K Acc{end}"]) == pytest.approx(100 * value)
    assert float(row["AVERAGE Acc low"]) < float(row["AVERAGE Acc"])


def test_markdown_has_one_cell_for_each_column() -> None:
    text = best_aes_table(THREE).markdown()
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert re.search(r"\*\*\d+\.\d \[\d+\.\d, \d+\.\d\]\*\*", text)
    assert "<u>" in text


def test_latex_is_balanced_and_in_the_papers_layout() -> None:
    for table in (best_aes_table(THREE), full_table(THREE, MODEL)):
        text = table.latex()
        assert text.count("{") == text.count("}")
        assert r"\multicolumn{" in text
        assert r"\cmidrule(lr){2-" in text
        assert r"\textit{AVERAGE}" in text
        body = [line for line in text.splitlines() if line.endswith(r"\\")]
        widths = {line.count(" & ") for line in body if "multi" not in line and " & " in line}
        assert widths == {len(table.groups) * len(table.columns)}
        assert "%" not in text.replace(r"\%", "").replace("{%\n", "")
    assert r"\textbf{" in best_aes_table(THREE).latex()
    assert r"\quad $\lambda$=5e-5" in full_table(THREE, MODEL).latex()


def test_forced_and_free_are_never_mixed() -> None:
    free = make_evaluation(answer="free", seed=3)
    table = full_table([*THREE, free], MODEL, "free")
    assert table.groups == ("GSM8K",)  # a mean of one would say nothing
    assert table.columns == ("Acc", "Len (CoT + Ans) (Red.)")
    cell = table.sections[0][1][1].cells[0]
    assert cell is not None
    result = free.results()[0][0]
    assert cell[1].estimate.value == pytest.approx(result.tokens.value + 5.0)
    assert cell[1].estimate.low < cell[1].estimate.value < cell[1].estimate.high
    assert "+5)" in cell[1].text()
    with pytest.raises(ValueError, match="no evaluation with free answers"):
        best_aes_table(THREE, "free")
    with pytest.raises(ValueError, match="no evaluation of 'none' with forced answers"):
        full_table(THREE, "none")


def test_an_average_of_independent_benchmarks_is_narrower() -> None:
    mean = average([Estimate(0.5, 0.4, 0.6), Estimate(0.7, 0.6, 0.8)])
    assert mean.value == pytest.approx(0.6)
    assert mean.low == pytest.approx(0.6 - 0.1 / 2**0.5)
    assert mean.high == pytest.approx(0.6 + 0.1 / 2**0.5)


def charged(evaluation: Evaluation) -> Evaluation:
    """The same, where each thinking token takes a thousand operations."""
    rules = [
        replace(rule, outcome=replace(rule.outcome, flops=1000 * rule.outcome.tokens))
        for rule in evaluation.rules
    ]
    return replace(evaluation, rules=rules)


def test_compute_stands_beside_where_it_was_counted() -> None:
    """In percent of the full trace's operations; it competes for nothing."""
    plain = best_aes_table(THREE).columns
    counted = [charged(one) for one in THREE]
    table = best_aes_table(counted)
    assert table.columns == (*plain, "Comp")
    assert "Comp: all that was computed, in % of the full trace's operations" in table.caption
    full, ours = table.sections[0][1][:2]
    assert [cell[3].text() for cell in full.cells if cell is not None] == ["100"] * 3
    for evaluation, cell in zip(counted, ours.cells, strict=False):
        assert cell is not None
        rows = [r for r in evaluation.results()[0] if r.method == "OS-Pruner"]
        best = max(rows, key=lambda r: r.aes.value)
        assert cell[3].text() == f"{100 * best.flops_ratio.value:.0f}"
        assert cell[3].mark == ""
    assert full_table(counted, MODEL).columns[-1] == "Comp"
    assert "Comp" not in full_table(THREE, MODEL).caption
