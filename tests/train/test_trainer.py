"""Training: it learns, takes a batch in parts, logs what it does, and refuses what cannot work."""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
import torch
from datasets import Dataset, concatenate_datasets
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils import get_total_norm
from transformers import Qwen2ForCausalLM, TrainerCallback

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.eval.methods import price_grid
from ospruner.eval.metrics import AES_ABSOLUTE, CHOSEN_BY
from ospruner.eval.replay import Outcome, replay, replay_full
from ospruner.eval.table import TraceTable
from ospruner.provenance import read_provenance
from ospruner.train.objective import batch_loss
from ospruner.train.policies import warning_about
from ospruner.train.traces import LabelledTraces, micro_batches, predict_outputs
from ospruner.train.trainer import StopTrainer

from .conftest import PRICED, PROBE, RANGE, SETTINGS, SHORT, Fit, MakeTrainer, log_of, make_labels


def reward(outcome: Outcome, price: float) -> float:
    return outcome.accuracy - price * outcome.mean_tokens


def probabilities(model: OSPrunerForCausalLM, dataset: Dataset) -> npt.NDArray[np.float32]:
    """(N, T) what a policy says at each step."""
    return predict_outputs(model, LabelledTraces.from_dataset(dataset)).probabilities()


def test_annealed_policies_earn_more(fit: Fit, tiny_base: Qwen2ForCausalLM, tmp_path: Path) -> None:
    before = {name: value.clone() for name, value in tiny_base.state_dict().items()}
    settings = SETTINGS | {"eval_strategy": "steps", "eval_steps": 30}
    results = fit(settings, make_labels(128))
    assert [result.path.name for result in results] == ["price3e-2", "price1e-2", "price5e-3"]
    assert [result.price for result in results] == SETTINGS["prices"]
    # What is told of each is true of the saved one.
    held_out = make_labels(40, seed=1, prefix="v")
    table = TraceTable.from_dataset(held_out)
    for saved in results:
        model = OSPrunerForCausalLM.from_base(tiny_base, saved.path)
        assert model.config.price == saved.price
        assert (model.config.method, model.config.default_mode) == ("os-pruner", "sample")
        outcome = replay(table, probabilities(model, held_out))
        assert saved.accuracy == pytest.approx(outcome.accuracy, abs=1e-5)
        assert saved.tokens == pytest.approx(outcome.mean_tokens, abs=1e-3)
        assert (saved.full_accuracy, saved.full_tokens > saved.tokens) == (1.0, True)
    assert all(torch.equal(before[name], v) for name, v in tiny_base.state_dict().items())

    fresh = make_labels(60, seed=2, prefix="t")
    table = TraceTable.from_dataset(fresh)
    trained = replay(table, probabilities(model, fresh))
    best = (table.correct - saved.price * table.lengths)[table.mask].max()
    assert reward(replay_full(table), saved.price) + 0.02 < reward(trained, saved.price) < best
    assert trained.accuracy > 0.9  # the answer is wrong at first: it waits until it is right
    epochs = [entry for entry in log_of(tmp_path / "run") if "loss" in entry]
    assert [entry["epoch"] for entry in epochs] == list(range(1, 16))
    assert epochs[4]["loss"] < epochs[0]["loss"] - 0.02
    points = [entry for entry in log_of(tmp_path / "run") if "eval_price" in entry]
    assert [point["step"] for point in points] == list(range(30, 241, 30))
    assert {point["eval_price"] for point in points} == set(SETTINGS["prices"])
    for point in points:
        earned = point["eval_accuracy"] - point["eval_price"] * point["eval_tokens"]
        assert point["eval_reward"] == pytest.approx(earned)


def test_one_policy_for_every_price(fit: Fit, tiny_base: Qwen2ForCausalLM, tmp_path: Path) -> None:
    (saved,) = fit(PRICED)
    assert saved.path == tmp_path / "run"
    held_out = make_labels(40, seed=1, prefix="v")
    table = TraceTable.from_dataset(held_out)
    full, model = replay_full(table), OSPrunerForCausalLM.from_base(tiny_base, saved.path)
    said = predict_outputs(model, LabelledTraces.from_dataset(held_out))
    for price in (2e-3, 5e-3, 2e-2):
        gained = reward(replay(table, said.probabilities(price)), price) - reward(full, price)
        assert gained > 0.2 * price * full.mean_tokens, price
    # For nothing, what helps is thought to the end; and tokens never rise with the price.
    assert replay(table, said.probabilities(0.0)).accuracy > full.accuracy - 0.01
    tokens = [
        replay(table, said.probabilities(p)).mean_tokens
        for p in (0.0, *np.geomspace(RANGE[0], RANGE[1]))
    ]
    assert tokens == sorted(tokens, reverse=True)
    assert tokens[0] > 1.3 * tokens[-1]
    # The default is the price of the highest AES of 31, and the record says so.
    assert model.config.prices is not None
    outcomes = {p: replay(table, said.probabilities(p)) for p in price_grid(model.config.prices)}
    whole = full.accuracy, full.mean_tokens
    best = max(
        outcomes, key=lambda p: AES_ABSOLUTE(outcomes[p].accuracy, outcomes[p].mean_tokens, *whole)
    )
    assert model.config.price == saved.price == best
    assert saved.accuracy == pytest.approx(outcomes[best].accuracy)
    record = read_provenance(saved.path).details
    assert (record["price_chosen_by"], record["settings"]["prices"]) == (CHOSEN_BY, RANGE)


