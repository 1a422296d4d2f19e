"""How the policy is computed while it trains: what its head says at step ends, as one module.

Of the last layer's output only the rows at step ends are read. Its keys and values are needed
everywhere, but queries, output projection and MLP only there: about one token in fifteen. Written
out for Llama's layer, which Qwen2 shares; other layers take the ordinary way, with equal results.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaModel, rotate_half
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model

from modeling_ospruner.policy_ospruner import StoppingPolicy

from .sinks import sinks_as_keys


class FusedKernels(TorchFunctionMode):
    """Keeps attention and experts on CUDA from kernels that are slow and hold much.

    The attention kernel that holds its scores, heads x S x S numbers ("math"), is the only one for
    grouped heads that are not both half precision and without a mask: with S = 15,000 and 28 heads
    it holds 25 GB a trace. Keys and values that are repeated for each head may go to the
    memory-efficient kernel. And the product of tokens with their experts is none of those that
    autocast knows: it would be computed in float32, as the weights are stored.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Calls `func`, with keys and values repeated, or experts cast, where that is needed."""
        kwargs = kwargs or {}
        if func is torch._grouped_mm and torch.is_autocast_enabled(args[0].device.type):
            dtype = torch.get_autocast_dtype(args[0].device.type)
            args = tuple(one.to(dtype) for one in args)
        if func is F.scaled_dot_product_attention and kwargs.get("enable_gqa"):
            query, key, value = args  # (B, heads, T, D), (B, KV, S, D) twice
            half = torch.is_autocast_enabled(query.device.type) or query.itemsize == 2
            if kwargs.get("attn_mask") is not None or not half:
                groups = query.shape[1] // key.shape[1]
                args = query, *(one.repeat_interleave(groups, dim=1) for one in (key, value))
                kwargs = {**kwargs, "enable_gqa": False}
        return func(*args, **kwargs)


def fused_kernels(device: torch.device) -> AbstractContextManager[Any]:
    """`FusedKernels` on CUDA; other devices need nothing."""
    return FusedKernels() if device.type == "cuda" else nullcontext()


@contextmanager
def no_scores(decoder: Any, device: torch.device) -> Iterator[None]:
    """In this block a decoder's attention holds no scores, heads x S x S numbers.

    Args:
        decoder: of whole texts, without padding before them; None for none.
        device: where it computes.
    """
    sinks = nullcontext() if decoder is None else sinks_as_keys(decoder.config)
    with fused_kernels(device), sinks:
        yield


def step_outputs(policy: StoppingPolicy, states: Any, positions: Tensor) -> Tensor:
    """What the policy's head says at step ends.

    Args:
        policy: the policy.
        states: `States` of traces padded at their right ends. As the policy is causal, the padding
            needs no mask.
        positions: (B, T) index in S of each step's last token.

    Returns:
        (B, T, K) float32: a logit, or with the head "price" what `price_logits` takes.
    """
    hidden = states.hidden
    with no_scores(policy.tail, hidden.device):
        if policy.queries:
            return policy.outputs(hidden, positions, keys=states.keys, columns=positions)
        if _takes_fast_tail(policy.tail):
            return _fast_outputs(policy, hidden, positions)
        outputs = policy.outputs(hidden)  # (B, S, K)
        return outputs.gather(1, positions[..., None].expand(*positions.shape, outputs.shape[2]))


def _takes_fast_tail(tail: nn.Module | None) -> bool:
    """Whether the last layer is Llama's, and no mask means "causal" to the others: sdpa alone."""
    if not isinstance(tail, LlamaModel | Qwen2Model):
        return False
    sliding = isinstance(tail, Qwen2Model) and tail.config.use_sliding_window
    return tail.config._attn_implementation == "sdpa" and not sliding


