"""Attention with sinks in torch's fused kernels, where transformers would hold all scores.

A sink is a learnt score for each head that takes its share of the softmax and adds nothing: what
one more key gives, if its value is zero. Queries and keys get one more dimension, in which each
query carries its head's sink, that key a one, and all other keys zero. So transformers' models of
`_FAMILIES`, which know eager attention only (heads x S x S scores), go through
`scaled_dot_product_attention`, sliding windows in blocks of their own width.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import eager_mask

_FAMILIES = ("gpt_oss", "granite_swa", "granitemoe_swa")  # whose layers all have sinks, and no more
_NAME = "ospruner_sinks"
_ALIGNED = 8  # dimensions of a head: what flash and memory-efficient kernels take a multiple of


def takes_sinks_as_keys(config: PreTrainedConfig) -> bool:
    """Whether a decoder has sinks that would go through eager attention."""
    return config.model_type in _FAMILIES and config._attn_implementation in ("eager", _NAME)


@contextmanager
def sinks_as_keys(config: PreTrainedConfig) -> Iterator[None]:
    """Decoders of this configuration hold no scores here; a no-op where there are no sinks.

    Of whole texts, without padding before them.
    """
    before = config._attn_implementation
    if takes_sinks_as_keys(config):
        config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def _mask(**arguments: Any) -> Tensor | None:
    """What transformers gives eager attention; None for "causal, in the layer's window"."""
    plain = arguments["attention_mask"] is None and arguments["allow_is_causal_skip"]
    if plain and arguments["q_length"] == arguments["kv_length"]:
        return None
    return eager_mask(**arguments)


def _attend(
    module: torch.nn.Module,
    query: Tensor,  # (B, heads, T, D)
    key: Tensor,  # (B, KV, S, D)
    value: Tensor,
    attention_mask: Tensor | None,  # (B, 1, T, S), added to scores; None with S = T: causal
    *,
    scaling: float,
    s_aux: Tensor,  # (heads,), the sinks
    sliding_window: int | None = None,  # tokens that a token sees, itself included; None for all
    **_: Any,  # also dropout, which is 0 here
) -> tuple[Tensor, None]:
    """Attention as transformers' layers call it: (B, T, heads, D), and no scores."""
    B, heads, T, D = query.shape
    room = -(D + 1) % _ALIGNED
    sinks = (s_aux / scaling).to(query.dtype)[None, :, None, None].expand(B, heads, T, 1)
    query = F.pad(torch.cat([query, sinks], dim=-1), (0, room))
    sink = F.pad(key.new_ones(1), (D, room)).expand(B, key.shape[1], 1, -1)  # as a key
    key, value = (F.pad(one, (0, 1 + room)) for one in (key, value))
    if attention_mask is None and sliding_window is not None and sliding_window < T:
        out = _in_blocks(query, key, value, sink, sliding_window, scaling)
    else:
        key, value = torch.cat([sink, key], dim=2), F.pad(value, (0, 0, 1, 0))
        how: dict[str, Any] = {"scale": scaling, "enable_gqa": True}
        if attention_mask is None:
            # One more query, so that the sink's key is in the past of all others.
            query, how["is_causal"] = F.pad(query, (0, 0, 1, 0)), True
        else:
            how["attn_mask"] = F.pad(attention_mask, (1, 0)).to(query.dtype)
        out = F.scaled_dot_product_attention(query, key, value, **how)[:, :, -T:]
    return out[..., :D].transpose(1, 2).contiguous(), None


def _in_blocks(
    query: Tensor,  # (B, heads, T, E)
    key: Tensor,  # (B, KV, T, E)
    value: Tensor,
    sink: Tensor,  # (B, KV, 1, E)
    window: int,
    scaling: float,
) -> Tensor:
    """Causal attention in a window of W tokens, (B, heads, T, E), W queries at a time.

    The queries of all heads that share keys are put in a row, so that no keys are repeated.
    """
    groups, found = query.shape[1] // key.shape[1], []
    for start in range(0, query.shape[2], window):
        end, first = min(start + window, query.shape[2]), max(0, start - window + 1)
        rows = torch.arange(start, end, device=key.device)[:, None]
        columns = torch.arange(first, end, device=key.device)
        seen = F.pad((columns <= rows) & (columns > rows - window), (1, 0), value=True)
        out = F.scaled_dot_product_attention(
            query[:, :, start:end].unflatten(1, (-1, groups)).flatten(2, 3),
            torch.cat([sink, key[:, :, first:end]], dim=2),
            F.pad(value[:, :, first:end], (0, 0, 1, 0)),
            attn_mask=seen.repeat(groups, 1),
            scale=scaling,
        )  # (B, KV, heads / KV x W, E)
        found.append(out.unflatten(2, (groups, -1)).flatten(1, 2))
    return torch.cat(found, dim=2)


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, _mask)
