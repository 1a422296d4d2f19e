"""`ospruner.make`: its rule, its rounds, and a run that is killed and goes on."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from modeling_ospruner import OSPrunerConfig
from ospruner import rounds as rounds_of
from ospruner.cli import app
from ospruner.demo import REASONER
from ospruner.demo.shipped import draw_split
from ospruner.rounds import Round, looks_of, make, round_sizes, worth_a_round
from ospruner.serving.requests import EFFORTS
from ospruner.train.labels.loading import load_labels
from ospruner.train.run_folder import record_of

from ..own_process import ended, start
from .conftest import write_rows

ROUND = Round(400, 200, 200, 2.0, 0.20, 0.3, 0.25, 4.0, "")


def test_labels_grow_as_long_as_they_are_worth_their_hours() -> None:
    """An hour is worth a point of the thinking tokens, a round at least half a point."""
    assert worth_a_round(ROUND), "5 points more in 4 hours"
    assert not worth_a_round(replace(ROUND, cost=6.0)), "5 points more in 6 hours"
    assert worth_a_round(replace(ROUND, expected=0.206, cost=0.01))
    assert not worth_a_round(replace(ROUND, expected=0.204, cost=0.01))
    assert worth_a_round(replace(ROUND, saved=0.0, expected=0.0, cost=90.0)), "no promise yet"
    assert round_sizes(500) == [50, 100, 200, 400, 500]
    assert round_sizes(30) == [30]
    # Of 50, ... 3200 problems half are for the promise; 100 of them cannot promise 2 points.
    assert looks_of(round_sizes(3200), 0.02) == 3
    assert looks_of(round_sizes(3200), 0.1) == 5
    assert looks_of([50], 0.02) == 1


def test_a_killed_run_goes_on_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds_of, "FIRST", 30)
    rows = [vars(one) for one in draw_split("train", 43, 2)]
    rows.append(rows[0] | {"id": "again"})
    problems, out = write_rows(tmp_path / "toys.jsonl", rows), tmp_path / "made"
    settings = {"engine": "transformers", "device": "cpu", "max_thinking_tokens": "300"}
    command = ["make", str(REASONER), "--dataset", problems, "--out", str(out)]
    command += ["--max-loss", "0.3", *(f"--set={name}={value}" for name, value in settings.items())]
    first = start(lambda: app(command))
    while not list(out.glob("rounds/30/checkpoint-*")):
        assert os.waitpid(first, os.WNOHANG) == (0, 0), "it ended before it could be killed"
        time.sleep(0.05)
    os.kill(first, signal.SIGKILL)
    assert ended(first) == -signal.SIGKILL
    shards = {path: path.read_bytes() for path in (out / "labels").glob("data/*.parquet")}
    assert shards
    done = CliRunner().invoke(app, command, env={"COLUMNS": "200"}, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    for words in ("30 problems, ", "44 problems, ", "all 44 problems are labelled", "30 points"):
        assert words in said
    assert f"ospruner serve {out / 'policy'} --max-loss 0.3" in said
    assert f"ospruner publish {out / 'policy'} ORG/NAME --dry-run" in said
    for path, content in shards.items():
        assert not path.exists() or path.read_bytes() == content, "labels were made again"
    made = OSPrunerConfig.from_pretrained(out / "policy")
    (promise,) = made.calibrations or []
    # Thresholds at price 0 come before the prices.
    assert made.efforts is not None
    careful = made.efforts[EFFORTS[-1]]
    assert (careful["price"], careful["threshold"]) == (0.0, 0.95)
    rounds = record_of(out)["rounds"]
    assert [one["problems"] for one in rounds] == [30, 44]
    assert promise["tokens_saved"] == max(one["saved"] for one in rounds)
    assert all(one["trained_on"] + one["tested_on"] <= one["problems"] for one in rounds)
    assert "30.0 points" in (out / "policy" / "README.md").read_text("utf-8")
    assert (out / "report" / "report.md").is_file()
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    # All problems are drawn in an order of its own, so that a sorted file is no other promise.
    assert load_labels(out / "labels").traces["problem_id"] != [row["id"] for row in rows]

    # Labels that one has come first, and each round has its own problems alone.
    limits = {"max_loss": 0.3, "problems": 36, "labels": out / "labels"}
    less: dict[str, Any] = {**settings, "max_thinking_tokens": 300, **limits}
    again = make(str(REASONER), problems, out=tmp_path / "again", **less)
    assert [one.problems for one in again.rounds] == [30, 36]
    assert [one.trained_on for one in again.rounds] < [one["trained_on"] for one in rounds]
    copied = load_labels(tmp_path / "again" / "labels").traces
    assert copied["trace_ids"] == load_labels(out / "labels").traces["trace_ids"], "labelled anew"
    with pytest.raises(ValueError, match="max_loss: 0.2 here, 0.3 there"):
        make(str(REASONER), problems, out=out, max_loss=0.2)
    with pytest.raises(ValueError, match="hours is 0; it must be above 0"):
        make(str(REASONER), problems, out=out, hours=0)
