"""`ospruner demo --quick` for real: stopped half-way, continued, and what it leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from modeling_ospruner import OSPrunerConfig
from ospruner.cli import app
from ospruner.demo.comparison import Predictions, compare_methods
from ospruner.demo.demo import PRICE_RANGE, QUICK, STANDARD, run_demo
from ospruner.eval.methods import EVERY_PRICE, FULL
from ospruner.eval.results import Results
from ospruner.eval.table import TraceTable
from ospruner.train.labels.folder import read_labels

pytestmark = pytest.mark.xdist_group("demo")  # its quick run is made once

COMMAND = [sys.executable, "-m", "ospruner.cli", "demo", "--quick", "--out"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A quick demo, killed as soon as training has begun and then run again to its end."""
    out = tmp_path_factory.mktemp("demo") / "run"
    first = subprocess.Popen(
        [*COMMAND, str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    checkpoint = out / "policies" / "seed0" / "os-pruner" / "checkpoint.pt"
    while not checkpoint.exists() and first.poll() is None:
        time.sleep(0.05)
    assert first.poll() is None, "the demo ended before it could be killed"
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    shards = {path: path.read_bytes() for path in (out / "labels").glob("*/data/*.parquet")}
    assert len(shards) == 3
    again = subprocess.run(
        [*COMMAND, str(out)],
        env=os.environ | {"COLUMNS": "80"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert {path: path.read_bytes() for path in shards} == shards, "labels were made again"
    return out, again.stdout


def test_prints_and_writes_what_it_found(finished: tuple[Path, str]) -> None:
    out, printed = finished
    # A name may be broken over two lines of its column.
    for words in ("accuracy %", "hindsight", "best fixed", "stop_policy=True"):
        assert words in printed
    assert "less each other" not in printed, "differences are shown on request"
    found = Results.read(out / "results.json")
    results, full = found.results, found.results[0]
    assert full.method == FULL
    labels = TraceTable.from_dataset(read_labels(out / "labels" / "test"))
    assert full.accuracy.value == pytest.approx(labels.full_correct.mean())
    assert full.tokens.value == pytest.approx(labels.full_tokens.mean())
    frontier = [r for r in results if r.method == EVERY_PRICE]
    known = OSPrunerConfig.from_pretrained(out / "policy").prices
    assert known is not None
    assert [r.parameter for r in frontier] == list(known.grid())
    assert (known.low, known.high) == PRICE_RANGE
    (claim,) = found.about["claims"]
    assert claim["holds"], "thinking tokens fall as their price rises"
    assert "64 test problems are too few to claim more" in printed.replace("\n", " ")
    assert (out / "pareto.png").read_bytes().startswith(b"\x89PNG")
    run = found.about["run"]
    assert run["seed"] == 0
    assert run["settings"] == vars(QUICK)
    assert "--quick" in run["command"]
    assert run["packages"]["torch"]
    assert {"git_commit", "git_modified", "python", "platform"} <= set(run)
    assert found.differences[0].other == FULL
    assert Results.read(out / "policy" / "results.json").to_dict() == found.to_dict()
    assert found.chosen is not None
    assert results[found.chosen].method == EVERY_PRICE
    promises = OSPrunerConfig.from_pretrained(out / "policy").calibrations
    assert (promises is None) == ("No setting keeps the promise" in found.about["promise"])


def test_the_policy_was_used_in_a_fresh_process(finished: tuple[Path, str]) -> None:
    out, _ = finished
    rows = json.loads((out / "side_by_side.json").read_text())
    assert len(rows) == 3
    for row in rows:
        off, on = row["off"], row["on"]
        assert on["thinking_tokens"] <= off["thinking_tokens"]
        assert off["thinking"].startswith(on["thinking"]), "rows differ before the stop"
        assert on["answer"].startswith("\\boxed{")
    card = (out / "policy" / "README.md").read_text()
    assert "OS-Pruner demo policy" in card


def test_splits_share_no_problem(finished: tuple[Path, str]) -> None:
    out, _ = finished
    problems = [
        set(read_labels(out / "labels" / split)["problem_id"])
        for split in ("train", "validation", "test")
    ]
    assert not problems[0] & problems[1]
    assert not problems[0] & problems[2]
    assert not problems[1] & problems[2]


def test_a_run_of_other_settings_is_refused(finished: tuple[Path, str]) -> None:
    out, _ = finished
    with pytest.raises(ValueError, match="holds a demo of other settings"):
        run_demo(out, STANDARD, 0, Console(quiet=True))


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("irreplaceable")
    with pytest.raises(ValueError, match="is not empty and holds no demo"):
        run_demo(tmp_path, QUICK, 0, Console(quiet=True))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_the_command_refuses_in_a_line_without_a_trace(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("irreplaceable")
    done = subprocess.run([*COMMAND, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Error:" in done.stderr
    assert "holds no demo" in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr


def test_quick_and_full_exclude_each_other() -> None:
    result = CliRunner().invoke(app, ["demo", "--quick", "--full"])
    assert result.exit_code == 2
    assert "exclude each other" in result.output


def test_choices_are_made_on_validation_alone(finished: tuple[Path, str]) -> None:
    out, _ = finished
    validation, test = (
        TraceTable.from_dataset(read_labels(out / "labels" / split))
        for split in ("validation", "test")
    )
    never, at_once = (np.full(validation.mask.shape, p, np.float32) for p in (0.0, 1.0))
    # On the test traces the two policies swap roles: a choice that peeked would change.
    swapped = [
        Predictions("os-pruner", 1e-3, [never], [np.ones(test.mask.shape, np.float32)]),
        Predictions("os-pruner", 5e-4, [at_once], [np.zeros(test.mask.shape, np.float32)]),
    ]
    comparison = compare_methods(validation, test, swapped)
    assert comparison.chosen.parameter == 1e-3
    assert comparison.chosen.reduction.value > 0.5
