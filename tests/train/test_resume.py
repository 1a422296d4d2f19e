"""An ended run goes on in its folder with the same bits; a folder of another run is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.formats_ospruner import DEEPSEEK_R1
from ospruner.eval.schema import LabelSettings
from ospruner.train.loop import StageResult
from ospruner.train.traces import LabelledTraces

from .conftest import SETTINGS, SHORT, MakeLabels, log_of

WORKER = """
import os, signal, sys
import torch
from datasets import load_from_disk
from transformers import AutoModelForCausalLM, AutoTokenizer
from ospruner.eval.schema import LabelSettings
from ospruner.train.loop import train
from ospruner.train.settings import TrainSettings
import json
torch.set_num_threads(1)
base, data, out, settings, kill_at = sys.argv[1:]
def progress(phase, done, total, note=""):
    if phase == "train" and done == int(kill_at):
        os.kill(os.getpid(), signal.SIGKILL)
train(AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base),
      load_from_disk(data + "/train"), load_from_disk(data + "/validation"),
      TrainSettings(**json.loads(settings)), LabelSettings.load(data + "/settings.json"), out,
      progress=progress)
"""


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums in the order of the worker, which computes on one thread too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def same_bits(one: Path, other: Path, stages: tuple[str, ...]) -> bool:
    for name in stages:
        ours, theirs = (load_file(run / name / "model.safetensors") for run in (one, other))
        assert ours.keys() == theirs.keys()
        assert ours["policy.head.weight"].abs().max() > 0
        if not all(torch.equal(ours[key], theirs[key]) for key in ours):
            return False
    logs = [[{k: v for k, v in e.items() if k != "seconds"} for e in log_of(run)] for run in
            (one, other)]  # fmt: skip
    return logs[0] == logs[1]


def test_killed_run_ends_with_the_same_bits(
    fit: Callable[..., list[StageResult]],
    one_thread: None,
    make_labels: MakeLabels,
    tiny_base_dir: Path,
    tmp_path: Path,
) -> None:
    labels, held_out = make_labels(40), make_labels(10, seed=1, prefix="v")
    labels.save_to_disk(tmp_path / "train")
    held_out.save_to_disk(tmp_path / "validation")
    LabelSettings(base_model=str(tiny_base_dir), reasoning_format=DEEPSEEK_R1.to_dict()).save(
        tmp_path / "settings.json"
    )
    settings = dataclasses.replace(
        SETTINGS,
        length_penalties=(2e-2, 1e-2),
        epochs_per_stage=2,
        checkpoint_every=3,
        final_learning_rate_share=0.1,
        swa_share=0.9,
    )  # 2 stages x 2 epochs x 5 steps
    kill_at = 14  # in the second stage's first epoch, two steps after a checkpoint
    command = [
        sys.executable, "-c", WORKER, str(tiny_base_dir), str(tmp_path), str(tmp_path / "killed"),
        json.dumps(settings.to_dict()), str(kill_at),
    ]  # fmt: skip
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "killed" / "lam2e-2").is_dir()
    assert not (tmp_path / "killed" / "lam1e-2").exists()
    steps: list[int] = []

    def progress(phase: str, done: int, total: int, note: str = "") -> None:
        if phase == "train":
            steps.append(done)

    fit(settings, labels, tmp_path / "killed", validation=held_out, progress=progress)
    assert steps == list(range(13, 21))  # goes on after step 12
    fit(settings, labels, tmp_path / "whole", validation=held_out)
    assert same_bits(tmp_path / "whole", tmp_path / "killed", ("lam2e-2", "lam1e-2"))


@pytest.mark.parametrize("kill_at", [3, 8])
def test_run_without_checkpoints_within_epochs_repeats_the_epoch(
    kill_at: int, fit: Callable[..., list[StageResult]], make_labels: MakeLabels, tmp_path: Path
) -> None:
    class Killed(BaseException):
        pass

    def progress(phase: str, done: int, total: int, note: str = "") -> None:
        if phase == "train" and done == kill_at:
            raise Killed

    labels = make_labels(40)
    settings = dataclasses.replace(SHORT, epochs_per_stage=2)
    with pytest.raises(Killed):
        fit(settings, labels, tmp_path / "killed", progress=progress)
    fit(settings, labels, tmp_path / "killed")
    fit(settings, labels, tmp_path / "whole")
    assert same_bits(tmp_path / "whole", tmp_path / "killed", ("lam1e-2",))


def test_finished_run_is_returned_as_it_is_and_may_be_moved(
    fit: Callable[..., list[StageResult]], tmp_path: Path
) -> None:
    (first,) = fit(SHORT)
    weights = (first.path / "model.safetensors").stat()
    (tmp_path / "run").rename(tmp_path / "moved")
    (again,) = fit(SHORT, out=tmp_path / "moved")
    assert again.path == tmp_path / "moved" / "lam1e-2"
    assert (again.path / "model.safetensors").stat().st_mtime_ns == weights.st_mtime_ns
    assert again.accuracy == first.accuracy


def test_run_goes_on_with_other_checkpoints_and_cache(
    fit: Callable[..., list[StageResult]], make_labels: MakeLabels, tmp_path: Path
) -> None:
    (kept,) = fit(SHORT, make_labels(40), tmp_path / "kept")
    free = dataclasses.replace(SHORT, cache_limit_bytes=0, checkpoint_every=1)
    (computed,) = fit(free, make_labels(40), tmp_path / "computed")
    assert log_of(tmp_path / "kept")[0]["trunk_states_bytes"] > 0
    assert log_of(tmp_path / "computed")[0]["trunk_states_bytes"] == 0
    assert computed.tokens == pytest.approx(kept.tokens, rel=1e-4)
    (again,) = fit(free, make_labels(40), tmp_path / "kept")
    assert again == kept


def test_states_on_disk_train_the_same_bits_and_are_found_again(
    fit: Callable[..., list[StageResult]],
    one_thread: None,
    make_labels: MakeLabels,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (kept,) = fit(SHORT, make_labels(40), tmp_path / "memory")
    states = tmp_path / "states"
    (disk,) = fit(SHORT, make_labels(40), tmp_path / "disk", states)
    traces = LabelledTraces.from_dataset(make_labels(40))
    sizes = [file.stat().st_size for file in states.glob("*.states")]
    assert len(sizes) == 2
    assert 4 * 32 * int(traces.token_lengths.sum()) in sizes
    ours, theirs = (load_file(stage.path / "model.safetensors") for stage in (kept, disk))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    # Another run on these labels reads them; no trunk runs.
    monkeypatch.setattr(LabelledTraces, "_run_trunk", None)
    (again,) = fit(SHORT, make_labels(40), tmp_path / "again", states)
    assert (again.accuracy, again.tokens) == (disk.accuracy, disk.tokens)


def test_a_pass_of_the_trunk_goes_on_where_it_was_cut(
    tiny_base: Qwen2ForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    make_labels: MakeLabels,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After three of six batches; other weights have a file of their own."""

    def six_batches(token_lengths: Any) -> list[Any]:
        return np.split(np.arange(12), 6)

    monkeypatch.setattr("ospruner.train.traces.length_batches", six_batches)
    monkeypatch.setattr("ospruner.train.trunk.kept._NOTED_EVERY", -1.0)
    model = OSPrunerForCausalLM.untrained(tiny_base, tiny_tokenizer, tuning="layers")
    whole = LabelledTraces.from_dataset(make_labels(12))
    assert whole.cache_states(model, 2**30) > 0
    asked: list[int] = []

    class CutError(Exception):
        pass

    def counted(self: LabelledTraces, model: Any, rows: Any) -> Any:
        asked.append(len(rows))
        if len(asked) == 4:
            raise CutError
        return run_trunk(self, model, rows)

    run_trunk = LabelledTraces._run_trunk
    monkeypatch.setattr(LabelledTraces, "_run_trunk", counted)
    cut = LabelledTraces.from_dataset(make_labels(12))
    cut.keep_states(tmp_path)
    with pytest.raises(CutError):
        cut.cache_states(model, 0)
    (note,) = tmp_path.glob("*.done")
    assert list(note.read_bytes()) == [1] * 6 + [0] * 6
    on = LabelledTraces.from_dataset(make_labels(12))
    on.keep_states(tmp_path)
    on.cache_states(model, 0)
    assert len(asked) == 4 + 3
    rows = np.arange(12)
    assert torch.equal(on.states(model, rows).hidden, whole.states(model, rows).hidden)
    shown = [file.suffix for file in tmp_path.iterdir() if not file.name.startswith(".")]
    assert sorted(shown) == [".npz", ".states"]
    with torch.no_grad():
        tiny_base.model.layers[0].mlp.up_proj.weight[0, 0] += 1.0
    other = LabelledTraces.from_dataset(make_labels(12))
    other.keep_states(tmp_path)
    other.cache_states(model, 0)
    assert len(list(tmp_path.glob("*.states"))) == 2


