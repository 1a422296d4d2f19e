"""`ospruner eval frontier` on made-up labels and small policies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from datasets import Dataset
from typer.testing import CliRunner

from modeling_ospruner.formats_ospruner import DEEPSEEK_R1
from ospruner.cli import app
from ospruner.eval.frontier.causal import CAUSAL
from ospruner.eval.results import Results
from ospruner.eval.schema import LabelSettings
from ospruner.provenance import provenance
from ospruner.train.comparing.frontier_labels import RULES, frontier_of_labels, rules_named
from ospruner.train.fresh import StageResult
from ospruner.train.labels.folder import data_hash
from ospruner.train.labels.writer import Chunk, LabelFolder

from ..conftest import SHORT, MakeLabels

Saved = Callable[[str, Dataset], str]


@pytest.fixture
def saved(tmp_path: Path, tiny_base_dir: Path) -> Saved:
    """Writes labels into a folder."""

    def write(name: str, rows: Dataset) -> str:
        settings = LabelSettings(
            base_model=str(tiny_base_dir), reasoning_format=DEEPSEEK_R1.to_dict()
        )
        folder = tmp_path / name
        with LabelFolder(folder, settings) as writer:
            writer.commit(Chunk(rows.to_list(), []))
            writer.finish()
            provenance(folder, seed=0, data_hash=data_hash(writer.chunks))
        return str(folder)

    return write


def test_the_command_compares_policies_and_rules(
    saved: Saved,
    make_labels: MakeLabels,
    fit: Callable[..., list[StageResult]],
    tmp_path: Path,
) -> None:
    validation, test = (
        saved(name, make_labels(24, seed=seed, prefix=name))
        for name, seed in (("validation", 3), ("test", 4))
    )
    fit(SHORT, out=tmp_path / "ours")
    fit(SHORT.baseline("terminator"), out=tmp_path / "theirs")
    out, file = tmp_path / "out", tmp_path / "numbers.json"
    run = CliRunner().invoke(
        app,
        ["eval", "frontier", test, "--validation", validation, "--out", str(out), "--policies",
         str(tmp_path / "theirs"), "--policies", str(tmp_path / "ours"), "--rules",
         "budget,agreement,just-enough,learnstop", "--lambdas", "1e-2,1e-3", "--replicates", "20",
         "--device", "cpu", "--force-base", "made up", "--json", str(file)],
    )  # fmt: skip
    assert run.exit_code == 0, run.output
    assert (out / "frontier.png").read_bytes()[:4] == b"\x89PNG"
    results = Results.read(file)
    assert results == Results.read(out / "frontier.json")
    assert [one.method for one in results.frontiers] == [
        "OS-Pruner", "TERMINATOR", "fixed budget", "answer agreement", "Think Just Enough",
        "LearnStop", CAUSAL,
    ]  # fmt: skip
    assert results.about["left_out"] == {}
    for one in results.frontiers:
        assert 0 <= one.area.low <= one.area.value <= one.area.high <= 1
        assert [penalty for penalty, _ in one.gap_closed] == [1e-2, 1e-3]
    # The second answer is right: what counts different answers finds it, and a budget does not.
    areas = {one.method: one.area.value for one in results.frontiers}
    assert areas["LearnStop"] > areas["fixed budget"] + 0.02
    assert "OS-Pruner's less it" in run.output


def test_rules_alone_need_no_base_and_choices_no_test_labels(
    saved: Saved, make_labels: MakeLabels
) -> None:
    validation = saved("validation", make_labels(16, seed=3, prefix="v"))
    test = saved("test", make_labels(16, seed=4, prefix="t"))
    wrong = make_labels(16, seed=4, prefix="t").map(
        lambda row: {"forced_correct": [1 - value for value in row["forced_correct"]]}
    )
    plain, shuffled = (
        frontier_of_labels(
            labels, validation, rules=("entropy", "agreement"), estimate=False, replicates=5
        )
        for labels in (test, saved("wrong", wrong))
    )
    assert [one.method for one in plain.results.frontiers] == ["answer entropy", "answer agreement"]
    for one, other in zip(plain.families, shuffled.families, strict=True):
        for rule, same in zip(one.test, other.test, strict=True):
            assert rule.tokens.tolist() == same.tokens.tolist()  # type: ignore[union-attr]
    assert plain.results.frontiers != shuffled.results.frontiers


def test_what_cannot_be_compared_is_refused(saved: Saved, make_labels: MakeLabels) -> None:
    labels = saved("labels", make_labels(16))
    others = saved("others", make_labels(16, seed=5, prefix="o"))
    with pytest.raises(ValueError, match="16 problems, such as 'p0', are in the labels and in"):
        frontier_of_labels(labels, labels)
    with pytest.raises(ValueError, match="there is nothing to compare: give policies, or rules"):
        frontier_of_labels(labels, others, rules=())
    with pytest.raises(ValueError, match="policy 'x@.5': thresholds are tried here by themselves"):
        frontier_of_labels(labels, others, ["x@.5"])
    with pytest.raises(ValueError, match="rule 'neat' cannot be had: NEAT"):
        rules_named("entropy,neat")
    with pytest.raises(ValueError, match="rule 'luck' is no family of rules; known are budget"):
        rules_named("luck")
    assert rules_named("all") == RULES
    assert rules_named("none") == ()
    assert rules_named("deer,learnstop") == ("deer", "learnstop")
