"""The commands that compare on labels, from replay to the page."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ospruner.cli import app
from ospruner.comparing import compare
from ospruner.demo.shipped import FORMAT, Reasoner, draw_split
from ospruner.eval.metrics import AesVariant
from ospruner.eval.results import Results
from ospruner.train.untrained import untrained


@pytest.fixture(scope="module")
def policy(reasoner: Reasoner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that stops now and then: untrained, with a mild bias."""
    model = untrained(reasoner.model, reasoner.tokenizer, 1, "layers", -2.0, FORMAT)
    model.config.price = 1e-3
    folder = tmp_path_factory.mktemp("policy")
    model.save_pretrained(folder)
    return folder


def test_the_commands_replay_report_and_compare(
    reasoner: Reasoner, policy: Path, tmp_path: Path
) -> None:
    reasoner.label(draw_split("test", 6, 0), tmp_path / "labels", seed=11)
    command = CliRunner()

    def run(*arguments: str) -> str:
        result = command.invoke(app, ["compare", *arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.output

    labels, out = str(tmp_path / "labels"), str(tmp_path / "out" / "toy")
    common = ["--set", "benchmark=toy", labels, str(policy)]
    rules = ["budget:100", "entropy:0.4", "--set", "rewards_at=1e-3"]
    numbers = str(tmp_path / "numbers.json")
    text = run(*common, *rules, "--out", out, "--json", numbers)
    assert "OS-Pruner" in text
    assert "less each other" not in text
    found = Results.read(numbers)
    frame = found.rules.set_index("method")
    assert frame.index.tolist() == ["full trace", "OS-Pruner", "fixed budget", "answer entropy"]
    assert frame["probe_tokens"]["answer entropy"] > 0
    assert found.natural_accuracy is not None
    assert found.natural_accuracy.value >= 0
    assert Results.read(Path(out) / "results.json").to_dict() == found.to_dict()
    # From what every method said, without labels and weights.
    anew = tmp_path / "anew"
    assert "OS-Pruner" in run(str(Path(out) / "signals.parquet"), "--out", str(anew))
    assert Results.read(anew / "results.json").to_dict() == found.to_dict()
    assert (frame["flops_ratio"] > 0).all()
    assert frame["flops_ratio"]["full trace"] == 1
    assert 0 < frame["flops"]["fixed budget"] < frame["flops"]["full trace"]
    assert not frame["aes_label"].str.contains("of compute").any()
    assert "FLOP" in text
    methods = [str(policy), str(shutil.copytree(policy, tmp_path / "twin")), "entropy:0.4"]
    by_compute = AesVariant(charge="compute")
    report = compare(labels, methods, variant=by_compute, rewards_at=[1e-3])
    pooled = report.frame.set_index("method")
    # The same policy twice is one row.
    assert pooled.index.tolist()[:3] == ["full trace", "OS-Pruner", "answer entropy"]
    assert pooled["tokens"]["OS-Pruner"] == frame["tokens"]["OS-Pruner"]
    # Trial answers cost more compute than they are charged in tokens.
    paid, free = pooled.loc["answer entropy"], frame.loc["answer entropy"]
    assert paid["aes"] < free["aes"]
    assert paid["reward@1e-3"] < free["reward@1e-3"]
    assert paid["tokens"] == free["tokens"]
    with pytest.raises(ValueError, match="charge is 'money'"):
        run(*common, "--out", out, "--set", "charge=money")
    assert "report.md" in run(str(tmp_path / "out"), "--json", numbers)
    (again,) = (Results.from_dict(one) for one in json.loads(Path(numbers).read_text()))
    assert (again.dataset, again.setting) == ("toy", found.setting)
    assert again.rules["setting"].tolist() == found.rules["setting"].tolist()
    with pytest.raises(ValueError, match="other settings.*'benchmark': 'toy'|benchmark: 'toy'"):
        run("--set", "benchmark=other", *common[2:], "--out", out)
    with pytest.raises(ValueError, match="limit is 0; it must be at least 1"):
        run(*common, "--limit", "0", "--out", str(tmp_path / "x"))
