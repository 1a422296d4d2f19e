"""An ended run goes on in its folder with the same weights; a folder of another is refused."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file

from ospruner.train.policies import SavedPolicy

from ..own_process import ended, start
from .conftest import (
    PRICED,
    SETTINGS,
    SHORT,
    BrokenOffError,
    Fit,
    MakeLabels,
    MakeTrainer,
    ending_at,
    files_for_a_group,
    log_of,
)

STAGES = SETTINGS | {
    "prices": [2e-2, 1e-2],
    "num_train_epochs": 2,
    "average": 0.9,
    "save_strategy": "steps",
    "save_steps": 3,
    "lr_scheduler_type": "linear",
    "eval_strategy": "steps",
    "eval_steps": 4,
}


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


def test_a_killed_run_ends_with_the_same_bits(
    fit: Fit, make_labels: MakeLabels, tmp_path: Path
) -> None:
    """Also where its last checkpoint is not whole: it goes on from the one before."""
    labels, held_out = make_labels(40), make_labels(10, seed=1, prefix="v")
    out, seen = tmp_path / "killed", list[int]()

    def killed(phase: str, done: int, total: int, note: str = "") -> None:
        # Of 2 stages x 2 epochs x 5 steps: in the second, two steps after a checkpoint.
        if phase == "train" and done == 14:
            os.kill(os.getpid(), signal.SIGKILL)

    assert ended(start(lambda: fit(STAGES, labels, out, held_out, progress=killed))) == -9
    assert (out / "price2e-2").is_dir()
    assert not (out / "price1e-2").exists()
    (out / "checkpoint-13").mkdir()
    (out / "checkpoint-13" / "trainer_state.json").write_text('{"epo')
    again = fit(STAGES, labels, out, held_out, progress=ending_at(-1, seen))
    whole = fit(STAGES, labels, tmp_path / "whole", held_out)
    assert seen == list(range(13, 21))  # goes on after step 12
    assert all(same(one, other) for one, other in zip(again, whole, strict=True))
    assert logged(out) == logged(tmp_path / "whole")


def test_a_run_that_was_broken_off_repeats_the_epoch(
    fit: Fit, make_labels: MakeLabels, tmp_path: Path
) -> None:
    labels, settings = make_labels(40), PRICED | {"num_train_epochs": 3, "average": 0.5}
    with files_for_a_group(tmp_path / "broken"), pytest.raises(BrokenOffError):
        fit(settings, labels, tmp_path / "broken", progress=ending_at(12))
    assert [*(tmp_path / "broken").glob("checkpoint-*/*.safetensors")]
    seen: list[int] = []
    (again,) = fit(settings, labels, tmp_path / "broken", progress=ending_at(-1, seen))
    (whole,) = fit(settings, labels, tmp_path / "whole")
    assert seen == list(range(11, 16))
    assert same(again, whole)


def test_a_finished_run_is_returned_as_it_is_and_a_folder_of_another_refused(
    fit: Fit, make_labels: MakeLabels, tmp_path: Path
) -> None:
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
        fit(SHORT, make_labels(64, seed=9))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match=r"another run's files \(thesis\.tex\)"):
        fit(SHORT, out=tmp_path / "other")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="is a file; a training run needs a folder"):
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


def test_runs_on_kept_states_end_alike_and_run_the_base_once(
    fit: Fit, make_labels: MakeLabels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels: Dataset = make_labels(40)
    (held,) = fit(SHORT, labels, tmp_path / "memory")
    (computed,) = fit(SHORT | {"states_gib": 0.0}, labels, tmp_path / "computed")
    assert computed.tokens == pytest.approx(held.tokens, rel=1e-4)
    kept = SHORT | {"states": str(tmp_path / "states")}
    (disk,) = fit(kept, labels, tmp_path / "disk")
    assert same(disk, held)
    monkeypatch.setattr("ospruner.train.traces.run_trunk", None)  # another run finds all there
    (again,) = fit(kept, labels, tmp_path / "again")
    assert same(again, held)
