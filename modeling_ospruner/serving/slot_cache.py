"""A key-value cache that is written in place and whose rows can be replaced."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

_CHUNK = 64


class SlotLayer(DynamicLayer):
    """A layer that keeps spare columns, so that a decode step copies nothing.

    `keys` and `values` are views (B, heads, columns, head size) of larger buffers.
    """

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the new columns and returns all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            batch, heads, _, size = key_states.shape
            self.key_buffer = key_states.new_zeros(batch, heads, 0, size)
            self.value_buffer = value_states.new_zeros(batch, heads, 0, value_states.shape[-1])
            self.columns = 0
        start, end = self.columns, self.columns + key_states.shape[-2]
        if end > self.key_buffer.shape[-2]:
            capacity = max(end + _CHUNK, end * 5 // 4)
            self.key_buffer = _grown(self.key_buffer, start, capacity)
            self.value_buffer = _grown(self.value_buffer, start, capacity)
        self.key_buffer[:, :, start:end] = key_states
        self.value_buffer[:, :, start:end] = value_states
        return self._show(end)

    def select(self, rows: torch.Tensor) -> None:
        """Keeps the given rows only, in this order."""
        self.key_buffer = self.key_buffer.index_select(0, rows)
        self.value_buffer = self.value_buffer.index_select(0, rows)
        self._show(self.columns)

    def shift(self, by: torch.Tensor) -> None:
        """Moves each row's columns to the right by its entry of (B,); what leaves is lost."""
        source = (torch.arange(self.columns, device=by.device) - by[:, None]).clamp(min=0)
        for name in ("key_buffer", "value_buffer"):
            old = vars(self)[name][:, :, : self.columns]  # (B, H, L, D)
            index = source[:, None, :, None].expand_as(old)
            setattr(self, name, old.gather(2, index))
        self._show(self.columns)

    def realign(self, first: int, columns: int) -> None:
        """Drops the columns before `first` and moves the rest to end at column `columns`."""
        moved = self.columns - first
        for name in ("key_buffer", "value_buffer"):
            old = vars(self)[name]
            new = old.new_zeros(*old.shape[:2], columns + _CHUNK, old.shape[-1])
            new[:, :, columns - moved : columns] = old[:, :, first : self.columns]
            setattr(self, name, new)
        self._show(columns)

    def place(self, rows: torch.Tensor, other: SlotLayer) -> None:
        """Overwrites rows with those of another cache, aligned at the last column."""
        start = self.columns - other.columns
        self.key_buffer[rows, :, start : self.columns] = other.key_buffer[:, :, : other.columns]
        self.value_buffer[rows, :, start : self.columns] = other.value_buffer[:, :, : other.columns]

    def _show(self, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.columns = columns
        keys, values = self.key_buffer[:, :, :columns], self.value_buffer[:, :, :columns]
        self.keys, self.values = keys, values
        return keys, values


class SlotCache(Cache):
    """One `SlotLayer` a decoder layer; for models whose layers all attend to everything."""

    def __init__(self, num_layers: int) -> None:
        self.slots = [SlotLayer() for _ in range(num_layers)]
        super().__init__(layers=list(self.slots))

    @property
    def columns(self) -> int:
        """How many columns are filled."""
        return self.slots[0].columns

    def select(self, rows: torch.Tensor) -> None:
        """Keeps the given rows only, in this order."""
        for layer in self.slots:
            layer.select(rows)

    def shift(self, by: torch.Tensor) -> None:
        """Moves each row's columns to the right by its entry of (B,); what leaves is lost."""
        for layer in self.slots:
            layer.shift(by)

    def realign(self, first: int, columns: int) -> None:
        """Drops the columns before `first` and moves the rest to end at column `columns`."""
        for layer in self.slots:
            layer.realign(first, columns)

    def place(self, rows: torch.Tensor, other: SlotCache) -> None:
        """Overwrites rows with those of another cache, aligned at the last column."""
        for layer, other_layer in zip(self.slots, other.slots, strict=True):
            layer.place(rows, other_layer)


def _grown(buffer: torch.Tensor, used: int, capacity: int) -> torch.Tensor:
    new = buffer.new_zeros(*buffer.shape[:2], capacity, buffer.shape[-1])
    new[:, :, :used] = buffer[:, :, :used]
    return new
