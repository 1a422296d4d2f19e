"""Tuning "lora": adapters beside the base's own layers, nothing copied, a small folder."""

from __future__ import annotations

import builtins
import copy
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    PreTrainedTokenizerFast,
    Qwen2ForCausalLM,
)
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
from transformers.utils.quantization_config import Mxfp4Config

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.policy_ospruner import check_tail
from ospruner.eval.replay import replay
from ospruner.eval.table import TraceTable
from ospruner.train.config import StopConfig
from ospruner.train.policies import SavedPolicy
from ospruner.train.predicting import predict
from ospruner.train.traces import LabelledTraces

from .conftest import SETTINGS, MakeLabels

LORA = SETTINGS | {
    "prices": [3e-2, 1e-2], "num_train_epochs": 2, "learning_rate": 5e-3, "tuning": "lora",
    "lora_rank": 4, "average": 0.5,
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
        assert loaded.config.tuning == "lora"
        outcome = replay(TraceTable.from_dataset(held_out), predict(loaded, held_out))
        assert outcome.accuracy == pytest.approx(stages[1].accuracy, abs=1e-5)
        loaded.generate(prompt, stop_policy=True, max_new_tokens=30, do_sample=False)
    own: Any = loaded.policy.layers[-1]
    theirs: Any = loaded.base.get_decoder().layers[-1]
    assert own.self_attn.q_proj.base_layer is theirs.self_attn.q_proj


def test_adapters_of_a_half_precision_base_are_in_float32(
    tiny_base: Qwen2ForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, make_labels: MakeLabels
) -> None:
    model = OSPrunerForCausalLM.untrained(tiny_base.bfloat16(), tiny_tokenizer, tuning="lora")
    trained = [p for p in model.policy.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {torch.float32}
    assert model.policy.tail is not None
    assert model.policy.tail.dtype == torch.bfloat16
    assert sum(p.numel() for p in trained) < sum(p.numel() for p in model.policy.parameters()) / 2
    traces = LabelledTraces.from_dataset(make_labels(8))
    assert np.isfinite(predict(model, traces)).all()


def tiny_gpt_oss(tokenizer: PreTrainedTokenizerFast) -> Any:
    config = GptOssConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=2,
        num_experts_per_tok=1, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def test_experts_that_are_no_projections_are_shared(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    base = tiny_gpt_oss(tiny_tokenizer)
    model = OSPrunerForCausalLM.untrained(base, tiny_tokenizer, tuning="lora", lora_rank=2)
    names = {name for name in model.policy.own_names() if "lora_" in name}
    assert names
    assert all("self_attn" in name for name in names)
    experts: Any = model.policy.layers[-1].mlp.experts  # type: ignore[union-attr]
    assert experts is base.get_decoder().layers[-1].mlp.experts


class Packed(torch.nn.Module):
    """As transformers' experts in MXFP4: bytes, which a forward put into the MLP alone can read."""

    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        self.plain = [experts]  # no part of the model
        bytes_ = torch.zeros(4, dtype=torch.uint8)
        self.gate_up_proj_blocks = torch.nn.Parameter(bytes_, requires_grad=False)


def unpacking(self: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    flat = hidden.reshape(-1, hidden.shape[-1])
    scores, weights, chosen = self.router(flat)
    return self.experts.plain[0](flat, chosen, weights).reshape_as(hidden), scores


def test_a_forward_that_a_quantised_base_was_given_is_shared(
    tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    base = tiny_gpt_oss(tiny_tokenizer)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    wanted = base(ids).logits
    for layer in base.model.layers:
        layer.mlp.experts = Packed(layer.mlp.experts)
        layer.mlp.forward = MethodType(unpacking, layer.mlp)
    assert torch.equal(base(ids).logits, wanted)
    base.hf_quantizer = object()
    model = OSPrunerForCausalLM.untrained(base, tiny_tokenizer, tuning="lora", lora_rank=2)
    check_tail(base, model.policy)  # fresh adapters add nothing
    torch.nn.init.normal_(model.policy.head.weight)
    said = model.stop_logits(ids)
    assert said.isfinite().all()
    model.save_pretrained(tmp_path)
    again = OSPrunerForCausalLM.from_base(base, tmp_path)
    assert torch.equal(again.stop_logits(ids), said)


class InFP8(torch.nn.Linear):
    """As transformers' `FP8Linear`: one byte a weight, and a scale."""

    def __init__(self, plain: torch.nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features, plain.bias is not None)
        scale = plain.weight.abs().max() / 448
        packed = (plain.weight / scale).to(torch.float8_e4m3fn)
        self.weight = torch.nn.Parameter(packed, requires_grad=False)
        self.weight_scale_inv = torch.nn.Parameter(scale.detach().float())
        self.bias = plain.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = (self.weight.float() * self.weight_scale_inv).to(input.dtype)
        return torch.nn.functional.linear(input, weight, self.bias)


def test_a_base_in_fp8_carries_adapters(
    tiny_base: Qwen2ForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, make_labels: MakeLabels
) -> None:
    base: Any = tiny_base.bfloat16()
    for layer in base.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, torch.nn.Linear):
                    setattr(part, name, InFP8(child))
    base.hf_quantizer = object()
    model = OSPrunerForCausalLM.untrained(base, tiny_tokenizer, tuning="lora", lora_rank=2)
    check_tail(base, model.policy)
    adapters = [p for name, p in model.policy.named_parameters() if ".lora_" in name]
    assert len(adapters) == 2 * 2 * 7
    assert all(one.dtype == torch.float32 and one.requires_grad for one in adapters)
    assert np.isfinite(predict(model, LabelledTraces.from_dataset(make_labels(8)))).all()
    prompt = torch.tensor([tiny_tokenizer.encode("Ann has 3 apples")])
    model.generate(prompt, stop_policy=True, max_new_tokens=30, do_sample=False)
    with torch.no_grad():
        adapters[0].fill_(torch.nan)
        assert model.stop_logits(prompt).isnan().all()  # its own weights are looked at still


def test_adapters_are_not_trained_through_weights_that_pass_no_gradient(
    tiny_tokenizer: PreTrainedTokenizerFast,
    fit: Callable[..., list[SavedPolicy]],
    tmp_path: Path,
) -> None:
    base = tiny_gpt_oss(tiny_tokenizer)
    base.hf_quantizer = Mxfp4HfQuantizer(Mxfp4Config())
    with pytest.raises(
        ValueError, match=r"packed weights of this GptOssForCausalLM \(Mxfp4Config\) p"
    ):
        fit(LORA, model=base)
    assert not (tmp_path / "run").exists()


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
    with pytest.raises(ImportError, match="'lora' needs the package peft.*pip install peft"):
        OSPrunerForCausalLM.untrained(tiny_base, tiny_tokenizer, tuning="lora")


def test_ranks_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="lora_rank is 0; it must be at least 1"):
        StopConfig("run", tuning="lora", lora_rank=0)
