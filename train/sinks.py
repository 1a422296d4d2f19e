"""Attention with sinks in torch's fused kernels, where transformers would hold all scores.

A sink is a learnt score for each head that takes its share of the softmax and adds nothing: what
one more key gives, if its value is zero. Queries and keys get one more dimension, in which each
query carries its head's sink, that key a one, and all other keys zero. So transformers' models of
`_FAMILIES`, which know eager attention only (heads x S x S scores), go through
`scaled_dot_product_attention`, sliding windows in blocks of their own width.
"""

from __future__ import annotations

import threading
from collections import Counter
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


class _Thread(threading.local):
    """Whether this thread runs whole texts, without padding, and so needs no masks."""

    whole = False


_thread = _Thread()
_users: Counter[int] = Counter()
_lock = threading.Lock()


@contextmanager
def sinks_as_keys(config: PreTrainedConfig) -> Iterator[None]:
    """No scores are held by decoders of this configuration; a no-op where there are no sinks.

    Other threads may use the decoder meanwhile, and go its ordinary way: with masks.

    Args:
        config: that the decoder's layers read.
    """
    if not takes_sinks_as_keys(config):
        yield
        return
    with _lock:
        _users[id(config)] += 1
        config._attn_implementation = _NAME
    before, _thread.whole = _thread.whole, True
    try:
        yield
    finally:
        _thread.whole = before
        with _lock:
            _users[id(config)] -= 1
            if not _users[id(config)]:
                config._attn_implementation = "eager"


def _mask(**arguments: Any) -> Tensor | None:
    """What transformers gives eager attention; None for "causal, in the layer's window"."""
    plain = arguments["attention_mask"] is None and arguments["allow_is_causal_skip"]
    if _thread.whole and plain and arguments["q_length"] == arguments["kv_length"]:
        return None
    return eager_mask(**arguments)


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    s_aux: Tensor,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' layers call it.

    Args:
        module: the layer's attention.
        query: (B, heads, T, D).
        key: (B, KV, S, D).
        value: (B, KV, S, D).
        attention_mask: (B, 1, T, S), added to the scores; None with S = T: causal.
        scaling: of the scores.
        s_aux: (heads,) the sinks.
        sliding_window: how many tokens a token sees, itself included, without a mask; None for all.
        dropout: as the layer says.

    Returns:
        (B, T, heads, D), and no scores.
    """
    B, heads, T, D = query.shape
    room = -(D + 1) % _ALIGNED
    sinks = (s_aux / scaling).to(query.dtype)[None, :, None, None]
    query = F.pad(torch.cat([query, sinks.expand(B, heads, T, 1)], dim=-1), (0, room))
    key, value = (F.pad(one, (0, 1 + room)) for one in (key, value))
    sink = F.pad(key.new_ones(1), (D, room))  # as a key
    if attention_mask is None and sliding_window is not None and sliding_window < T:
        out = _in_blocks(query, key, value, sink, sliding_window, scaling, dropout)
        return out[:, :, :T, :D].transpose(1, 2).contiguous(), None
    key = torch.cat([sink.expand(B, key.shape[1], 1, -1), key], dim=2)
    value = F.pad(value, (0, 0, 1, 0))
    if attention_mask is None:
        # One more query, so that the sink's key is in the past of all others.
        query = F.pad(query, (0, 0, 1, 0))
        mask = None
    else:
        mask = F.pad(attention_mask, (1, 0)).to(query.dtype)
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=True,
    )[:, :, -T:]
    return out[..., :D].transpose(1, 2).contiguous(), None


def _in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink: Tensor,
    window: int,
    scaling: float,
    dropout: float,
) -> Tensor:
    """Causal attention in a window of W tokens, (B, heads, n W, E) with n W at least T.

    The queries of a block of W tokens see keys of their own block and the one before. No query sees
    the first key of the one before, so the sink's stands in its place. The queries of all heads
    that share keys are put in a row, so that no keys are repeated.

    Args:
        query: (B, heads, T, E).
        key: (B, KV, T, E).
        value: (B, KV, T, E).
        sink: (E,), the sink's key.
        window: W.
        scaling: of the scores.
        dropout: of the probabilities.
    """
    B, heads, T, E = query.shape
    KV, n = key.shape[1], -(-T // window)
    query, own, own_values = (
        F.pad(one, (0, 0, 0, n * window - T)).unflatten(2, (n, window))
        for one in (query, key, value)
    )  # (B, heads or KV, n, W, E)
    # (B, KV, heads / KV, n, W, E), then (B n, KV, heads / KV x W, E)
    query = query.unflatten(1, (KV, -1)).movedim(3, 1).flatten(3, 4).flatten(0, 1)
    past, past_values = (F.pad(one, (0, 0, 0, 0, 1, -1)) for one in (own, own_values))
    keys = torch.cat([sink.expand(B, KV, n, 1, E), past[:, :, :, 1:], own], dim=3)
    values = torch.cat(
        [past_values.new_zeros(()).expand(B, KV, n, 1, E), past_values[:, :, :, 1:], own_values],
        dim=3,
    )
    # (B n, KV, 2 W, E)
    keys, values = (one.transpose(1, 2).flatten(0, 1) for one in (keys, values))
    rows, columns = (torch.arange(size, device=key.device) for size in (window, 2 * window))
    near = (columns > rows[:, None]) & (columns <= rows[:, None] + window)
    begun = (columns >= window) | (torch.arange(n, device=key.device) > 0)[:, None, None, None]
    visible = (near & begun) | (columns == 0)  # (n, 1, W, 2 W)
    out = F.scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=visible.repeat(B, 1, heads // KV, 1),
        dropout_p=dropout,
        scale=scaling,
    )  # (B n, KV, heads / KV x W, E)
    out = out.unflatten(0, (B, n)).unflatten(3, (heads // KV, window))
    return out.movedim(1, 3).flatten(1, 2).flatten(2, 3)


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, _mask)
