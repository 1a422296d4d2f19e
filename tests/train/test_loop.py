"""Training: it learns, continues after a kill with the same bits, and refuses what cannot work."""

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
from datasets import Dataset, concatenate_datasets
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.reasoning_format import DEEPSEEK_R1
from ospruner.eval.replay import replay, replay_full
from ospruner.eval.schema import LabelSettings, TraceTable
from ospruner.train.loop import StageResult, TrainingDivergedError, train
from ospruner.train.packing import LabelledTraces
from ospruner.train.policies import predict
from ospruner.train.settings import TrainSettings

MakeLabels = Callable[..., Dataset]
PENALTY = 5e-3
SETTINGS = TrainSettings(
    # Started at 1e-2, this problem collapses to "never stop", as the paper describes.
    length_penalties=(3e-2, 1e-2, PENALTY),
    epochs_per_stage=5,
    batch_size=8,
    learning_rate=2e-3,
    head_learning_rate=1e-2,
)
SHORT = dataclasses.replace(SETTINGS, length_penalties=(1e-2,), epochs_per_stage=1)


@pytest.fixture
def fit(
    tiny_base: Qwen2ForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tiny_base_dir: Path,
    make_labels: MakeLabels,
    tmp_path: Path,
) -> Callable[..., list[StageResult]]:
    """Trains on 64 made-up traces, unless told otherwise."""

    def run(
        settings: TrainSettings = SETTINGS,
        labels: Dataset | LabelledTraces | None = None,
        out: Path = tmp_path / "run",
        **changes: Any,
    ) -> list[StageResult]:
        labels = make_labels(64) if labels is None else labels
        held_out = changes.pop("validation", make_labels(40, seed=1, prefix="v"))
        label_settings = LabelSettings(
            base_model=str(tiny_base_dir), reasoning_format=DEEPSEEK_R1.to_dict()
        )
        return train(
            tiny_base, tiny_tokenizer, labels, held_out, settings, label_settings, out, **changes
        )

    return run


def log_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text("utf-8").splitlines()]


def test_trained_policy_earns_more_than_never_stopping(
    fit: Callable[..., list[StageResult]],
    make_labels: MakeLabels,
    tiny_base: Qwen2ForCausalLM,
    tmp_path: Path,
) -> None:
    results = fit(SETTINGS, make_labels(128))
    assert [result.name for result in results] == ["lam3e-2", "lam1e-2", "lam5e-3"]
    assert [result.length_penalty for result in results] == [3e-2, 1e-2, PENALTY]
    fresh = make_labels(60, seed=2, prefix="t")
    table = TraceTable.from_dataset(fresh)

    def reward(outcome: Any) -> float:
        return float(outcome.accuracy - PENALTY * outcome.mean_tokens)

    def outcome_of(path: Path) -> Any:
        model = OSPrunerForCausalLM.from_base(tiny_base, path)
        return replay(table, predict(model, fresh))

    trained = outcome_of(results[-1].path)
    never = reward(replay_full(table))
    best = float((table.correct - PENALTY * table.lengths)[table.mask].max())
    assert never + 0.02 < reward(trained) < best
    assert trained.accuracy > 0.9  # the answer is wrong at first: it waits until it is right
    # The log says how it went.
    header, *entries = log_of(tmp_path / "run")
    assert header["traces"] == 128
    assert header["trunk_states_bytes"] > 0
    epochs = [entry for entry in entries if "epoch" in entry]
    assert [(e["stage"], e["epoch"]) for e in epochs] == [
        (name, epoch) for name in ("lam3e-2", "lam1e-2", "lam5e-3") for epoch in range(5)
    ]
    assert epochs[4]["loss"] < epochs[0]["loss"] - 0.02
    assert all(0 <= e["saturated_share"] <= 1 for e in epochs)


