"""Training: it learns, logs what it does, and refuses what cannot work."""

from __future__ import annotations

import dataclasses
import io
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import concatenate_datasets
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.eval.replay import replay, replay_full
from ospruner.eval.schema import TraceTable
from ospruner.train.fresh import batch_loss, predict
from ospruner.train.loop import StageResult, TrainingDivergedError, print_stages

from .conftest import PENALTY, SETTINGS, SHORT, MakeLabels, log_of


def test_trained_policy_earns_more_than_never_stopping(
    fit: Callable[..., list[StageResult]],
    make_labels: MakeLabels,
    tiny_base: Qwen2ForCausalLM,
    tmp_path: Path,
) -> None:
    results = fit(SETTINGS, make_labels(128))
    assert [result.name for result in results] == ["lam3e-2", "lam1e-2", "lam5e-3"]
    assert [result.price for result in results] == [3e-2, 1e-2, PENALTY]
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


def test_a_head_rate_too_high_for_the_base_is_named(
    fit: Callable[..., list[StageResult]], tiny_base: Qwen2ForCausalLM, tmp_path: Path
) -> None:
    once = dataclasses.replace(SETTINGS, length_penalties=(PENALTY,), epochs_per_stage=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(dataclasses.replace(once, head_learning_rate=1e-3), out=tmp_path / "low")
    with pytest.warns(UserWarning, match=r"may move a stop logit by .*--head-learning-rate"):
        fit(dataclasses.replace(once, head_learning_rate=0.1), out=tmp_path / "high")
    low, high = (log_of(tmp_path / name)[1]["largest_logit_step"] for name in ("low", "high"))
    assert high == pytest.approx(100 * low)
    # A normalised state of width H has magnitudes that sum to H at the most.
    assert 0.3 * tiny_base.config.hidden_size < low / 1e-3 <= tiny_base.config.hidden_size


@pytest.mark.parametrize("seed", [0, 1])
def test_an_entropy_bonus_keeps_a_run_from_never_stopping(
    fit: Callable[..., list[StageResult]], make_labels: MakeLabels, tmp_path: Path, seed: int
) -> None:
    labels = make_labels(128)
    settings = dataclasses.replace(SETTINGS, length_penalties=(1e-2,), seed=seed)
    (stuck,) = fit(settings, labels, tmp_path / "without")
    (free,) = fit(dataclasses.replace(settings, entropy_bonus=0.05), labels, tmp_path / "with")
    assert stuck.tokens > 0.99 * stuck.full_tokens  # 1e-2 is too low a lambda to begin with
    assert free.tokens < 0.8 * free.full_tokens
    assert free.accuracy > 0.98
    without, with_bonus = (log_of(tmp_path / name)[-2] for name in ("without", "with"))
    assert with_bonus["saturated_share"] < 0.8 < without["saturated_share"]


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
        assert model.config.price == result.price
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
    settings = SETTINGS.baseline(method)
    assert settings.num_policy_layers == 2
    (result,) = fit(settings, dataset)
    assert (result.name, result.price) == (method, 0.0)
    assert len([e for e in log_of(tmp_path / "run") if "epoch" in e]) == 15
    model = OSPrunerForCausalLM.from_base(tiny_base, result.path)
    assert (model.config.method, model.config.default_mode) == (method, "threshold")
    table = TraceTable.from_dataset(dataset)
    target = table.correct if method == "probe" else table.matches_final
    said = predict(model, dataset)[table.mask] > 0.5
    assert (said == target[table.mask]).mean() > 0.9


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
    said = r"the loss is nan at step 1: stage lam3e-2, epoch 0, batch 0 .* base's own hidden states"
    with pytest.raises(TrainingDivergedError, match=said):
        fit()
    with np.load(tmp_path / "run" / "failed_batch.npz") as kept:
        assert np.isnan(kept["logits"]).any()
        assert len(kept["rows"]) == len(kept["correct"]) == SETTINGS.batch_size


def test_a_gradient_that_is_not_finite_stops_the_run_at_its_step(
    fit: Callable[..., list[StageResult]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    steps = 0

    def loss_with_a_bad_slope(method: str, logits: Tensor, *rest: Any) -> Tensor:
        nonlocal steps
        steps += 1
        # The value is 0, the slope of the root there infinite: the third step's gradient is NaN.
        bad = (0 * logits.sum()).sqrt() if steps == 3 else 0
        return batch_loss(method, logits, *rest) + bad

    def fine(method: str, logits: Tensor, *rest: Any) -> Tensor:
        return batch_loss(method, logits, *rest)

    monkeypatch.setattr("ospruner.train.run.batch_loss", loss_with_a_bad_slope)
    settings = dataclasses.replace(SHORT, checkpoint_every=1, precision="bfloat16")
    said = (
        r"not finite.*: gradient of head\.weight, .* more at step 3: stage lam1e-2, epoch 0, "
        r"batch 2 .* Lower learning_rate \(0\.01 at most\), or train with precision float32"
    )
    with pytest.raises(TrainingDivergedError, match=said):
        fit(settings)
    with np.load(tmp_path / "run" / "failed_batch.npz") as kept:
        assert np.isfinite(kept["logits"]).all()
    # The run goes on from the step before.
    monkeypatch.setattr("ospruner.train.run.batch_loss", fine)
    (stage,) = fit(settings)
    tensors = load_file(stage.path / "model.safetensors").values()
    assert all(tensor.isfinite().all() for tensor in tensors)
    assert [e["steps"] for e in log_of(tmp_path / "run") if "epoch" in e] == [8]


@pytest.mark.parametrize("rate", [1e39, 1e30])
def test_weights_that_explode_stop_the_run_before_a_policy_is_saved(
    fit: Callable[..., list[StageResult]], make_labels: MakeLabels, tmp_path: Path, rate: float
) -> None:
    # One step, whose loss and gradients are finite: only the weights after it are not.
    settings = dataclasses.replace(
        SHORT, learning_rate=rate, head_learning_rate=rate, batch_size=32
    )
    with pytest.raises(TrainingDivergedError, match=r"weights of head\.weight, .* at step 1: "):
        fit(settings, make_labels(32))
    assert not (tmp_path / "run" / "lam1e-2").exists()


@pytest.mark.parametrize(
    ("bias", "said"),
    [
        (-30.0, "never stops: on the validation traces it equals the full trace and saves 0.0 %"),
        (30.0, "always stops: on the validation traces at the first step"),
        (-2.0, ""),
    ],
)
def test_a_policy_that_is_a_trivial_rule_is_saved_with_a_warning(
    bias: float,
    said: str,
    fit: Callable[..., list[StageResult]],
    tmp_path: Path,
) -> None:
    still = dataclasses.replace(SHORT, init_bias=bias, learning_rate=1e-9, head_learning_rate=1e-9)
    (stage,) = fit(still)
    assert stage.warning.startswith(said)
    assert bool(stage.warning) == bool(said)
    assert log_of(tmp_path / "run")[-1]["validation"]["warning"] == stage.warning
    record = json.loads((stage.path / "provenance.json").read_text("utf-8"))
    assert record["details"].get("warning", "") == stage.warning
    printed = io.StringIO()
    print_stages([stage], Console(file=printed, width=200))
    row = next(line for line in printed.getvalue().splitlines() if "lam1e-2" in line)
    assert (said.partition(":")[0] in row, "Warning: lam1e-2" in printed.getvalue()) == (
        True,
        bool(said),
    )


def test_memory_that_runs_out_says_what_to_lower(
    fit: Callable[..., list[StageResult]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        torch.empty(1 << 60)  # the allocator's own error

    monkeypatch.setattr("ospruner.train.run.batch_loss", fail)
    with pytest.raises(
        MemoryError, match="out of memory with 1 target.*micro_batch_tokens 16384.* lower micro_b"
    ):
        fit()


def test_the_log_keeps_the_dynamics(fit: Callable[..., list[StageResult]], tmp_path: Path) -> None:
    stages = fit(dataclasses.replace(SETTINGS, validate_every=3))
    points = [entry["dynamics"] for entry in log_of(tmp_path / "run") if "dynamics" in entry]
    assert [point["steps"] for point in points] == list(range(3, points[-1]["steps"] + 1, 3))
    assert {point["price"] for point in points} == {s.price for s in stages}
    assert all(0 <= point["accuracy"] <= 1 and point["tokens"] > 0 for point in points)


def test_what_cannot_be_learnt_from_is_refused(
    fit: Callable[..., list[StageResult]], make_labels: MakeLabels, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"there are 5 training traces .* at least 8"):
        fit(labels=make_labels(5))
    right = make_labels(20).map(lambda row: {"forced_correct": [1.0] * len(row["step_ends"])})
    with pytest.raises(ValueError, match="forced_correct makes the label 1 at every step of"):
        fit(labels=right)
    same = make_labels(20).map(lambda row: {"matches_final": [True] * len(row["step_ends"])})
    with pytest.raises(ValueError, match="matches_final makes the label 1 at every step"):
        fit(SETTINGS.baseline("convergence"), same)
    with pytest.raises(ValueError, match="64 problems are in both .* such as 'p0'"):
        fit(validation=make_labels(64))
    with pytest.raises(ValueError, match="holds no traces"):
        fit(labels=make_labels(8).select([]))
    assert not (tmp_path / "run").exists()


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
    fresh = OSPrunerForCausalLM.untrained(
        tiny_base, tiny_tokenizer, tuning="layers"
    ).policy.state_dict()
    name = "tail.layers.1.mlp.up_proj.weight"
    moved = (saved[f"policy.{name}"] - fresh[name].float()).abs()
    assert 0 < moved.max() < 5e-4  # such steps round to nothing in bfloat16
    loaded = OSPrunerForCausalLM.from_base(tiny_base, result.path)
    assert loaded.policy.tail is not None
    assert loaded.policy.tail.dtype == torch.bfloat16
    said = predict(loaded, make_labels(40, seed=1, prefix="v"))
    np.testing.assert_allclose(said, result.validation_probabilities(), atol=5e-2)


def test_traces_beyond_the_bases_positions_are_refused(
    fit: Callable[..., list[StageResult]],
    make_labels: MakeLabels,
    tiny_base: Qwen2ForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
) -> None:
    fitting = make_labels(64).filter(lambda row: len(row["step_ends"]) < 5)
    held_out = make_labels(40, seed=1, prefix="v")
    lengths = [len(row["prompt_ids"]) + len(row["trace_ids"]) for row in held_out]
    tiny_base.config.max_position_embeddings = max(lengths) - 1
    first = lengths.index(max(lengths))
    said = rf"longer than the base's {max(lengths) - 1} positions .* trace {first} .*'v{first}'"
    with pytest.raises(ValueError, match=said):
        fit(SHORT, fitting)
    assert not (tmp_path / "run").exists()
    model = OSPrunerForCausalLM.untrained(tiny_base, tiny_tokenizer, tuning="layers")
    with pytest.raises(ValueError, match=said):
        predict(model, held_out)
    assert predict(model, fitting).shape[0] == len(fitting)
