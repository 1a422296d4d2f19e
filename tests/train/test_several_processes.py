"""Two processes train what one trains: same losses, and either goes on where the other stopped."""

from __future__ import annotations

import os
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from ospruner.train.config import StopConfig
from ospruner.train.policies import SavedPolicy
from ospruner.train.trainer import StopTrainer

from ..own_process import ended, start
from .conftest import BrokenOffError, ending_at, log_of

STAGES: dict[str, Any] = {
    "head": "fixed",
    "prices": [1e-3, 2e-4],
    "tuning": "layers",
    "num_train_epochs": 1,
    "batch_size": 7,  # odd: two processes take different shares, and of the last batch one has none
    "learning_rate": 5e-4,
    "average": 0.5,
    "states_gib": 0.0,
    "save_strategy": "steps",
    "save_steps": 1,
    "limit": 45,
    "disable_tqdm": True,
    "use_cpu": True,
}
RUNS: dict[str, dict[str, Any]] = {
    "layers": STAGES,
    "price": STAGES | {"head": "price", "prices": [5e-5, 1e-2]},
    "queries": STAGES | {"tuning": "queries"},
    "probe": {k: v for k, v in STAGES.items() if k not in ("head", "prices")} | {"method": "probe"},
    "lora": STAGES | {"adapter_rank": 4},
}
EVER = 10_000


def train(
    labels: Path, out: Path, how: str, break_after: int = EVER, **more: Any
) -> list[SavedPolicy]:
    """Trains until it is done, or until so many steps are taken."""
    config, cut = StopConfig(str(out), **RUNS[how] | more), ending_at(break_after + 1)
    trainer = StopTrainer(config, str(labels), progress=cut)
    trainer.train()
    return trainer.policies


def in_two(labels: Path, out: Path, how: str, break_after: int = EVER) -> None:
    """Trains in two processes on the CPU, through gloo.

    One process takes a batch whole and runs the trunk anew; these take it in parts, and share a
    folder of the trunk's states.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}

    def one(rank: str) -> None:
        os.environ.update(place, RANK=rank, LOCAL_RANK=rank, ACCELERATE_USE_CPU="true")
        AcceleratorState._reset_state(reset_partial_state=True)
        parts: dict[str, Any] = {"micro_batch_tokens": 400, "states": f"{out}.states"}
        if break_after < EVER:
            with pytest.raises(BrokenOffError):
                train(labels, out, how, break_after, **parts)
            return
        policies = train(labels, out, how, **parts)
        assert len(policies) == (1 if how in ("price", "probe") else 2)
        assert torch.distributed.get_world_size() == 2

    children = [start(partial(one, rank)) for rank in "01"]
    assert [ended(child) for child in children] == [0, 0]


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
    in_two(labels, tmp_path / "two", how)
    train(labels, tmp_path / "one", how)
    same_curve(tmp_path / "two", tmp_path / "one")
    assert len(list((tmp_path / "two.states").glob("*/*.safetensors"))) == 45


@pytest.mark.slow
def test_one_number_of_processes_starts_and_another_ends(labels: Path, tmp_path: Path) -> None:
    train(labels, tmp_path / "one", "layers")
    in_two(labels, tmp_path / "fewer", "layers", 4)
    train(labels, tmp_path / "fewer", "layers")
    same_curve(tmp_path / "fewer", tmp_path / "one", resumed=True)
    with pytest.raises(BrokenOffError):
        train(labels, tmp_path / "more", "layers", break_after=3)
    in_two(labels, tmp_path / "more", "layers")
    same_curve(tmp_path / "more", tmp_path / "one", resumed=True)