def test_validation_result_is_that_of_the_saved_policy(
    fit: Callable[..., list[StageResult]], make_labels: MakeLabels, tiny_base: Qwen2ForCausalLM
) -> None:
    settings = dataclasses.replace(SETTINGS, length_penalties=(3e-2, 1e-2), epochs_per_stage=1)
    (first, second), held_out = fit(settings), make_labels(40, seed=1, prefix="v")
    assert (
        load_file(first.path / "model.safetensors").keys()
        == load_file(second.path / "model.safetensors").keys()
    )
    for result in (first, second):
        model = OSPrunerForCausalLM.from_base(tiny_base, result.path)
        assert model.config.length_penalty == result.length_penalty
        assert (model.config.method, model.config.default_mode) == ("os-pruner", "sample")
        probabilities = predict(model, held_out)
        np.testing.assert_allclose(result.validation_probabilities(), probabilities, atol=1e-6)
        outcome = replay(TraceTable.from_dataset(held_out), probabilities)
        assert result.accuracy == pytest.approx(outcome.accuracy, abs=1e-5)
        assert result.tokens == pytest.approx(outcome.mean_tokens, abs=1e-3)
        assert (result.full_accuracy, result.full_tokens > result.tokens) == (1.0, True)


@pytest.mark.parametrize("method", ["probe", "convergence"])
def test_baseline_learns_its_label_with_as_many_epochs(
    method: Any,
    fit: Callable[..., list[StageResult]],
    make_labels: MakeLabels,
    tiny_base: Qwen2ForCausalLM,
    tmp_path: Path,
) -> None:
    # Where the natural end is wrong, "right" and "final" are opposite labels.
    dataset = make_labels(64).map(
        lambda row: {
            "forced_correct": [1.0 - value for value in row["forced_correct"]],
        }
    )
    (result,) = fit(SETTINGS.baseline(method), dataset)
    assert (result.name, result.length_penalty) == (method, 0.0)
    assert len([e for e in log_of(tmp_path / "run") if "epoch" in e]) == 15
    model = OSPrunerForCausalLM.from_base(tiny_base, result.path)
    assert (model.config.method, model.config.default_mode) == (method, "threshold")
    table = TraceTable.from_dataset(dataset)
    target = table.correct if method == "probe" else table.matches_final
    said = predict(model, dataset)[table.mask] > 0.5
    assert (said == target[table.mask]).mean() > 0.9


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


def test_learning_rates_fall_within_each_stage(
    fit: Callable[..., list[StageResult]], make_labels: MakeLabels, tmp_path: Path
) -> None:
    settings = dataclasses.replace(
        SHORT, length_penalties=(2e-2, 1e-2), epochs_per_stage=2, final_learning_rate_share=0.5
    )
    rates: list[list[float]] = []
    checkpoint = tmp_path / "run" / "checkpoint.pt"

    def progress(phase: str, done: int, total: int, note: str = "") -> None:
        if checkpoint.exists():
            state = torch.load(checkpoint, weights_only=True)["optimizer"]
            rates.append([group["lr"] for group in state["param_groups"]])

    every = dataclasses.replace(settings, checkpoint_every=1)
    fit(every, make_labels(40), progress=progress)
    # 2 stages x 10 steps, of each of which the next one finds the checkpoint.
    stages = [1e-2 * (1 - 0.5 * k / 10) for k in range(10)]
    assert [rate[0] for rate in rates] == pytest.approx([*stages, *stages[:-1]])
    assert all(rate[1] == pytest.approx(rate[0] / 5) for rate in rates)


