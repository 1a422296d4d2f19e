"""Two processes train what one trains: same losses, and either goes on where the other stopped."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from safetensors.torch import load_file

from ospruner.demo.shipped import Reasoner, draw_split
from ospruner.train.from_labels import train_from_labels
from ospruner.train.processes import Processes, open_processes

from .several_processes import PRICED, QUERIES, SETTINGS

PROGRAM = Path(__file__).with_name("several_processes.py")
EVER = 10_000


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several") / "labels"
    Reasoner().label(draw_split("train", 45, 7), folder, 7)
    return folder


@pytest.fixture(scope="module")
def alone(labels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process trains."""
    out = tmp_path_factory.mktemp("alone")
    train_from_labels(labels, out, lambda table: SETTINGS)
    return out


def launch(*arguments: object) -> str:
    """Two processes on the CPU; what they print.

    `accelerate launch` starts several on GPUs by torchrun, and on CPUs by MPI alone.
    """
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


def losses(out: Path) -> list[float]:
    entries = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    return [entry["loss"] for entry in entries if "epoch" in entry]


def same_curve(out: Path, reference: Path) -> None:
    assert len(losses(out)) == 2
    assert losses(out) == pytest.approx(losses(reference), abs=1e-4)
    for name in ("lam1e-3", "lam2e-4"):
        mine, theirs = (load_file(run / name / "model.safetensors") for run in (out, reference))
        assert mine.keys() == theirs.keys()
        for key, tensor in mine.items():
            torch.testing.assert_close(tensor, theirs[key], atol=2e-3, rtol=0)


@pytest.mark.parametrize("how", [pytest.param("copies", marks=pytest.mark.slow), "shard"])
def test_two_processes_start_and_one_ends(
    how: str, labels: Path, alone: Path, tmp_path: Path
) -> None:
    said = launch(PROGRAM, labels, tmp_path / "run", how, 4)
    for rank in (0, 1):
        assert f"broke off in process {rank} of 2, sharded: {how == 'shard'}" in said
    train_from_labels(labels, tmp_path / "run", lambda table: SETTINGS)
    same_curve(tmp_path / "run", alone)


@pytest.mark.parametrize("how", ["copies", pytest.param("shard", marks=pytest.mark.slow)])
def test_one_process_starts_and_two_end(
    how: str, labels: Path, alone: Path, tmp_path: Path
) -> None:
    class CutError(Exception):
        pass

    def cut(phase: str, done: int, total: int, note: str = "") -> None:
        if phase == "train" and done == 3:
            raise CutError

    with pytest.raises(CutError):
        train_from_labels(labels, tmp_path / "run", lambda table: SETTINGS, progress=cut)
    launch(PROGRAM, labels, tmp_path / "run", how, EVER)
    same_curve(tmp_path / "run", alone)
    assert len([*(tmp_path / "run.states").glob("*.states")]) == 2 * (how == "copies")


@pytest.mark.slow
def test_two_processes_train_every_price_as_one_does(labels: Path, tmp_path: Path) -> None:
    train_from_labels(labels, tmp_path / "alone", lambda table: PRICED)
    launch(PROGRAM, labels, tmp_path / "run", "price", EVER)
    found = [losses(tmp_path / name) for name in ("run", "alone")]
    assert found[0] == pytest.approx(found[1], abs=1e-4)
    mine, theirs = (
        load_file(tmp_path / name / "price" / "model.safetensors") for name in ("run", "alone")
    )
    for key, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[key], atol=2e-3, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["queries", "queries-shard"])
def test_two_processes_train_queries_as_one_does(how: str, labels: Path, tmp_path: Path) -> None:
    train_from_labels(labels, tmp_path / "alone", lambda table: QUERIES)
    launch(PROGRAM, labels, tmp_path / "run", how, EVER)
    same_curve(tmp_path / "run", tmp_path / "alone")
    assert len([*(tmp_path / "run.states").glob("*.states")]) == 2 * (how == "queries")


def test_processes_of_several_machines_share_no_file(labels: Path, tmp_path: Path) -> None:
    processes = Processes()
    processes.one_machine = False
    with pytest.raises(ValueError, match="are kept in .* by the processes of one machine"):
        train_from_labels(
            labels,
            tmp_path / "run",
            lambda table: SETTINGS,
            states=tmp_path / "states",
            processes=processes,
        )


@pytest.mark.slow
@pytest.mark.parametrize("module", [("ospruner.cli", "train"), ("ospruner.train.loop",)])
def test_the_command_runs_under_accelerate(
    module: tuple[str, ...], labels: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    line = ["-m", *module, "--labels", labels, "--out", out, "--batch-size", 8]
    said = launch(*line, "--lambdas", "1e-3", "--tuning", "head")
    assert said.count("On the validation traces") == 1  # one process prints
    assert (out / "lam1e-3" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("multi", [(), ("--multi",)])
def test_adapters_in_two_processes(multi: tuple[str, ...], labels: Path, tmp_path: Path) -> None:
    line = ["-m", "ospruner.cli", "train", "--labels", labels, "--tuning", "lora", *multi]
    line += ["--lambdas", "1e-3,2e-4", "--batch-size", 7, "--learning-rate", "5e-4"]
    # Several targets share the base's layers, which cannot be split for each: they are copied.
    launch(*line, "--out", tmp_path / "two", *(() if multi else ("--shard",)))
    one = [sys.executable, *map(str, line), "--out", str(tmp_path / "one")]
    subprocess.run(one, check=True, capture_output=True, timeout=500)
    for target in ("lam1e-3", "lam2e-4", "probe", "convergence") if multi else (".",):
        assert losses(tmp_path / "two" / target) == pytest.approx(
            losses(tmp_path / "one" / target), abs=1e-4
        )


def test_adapters_of_several_targets_are_not_split(labels: Path, tmp_path: Path) -> None:
    processes = Processes()
    processes.sharded = True
    settings = dataclasses.replace(SETTINGS, tuning="lora")
    with pytest.raises(ValueError, match=r"4 targets of adapters share .*: leave out --shard"):
        train_from_labels(
            labels, tmp_path / "run", lambda table: settings, multi=True, processes=processes
        )


class Diary(GeneralTracker):
    """A tracker that remembers."""

    name = "diary"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[int | None, dict[str, float]]] = []

    @property
    def tracker(self) -> None:
        """None is wrapped."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Nothing to remember."""

    def log(self, values: dict[str, float], step: int | None = None, **_: Any) -> None:
        """Remembers."""
        self.entries.append((step, values))


def test_trackers_of_accelerate_are_told(labels: Path, tmp_path: Path) -> None:
    diary = Diary()
    accelerator = Accelerator(cpu=True, log_with=diary)
    accelerator.init_trackers("ospruner")
    settings = dataclasses.replace(SETTINGS, tuning="head", validate_every=2)
    processes = Processes(accelerator)
    train_from_labels(labels, tmp_path / "run", lambda table: settings, processes=processes)
    names = {name for _, values in diary.entries for name in values}
    wanted = ("loss", "saturated_share", "accuracy", "tokens", "price")
    assert {f"run/{name}" for name in wanted} <= names
    steps = [step for step, _ in diary.entries if step is not None]
    assert steps == sorted(steps)
    assert steps[-1] > 2


def test_trackers_are_asked_for_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tracker is 'diary'; it must be one of tensorboard"):
        open_processes(tmp_path, "diary")
