"""The paper against its own numbers, as docs/reproduce.md tells."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ospruner.cli.commands import app
from ospruner.eval.metrics import AES_ABSOLUTE, AES_RELATIVE
from ospruner.eval.report.paper import published, table_1_scores, with_published
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
    assert len(aime) == 3
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
    frame = with_published(make_evaluation().results)
    assert frame is not None
    frame = frame.set_index(["method", "setting"])
    paper = frame[["paper_accuracy_percent", "paper_length_tokens"]]
    assert paper.loc[("full trace", "")].tolist() == [88.7, 1219]
    assert paper.loc[("OS-Pruner", "price=5e-5")].tolist() == [88.0, 496]
    assert paper.loc[("probe", "≥.70")].tolist()[1] == 632
    assert paper.loc[("fixed budget", "200 tokens")].isna().all()
    free = with_published(make_evaluation(answer="free", benchmark="gsm8k").results)
    assert free is not None
    assert (free["paper_length_tokens"].iloc[0], free["paper_answer_tokens"].iloc[0]) == (1443, 223)
    assert with_published(make_evaluation(benchmark="math500").results) is not None
    assert with_published(make_evaluation(model="toy").results) is None
    assert with_published(make_evaluation(benchmark="GPQA").results) is None


def test_the_command_prints_table_1_and_earlier_comparisons(tmp_path: Path) -> None:
    save_comparison(tmp_path / "e")

    def said(*arguments: str) -> str:
        return CliRunner().invoke(app, ["compare", *arguments], catch_exceptions=False).output

    numbers = tmp_path / "numbers.json"
    assert "absolute, α=1, β=3, γ=5: 0.007" in said("--paper", "--json", str(numbers))
    assert len(json.loads(numbers.read_text())) == 60
    assert "Each method at its best AES" in said(str(tmp_path), "--json", str(numbers))
    (one,) = json.loads(numbers.read_text())
    assert Results.from_dict(one).rules["method"][0] == "full trace"
    assert "59.3" in (tmp_path / "report.md").read_text("utf-8")  # of the paper
    refused = CliRunner().invoke(app, ["compare", str(tmp_path), "--set", "model=mine"])
    assert refused.exit_code == 2  # it names nothing anew
