"""What a run says beforehand that it will hold is what it then holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from modeling_ospruner.reasoning_format import DEEPSEEK_R1
from ospruner.eval.schema import LabelSettings
from ospruner.train.memory import memory_need
from ospruner.train.packing import LabelledTraces
from ospruner.train.policies import batch_loss, new_policy
from ospruner.train.run import new_optimizer
from ospruner.train.settings import TrainSettings

from .conftest import MakeLabels


def held(tensors: Iterable[torch.Tensor | None]) -> int:
    return sum(t.nbytes for t in tensors if t is not None)


@pytest.mark.parametrize("tuning", ["layers", "attention", "lora", "head"])
def test_the_statement_is_what_tensors_then_take(
    tuning: str,
    tiny_base: Qwen2ForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tiny_base_dir: Path,
    make_labels: MakeLabels,
) -> None:
    settings = TrainSettings(length_penalties=(1e-2, 1e-3), tuning=tuning)  # type: ignore[arg-type]
    targets = list(settings.targets().values())
    traces = LabelledTraces.from_dataset(make_labels(12))
    need = memory_need(tiny_base, targets, traces, traces)
    labels = LabelSettings(base_model=str(tiny_base_dir), reasoning_format=DEEPSEEK_R1.to_dict())
    model = new_policy(tiny_base, tiny_tokenizer, settings, labels)
    own = model.policy.own_names()
    assert need.tail_bytes == held(p for n, p in model.policy.named_parameters() if n in own)
    optimizer = new_optimizer(model, settings)
    batch = traces.batch(torch.arange(8).numpy())
    hidden = traces.states(model, batch.rows)
    logits = model.policy(hidden).gather(1, batch.positions)
    batch_loss("os-pruner", logits, batch, 1e-2).backward()
    assert need.gradient_bytes == held(p.grad for p in model.policy.parameters())
    optimizer.step()
    moments = [s[name] for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert need.optimizer_bytes == held(moments)
    averaged = [dataclasses.replace(target, swa_share=0.5) for target in targets]
    more = memory_need(tiny_base, averaged, traces, traces)
    assert more.total_bytes - need.total_bytes == len(targets) * need.gradient_bytes
    assert need.states_bytes == 2 * traces.cache_states(model, 2**30)
    small = memory_need(
        tiny_base,
        [dataclasses.replace(settings, cache_limit_bytes=0, cache_on_disk=True)],
        traces,
        traces,
    )
    assert (small.states_bytes, small.disk_bytes) == (0, need.states_bytes)
    assert "on disk" in str(small)
    assert need.base_bytes == tiny_base.get_memory_footprint()
    each = 4 * (need.tail_bytes + need.optimizer_bytes)
    assert need.total_bytes == need.base_bytes + each + need.gradient_bytes + need.states_bytes
    assert str(need).startswith("4 target(s) will hold ")