def test_a_stage_ends_with_the_mean_of_its_last_weights(
    fit: Callable[..., list[StageResult]], make_labels: MakeLabels, tmp_path: Path
) -> None:
    def run(swa_share: float) -> tuple[list[Tensor], list[Tensor]]:
        """The head's weights before each step but the first, and those that were saved."""
        out, before = tmp_path / f"{swa_share}", []

        def progress(phase: str, done: int, total: int, note: str = "") -> None:
            if phase == "train" and done > 1:
                state = torch.load(out / "checkpoint.pt", weights_only=True)
                before.append(state["policy"]["head.weight"])

        settings = dataclasses.replace(
            SHORT, length_penalties=(2e-2, 1e-2), epochs_per_stage=2, checkpoint_every=1
        )  # 2 stages x 10 steps
        stages = fit(
            dataclasses.replace(settings, swa_share=swa_share),
            make_labels(40),
            out,
            progress=progress,
        )
        files = [load_file(stage.path / "model.safetensors") for stage in stages]
        return before, [tensors["policy.head.weight"] for tensors in files]

    last, (last_saved, _) = run(0)
    mean, (mean_saved, _) = run(0.4)
    assert all(map(torch.equal, last[:9], mean[:9]))  # what is averaged trains as before
    torch.testing.assert_close(mean_saved, (sum(last[6:9]) + last_saved) / 4)
    assert not torch.allclose(mean_saved, last_saved)
    assert torch.equal(last[9], last_saved)
    assert torch.equal(mean[9], mean_saved)  # where the next stage begins


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


def test_base_stays_as_it_was(
    fit: Callable[..., list[StageResult]], tiny_base: Qwen2ForCausalLM
) -> None:
    before = {name: value.clone() for name, value in tiny_base.state_dict().items()}
    fit(SHORT)
    assert all(torch.equal(before[name], v) for name, v in tiny_base.state_dict().items())


def test_capped_traces_are_dropped_and_counted(
    fit: Callable[..., list[StageResult]], make_labels: MakeLabels, tmp_path: Path
) -> None:
    capped = make_labels(5, seed=3, prefix="c", ended="cap")
    (mixed,) = fit(SHORT, concatenate_datasets([capped, make_labels(64)]))
    header = log_of(tmp_path / "run")[0]
    assert (header["traces"], header["capped_traces_dropped"]) == (64, 5)
    steps = [e["steps"] for e in log_of(tmp_path / "run") if "epoch" in e]
    assert steps == [8]  # 64 traces in batches of 8
    assert mixed.tokens > 0
    with pytest.raises(ValueError, match=r"0 training traces .* \(5 were cut at the cap\)"):
        fit(SHORT, capped, tmp_path / "other")


def test_nan_stops_the_run_with_a_clear_error(
    fit: Callable[..., list[StageResult]], tiny_base: Qwen2ForCausalLM, tmp_path: Path
) -> None:
    with torch.no_grad():
        tiny_base.get_decoder().layers[0].mlp.down_proj.weight.fill_(float("nan"))
    with pytest.raises(TrainingDivergedError, match=r"the loss is nan in stage lam3e-2, epoch 0"):
        fit()
    with np.load(tmp_path / "run" / "failed_batch.npz") as kept:
        assert np.isnan(kept["logits"]).any()
        assert len(kept["rows"]) == len(kept["correct"]) == SETTINGS.batch_size