@pytest.mark.parametrize("tuning", ["layers", "queries"])
def test_labels_that_grew_cost_a_pass_over_the_new_traces(
    tuning: str,
    tiny_base: Qwen2ForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    make_labels: MakeLabels,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also in another order; what is copied is what was kept."""
    model = OSPrunerForCausalLM.untrained(tiny_base, tiny_tokenizer, tuning=tuning)
    grown = make_labels(12)
    first = grown.select([7, 2, 5])

    def kept(labels: Dataset) -> LabelledTraces:
        traces = LabelledTraces.from_dataset(labels)
        traces.keep_states(tmp_path)
        traces.cache_states(model, 0)
        return traces

    before = kept(first)
    asked: list[int] = []
    run_trunk = LabelledTraces._run_trunk

    def noted(self: LabelledTraces, model: Any, rows: Any) -> Any:
        asked.extend(rows)
        return run_trunk(self, model, rows)

    monkeypatch.setattr(LabelledTraces, "_run_trunk", noted)
    after = kept(grown)
    assert sorted(asked) == [0, 1, 3, 4, 6, 8, 9, 10, 11]
    for here, there in enumerate([7, 2, 5]):
        old, new = (one.states(model, np.array([n])) for one, n in ((before, here), (after, there)))
        assert torch.equal(old.hidden, new.hidden)
        for a, b in zip(old.keys, new.keys, strict=True):
            assert torch.equal(a.keys, b.keys)
            assert torch.equal(a.values, b.values)
    whole = LabelledTraces.from_dataset(grown)
    whole.cache_states(model, 2**30)
    rows = np.arange(12)
    torch.testing.assert_close(
        after.states(model, rows).hidden, whole.states(model, rows).hidden, rtol=1e-4, atol=1e-5
    )
    for note in tmp_path.glob("*.npz"):
        note.write_bytes(note.read_bytes()[:100])
    with pytest.raises(ValueError, match="npz, which tells .* delete both files"):
        kept(grown.select([1, 2]))
