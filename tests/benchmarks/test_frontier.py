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
from ospruner.train.toy import demo

SIZE = dataclasses.replace(
    demo.QUICK,
    train=34,
    validation=10,
    test=10,
    seeds=2,
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
    script = repo_dir / "benchmarks" / "frontier.py"
    monkeypatch.syspath_prepend(script.parent)
    monkeypatch.setattr(sys, "argv", [str(script), "--run", str(run), "--json", str(file)])
    runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr().out
    found = json.loads(printed.splitlines()[-1])
    assert found == json.loads(file.read_text())
    about = found["about"]
    assert (about["seeds"], about["test_traces"], about["left_out"]) == (2, 10, {})
    trained = {"OS-Pruner", "probe", "convergence"}
    free = {"fixed budget", "answer entropy", "trial confidence", "answer agreement"}
    frontiers = Results.read(file).frontiers
    assert {one.method for one in frontiers} == trained | free | {CAUSAL}
    assert [one.method for one in frontiers if one.lead is None] == ["OS-Pruner", CAUSAL]
    for one in frontiers:
        assert [penalty for penalty, _ in one.gap_closed] == [5e-4, 2e-4, 1e-4]
    assert list(about["seed_spread"]) == ["lam5e-3", "lam1e-3", "lam5e-4"]
    for spread in about["seed_spread"].values():
        assert spread["accuracy_points"] > 0
        assert spread["accuracy_standard_error"] > 0
        assert spread["indifferent_tokens_percent"] >= 0
    assert all(0 <= one.area.value <= 1 for one in frontiers)