def test_memory_that_runs_out_says_what_to_lower(
    fit: Callable[..., list[StageResult]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        torch.empty(1 << 60)  # the allocator's own error

    monkeypatch.setattr("ospruner.train.run.batch_loss", fail)
    with pytest.raises(
        MemoryError, match="out of memory with 1 target.*batch_size 8.* lower batch"
    ):
        fit()


def test_the_log_keeps_the_dynamics(fit: Callable[..., list[StageResult]], tmp_path: Path) -> None:
    stages = fit(dataclasses.replace(SETTINGS, validate_every=3))
    points = [entry["dynamics"] for entry in log_of(tmp_path / "run") if "dynamics" in entry]
    assert [point["steps"] for point in points] == list(range(3, points[-1]["steps"] + 1, 3))
    assert {point["length_penalty"] for point in points} == {s.length_penalty for s in stages}
    assert all(0 <= point["accuracy"] <= 1 and point["tokens"] > 0 for point in points)


def test_what_cannot_be_learnt_from_is_refused(
    fit: Callable[..., list[StageResult]], make_labels: MakeLabels, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"there are 5 training traces .* at least 8"):
        fit(labels=make_labels(5))
    right = make_labels(20).map(lambda row: {"forced_correct": [1.0] * len(row["step_ends"])})
    with pytest.raises(ValueError, match=r"forced_correct is 1\.0 at every step of all 20"):
        fit(labels=right)
    same = make_labels(20).map(lambda row: {"matches_final": [True] * len(row["step_ends"])})
    with pytest.raises(ValueError, match="matches_final is True at every step"):
        fit(SETTINGS.baseline("convergence"), same)
    with pytest.raises(ValueError, match="64 problems are in both .* such as 'p0'"):
        fit(validation=make_labels(64))
    with pytest.raises(ValueError, match="holds no traces"):
        fit(labels=make_labels(8).select([]))
    assert not (tmp_path / "run").exists()


def test_folder_of_another_run_is_refused(
    fit: Callable[..., list[StageResult]], make_labels: MakeLabels, tmp_path: Path
) -> None:
    fit(SHORT)
    with pytest.raises(ValueError, match=r"another training run \(settings: .*'seed': 5"):
        fit(dataclasses.replace(SHORT, seed=5))
    with pytest.raises(ValueError, match=r"another training run \(train_labels: "):
        fit(SHORT, make_labels(64, seed=9))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match=r"another run's files \(thesis\.tex\)"):
        fit(SHORT, out=tmp_path / "other")


@pytest.mark.parametrize(("n", "tuning"), [(0, "layers"), (1, "attention"), (2, "head")])
def test_other_depths_and_tunings_train(
    n: int, tuning: Any, fit: Callable[..., list[StageResult]], tmp_path: Path
) -> None:
    settings = dataclasses.replace(
        SETTINGS, length_penalties=(1e-2,), num_policy_layers=n, tuning=tuning, epochs_per_stage=3
    )
    (result,) = fit(settings)
    losses = [e["loss"] for e in log_of(tmp_path / "run") if "epoch" in e]
    assert losses[-1] < losses[0]
    assert result.tokens > 0


def test_bfloat16_base_trains_in_float32_and_loads_in_its_own_dtype(
    fit: Callable[..., list[StageResult]],
    make_labels: MakeLabels,
    tiny_base: Qwen2ForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
) -> None:
    tiny_base.bfloat16()
    small = dataclasses.replace(SHORT, learning_rate=1e-5, epochs_per_stage=4)
    (result,) = fit(small)
    saved = load_file(result.path / "model.safetensors")
    fresh = OSPrunerForCausalLM.untrained(tiny_base, tiny_tokenizer).policy.state_dict()
    name = "tail.layers.1.mlp.up_proj.weight"
    moved = (saved[f"policy.{name}"] - fresh[name].float()).abs()
    assert 0 < moved.max() < 5e-4  # such steps round to nothing in bfloat16
    loaded = OSPrunerForCausalLM.from_base(tiny_base, result.path)
    assert loaded.policy.tail is not None
    assert loaded.policy.tail.dtype == torch.bfloat16
    said = predict(loaded, make_labels(40, seed=1, prefix="v"))
    np.testing.assert_allclose(said, result.validation_probabilities(), atol=5e-2)


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
    settings = dataclasses.replace(SHORT, cache_limit_bytes=0, cache_on_disk=True)
    (disk,) = fit(settings, make_labels(40), tmp_path / "disk")
    files = [tmp_path / "disk" / f"trunk_states.{name}" for name in ("train", "validation")]
    traces = LabelledTraces.from_dataset(make_labels(40))
    assert files[0].stat().st_size == 4 * 32 * int(traces.token_lengths.sum())
    ours, theirs = (load_file(stage.path / "model.safetensors") for stage in (kept, disk))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    # A run that begins anew there reads them; no trunk runs.
    for name in ("checkpoint.pt", "log.jsonl"):
        (tmp_path / "disk" / name).unlink()
    monkeypatch.setattr(LabelledTraces, "_run_trunk", None)
    (again,) = fit(settings, make_labels(40), tmp_path / "disk")
    assert again == disk
