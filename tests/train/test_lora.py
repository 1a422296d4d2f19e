"""Low-rank training: adapters beside the copies, a small folder; merged where it is loaded."""

from __future__ import annotations

import builtins
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2ForCausalLM,
)

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.eval.replay import replay
from ospruner.eval.table import TraceTable
from ospruner.train.policies import SavedPolicy
from ospruner.train.predicting import predict
from ospruner.train.traces import LabelledTraces
from ospruner.train.untrained import untrained

from .conftest import SETTINGS, MakeLabels

LORA = SETTINGS | {
    "prices": [3e-2, 1e-2], "num_train_epochs": 2, "learning_rate": 5e-3,
    "adapter_rank": 4, "average": 0.5,
}  # fmt: skip


def test_a_policy_of_adapters_trains_saves_loads_and_generates(
    tiny_base: Qwen2ForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    fit: Callable[..., list[SavedPolicy]],
    make_labels: MakeLabels,
) -> None:
    before = copy.deepcopy(tiny_base.state_dict())
    prompt = torch.tensor([tiny_tokenizer.encode("Ann has 3 apples")])
    base: Any = tiny_base
    said = base.generate(prompt, max_new_tokens=20, do_sample=False)
    held_out = make_labels(20, seed=1, prefix="v")
    stages = fit(LORA, make_labels(40), validation=held_out)
    after = tiny_base.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert torch.equal(base.generate(prompt, max_new_tokens=20, do_sample=False), said)
    saved = load_file(stages[1].path / "model.safetensors")
    adapters = {name for name in saved if ".lora_" in name}
    assert set(saved) - adapters == {"policy.head.weight", "policy.head.bias"}
    assert len(adapters) == 2 * 2 * 7  # A and B for each projection of two layers
    assert all(saved[name].any() for name in adapters)  # also the B, which began at zero
    for loaded in (
        OSPrunerForCausalLM.from_base(tiny_base, stages[1].path),
        OSPrunerForCausalLM.from_pretrained(stages[1].path),
    ):
        assert (loaded.config.tuning, loaded.config.adapter_rank) == ("layers", 0)
        outcome = replay(TraceTable.from_dataset(held_out), predict(loaded, held_out))
        assert outcome.accuracy == pytest.approx(stages[1].accuracy, abs=1e-5)
        loaded.generate(prompt, stop_policy=True, max_new_tokens=30, do_sample=False)
    assert not any(".lora_" in name for name in loaded.policy.state_dict()), "they are merged"


def test_adapters_of_a_half_precision_base_are_in_float32(
    tiny_base: Qwen2ForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, make_labels: MakeLabels
) -> None:
    model = untrained(tiny_base.bfloat16(), tiny_tokenizer, tuning="layers", adapter_rank=16)
    trained = [p for p in model.policy.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {torch.float32}
    assert model.policy.tail is not None
    assert model.policy.tail.dtype == torch.bfloat16
    assert sum(p.numel() for p in trained) < sum(p.numel() for p in model.policy.parameters()) / 2
    traces = LabelledTraces.from_dataset(make_labels(8))
    assert np.isfinite(predict(model, traces)).all()


def test_without_peft_the_package_is_named(
    tiny_base: Qwen2ForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "peft":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="adapters need the package peft.*pip install peft"):
        untrained(tiny_base, tiny_tokenizer, adapter_rank=4)
