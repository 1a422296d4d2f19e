"""vLLM's Gemma 3 with the EAGLE-3 tap that its other models have."""

from __future__ import annotations

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.gemma3 import Gemma3ForCausalLM, Gemma3Model
from vllm.model_executor.models.interfaces import EagleModelMixin
from vllm.model_executor.models.utils import maybe_prefix

__all__ = ["TappedGemma3ForCausalLM"]


class _TappedGemma3Model(Gemma3Model, EagleModelMixin):  # compiled as Gemma3Model says
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


class TappedGemma3ForCausalLM(Gemma3ForCausalLM):
    """vLLM's own around a model that can be tapped."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        # Not Gemma3ForCausalLM's: that makes a model without a tap, whose layers vLLM would keep.
        nn.Module.__init__(self)
        config, packed = vllm_config.model_config.hf_config, vllm_config.quant_config
        self.config, self.quant_config = config, packed
        self.model = _TappedGemma3Model(
            vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model")
        )
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            quant_config=packed,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(
            config.vocab_size, soft_cap=config.final_logit_softcapping
        )
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors
