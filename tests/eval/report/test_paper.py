"""The paper against its own numbers, as docs/reproduce.md tells."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from ospruner.eval.metrics import AES_ABSOLUTE, AES_RELATIVE
from ospruner.eval.report.paper import (
    MODELS,
    print_comparisons,
    print_table_1,
    published,
    table_1_scores,
    with_published,
)
from ospruner.eval.results import Results

from ..evaluations import make_evaluation, save_comparison


def test_table_1_follows_the_absolute_variant_and_the_printed_definition_misses() -> None:
    scores = table_1_scores(AES_ABSOLUTE)
    assert len(scores) == 45 + 15  # averages are means of scores
    assert (scores["recomputed"] - scores["aes"]).abs().max() <= 0.0075
    scores = table_1_scores(AES_RELATIVE)
    off = (scores["recomputed"] - scores["aes"]).abs()
    assert (off > 0.0075).sum() > 25
    worst = scores.loc[off.idxmax()]
    assert (worst.model, worst.method, worst.benchmark) == ("DRPO-7B", "OS-Pruner", "AIME")
    assert worst.recomputed == pytest.approx(-0.643, abs=1e-3)
    aime = scores[(scores["benchmark"] == "AIME") & (scores["method"] == "OS-Pruner")]
    assert len(aime) == len(MODELS)
    assert (aime["recomputed"] < 0).all()


def test_reductions_of_free_answers_are_of_thinking_and_answer_together() -> None:
    """Of FlashThink's, too, whatever its verifier reads."""
    rows = published("full").set_index(["model", "benchmark"])
    free = rows[(rows["answer"] == "free") & rows["cot_tokens"].notna()]
    assert len(free) > 200
    spent = free["cot_tokens"] + free["answer_tokens"]
    full = spent[free["method"] == "Baseline"]
    apart = 100 * (1 - spent / full.loc[spent.index]) - free["reduction_percent"]
    assert apart.abs().max() < 0.315  # the paper's own rounding of lengths


def test_measured_stands_beside_published() -> None:
    made = make_evaluation().results
    frame = with_published(made).set_index(["method", "setting"])
    paper = frame[["paper_accuracy_percent", "paper_length_tokens"]]
    assert paper.loc[("full trace", "")].tolist() == [88.7, 1219]
    assert paper.loc[("OS-Pruner", "price=5e-5")].tolist() == [88.0, 496]
    assert paper.loc[("probe", "≥.70")].tolist()[1] == 632
    assert paper.loc[("fixed budget", "200 tokens")].isna().all()
    free = with_published(make_evaluation(answer="free").results).iloc[0]
    assert (free["paper_length_tokens"], free["paper_answer_tokens"]) == (1443, 223)
    for name, other in (("model", "toy"), ("benchmark", "GPQA")):
        with pytest.raises(ValueError, match=f"the paper has no {name} '{other}'; it has "):
            with_published(made, **{name: other})


def test_the_command_prints_both(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=140, no_color=True, record=True)
    assert len(print_table_1(console)) == 60
    save_comparison(tmp_path / "e")
    numbers = print_comparisons(tmp_path, console, paper=True)
    print_comparisons(tmp_path, console)
    text, rows = console.export_text(), ("absolute, α=1, β=3, γ=5: 0.007", "88.0", "59.3")
    assert all(said in text for said in (*rows, "Each method at its best AES"))
    (one,) = json.loads(json.dumps(numbers))
    measured, told = Results.from_dict(one), one["about"]["published"]
    assert len(measured.rules) == len(told)
    assert measured.rules["method"][0] == "full trace"
    assert told[0]["paper_accuracy_percent"] == 88.7
    assert told[-1]["paper_accuracy_percent"] is None
