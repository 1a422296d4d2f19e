"""A batch that is taken in parts takes the step of the whole batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils import get_total_norm
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from modeling_ospruner.formats_ospruner import DEEPSEEK_R1
from ospruner.eval.schema import LabelSettings
from ospruner.progress import silent
from ospruner.train.fresh import new_policy
from ospruner.train.processes import Processes
from ospruner.train.run import Run
from ospruner.train.run_folder import RunFolder
from ospruner.train.settings import TrainSettings
from ospruner.train.traces import LabelledTraces
from ospruner.train.trunk.batches import micro_batches

from .conftest import SHORT, MakeLabels, log_of

Step = Callable[..., tuple[int, float, list[torch.Tensor]]]


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


@pytest.fixture
def step(
    tiny_base: Qwen2ForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tiny_base_dir: Path,
    make_labels: MakeLabels,
    tmp_path: Path,
) -> Step:
    """Takes a run's first step: in how many parts, the loss, and the gradients it steps with."""
    labels = LabelSettings(base_model=str(tiny_base_dir), reasoning_format=DEEPSEEK_R1.to_dict())
    traces = LabelledTraces.from_dataset(make_labels(12))

    def take(settings: TrainSettings, out: str) -> tuple[int, float, list[torch.Tensor]]:
        model = new_policy(tiny_base, tiny_tokenizer, settings, labels)
        weight = model.policy.head.weight.data
        weight.normal_(generator=torch.Generator().manual_seed(0))  # zeros would hide the layers'
        found: list[torch.Tensor] = []

        def keep(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            for group in optimizer.param_groups:
                found.extend(p.grad.clone() for p in group["params"])

        handle = register_optimizer_step_pre_hook(keep)
        try:
            with RunFolder(tmp_path / out, {}) as folder:
                rows = np.arange(12)
                run = Run(model, traces, rows, traces, settings, folder, silent, Processes())
                work = run.work()
                shares = next(work)
                # The epoch is of one batch: with its only step the run is over.
                with pytest.raises(StopIteration):
                    work.send(run.states_of(shares))
        finally:
            handle.remove()
        (loss,) = (entry["loss"] for entry in log_of(tmp_path / out) if "epoch" in entry)
        return len(shares), loss, found

    return take


@pytest.mark.parametrize("cache_limit_bytes", [0, 2**31])
@pytest.mark.parametrize("method", ["os-pruner", "probe", "every price"])
def test_gradients_and_loss_are_those_of_the_whole_batch(
    step: Step, method: str, cache_limit_bytes: int
) -> None:
    settings = dataclasses.replace(SHORT, batch_size=12, cache_limit_bytes=cache_limit_bytes)
    settings = dataclasses.replace(settings, entropy_bonus=0.01)
    if method == "probe":
        settings = settings.baseline("probe")
    if method == "every price":
        priced: dict[str, Any] = {"head": "price", "price_range": (1e-3, 5e-2)}
        settings = dataclasses.replace(settings, length_penalties=(), **priced)
    one, whole_loss, whole = step(settings, "whole")
    many, loss, parts = step(dataclasses.replace(settings, micro_batch_tokens=100), "parts")
    each, alone_loss, alone = step(dataclasses.replace(settings, micro_batch_tokens=1), "alone")
    assert (one, each) == (1, 12)
    assert 2 < many < 12
    assert loss == pytest.approx(whole_loss, abs=1e-6)
    assert alone_loss == pytest.approx(whole_loss, abs=1e-6)
    assert any(gradient.abs().max() > 1e-3 for gradient in whole[2:])
    for found in (parts, alone):
        for ours, theirs in zip(found, whole, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_long_gradients_are_cut_to_the_norm_that_is_asked_for(step: Step) -> None:
    settings = dataclasses.replace(SHORT, batch_size=12)
    _, _, plain = step(settings, "plain")
    clip = partial(dataclasses.replace, settings, micro_batch_tokens=100)
    _, _, short = step(clip(max_gradient_norm=1e-3), "short")
    _, _, same = step(clip(max_gradient_norm=1e3), "same")
    norm = float(get_total_norm(plain))
    assert norm > 1e-2
    for ours, theirs, unclipped in zip(short, plain, same, strict=True):
        torch.testing.assert_close(ours, theirs * 1e-3 / norm, atol=1e-8, rtol=1e-3)
        torch.testing.assert_close(unclipped, theirs, atol=1e-6, rtol=1e-5)
