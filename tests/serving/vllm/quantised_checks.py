"""Policies on quantised bases inside vLLM, of each layout; run by test_bases.py.

vLLM packs the base as its checkpoint says, every packed tensor finds its place, and the tail beside
it is not packed. Nothing is computed: vLLM has no kernels on CPUs for most layouts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.quantization import mxfp4 as mxfp4_layers

from ospruner.demo.shipped import Reasoner
from ospruner.serving.vllm.model import OSPrunerVLLM
from ospruner.train.untrained import untrained

from .bases_checks import SIZES, random_base
from .plugin_checks import environment
from .plugin_replay import perturb

__all__ = ["environment"]

GROUP = 32
_Tensors = dict[str, torch.Tensor]


def fp8(name: str, weight: torch.Tensor) -> _Tensors:
    scale = weight.abs().max().float() / 448
    return {
        f"{name}.weight": (weight / scale).to(torch.float8_e4m3fn),
        f"{name}.weight_scale": scale.reshape(1),
    }


def _random_bits(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)


def awq(name: str, weight: torch.Tensor) -> _Tensors:
    out, width = weight.shape
    return {
        f"{name}.qweight": _random_bits(width, out // 8),
        f"{name}.qzeros": _random_bits(width // GROUP, out // 8),
        f"{name}.scales": torch.full((width // GROUP, out), 0.01, dtype=torch.float16),
    }


def gptq(name: str, weight: torch.Tensor) -> _Tensors:
    out, width = weight.shape
    return {
        f"{name}.qweight": _random_bits(width // 8, out),
        f"{name}.qzeros": torch.full((width // GROUP, out // 8), 0x77777777, dtype=torch.int32),
        f"{name}.scales": torch.full((width // GROUP, out), 0.01, dtype=torch.float16),
        f"{name}.g_idx": torch.arange(width, dtype=torch.int32) // GROUP,
    }


def mxfp4(name: str, weight: torch.Tensor) -> _Tensors:
    experts, width, out = weight.shape  # transformers keeps them transposed
    blocks = torch.randint(0, 256, (experts, out, width // 32, 16), dtype=torch.uint8)
    scales = torch.full((experts, out, width // 32), 122, dtype=torch.uint8)  # 2^-5
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


LAYOUTS: dict[str, tuple[str, Callable[..., _Tensors], dict[str, Any]]]
LAYOUTS = {  # base, what packs a weight, quantization_config
    # First, for the first one makes vLLM's process groups: with one for experts.
    "mxfp4": (
        "gpt_oss",
        mxfp4,
        {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ]
        },
    ),
    "fp8": ("qwen3", fp8, {"activation_scheme": "dynamic"}),
    "awq": ("qwen3", awq, {"bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "gptq": ("qwen3", gptq, {"bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}),
}
PACKED = {  # what vLLM holds of a layer, by layout
    "fp8": ("qkv_proj.weight_scale", torch.float8_e4m3fn),
    "awq": ("qkv_proj.qweight", torch.int32),
    "gptq": ("qkv_proj.qweight", torch.int32),
    "mxfp4": ("w13_weight_scale", torch.uint8),
}


@pytest.fixture
def saved(reasoner: Reasoner, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """A policy of the whole base's layers, on a checkpoint of the base that is packed."""
    method = request.param
    base_type, pack, config = LAYOUTS[method]
    torch.manual_seed(0)
    base = random_base(base_type, tie_word_embeddings=False).bfloat16().eval()
    folder = tmp_path / "base"
    base.save_pretrained(folder)
    reasoner.tokenizer.save_pretrained(folder)
    model = untrained(
        base, reasoner.tokenizer, base_model_name_or_path=str(folder), tuning="layers"
    )
    perturb(model)
    model.save_pretrained(tmp_path / "policy")
    tensors: _Tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        inside = name.startswith("model.layers.")
        experts = name.endswith(("gate_up_proj", "down_proj"))
        if inside and (experts if method == "mxfp4" else name.endswith("proj.weight")):
            tensors |= pack(name.removesuffix(".weight"), tensor)
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    literals = json.loads(file.read_text())
    literals["quantization_config"] = {"quant_method": method, **config}
    file.write_text(json.dumps(literals))
    return method


@pytest.mark.parametrize("saved", LAYOUTS, indirect=True)
def test_the_base_is_packed_and_the_tail_is_not(
    saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On CPUs vLLM finds no kernel for MXFP4, and would go no further.
    kernel = (mxfp4_layers.Mxfp4MoeBackend.MARLIN, None)
    monkeypatch.setattr(mxfp4_layers, "select_mxfp4_moe_backend", lambda moe: kernel)
    policy = str(tmp_path / "policy")
    config = EngineArgs(
        model=policy, dtype="bfloat16", enforce_eager=True, max_model_len=512
    ).create_engine_config()
    with set_current_vllm_config(config), torch.inference_mode():
        init_distributed_environment(1, 0, f"file://{tmp_path}/store", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        previous = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        served = OSPrunerVLLM(vllm_config=config)
        torch.set_default_dtype(previous)
        stored = load_file(tmp_path / "base" / "model.safetensors")
        own = load_file(tmp_path / "policy" / "model.safetensors")
        weights = [*own.items(), *((f"base.{name}", one) for name, one in stored.items())]
        loaded = served.load_weights(iter(weights))
    parameters = dict(served.named_parameters())
    scales = (".q_scale", ".k_scale", ".v_scale", ".prob_scale")  # of FP8 caches: seldom stored
    assert {one for one in parameters if not one.endswith(scales)} - loaded == set()
    name, dtype = PACKED[saved]
    packed = [one for one in parameters if one.startswith("base.") and one.endswith(name)]
    assert len(packed) == SIZES["num_hidden_layers"]
    kinds = {one: tensor.dtype for one, tensor in parameters.items()}
    assert dtype in {kind for one, kind in kinds.items() if one.startswith("base.model.layers")}
    assert {kind for one, kind in kinds.items() if one.startswith("tail.")} == {torch.bfloat16}
