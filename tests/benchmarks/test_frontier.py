"""The benchmark of frontiers, on a demo that is far too small to prove anything."""

from __future__ import annotations

import io
import json
import runpy
import sys
from pathlib import Path

import pytest
from rich.console import Console

from ospruner.demo import demo
from ospruner.eval.learnstop import LEARN_STOP
from ospruner.eval.results import Results, prices_of
from ospruner.rules import FAMILIES

SIZE = demo.DemoSize("tiny", train=34, validation=10, test=10, seeds=2, epochs=2, max_loss=0.5)


@pytest.mark.slow
def test_it_reads_a_demo(
    repo_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, file = tmp_path / "demo", tmp_path / "frontier.json"
    demo.run_demo(run, SIZE, 0, Console(file=io.StringIO()))
    script = repo_dir / "benchmarks" / "frontier.py"
    monkeypatch.syspath_prepend(script.parent)
    monkeypatch.setattr(
        sys, "argv", [str(script), "--run", str(run), "--anneal", "--json", str(file)]
    )
    runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr().out
    found = json.loads(printed.splitlines()[-1])
    assert found == json.loads(file.read_text())
    about = found["about"]
    assert (about["seeds"], about["test_traces"], about["left_out"]) == (2, 10, {})
    trained = {"OS-Pruner, one policy", "OS-Pruner, annealed", "probe", "convergence"}
    free = {family.method for name, family in FAMILIES.items() if name != "step"} | {LEARN_STOP}
    frontiers = Results.read(file).frontiers
    assert set(frontiers["method"]) == trained | free
    assert frontiers["method"][frontiers["lead"].isna()].tolist() == ["OS-Pruner, one policy"]
    assert list(prices_of(frontiers, "gap")) == [5e-4, 2e-4, 1e-4]
    of_one_price = ["lam5e-3", "lam1e-3", "lam5e-4", "lam2e-4"]
    spreads = about["seed_spread"]
    first, *_, last = list(spreads)[:7]
    assert (first, last) == ("price 0", "price 1e-2")
    assert list(spreads)[7:] == of_one_price
    for spread in (spreads[name] for name in of_one_price):
        assert spread["accuracy_points"] > 0
        assert spread["accuracy_standard_error"] > 0
    assert frontiers["area"].between(0, 1).all()
    assert "DOES NOT HOLD" in printed
    (run / "policies" / "seed1").rename(tmp_path / "seed1")
    monkeypatch.setattr(sys, "argv", [str(script), "--run", str(run)])
    runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr().out
    assert "one training seed: nothing is known" in printed
    assert "spread over the seeds " not in printed  # the table's head
