"""Which policies and bases vLLM serves: refused at the start, by what is seen of them."""

import importlib
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models import gemma3, transformers
from vllm.model_executor.models.interfaces import (
    EagleModelMixin,
    has_inner_state,
    is_hybrid,
    supports_eagle3,
)

from modeling_ospruner.configuration_ospruner import OSPrunerConfig

from ..checks import Works, check_policy, check_settings
from .plugin import HARMONY_PARSER, architecture, is_recurrent


class _TappedGemma3Model(gemma3.Gemma3Model, EagleModelMixin):  # compiled as Gemma3Model says
    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        """The last hidden states, (T, H), and, where one is tapped, what enters that layer."""
        hidden = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        residual = None
        tapped: list[torch.Tensor] = []
        for i, layer in enumerate(self.layers):
            self._maybe_add_hidden_state(tapped, i, hidden, residual)
            hidden, residual = layer(positions, hidden, residual)
        hidden, _ = self.norm(hidden, residual)
        return (hidden, tapped) if tapped else hidden


class _TappedGemma3ForCausalLM(gemma3.Gemma3ForCausalLM):
    """vLLM's own around a model that can be tapped, as vLLM's other models can."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        # One made beside another would leave its layers with vLLM.
        with patch.object(gemma3, "Gemma3Model", _TappedGemma3Model):
            super().__init__(vllm_config=vllm_config, prefix=prefix)


TAPPED = {"Gemma3ForCausalLM": _TappedGemma3ForCausalLM}  # in the place of vLLM's without a tap
_ONE_RANK = "use --tensor-parallel-size, or one server for each replica"
_WORKS: Works = {
    # The tail follows the whole base, on all tokens of a step.
    "parallel_config.pipeline_parallel_size": ((1,), "use --tensor-parallel-size"),
    "parallel_config.prefill_context_parallel_size": ((1,), _ONE_RANK),
    "parallel_config.use_ubatching": ((False,), "leave --enable-dbo out"),
    "model_config.enable_trace_replay": ((False,), "what it replays is written over every stop"),
}
_QUERIES_WORK: Works = {  # with what it was run
    "cache_config.cache_dtype": (
        ("auto", "float32", "bfloat16", "float16"),
        "leave --kv-cache-dtype out, for it reads the base's keys and values unquantised",
    ),
    # It runs where steps end, which other ranks do not know of.
    "parallel_config.data_parallel_size": ((1,), _ONE_RANK),
    "parallel_config.decode_context_parallel_size": ((1,), _ONE_RANK),
}
_DRAFTS_WORK: Works = {
    "speculative_config.method": (
        ("ngram", "ngram_gpu", "draft_model", "eagle", "eagle3"),
        "no other drafts were run, and vLLM makes MTP's layers of a policy's configuration",
    ),
    "speculative_config.rejection_sample_method": (
        ("standard", "block"),
        "it takes drafts whatever the model says, also beyond a stop",
    ),
}


def why_not(text: Any, queries: bool = True) -> str | None:
    """Why vLLM cannot run a base of this configuration with a tail beside it; None if it can.

    A tail of `queries` only keeps nothing of its own.
    """
    name = architecture(text)
    if name not in ModelRegistry.models:
        return f"there is no {name}"
    try:
        found = ModelRegistry.models[name].load_model_cls()
    except ImportError as error:
        return f"{name} cannot be imported ({error})"
    if issubclass(found, transformers.base.Base):
        return f"{name} is run by transformers' own code, whose layers are not copied"
    if is_hybrid(found) or has_inner_state(found):
        if not is_recurrent(text):
            return f"{name} keeps recurrent states, and no layer_types say where"
        if not queries:
            return f"{name} keeps recurrent states, beside which a policy is one of queries"
    if vars(text).get("kv_lora_rank"):
        return f"{name} has compressed (latent) keys and values, which are not read"
    # A decoder beside it may have the tap, as GLM-4's, of which vLLM does not say so.
    beside = vars(importlib.import_module(found.__module__)).values()
    decoders = [one for one in beside if isinstance(one, type) and issubclass(one, EagleModelMixin)]
    tapped = any(one.__module__ == found.__module__ for one in decoders)
    if not (supports_eagle3(found) or name in TAPPED or tapped):
        return f"{name} has no tap (EAGLE-3's), by which its hidden states would be read"
    return None


def class_of_base(vllm_config: VllmConfig) -> Any:
    """VLLM's own model of a policy's base."""
    name = architecture(vllm_config.model_config.hf_text_config)
    return ModelRegistry.models[name].load_model_cls()


def check_start(vllm_config: VllmConfig) -> None:
    """Refuses what the policy would silently do without, or do wrong.

    Raises:
        ValueError: naming what was asked for and what to do; or see `check_policy`.
        OSError: the base or the policy's file is not found.
    """
    config: OSPrunerConfig = vllm_config.model_config.hf_config
    layers, queries = config.num_policy_layers > 0, config.tuning == "queries"
    drafts = vllm_config.speculative_config is not None
    works = {**_WORKS, **(_DRAFTS_WORK if drafts else {})}
    works |= _QUERIES_WORK if queries and layers else {}
    parser = vllm_config.structured_outputs_config.reasoning_parser
    if parser == "openai_gptoss":
        raise ValueError(
            f"reasoning_parser is {parser!r}, which works for models alone whose type is gpt_oss; "
            f"a policy's is not: use --reasoning-parser {HARMONY_PARSER} (`ospruner serve` does)"
        )
    check_settings(vllm_config, works, "vLLM")
    model, load = vllm_config.model_config, vllm_config.load_config
    weights = load.load_format != "dummy"
    # Before the base's weights are read, and with the same words as everywhere.
    unfit = why_not(config.get_text_config(), queries or not layers)
    check_policy(config, model.model, "vLLM", unfit, model.revision, load.download_dir, weights)


def check_windows(base: nn.Module, name: str, window: int | None) -> None:
    """Refuses a base that sees other tokens in vLLM than in transformers, as Cohere 2 MoE does."""
    seen = {one.sliding_window for one in base.modules() if isinstance(one, Attention)}
    if others := seen - {None, window}:
        raise ValueError(
            f"vLLM's {name} looks back over {max(others)} tokens, transformers' over {window}: "
            "generate with transformers"
        )
