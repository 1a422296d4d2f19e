"""Policies on quantised bases inside vLLM, of each layout; run by test_plugin.py.

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
from vllm.utils.torch_utils import set_default_torch_dtype

from modeling_ospruner import OSPrunerForCausalLM as Policy
from ospruner.serving.vllm.model import OSPrunerVLLM

from .bases_checks import SIZES
from .bases_checks import make as make

GROUP = 32
_Tensors = dict[str, torch.Tensor]


def fp8(name: str, weight: torch.Tensor) -> _Tensors:
    packed = weight.to(torch.float8_e4m3fn)
    return {f"{name}.weight": packed, f"{name}.weight_scale": torch.ones(1)}


def awq(name: str, weight: torch.Tensor) -> _Tensors:
    out, width = weight.shape
    return {
        f"{name}.qweight": torch.zeros(width, out // 8, dtype=torch.int32),
        f"{name}.qzeros": torch.zeros(width // GROUP, out // 8, dtype=torch.int32),
        f"{name}.scales": torch.full((width // GROUP, out), 0.01, dtype=torch.float16),
    }


def gptq(name: str, weight: torch.Tensor) -> _Tensors:
    out, width = weight.shape
    groups = torch.arange(width, dtype=torch.int32) // GROUP
    packed = {f"{name}.qweight": torch.zeros(width // 8, out, dtype=torch.int32)}
    return awq(name, weight) | packed | {f"{name}.g_idx": groups}


def mxfp4(name: str, weight: torch.Tensor) -> _Tensors:
    experts, width, out = weight.shape  # transformers keeps them transposed
    blocks = torch.zeros(experts, out, width // 32, 16, dtype=torch.uint8)
    scales = torch.zeros(experts, out, width // 32, dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


_WHOLE = [f"model.layers.*.{name}" for name in ("self_attn", "mlp.router")]
_MXFP4 = {"modules_to_not_convert": [*_WHOLE, "model.embed_tokens", "lm_head"]}
_FOUR_BITS = {"bits": 4, "group_size": GROUP}
LAYOUTS: dict[str, tuple[str, Callable[..., _Tensors], dict[str, Any]]]
LAYOUTS = {  # base, what packs a weight, quantization_config
    "mxfp4": ("gpt_oss", mxfp4, _MXFP4),  # first: it makes process groups with one for experts
    "fp8": ("qwen3", fp8, {"activation_scheme": "dynamic"}),
    "awq": ("qwen3", awq, _FOUR_BITS | {"zero_point": True, "version": "gemm"}),
    "gptq": ("qwen3", gptq, _FOUR_BITS | {"desc_act": False, "sym": True}),
}
PACKED = {  # what vLLM holds of a layer, by layout
    "fp8": ("qkv_proj.weight_scale", torch.float8_e4m3fn),
    "awq": ("qkv_proj.qweight", torch.int32),
    "gptq": ("qkv_proj.qweight", torch.int32),
    "mxfp4": ("w13_weight_scale", torch.uint8),
}


def pack_base(folder: Path, method: str) -> None:
    """Packs a saved base's layers, as its configuration then says."""
    _, pack, config = LAYOUTS[method]
    tensors: _Tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        inside = name.startswith("model.layers.")
        experts = name.endswith(("gate_up_proj", "down_proj"))
        if inside and (experts if method == "mxfp4" else name.endswith("proj.weight")):
            tensors |= pack(name.removesuffix(".weight"), tensor)
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    literals = json.loads((folder / "config.json").read_text())
    literals["quantization_config"] = {"quant_method": method, **config}
    (folder / "config.json").write_text(json.dumps(literals))


@pytest.mark.parametrize("method", LAYOUTS)
def test_the_base_is_packed_and_the_tail_is_not(
    make: Callable[..., Policy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    make(LAYOUTS[method][0], 2, tie_word_embeddings=False)
    pack_base(tmp_path / "base", method)
    # On CPUs vLLM finds no kernel for MXFP4, and would go no further.
    kernel = (mxfp4_layers.Mxfp4MoeBackend.MARLIN, None)
    monkeypatch.setattr(mxfp4_layers, "select_mxfp4_moe_backend", lambda moe: kernel)
    asked: dict[str, Any] = {"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 512}
    config = EngineArgs(model=str(tmp_path / "policy"), **asked).create_engine_config()
    with set_current_vllm_config(config), torch.inference_mode():
        init_distributed_environment(1, 0, f"file://{tmp_path}/store", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        with set_default_torch_dtype(torch.bfloat16):
            served = OSPrunerVLLM(vllm_config=config)
        stored = load_file(tmp_path / "base" / "model.safetensors")
        own = load_file(tmp_path / "policy" / "model.safetensors")
        weights = [*own.items(), *((f"base.{name}", one) for name, one in stored.items())]
        loaded = served.load_weights(iter(weights))
    parameters = dict(served.named_parameters())
    scales = (".q_scale", ".k_scale", ".v_scale", ".prob_scale")  # of FP8 caches: seldom stored
    assert {one for one in parameters if not one.endswith(scales)} - loaded == set()
    name, dtype = PACKED[method]
    packed = [one for one in parameters if one.startswith("base.") and one.endswith(name)]
    assert len(packed) == SIZES["num_hidden_layers"]
    kinds = {one: tensor.dtype for one, tensor in parameters.items()}
    assert dtype in {kind for one, kind in kinds.items() if one.startswith("base.model.layers")}
    assert {kind for one, kind in kinds.items() if one.startswith("tail.")} == {torch.bfloat16}
