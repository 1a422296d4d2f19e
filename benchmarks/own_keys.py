"""Two forms between "layers" and "queries", for the study `forms.py` alone.

A policy that is queries only attends to keys and values that the base has in its cache. These two
have some of their own, which a serving engine would have to make and keep:

- "own keys at step ends": at step ends the copies' own, of their own states there, stand in the
  place of the base's;
- "own projections": everywhere the copies' own projections, of the base's states that enter each
  layer.

Both equal the base untrained. Their layers are those of Qwen2 in float32; nothing here generates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

from modeling_ospruner import policy_ospruner
from modeling_ospruner.configuration_ospruner import hidden_entering
from modeling_ospruner.policy_ospruner import LayerKeys, Reader, StoppingPolicy

__all__ = ["OWN_KEYS", "step_end_keys", "stream_keys"]

Shown = list[dict[str, Any]]
ToShow = Callable[[StoppingPolicy, Sequence[LayerKeys], Tensor, Tensor | None], Shown]


class _OwnAtStepEnds:
    """The cache of one pass: at step ends the copies' own keys and values, elsewhere the base's.

    Args:
        known: keys and values of the base, by layer.
        columns: (B or 1, T) of the step ends; 0, which is never one, on padding.
    """

    def __init__(self, known: Sequence[LayerKeys], columns: Tensor) -> None:
        self._known, self._columns = known, columns

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        known = self._known[layer_idx]
        return self._put(known.keys, keys), self._put(known.values, values)

    def _put(self, base: Tensor, own: Tensor) -> Tensor:
        """(B, KV, S, D) with `own` (B, KV, T, D) at the step ends."""
        slots = torch.where(self._columns > 0, self._columns, base.shape[2])  # padding: one beyond
        places = slots[:, None, :, None].expand(own.shape)
        return F.pad(base.to(own.dtype), (0, 0, 0, 1)).scatter(2, places, own)[:, :, :-1]


def _with_own(to_show: ToShow) -> ToShow:
    def show(
        policy: StoppingPolicy, keys: Sequence[LayerKeys], columns: Tensor, mask: Tensor | None
    ) -> Shown:
        cache = _OwnAtStepEnds(keys, columns)
        return [{**one, "past_key_values": cache} for one in to_show(policy, keys, columns, mask)]

    return show


def _keep_keys(layers: nn.ModuleList) -> None:
    """In the place of `_drop_keys`: the copies keep their projections, and train them."""


@contextmanager
def step_end_keys() -> Iterator[None]:
    """Within, policies with tuning "queries" have own keys and values at step ends."""
    show = _with_own(StoppingPolicy._to_show)
    with (
        patch.object(policy_ospruner, "_drop_keys", _keep_keys),
        patch.object(StoppingPolicy, "_to_show", show),
    ):
        yield


class _Stream:
    """In the place of a layer's cache: the reader hears of the state that enters, not of keys.

    Args:
        reader: who listens.
        hidden: (B, S, H).
        positions: (B or 1, S).
    """

    def __init__(self, reader: Reader, hidden: Tensor, positions: Tensor) -> None:
        self._reader, self._hidden = reader, hidden
        self._positions = positions.expand(hidden.shape[:2]).to(hidden.dtype)

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        as_one_head = LayerKeys(self._hidden[:, None], self._positions[:, None, :, None])
        self._reader.heard(as_one_head)
        return keys, values


def _hear_stream(
    reader: Reader, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """In the place of `Reader._before_layer`."""
    hidden = hidden_entering(args, kwargs).detach()
    if module is reader._first:
        reader.hidden, reader.keys = hidden, []
    return args, {**kwargs, "past_key_values": _Stream(reader, hidden, kwargs["position_ids"])}


def _with_projections(to_show: ToShow) -> ToShow:
    def show(
        policy: StoppingPolicy, streams: Sequence[LayerKeys], columns: Tensor, mask: Tensor | None
    ) -> Shown:
        keys = [
            _projected(policy.tail, layer, one.keys[:, 0], one.values[:, 0, :, 0].long())
            for layer, one in zip(policy.layers, streams, strict=True)
        ]
        return to_show(policy, keys, columns, mask)

    return show


def _projected(tail: Any, layer: Any, stream: Tensor, positions: Tensor) -> LayerKeys:
    """What a copy's projections make of the base's states (B, S, H) at positions (B, S)."""
    attention, normed = layer.self_attn, layer.input_layernorm(stream)
    keys, values = (
        projection(normed).unflatten(2, (-1, attention.head_dim)).transpose(1, 2)
        for projection in (attention.k_proj, attention.v_proj)
    )
    keys, _ = apply_rotary_pos_emb(keys, keys, *tail.rotary_emb(stream, positions))
    return LayerKeys(keys, values)


@contextmanager
def stream_keys() -> Iterator[None]:
    """Within, policies with tuning "queries" project the base's states to keys and values."""
    show = _with_projections(StoppingPolicy._to_show)
    with (
        patch.object(policy_ospruner, "_drop_keys", _keep_keys),
        patch.object(Reader, "_before_layer", _hear_stream),
        patch.object(StoppingPolicy, "_to_show", show),
    ):
        yield


OWN_KEYS = {
    "queries, own keys at step ends": step_end_keys,
    "queries, own projections": stream_keys,
}