def test_an_entropy_bonus_keeps_a_run_from_never_stopping(fit: Fit, tmp_path: Path) -> None:
    settings = SETTINGS | {"prices": [1e-2]}
    (stuck,) = fit(settings, 128, tmp_path / "without")
    (free,) = fit(settings | {"entropy_bonus": 0.05}, 128, tmp_path / "with")
    assert stuck.tokens > 0.99 * stuck.full_tokens  # 1e-2 is too low a price to begin with
    assert free.tokens < 0.8 * free.full_tokens
    assert free.accuracy > 0.98


@pytest.mark.parametrize("method", ["probe", "convergence", "final-answer"])
def test_baselines_learn_their_labels(method: str, fit: Fit, tiny_base: Qwen2ForCausalLM) -> None:
    # Where the natural end is wrong, "right" and "final" are opposite labels.
    dataset = make_labels(64).map(
        lambda row: {"forced_correct": [1.0 - value for value in row["forced_correct"]]}
    )
    (saved,) = fit(PROBE | {"method": method, "num_train_epochs": 15}, dataset)
    assert (saved.method, saved.price) == (method, 0.0)
    model = OSPrunerForCausalLM.from_base(tiny_base, saved.path)
    assert (model.config.method, model.config.default_mode) == (method, "threshold")
    table = TraceTable.from_dataset(dataset)
    target = table.correct if method == "probe" else table.matches_final
    said = probabilities(model, dataset)[table.mask] > 0.5
    assert (said == target[table.mask]).mean() > 0.9