def _fast_outputs(policy: StoppingPolicy, hidden: Tensor, positions: Tensor) -> Tensor:
    tail: Any = policy.tail
    hidden = hidden.to(tail.dtype)
    everywhere = torch.arange(hidden.shape[1], device=hidden.device)[None]  # (1, S)
    rotary = tail.rotary_emb(hidden, everywhere)  # cos, sin (1, S, D)
    for layer in tail.layers[:-1]:
        # `forward` itself: the policy's hooks are for decoders that scale their embeddings.
        hidden = layer.forward(
            hidden, attention_mask=None, position_ids=everywhere, position_embeddings=rotary
        )
    at_steps = _last_layer(tail.layers[-1], hidden, positions, rotary)  # (B, T, H)
    with torch.autocast(hidden.device.type, enabled=False):
        outputs: Tensor = policy.head(tail.norm(at_steps).float())
    return outputs


def _last_layer(
    layer: Any, hidden: Tensor, positions: Tensor, rotary: tuple[Tensor, Tensor]
) -> Tensor:
    """The layer's output (B, T, H) at `positions`, from its whole input (B, S, H)."""
    attention = layer.self_attn
    B, S, H = hidden.shape
    T, D = positions.shape[1], attention.head_dim
    index = positions[..., None].expand(B, T, H)
    normed = layer.input_layernorm(hidden)  # (B, S, H)
    keys = attention.k_proj(normed).view(B, S, -1, D).transpose(1, 2)  # (B, KV, S, D)
    values = attention.v_proj(normed).view(B, S, -1, D).transpose(1, 2)
    queries = attention.q_proj(normed.gather(1, index)).view(B, T, -1, D).transpose(1, 2)
    cos, sin = rotary  # (1, S, D)
    keys = keys * cos[:, None] + rotate_half(keys) * sin[:, None]
    cos_at, sin_at = cos[0][positions][:, None], sin[0][positions][:, None]  # (B, 1, T, D)
    queries = queries * cos_at + rotate_half(queries) * sin_at
    visible = torch.arange(S, device=hidden.device) <= positions[..., None]  # (B, T, S)
    seen = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=visible[:, None], scale=attention.scaling, enable_gqa=True
    )  # (B, heads, T, D)
    out = hidden.gather(1, index) + attention.o_proj(seen.transpose(1, 2).reshape(B, T, -1))
    mlp_out: Tensor = out + layer.mlp(layer.post_attention_layernorm(out))
    return mlp_out


class TrainedPolicy(nn.Module):
    """A policy that is called with the trunk's states and gives its head's outputs at step ends.

    It is always in eval mode, as when generating: whatever dropout the base has stays off.

    Args:
        policy: the policy.
        half: whether its layers compute in bfloat16; weights, head and loss stay in float32.
        checkpointing: whether its layers keep their inputs alone, and compute the rest again in the
            backward pass.
    """

    _keys_to_ignore_on_save = None  # asked for by transformers' Trainer

    def __init__(self, policy: StoppingPolicy, half: bool = False, checkpointing: bool = False):
        super().__init__()
        self.policy = policy.eval()
        self._half = half
        again = partial(no_scores, policy.tail, policy.head.weight.device)
        for layer in policy.layers if checkpointing else ():
            # Inside the call, after the hook that puts back its input. The contexts are around the
            # forward pass, and around the same again in the backward pass.
            layer.forward = partial(
                checkpoint,
                layer.forward,
                use_reentrant=False,
                context_fn=lambda: (nullcontext(), again()),
            )

    def train(self, mode: bool = True) -> TrainedPolicy:
        """Stays in eval mode."""
        return super().train(False)

    def forward(self, states: Any, positions: Tensor) -> Tensor:
        """(B, T, K) float32; see `step_outputs`."""
        with torch.autocast(states.hidden.device.type, torch.bfloat16, enabled=self._half):
            return step_outputs(self.policy, states, positions)


@contextmanager
def no_denormals() -> Iterator[None]:
    """Counts numbers too small for a float's full precision as 0, on CPUs.

    The gradients of saturated stop probabilities fade through them, and computing on them made a
    training step twice as slow. Threads inherit this from the one that starts them, so begin early.
    """
    for dtype in (np.float32, np.float64):
        np.finfo(dtype)  # NumPy looks at a type when first asked, and would warn
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
