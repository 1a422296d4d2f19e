"""An ended run goes on in its folder with the same weights, also in another number of processes.

Two processes train what one trains; a folder of another run is refused.
"""

import os
import signal
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
from .conftest import PRICED, SHORT, Fit, MakeTrainer, ending_at, files_for_a_group, log_of

STAGES = SHORT | {"prices": [2e-2, 1e-2], "num_train_epochs": 2, "average": 0.9}
STAGES |= {"save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "linear"}
STAGES |= {"eval_strategy": "steps", "eval_steps": 4}


def same(one: SavedPolicy, other: SavedPolicy) -> bool:
    """Whether two runs have saved the same bits and told the same of them."""
    ours, theirs = (load_file(saved.path / "model.safetensors") for saved in (one, other))
    assert ours.keys() == theirs.keys()
    assert ours["policy.head.weight"].abs().max() > 0
    told = ("price", "accuracy", "tokens", "warning")
    equal = all(getattr(one, name) == getattr(other, name) for name in told)
    return equal and all(torch.equal(ours[key], theirs[key]) for key in ours)


def logged(out: Path) -> list[dict[str, Any]]:
    """The log without what depends on the clock.

    Nor the loss: transformers means it over the steps since the last log or the resuming.
    """
    kept = ("learning_rate", "eval_accuracy", "eval_tokens", "step")
    return [
        {k: v for k, v in entry.items() if k in kept}
        for entry in log_of(out)
        if "loss" in entry or "eval_price" in entry
    ]


def test_a_killed_run_ends_with_the_same_bits(fit: Fit, tmp_path: Path) -> None:
    """Also where its last checkpoint is not whole: it goes on from the one before."""
    out, seen = tmp_path / "killed", list[int]()

    def killed(phase: str, done: int, total: int, note: str = "") -> None:
        # Of 2 stages x 2 epochs x 5 steps: in the second, two steps after a checkpoint.
        if phase == "train" and done == 14:
            os.kill(os.getpid(), signal.SIGKILL)

    assert ended(start(lambda: fit(STAGES, 40, out, 10, progress=killed))) == -9
    assert (out / "price2e-2").is_dir()
    assert not (out / "price1e-2").exists()
    (out / "checkpoint-13").mkdir()
    (out / "checkpoint-13" / "trainer_state.json").write_text('{"epo')
    again = fit(STAGES, 40, out, 10, progress=ending_at(-1, seen))
    whole = fit(STAGES, 40, tmp_path / "whole", 10)
    assert seen == list(range(13, 21))  # goes on after step 12
    assert all(same(one, other) for one, other in zip(again, whole, strict=True))
    assert logged(out) == logged(tmp_path / "whole")


def test_a_run_that_was_broken_off_repeats_the_epoch(fit: Fit, tmp_path: Path) -> None:
    settings = PRICED | {"num_train_epochs": 3, "average": 0.5}
    with files_for_a_group(tmp_path / "broken"), pytest.raises(InterruptedError):
        fit(settings, 40, tmp_path / "broken", progress=ending_at(12))
    assert [*(tmp_path / "broken").glob("checkpoint-*/*.safetensors")]
    seen: list[int] = []
    (again,) = fit(settings, 40, tmp_path / "broken", progress=ending_at(-1, seen))
    (whole,) = fit(settings, 40, tmp_path / "whole")
    assert seen == list(range(11, 16))
    assert same(again, whole)


def test_a_finished_run_is_returned_and_another_refused(fit: Fit, tmp_path: Path) -> None:
    (first,) = fit(SHORT)
    weights = (first.path / "model.safetensors").stat()
    (tmp_path / "run").rename(tmp_path / "moved")
    (again,) = fit(SHORT | {"micro_batch_tokens": 50}, out=tmp_path / "moved")
    assert again.path == tmp_path / "moved"
    assert (again.path / "model.safetensors").stat().st_mtime_ns == weights.st_mtime_ns
    assert (again.accuracy, again.tokens) == (first.accuracy, first.tokens)
    (tmp_path / "moved").rename(tmp_path / "run")
    with pytest.raises(ValueError, match=r"holds another run \(settings: .*'seed': 5"):
        fit(SHORT | {"seed": 5})
    with pytest.raises(ValueError, match=r"holds another run \(train_labels: "):
        fit(SHORT, 63)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file"):
        fit(SHORT, out=tmp_path / "file")


def test_two_runs_do_not_write_one_folder(make_trainer: MakeTrainer) -> None:
    second = make_trainer(SHORT)
    refused: list[int] = []

    def also(phase: str, done: int, total: int, note: str = "") -> None:
        if phase == "train" and not refused:
            with pytest.raises(ValueError, match="is being written by another run"):
                second.train()
            refused.append(done)

    make_trainer(SHORT, progress=also).train()
    assert refused == [1]


def test_kept_states_end_alike(fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (held,) = fit(SHORT, 40, tmp_path / "memory")
    (computed,) = fit(SHORT | {"states_gib": 0.0}, 40, tmp_path / "computed")
    assert computed.tokens == pytest.approx(held.tokens, rel=1e-4)
    kept = SHORT | {"states": str(tmp_path / "states")}
    (disk,) = fit(kept, 40, tmp_path / "disk")
    assert same(disk, held)
    monkeypatch.setattr("ospruner.train.traces.run_trunk", None)  # another run finds all there
    (again,) = fit(kept, 40, tmp_path / "again")
    assert same(again, held)


# Two processes.

LAYERS: dict[str, Any] = {"head": "fixed", "prices": [1e-3, 2e-4], "tuning": "layers", "limit": 45}
LAYERS |= {"num_train_epochs": 1, "learning_rate": 5e-4, "average": 0.5, "states_gib": 0.0}
LAYERS |= {"save_strategy": "steps", "save_steps": 1, "disable_tqdm": True, "use_cpu": True}
LAYERS |= {"batch_size": 7}  # two processes take different shares, and of the last one has none
RUNS: dict[str, dict[str, Any]] = {
    "layers": LAYERS,
    "price": LAYERS | {"head": "price", "prices": [5e-5, 1e-2]},
    "queries": LAYERS | {"tuning": "queries"},
    "probe": {k: v for k, v in LAYERS.items() if k not in ("head", "prices")} | {"method": "probe"},
    "lora": LAYERS | {"adapter_rank": 4},
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
            with pytest.raises(InterruptedError):
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
    with pytest.raises(InterruptedError):
        train(labels, tmp_path / "more", "layers", break_after=3)
    in_two(labels, tmp_path / "more", "layers")
    same_curve(tmp_path / "more", tmp_path / "one", resumed=True)
