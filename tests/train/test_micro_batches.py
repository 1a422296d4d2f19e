"""A batch that is taken in parts takes the step of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils import get_total_norm
from transformers import TrainerCallback

from ospruner.train.batches import micro_batches
from ospruner.train.trainer import StopTrainer

from .conftest import PRICED, PROBE, SHORT, MakeLabels, log_of

Step = Callable[..., tuple[float, list[torch.Tensor]]]


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 200), st.integers(1, 4)
)
def test_parts_hold_each_trace_once_and_no_process_more_than_its_slots(
    lengths: list[int], max_tokens: int, processes: int
) -> None:
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


class Keeping(TrainerCallback):
    """Keeps the gradients of the first step."""

    gradients: list[torch.Tensor] = []  # noqa: RUF012

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Before they are used."""
        parameters = named["model"].parameters()
        self.gradients = [p.grad.clone() for p in parameters if p.grad is not None]


@pytest.fixture
def step(make_trainer: Callable[..., StopTrainer], make_labels: MakeLabels, tmp_path: Any) -> Step:
    """Takes a run's only step: the loss, and the gradients it steps with."""

    def take(settings: dict[str, Any], out: str, **changes: Any) -> tuple[float, list[Any]]:
        keeping, one = Keeping(), {"batch_size": 12, "num_train_epochs": 1}
        trainer = make_trainer(
            settings | one | changes, make_labels(12), tmp_path / out, callbacks=[keeping]
        )
        weight = trainer.stop_model.policy.head.weight.data
        weight.normal_(generator=torch.Generator().manual_seed(0))  # zeros would hide the layers'
        trainer.train()
        (loss,) = (entry["loss"] for entry in log_of(tmp_path / out) if "loss" in entry)
        return loss, keeping.gradients

    return take


@pytest.mark.parametrize("states_gib", [0.0, 2.0])
@pytest.mark.parametrize("settings", [SHORT, PROBE, PRICED], ids=["fixed", "probe", "price"])
def test_gradients_and_loss_are_those_of_the_whole_batch(
    step: Step, settings: dict[str, Any], states_gib: float
) -> None:
    settings = settings | {"states_gib": states_gib}
    whole_loss, whole = step(settings, "whole")
    loss, parts = step(settings, "parts", micro_batch_tokens=100)
    alone_loss, alone = step(settings, "alone", micro_batch_tokens=1)
    assert loss == pytest.approx(whole_loss, abs=1e-6)
    assert alone_loss == pytest.approx(whole_loss, abs=1e-6)
    assert any(gradient.abs().max() > 1e-3 for gradient in whole[:-2])
    for found in (parts, alone):
        for ours, theirs in zip(found, whole, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_long_gradients_are_cut_to_the_norm_that_is_asked_for(step: Step) -> None:
    _, plain = step(SHORT, "plain")
    _, short = step(SHORT, "short", max_grad_norm=1e-3, micro_batch_tokens=100)
    norm = float(get_total_norm(plain))
    assert norm > 1e-2
    for ours, theirs in zip(short, plain, strict=True):
        torch.testing.assert_close(ours, theirs * 1e-3 / norm, atol=1e-8, rtol=1e-3)