class Watching(TrainerCallback):
    """Keeps the first step's gradients, and the head's weights after each before the averaging."""

    def __init__(self) -> None:
        self.heads: list[Tensor] = []
        self.gradients: list[Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Before they are used."""
        parameters = named["model"].parameters()
        self.gradients = self.gradients or [p.grad.clone() for p in parameters if p.requires_grad]

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Copies them."""
        self.heads.append(named["model"].policy.head.weight.detach().clone())


def test_a_stage_ends_with_the_mean_of_its_last_weights(fit: Fit, tmp_path: Path) -> None:
    def run(average: float) -> tuple[list[Tensor], list[Tensor]]:
        """The head's weights after each step, and those that were saved."""
        settings = SETTINGS | {"prices": [2e-2, 1e-2], "num_train_epochs": 2, "average": average}
        watching = Watching()  # 2 stages x 10 steps
        saved = fit(settings, 40, tmp_path / f"{average}", callbacks=[watching])
        files = [load_file(one.path / "model.safetensors") for one in saved]
        return watching.heads, [tensors["policy.head.weight"] for tensors in files]

    last, last_saved = run(0.0)
    mean, mean_saved = run(0.4)
    assert len(mean) == 20
    assert all(map(torch.equal, last[:10], mean[:10]))  # what is averaged trains as before
    torch.testing.assert_close(mean_saved[0], sum(last[6:10]) / 4)
    torch.testing.assert_close(mean_saved[1], sum(mean[16:]) / 4)
    assert torch.equal(last[9], last_saved[0])
    # The next stage begins with the mean: its first step is of the head's rate at the most.
    assert (mean[10] - mean_saved[0]).abs().max() < 1.1e-2
    assert (last[10] - mean_saved[0]).abs().max() > 1.1e-2


# A batch that is taken in parts takes the step of the whole batch.


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 200), st.integers(1, 4)
)
def test_parts_fit_and_hold_all_traces(lengths: list[int], max_tokens: int, processes: int) -> None:
    token_lengths, rows = np.array([0, *lengths]), np.arange(1, len(lengths) + 1)
    parts = micro_batches(token_lengths, rows, max_tokens, processes)
    assert np.concatenate(parts).tolist() == rows.tolist()
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        longest = int(token_lengths[part].max())
        each = -(-len(part) // processes)
        assert len(part)
        assert each == 1 or each * longest <= max_tokens
        if following is not None:  # the next trace would have been too much
            longer = max(longest, int(token_lengths[following[0]]))
            assert -(-(len(part) + 1) // processes) * longer > max_tokens
            assert len(part) >= processes


@pytest.mark.parametrize("settings", [SHORT | {"states_gib": 0.0}, PROBE, PRICED])
def test_parts_step_as_the_whole(settings: Any, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    def take(name: str, **changes: Any) -> tuple[float, list[Tensor]]:
        """Takes a run's only step: the loss, and the gradients it steps with."""
        one = {"batch_size": 12, "num_train_epochs": 1}
        out, watching = tmp_path / name, Watching()
        trainer = make_trainer(settings | one | changes, 12, out, callbacks=[watching])
        weight = trainer.stop_model.policy.head.weight.data
        weight.normal_(generator=torch.Generator().manual_seed(0))  # zeros would hide the layers'
        trainer.train()
        (loss,) = (entry["loss"] for entry in log_of(out) if "loss" in entry)
        return loss, watching.gradients

    loss, whole = take("whole")
    norm = float(get_total_norm(whole))
    assert any(gradient.abs().max() > 1e-3 for gradient in whole[:-2])
    for name, tokens, longest in (("parts", 100, 0.0), ("alone", 1, 0.0), ("cut", 100, 1e-3)):
        told, found = take(name, micro_batch_tokens=tokens, max_grad_norm=longest)
        assert told == pytest.approx(loss, abs=1e-6)
        for ours, theirs in zip(found, whole, strict=True):
            wanted = theirs * longest / norm if longest else theirs
            torch.testing.assert_close(ours, wanted, atol=1e-6 * (longest or 1), rtol=1e-3)


# What goes wrong.


def test_nan_stops_the_run_with_a_clear_error(fit: Fit, tiny_base: Qwen2ForCausalLM) -> None:
    with torch.no_grad():
        tiny_base.get_decoder().layers[0].mlp.down_proj.weight.fill_(float("nan"))
    said = r"the loss is nan at step 1 \(traces .* base's own hidden states are not finite"
    with pytest.raises(FloatingPointError, match=said):
        fit()


def test_bad_gradients_stop_runs(fit: Fit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    steps = 0

    def loss_with_a_bad_slope(method: str, logits: Tensor, *rest: Any) -> Tensor:
        nonlocal steps
        steps += 1
        # The value is 0, the slope of the root there infinite: the third step's gradient is NaN.
        bad = (0 * logits.sum()).sqrt() if steps == 3 else 0
        return batch_loss(method, logits, *rest) + bad

    settings = SHORT | {"save_strategy": "steps", "save_steps": 1}
    with monkeypatch.context() as patched:
        patched.setattr("ospruner.train.trainer.batch_loss", loss_with_a_bad_slope)
        said = r"gradients or .* at step 3 .* Lower learning_rate \(0\.002\) or head_"
        with pytest.raises(FloatingPointError, match=said):
            fit(settings)
    # The run goes on from the step before.
    (saved,) = fit(settings)
    tensors = load_file(saved.path / "model.safetensors").values()
    assert all(tensor.isfinite().all() for tensor in tensors)
    assert log_of(tmp_path / "run")[-1]["step"] == 8


def test_checkpoints_take_a_tenth_of_the_time(fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, saved, save = 0, list[int](), StopTrainer._save_checkpoint

    def slow_save(trainer: StopTrainer, *args: Any) -> None:
        nonlocal seconds
        seconds += 10
        saved.append(round(trainer.state.epoch or 0))
        save(trainer, *args)

    def slow_loss(*args: Any) -> Tensor:
        nonlocal seconds
        seconds += 5  # a pass takes 40
        return batch_loss(*args)

    monkeypatch.setattr(StopTrainer, "_save_checkpoint", slow_save)
    monkeypatch.setattr("ospruner.train.trainer.batch_loss", slow_loss)
    monkeypatch.setattr("ospruner.train.trainer.monotonic", lambda: seconds)
    fit(SHORT | {"num_train_epochs": 12})
    assert saved[:3] == [1, 4, 7]


@pytest.mark.parametrize("rate", [1e39, 1e30])
def test_weights_that_explode_stop_the_run(fit: Fit, tmp_path: Path, rate: float) -> None:
    # One step, whose loss and gradients are finite: only the weights after it are not.
    settings = SHORT | {"learning_rate": rate, "head_learning_rate": rate, "batch_size": 32}
    with pytest.raises(FloatingPointError, match=r"weights are not finite.* at step 1 "):
        fit(settings, 32)
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_what_a_policy_did_not_learn_is_said_and_saved(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(SHORT | {"learning_rate": 1e-9, "head_learning_rate": 1e-9})
    torch.nn.init.constant_(trainer.stop_model.policy.head.bias, -30)
    trainer.train()
    (stored,) = trainer.policies
    assert read_provenance(stored.path).details["warning"] == stored.warning
    assert stored.warning.startswith("took 8 optimiser steps")
    assert "never stops" in stored.warning
    assert "always stops" not in stored.warning

    table = TraceTable.from_dataset(make_labels(40))
    full = replay_full(table)
    at_once, drawn = (replay(table, np.full(table.mask.shape, p)) for p in (1.0, 0.5))
    assert warning_about(table, at_once, 0.0, 100).startswith("always stops")
    lost, saved = full.accuracy - drawn.accuracy, full.mean_tokens - drawn.mean_tokens
    assert lost > 0.1
    fair = lost / saved
    assert warning_about(table, drawn, 1.1 * fair, 100) == ""
    worse = f"is worse than never stopping at its own price {0.9 * fair:g}"
    assert warning_about(table, drawn, 0.9 * fair, 100).startswith(worse)
    assert warning_about(table, drawn, 0.0, 100) == ""  # a classifier has no price
    every = warning_about(table, drawn, 1.1 * fair, 99, [drawn])
    assert every.startswith("took 99 optimiser steps")
    assert "at every price" in every
    assert "at every price" not in warning_about(table, drawn, 1.1 * fair, 100, [drawn, full])


def test_memory_that_runs_out_says_what_to_lower(fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        torch.empty(1 << 60)  # the allocator's own error

    monkeypatch.setattr("ospruner.train.trainer.batch_loss", fail)
    with pytest.raises(MemoryError, match="out of memory with micro_batch_tokens 16384 .* lower m"):
        fit(SHORT)


def test_what_cannot_be_learnt_from(fit: Fit, tiny_base: Qwen2ForCausalLM, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there are 5 training traces .* at least 8"):
        fit(labels=5)
    same = make_labels(20).map(lambda row: {"matches_final": [True] * len(row["step_ends"])})
    with pytest.raises(ValueError, match="matches_final makes the label 1 at every step"):
        fit(PROBE | {"method": "convergence"}, same)
    with pytest.raises(ValueError, match="64 problems are in both .*'Ann p0 has 3 apples'"):
        fit(validation=make_labels(64).map(lambda row: {"problem_id": "v" + row["problem_id"]}))
    # Traces beyond the base's positions.
    fitting = make_labels(64).filter(lambda row: len(row["step_ends"]) < 5)
    held_out = make_labels(40, seed=1, prefix="v")
    lengths = [len(row["prompt_ids"]) + len(row["trace_ids"]) for row in held_out]
    tiny_base.config.max_position_embeddings = max(lengths) - 1
    first = lengths.index(max(lengths))
    said = rf"longer than the base's {max(lengths) - 1} positions .* trace {first} .*'v{first}'"
    with pytest.raises(ValueError, match=said):
        fit(SHORT, fitting)
    assert not (tmp_path / "run").exists()


def test_a_bfloat16_base_is_trained_in_float32(fit: Fit, tiny_base: Qwen2ForCausalLM) -> None:
    tiny_base.bfloat16()
    (saved,) = fit(SHORT | {"learning_rate": 1e-5})
    for name, tensor in load_file(saved.path / "model.safetensors").items():
        moved = not torch.equal(tensor, tensor.bfloat16().float())
        assert moved == (name != "policy.tail.norm.weight"), name


def test_capped_traces_go_and_it_is_pushed(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    capped = make_labels(5, seed=3, prefix="c", ended="cap")
    trainer = make_trainer(SHORT, concatenate_datasets([capped, make_labels(64)]))
    with pytest.raises(ValueError, match="0 policies are trained here: train first"):
        trainer.push_to_hub("org/policy")
    trainer.train()
    (saved,) = trainer.policies
    assert read_provenance(saved.path).details["training_traces"] == 64
    assert log_of(tmp_path / "run")[-1]["step"] == 8  # 64 traces in batches of 8
    with mock.patch("ospruner.publish", create=True) as publish:
        trainer.push_to_hub("org/policy", private=True)
    publish.assert_called_once_with(saved.path, "org/policy", private=True)
    with pytest.raises(ValueError, match=r"0 training traces .* \(5 were cut at the cap\)"):
        make_trainer(SHORT, capped, tmp_path / "other")
