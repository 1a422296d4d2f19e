"""Rows that decode side by side on one cache, in which the last column is the same for all.

Where every layer attends to everything, the cache is written in place and its rows can be copied
and joined; attention of single new tokens does not copy keys and values for each query head, which
on a CPU is 2-4x faster, and on a GPU saves gigabytes a layer. Other bases (sliding windows,
recurrent states) keep transformers' own kinds of caches: their rows are only ever dropped.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ospruner.bases import input_device

from ..interface import TokenCount

_NAME = "ospruner_grouped"
_MASK_NUMBERS = 2**24  # of a pass of several tokens: longer texts take several passes


def _grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # (B, Hq, S, D)
    key: torch.Tensor,  # (B, Hkv, L, D)
    value: torch.Tensor,  # (B, Hkv, L, D)
    attention_mask: torch.Tensor | None,  # additive, (B, 1, S, L)
    dropout: float = 0.0,
    scaling: float | None = None,  # factor on the scores; 1/sqrt(D) by default
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers' sdpa attention, but masked query heads share their keys and values."""
    B, Hq, S, D = query.shape
    Hkv = key.shape[1]
    many = S > 1 and query.device.type != "cpu"  # masked GQA: the kernel that keeps all scores
    if attention_mask is None or kwargs.get("position_bias") is not None or many:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
    if S == 1:
        grouped = query.view(B, Hkv, Hq // Hkv, D) * (D**-0.5 if scaling is None else scaling)
        scores = torch.matmul(grouped, key.transpose(-1, -2)).add_(attention_mask)  # (B, Hkv, G, L)
        shares = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        out = torch.matmul(shares.to(value.dtype), value).view(B, Hq, 1, value.shape[-1])
    else:
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=Hq != Hkv
        )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, _grouped_attention)


