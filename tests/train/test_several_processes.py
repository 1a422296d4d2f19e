"""Two processes train what one trains: same losses, and either goes on where the other stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ospruner.train.config import StopConfig
from ospruner.train.trainer import StopTrainer

from .conftest import log_of
from .several_processes import RUNS, BreakOffError

PROGRAM = Path(__file__).with_name("several_processes.py")
EVER = 10_000


@pytest.fixture(scope="module")
def labels(labelled: Path) -> Path:
    return labelled / "train"


def alone(labels: Path, out: Path, how: str, break_after: int = EVER) -> None:
    """Trains in this process."""

    def cut(phase: str, done: int, total: int, note: str = "") -> None:
        if phase == "train" and done > break_after:
            raise BreakOffError

    StopTrainer(StopConfig(str(out), **RUNS[how]), str(labels), progress=cut).train()


def launch(*arguments: object) -> str:
    """Two processes on the CPU, through gloo; what they print."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*launcher, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def same_curve(out: Path, reference: Path, resumed: bool = False) -> None:
    mine, theirs = (
        [entry["loss"] for entry in log_of(run) if "loss" in entry] for run in (out, reference)
    )
    assert mine
    # After resuming, transformers means the loss over the steps since.
    assert resumed or mine == pytest.approx(theirs, abs=1e-4)
    files = sorted(file.relative_to(reference) for file in reference.glob("**/model.safetensors"))
    files = [file for file in files if "checkpoint" not in str(file)]
    assert files
    for file in files:
        one, other = load_file(out / file), load_file(reference / file)
        assert one.keys() == other.keys()
        for key, tensor in one.items():
            torch.testing.assert_close(tensor, other[key], atol=2e-3, rtol=0)


@pytest.mark.parametrize(
    "how",
    ["layers", *(pytest.param(how, marks=pytest.mark.slow) for how in RUNS if how != "layers")],
)
def test_two_processes_train_as_one_does(how: str, labels: Path, tmp_path: Path) -> None:
    said = launch(PROGRAM, labels, tmp_path / "two", how, EVER)
    policies = 1 if how in ("price", "probe") else 2
    for rank in (0, 1):
        assert f"process {rank}: {policies} policies" in said
    alone(labels, tmp_path / "one", how)
    same_curve(tmp_path / "two", tmp_path / "one")
    assert len(list((tmp_path / "two.states").glob("*/*.safetensors"))) == 45


@pytest.mark.slow
def test_one_number_of_processes_starts_and_another_ends(labels: Path, tmp_path: Path) -> None:
    alone(labels, tmp_path / "one", "layers")
    said = launch(PROGRAM, labels, tmp_path / "fewer", "layers", 4)
    for rank in (0, 1):
        assert f"broke off in process {rank} of 2" in said
    alone(labels, tmp_path / "fewer", "layers")
    same_curve(tmp_path / "fewer", tmp_path / "one", resumed=True)
    with pytest.raises(BreakOffError):
        alone(labels, tmp_path / "more", "layers", break_after=3)
    launch(PROGRAM, labels, tmp_path / "more", "layers", EVER)
    same_curve(tmp_path / "more", tmp_path / "one", resumed=True)
