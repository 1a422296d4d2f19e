"""The benchmark of frontiers, on a demo that is far too small to prove anything."""

from __future__ import annotations

import dataclasses
import io
import json
import runpy
import sys
from pathlib import Path

import pytest
from rich.console import Console

from modeling_ospruner.common.results_file import Results
from ospruner.eval.frontier.causal import CAUSAL
from ospruner.eval.frontier.learnstop import LEARN_STOP
from ospruner.eval.rules.families import FAMILIES
from ospruner.train.comparing.frontier_labels import RULES
from ospruner.train.from_labels import settings_for, train_from_labels
from ospruner.train.toy import demo

SIZE = dataclasses.replace(
    demo.QUICK,
    train=34,
    validation=10,
    test=10,
    seeds=2,
    price_range=(),
    max_loss=0.0,
    not_chosen=1,
    layers=2,
    steep_penalties=(5e-3,),
    length_penalties=(1e-3, 5e-4),
    epochs_per_stage=1,
    baseline_epochs=1,
    swa_share=0.5,
)


@pytest.mark.slow
def test_it_reads_a_demo(
    repo_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, file = tmp_path / "demo", tmp_path / "frontier.json"
    demo.run_demo(run, dataclasses.replace(SIZE, name="tiny"), 0, Console(file=io.StringIO()))
    priced = settings_for("5e-5,1e-2", head="price", epochs_per_stage=1)
    for seed in (0, 1):
        train_from_labels(
            run / "labels" / "train",
            run / "policies" / f"seed{seed}" / "price",
            priced,
            validation=run / "labels" / "validation",
        )
    script = repo_dir / "benchmarks" / "frontier.py"
    monkeypatch.syspath_prepend(script.parent)
    monkeypatch.setattr(sys, "argv", [str(script), "--run", str(run), "--json", str(file)])
    runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr().out
    found = json.loads(printed.splitlines()[-1])
    assert found == json.loads(file.read_text())
    about = found["about"]
    assert (about["seeds"], about["test_traces"], about["left_out"]) == (2, 10, {})
    trained = {"OS-Pruner", "OS-Pruner, one policy", "probe", "convergence"}
    free = {FAMILIES[name].method for name in RULES if name in FAMILIES} | {LEARN_STOP}
    frontiers = Results.read(file).frontiers
    assert {one.method for one in frontiers} == trained | free | {CAUSAL}
    assert [one.method for one in frontiers if one.lead is None] == ["OS-Pruner", CAUSAL]
    for one in frontiers:
        assert [penalty for penalty, _ in one.gap_closed] == [5e-4, 2e-4, 1e-4]
    annealed = ["lam5e-3", "lam1e-3", "lam5e-4"]
    spreads = about["seed_spread"]
    assert list(spreads)[:4] == [*annealed, "price 0"]
    assert list(spreads)[-1] == "price 1e-2"
    assert len(spreads) == 3 + 7
    for spread in (spreads[name] for name in annealed):
        assert spread["accuracy_points"] > 0
        assert spread["accuracy_standard_error"] > 0
        assert spread["indifferent_tokens_percent"] >= 0
    assert all(0 <= one.area.value <= 1 for one in frontiers)
    script = repo_dir / "benchmarks" / "effort.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--run", str(run), "--json", str(file)])
    runpy.run_path(str(script), run_name="__main__")
    curves = json.loads(file.read_text())["curves"]
    # OS-Pruner's two annealed stages take two passes.
    assert [(one["method"], one["passes"], one["used"]) for one in curves] == [
        ("probe", 1, True), ("probe", 2, False), ("convergence", 1, True),
        ("convergence", 2, False),
    ]  # fmt: skip
    assert all(one["cross_entropy"] > 0 and 0 < one["area"] < 1 for one in curves)
    assert "lowest cross-entropy" in capsys.readouterr().out
