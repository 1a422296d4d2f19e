"""What tables show, pick, mark and average, and how they are written."""

import io
import math
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from ospruner.eval.methods import FRONTIER, ORACLE
from ospruner.eval.report.summary import differences_table, frontier_tables, results_table
from ospruner.eval.report.tables import AVERAGE, Table, best_aes_table, full_table, grid_frame
from ospruner.eval.results import Estimate, Results, best_rows, frame_of

from ...made_results import make_result, spread
from ..evaluations import make_evaluation

MODEL = "DeepSeek-R1-Distill-Qwen-7B"
MADE = [make_evaluation(benchmark=name, seed=i) for i, name in enumerate(("GSM8K", "MATH-500"))]
TWO = [one.results for one in MADE]
FRAME = grid_frame(TWO)


def lines_of(table: Table) -> list[str]:
    """What a terminal of 80 columns shows."""
    console = Console(width=80, no_color=True, record=True, file=io.StringIO())
    console.print(table)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    return lines


def groups(table: Table) -> list[str]:
    return list(dict.fromkeys(table.numbers.columns.get_level_values(0)))


def test_results_stand_in_80_columns_with_their_intervals() -> None:
    budget = make_result("fixed budget", 0.59, 110, 110, "tokens")
    budget |= spread("aes", Estimate(0.42, 0.37, 0.49))
    rows = [make_result(FRONTIER, 0.6 - 0.1 * p, 240, 5e-5 * p, "price") for p in range(8)]
    limits = ORACLE, f"{ORACLE}, no loss"
    rows += [budget, *(make_result(name, 0.8, 50, kind="limit") for name in limits)]
    lines = lines_of(results_table(frame_of(rows), "Test"))
    # One line a rule; ± is the wider half of an interval.
    row = r" *fixed budget 110 tokens +59\.0 ±2\.0 +110 ±5 +45\.0 ±1\.0 +0\.42 ±0\.07 *"
    assert any(re.fullmatch(row, line) for line in lines)
    text = " ".join(" ".join(lines).split())
    names = [f"{one['method']} {one['setting']}".strip() for one in rows]
    caption = "1,500 traces of 1,500 problems", "AES absolute, α=1, β=3, γ=5"
    assert all(said in text for said in (*names, *caption))
    assert len(lines) <= len(names) + 9
    oracle = next(i for i, line in enumerate(lines) if ORACLE in line)
    assert not lines[oracle - 1].strip()  # limits stand apart
    table = results_table(frame_of([budget | spread("flops", Estimate(2e12, 1e12, 3e12))]))
    assert any(re.search(r"0\.42 ±0\.07 +2\.0 *$", line) for line in lines_of(table))
    assert "2.0 [1.0, 3.0]" in table.markdown(), "names need the width in terminals alone"


def test_differences_have_signs() -> None:
    difference = {
        "rule": "OS-Pruner price=5e-5",
        "other": "convergence (1 point) ≥.95",
        **spread("accuracy", Estimate(0.012, -0.001, 0.02)),
        **spread("tokens", Estimate(-17.2, -19, -15)),
        **spread("reduction", Estimate(0.078, 0.069, 0.086)),
        **spread("aes", Estimate(-0.001, -0.004, math.nan)),
    }
    lines = lines_of(differences_table(frame_of([difference], "differences")))
    row = next(line for line in lines if "convergence (1 point) ≥.95" in line)
    # No minus zero, no "nan".
    assert all(part in row for part in ("+1.2 ±1.3", "-17.2 ±2.2", "+7.8 ±0.9", "+0.00 ±–"))
    assert any("OS-Pruner price=5e-5 less each other" in line for line in lines)


def test_shares_of_the_gap_keep_their_methods_names_in_80_columns() -> None:
    share = Estimate(-0.334, -0.969, 0.051)
    columns = ("area", "lead", *(f"gap@1e-{n}" for n in range(1, 5)))
    row = {k: x for one in columns for k, x in spread(one, share).items()}
    frame = frame_of([{"method": "OS-Pruner, one policy", **row}], "frontiers")
    lines = lines_of(frontier_tables(Results(dataset="d", setting="s", frontiers=frame))[1])
    (line,) = (line for line in lines if line.strip().startswith("OS-Pruner, one policy"))
    assert line.count("-33.4 ±63.5") == 4


def test_best_rows_are_chosen_per_benchmark_and_averaged() -> None:
    table = best_aes_table(FRAME)
    assert groups(table) == ["GSM8K", "MATH-500", AVERAGE]
    methods = ["full trace", "OS-Pruner", "probe", "fixed budget"]
    assert list(table.numbers.index) == [(MODEL, method) for method in methods]
    ours = table.numbers.loc[(MODEL, "OS-Pruner")]
    for one in TWO:
        scores = best_rows(one.frame).set_index("method")["aes"]
        assert ours[one.settings["benchmark"], "aes"] == scores["OS-Pruner"]
    singles, mean = [ours["GSM8K"], ours["MATH-500"]], ours[AVERAGE]
    assert mean["aes"] == pytest.approx(np.mean([one["aes"] for one in singles]))
    down = np.hypot(*(one["aes"] - one["aes_low"] for one in singles)) / 2
    assert mean["aes_low"] == pytest.approx(mean["aes"] - down), "independent benchmarks"
    assert "on these very traces" in table.caption


