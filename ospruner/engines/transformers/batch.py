"""Rows that decode side by side on one cache, in which the last column is the same for all.

Where every layer attends to everything, the cache is written in place and its rows can be copied
and joined; attention of few tokens does not copy keys and values for each query head, which on a
CPU is 2-4x faster, and on a GPU saves gigabytes a layer. Other bases keep transformers' own caches.
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
_FEW_QUERIES = 128  # of a pass: up to so many, all scores on the keys as they lie fit
MASK_NUMBERS = 2**24  # of a pass of several tokens: more of them take several passes


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
    Hkv, L = key.shape[1:3]
    if attention_mask is None or kwargs.get("position_bias") is not None or S > _FEW_QUERIES:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
    grouped = query.reshape(B, Hkv, -1, D) * (D**-0.5 if scaling is None else scaling)
    scores = torch.matmul(grouped, key.transpose(-1, -2)).view(B, Hkv, -1, S, L)
    scores += attention_mask[:, :, None]
    shares = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    out = torch.matmul(shares.to(value.dtype).view(B, Hkv, -1, L), value).view(B, Hq, S, -1)
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
        return self.show(end)

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
        layer.show(columns)
        return layer

    def show(self, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first columns; what is written next stands behind them."""
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
        self.cache: Any = DynamicCache(config=model.config)
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
        self.seen = self.seen if start else real[:, :0]
        positions = (self.seen.sum(1, keepdim=True) + real.cumsum(1) - 1).clamp(min=0)  # (B, S)
        # Where nothing is hidden but what comes after, attention is causal without any mask.
        plain = not start and S > 1 and bool((real[:, 1:] <= real[:, :-1]).all())
        size = S if plain or not self.packed else max(1, MASK_NUMBERS // (B * (start + S)))
        for low in range(0, S, size):
            some = slice(low, low + size)
            self.seen = torch.cat([self.seen, real[:, some]], dim=1)
            mask = None if plain else self._mask(start + low)
            logits = self._run(ids[:, some], positions[:, some], mask)
        return logits[:, -1]

    def branch(
        self, ids: torch.Tensor, forks: torch.Tensor, ends: torch.Tensor, each: int = 1
    ) -> torch.Tensor:
        """Runs further tokens of forks, which see the first columns of their row and their own.

        Args:
            ids: (B, n * each).
            forks: (B, F) of all columns of forks, these last: which one of its row; -1 is padding.
            ends: (B, K) how many of the first columns each fork sees.
            each: how many tokens of each fork follow one another.

        Returns:
            The logits (B, n, V) after the last token of each.
        """
        S, trunk = ids.shape[1], self.columns + ids.shape[1] - forks.shape[1]
        self.seen = torch.cat([self.seen, forks[:, -S:] >= 0], dim=1)
        columns = torch.arange(self.columns, device=self.device)
        forks, own = forks.to(self.device), columns[-S:, None]
        fork = forks[:, -S:]  # (B, S)
        sees = ends.to(self.device).gather(1, fork.clamp(min=0))[..., None]
        mine = (forks[:, None] == fork[..., None]) & (columns[trunk:] <= own)
        visible = torch.cat([columns[:trunk] < sees, mine], dim=-1)  # (B, S, columns)
        kept = torch.arange(each - 1, S, each)
        return self._run(ids, visible.sum(-1) - 1, self._additive(visible[:, None]), kept)

    def _run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
        kept: torch.Tensor | int = 1,
    ) -> torch.Tensor:
        """The logits of a pass, of the last columns or of those that are kept."""
        # Logits of other tokens than the last would, of a long prompt, fill gigabytes.
        supported = self.model._supports_logits_to_keep()
        logits: torch.Tensor = self.model(
            input_ids=ids.to(self.device),
            attention_mask=mask,
            position_ids=positions.to(self.device),
            past_key_values=self.cache,
            use_cache=True,
            **({"logits_to_keep": kept} if supported else {}),
        ).logits
        computed = int(self.seen[:, -ids.shape[1] :].sum())
        self.count.computed += computed
        self.count.padding += ids.numel() - computed
        return logits if supported or isinstance(kept, int) else logits[:, kept]

    def _additive(self, visible: torch.Tensor) -> torch.Tensor:
        return (~visible).to(self.model.dtype).mul_(torch.finfo(self.model.dtype).min)

    def _mask(self, start: int) -> torch.Tensor | None:
        """What the columns from `start` see."""
        seen = self.seen.to(self.device)
        if not self.packed:
            return seen.long()
        visible = seen[:, None, None]  # (B, 1, 1, columns)
        if self.columns - start > 1:
            columns = torch.arange(self.columns, device=self.device)
            own = columns[start:, None]
            # A column of padding sees itself, so that no softmax is over nothing.
            visible = (visible & (columns < own)) | (columns == own)  # (B, 1, S, columns)
        return self._additive(visible)

    def crop(self, columns: int) -> None:
        """Forgets what comes after so many columns."""
        self.seen = self.seen[:, :columns]
        for layer in self.cache.layers:
            layer.show(columns)

    def take(self, rows: Sequence[int]) -> RowBatch:
        """A batch of some of the rows; of one that is not packed nothing else is left."""
        if self.packed:
            return joined([(self, rows)])
        index: Any = torch.tensor(rows)
        self.cache.reorder_cache(index)
        self.seen = self.seen[index]
        return self


def joined(parts: Sequence[tuple[RowBatch, Sequence[int]]]) -> RowBatch:
    """A batch of some rows (one may come several times) of packed batches; all end together."""
    pieces: list[tuple[Any, torch.Tensor, slice]] = []
    seen = []
    for batch, rows in parts:
        index = torch.tensor(rows)
        sees = batch.seen[index]
        first = int(sees.any(0).int().argmax())  # nobody looks at what lies before
        pieces.append((batch.cache.layers, index, slice(first, batch.columns)))
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
    ids = table(texts, -1, "left" if at_left else "right")
    return ids.clamp(min=0), ids >= 0


def table(rows: Sequence[Sequence[int]], filling: int, side: str = "right") -> torch.Tensor:
    """Rows of numbers as a tensor (B, S), filled up on one side."""
    tensors = [torch.as_tensor(row, dtype=torch.long) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=filling, padding_side=side)