@contextmanager
def attention_for(model: PreTrainedModel, packed: bool) -> Iterator[None]:
    """Uses this attention in place of sdpa for packed rows; masks must be 4-D or None there."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    if packed and before == "sdpa":
        config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def spare_columns(columns: int) -> int:
    """How many columns more than it needs a layer takes when it grows."""
    return max(64, columns // 4)


class SlotLayer(DynamicLayer):
    """A layer that keeps spare columns, so that a decode step copies nothing.

    `keys` and `values` are views (B, heads, columns, head size) of two larger buffers, which lie
    where the layer computes; rows may be named from any device.
    """

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the new columns and returns all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.buffers = [key_states[:, :, :0], value_states[:, :, :0]]
            self.columns = 0
        start, end = self.columns, self.columns + key_states.shape[-2]
        for n, states in enumerate((key_states, value_states)):
            if end > self.buffers[n].shape[-2]:
                grown = _room(self.buffers[n], len(states), end)
                grown[:, :, :start] = self.buffers[n][:, :, :start]
                self.buffers[n] = grown
            self.buffers[n][:, :, start:end] = states
        return self._show(end)

    @classmethod
    def joined(
        cls, pieces: Sequence[tuple[SlotLayer, torch.Tensor, slice]], columns: int
    ) -> SlotLayer:
        """A layer of rows of others, all of which end in its last column.

        Pieces are layers, which of their rows (a row may come several times) and columns.
        """
        layer = copy.copy(pieces[0][0])
        layer.buffers = []
        for n, like in enumerate(pieces[0][0].buffers):
            new, start = _room(like, sum(len(rows) for _, rows, _ in pieces), columns), 0
            for other, rows, kept in pieces:
                part = other.buffers[n][:, :, kept]
                end, gap = start + len(rows), columns - part.shape[2]
                new[start:end, :, :gap] = 0  # hidden, but read: it must be finite
                to = new[start:end, :, gap:columns]
                torch.index_select(part, 0, rows.to(like.device), out=to)
                start = end
            layer.buffers.append(new)
        layer._show(columns)
        return layer

    def _show(self, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.columns = columns
        self.keys, self.values = keys, values = [one[:, :, :columns] for one in self.buffers]
        return keys, values


def _room(like: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """An empty buffer (rows, heads, columns and some, head size)."""
    return like.new_empty(rows, like.shape[1], columns + spare_columns(columns), like.shape[3])


class RowBatch:
    """Rows that decode side by side; `packed` where all layers are slots, and take any mask."""

    def __init__(self, model: PreTrainedModel, count: TokenCount, packed: bool) -> None:
        self.model: Any = model
        self.count = count
        self.packed = packed
        self.device = input_device(model)
        self.cache = DynamicCache(config=model.config)
        if packed:
            self.cache.layers = [SlotLayer() for _ in self.cache.layers]
        self.seen = torch.zeros(0, 0, dtype=torch.bool)  # (B, columns) which hold a row's tokens

    @property
    def columns(self) -> int:
        """How many columns are filled."""
        return self.seen.shape[1]

    def feed(self, ids: torch.Tensor, real: torch.Tensor | None = None) -> torch.Tensor:
        """Runs further tokens of every row; the logits (B, V) after the last column.

        Args:
            ids: (B, S).
            real: (B, S) bool: which of them are tokens; others are never seen. Default: all.
        """
        B, S = ids.shape
        real = torch.ones(B, S, dtype=torch.bool) if real is None else real
        start = self.columns
        seen = self.seen if start else real[:, :0]
        positions = (seen.sum(1, keepdim=True) + real.cumsum(1) - 1).clamp(min=0)  # (B, S)
        self.seen = torch.cat([seen, real], dim=1)
        # Where nothing is hidden but what comes after, attention is causal without any mask.
        plain = not start and S > 1 and bool((real[:, 1:] <= real[:, :-1]).all())
        size = S if plain or not self.packed else max(1, _MASK_NUMBERS // (B * (start + S)))
        # Logits of other tokens than the last would, of a long prompt, fill gigabytes.
        last = {"logits_to_keep": 1} if self.model._supports_logits_to_keep() else {}
        for low in range(0, S, size):
            high = min(low + size, S)
            output = self.model(
                input_ids=ids[:, low:high].to(self.device),
                attention_mask=None if plain else self._mask(start + low, start + high),
                position_ids=positions[:, low:high].to(self.device),
                past_key_values=self.cache,
                use_cache=True,
                **last,
            )
        logits: torch.Tensor = output.logits[:, -1]
        computed = int(real.sum())
        self.count.computed += computed
        self.count.padding += real.numel() - computed
        return logits

    def _mask(self, start: int, end: int) -> torch.Tensor | None:
        """What the columns from `start` to `end` see of those before `end`."""
        seen = self.seen[:, :end].to(self.device)
        if not self.packed:
            return seen.long()
        visible = seen[:, None, None]  # (B, 1, 1, end)
        if end - start > 1:
            columns = torch.arange(end, device=self.device)
            own = columns[start:, None]
            # A column of padding sees itself, so that no softmax is over nothing.
            visible = (visible & (columns < own)) | (columns == own)  # (B, 1, S, end)
        zero = torch.zeros((), dtype=self.model.dtype, device=self.device)
        return torch.where(visible, zero, torch.finfo(zero.dtype).min)

    def take(self, rows: Sequence[int]) -> RowBatch:
        """A batch of some of the rows; of one that is not packed nothing else is left."""
        if self.packed:
            return joined([(self, rows, None)])
        index: Any = torch.tensor(rows)
        self.cache.reorder_cache(index)
        self.seen = self.seen[index]
        return self


def joined(parts: Sequence[tuple[RowBatch, Sequence[int], Sequence[int] | None]]) -> RowBatch:
    """A batch of rows of packed batches, all of which end in the same column.

    Each part is a batch, which of its rows (a row may come several times), and for each row the
    column before which it is copied, or None for all.
    """
    pieces: list[tuple[Any, torch.Tensor, slice]] = []
    seen = []
    for batch, rows, ends in parts:
        index = torch.tensor(rows)
        sees = batch.seen[index]
        if ends is not None:
            sees = sees[:, : max(ends)]
            sees &= torch.arange(max(ends)) < torch.tensor(ends)[:, None]
        first = int(sees.any(0).int().argmax())  # nobody looks at what lies before
        pieces.append((batch.cache.layers, index, slice(first, sees.shape[1])))
        seen.append(sees[:, first:])
    columns = max(part.shape[1] for part in seen)
    new = copy.copy(parts[0][0])
    new.seen = torch.cat([F.pad(part, (columns - part.shape[1], 0)) for part in seen])
    new.cache = copy.copy(new.cache)
    new.cache.layers = [
        SlotLayer.joined([(layers[n], index, kept) for layers, index, kept in pieces], columns)
        for n in range(len(new.cache.layers))
    ]
    return new


def padded(
    texts: Sequence[Sequence[int]], at_left: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts as ids (B, S), and which of these are real."""
    rows = [torch.as_tensor(text, dtype=torch.long) for text in texts]
    side = "left" if at_left else "right"
    ids = pad_sequence(rows, batch_first=True, padding_value=-1, padding_side=side)
    return ids.clamp(min=0), ids >= 0