def test_replay_and_online_of_the_same_are_told_apart() -> None:
    single = best_aes_table(grid_frame([make_evaluation(benchmark="ARC", seed=2).results]))
    assert groups(single) == ["ARC"], "a mean of one says nothing"
    both = grid_frame([TWO[0], make_evaluation(mode="online").results])
    assert groups(best_aes_table(both))[:2] == ["GSM8K", "GSM8K (online)"]


def test_the_two_highest_aes_are_marked_and_nothing_else_competes() -> None:
    """As shown, so that ties share a mark; here each thinking token takes a thousand operations."""
    twin = replace(MADE[0].rules[-1], method="twin")
    found = []
    for report, more in zip(MADE, ([twin], []), strict=True):
        rules = [
            replace(rule, outcome=replace(rule.outcome, flops=1000 * rule.outcome.tokens))
            for rule in (*report.rules, *more)
        ]
        found.append(replace(report, rules=rules).results)
    table = best_aes_table(grid_frame(found))
    assert [column.head for column in table.columns] == ["Acc", "Len", "AES", "Comp"]
    texts = table.texts(), table.texts("1|", "2|")
    shown, marked = (one.map(lambda text: text.partition(" [")[0]) for one in texts)
    rest = (one.drop(columns="aes", level=1) for one in (shown, marked))
    pd.testing.assert_frame_equal(*rest)
    scores = shown["GSM8K", "aes"].astype(float)
    highest = sorted({*scores[1:]}, reverse=True)
    places = dict(zip(highest, "12", strict=False))
    wanted = [shown["GSM8K", "aes"].iloc[0], *(f"{places.get(x, '')}{x:.2f}" for x in scores[1:])]
    assert marked["GSM8K", "aes"].tolist() == wanted
    assert set(marked.loc[(MODEL, "twin")][AVERAGE]) == {"–"}, "MATH-500 lacks the row"
    # In percent of the full trace's operations, and only where these were counted.
    assert "Comp: all that was computed, in % of the full trace's operations" in table.caption
    assert (table.numbers.loc[(MODEL, "full trace")].xs("flops_ratio", level=1) == 1).all()
    assert "Comp" not in full_table(FRAME, MODEL).caption


def test_settings_chosen_on_validation_are_shown() -> None:
    ours = FRAME["method"] == FRONTIER
    worst = FRAME[ours].groupby("benchmark")["aes"].idxmin()  # as if validation had taken them
    table = best_aes_table(FRAME.assign(chosen=FRAME.index.isin(worst)))
    for name, place in worst.items():
        assert table.numbers.loc[(MODEL, FRONTIER)][name, "aes"] == FRAME["aes"][place]
    assert "chosen on validation where it was compared with some, else on these" in table.caption


def test_markdown_and_latex_are_whole() -> None:
    best, full = best_aes_table(FRAME), full_table(FRAME, MODEL)
    text = best.markdown()
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert re.search(r"\*\*-?\d\.\d\d \[-?\d\.\d\d, -?\d\.\d\d\]\*\*", text)
    assert "<u>" in text
    for table in (best, full):
        text = table.latex()
        assert text.count("{") == text.count("}")
        assert r"\multicolumn{3}{c}{GSM8K}" in text
        assert re.search(r"\d+\.\d \[\d+\.\d, \d+\.\d\]", text), "with its interval"
        body = [line for line in text.splitlines() if line.endswith(r"\\") and "multi" not in line]
        assert len({line.count("&") for line in body}) == 1
        assert "%" not in text.replace(r"\%", "")
        assert f"tab:{table.name}" in text
    assert r"\textbf{" in best.latex()
    assert "price=5e-5" in full.latex()


def test_free_answers_are_counted_with_their_thinking() -> None:
    frame = grid_frame([*TWO, make_evaluation(answer="free", seed=3).results])
    for make in (best_aes_table, lambda both: full_table(both, MODEL)):
        with pytest.raises(ValueError, match="too many values"):  # the kinds are never mixed
            make(frame)
    table = full_table(frame[frame["answer"] == "free"], MODEL)
    assert groups(table) == ["GSM8K"]
    heads = [column.head for column in table.columns]
    assert heads == ["Acc", "CoT", "Ans", "CoT + Ans", "Red. %"]
    full: pd.Series = table.numbers.iloc[0]["GSM8K"]
    assert full["generated_tokens"] == pytest.approx(full["tokens"] + 5.0)
    assert full["generated_tokens_low"] < full["generated_tokens"] < full["generated_tokens_high"]
