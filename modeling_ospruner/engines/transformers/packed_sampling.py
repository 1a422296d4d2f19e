"""Continuous batched sampling: finished rows are replaced while the others go on decoding."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from modeling_ospruner.engines.interface import Sampled, SamplingSettings, TokenCount
from modeling_ospruner.formats_ospruner import TokenFormat
from modeling_ospruner.policy_ospruner import input_device
from modeling_ospruner.rules_ospruner import last_logits

from .cache import SlotCache
from .packed_forks import prefill_shared
from .rows import SamplingRow, batch_noise, choose, run_alone, uniforms

_REFILL_SHARE = 8  # replace finished rows once they are one in so many
_MASK_CHUNK = 256


class PackedSampler:
    """Samples rows in slots of one cache, whose last column is the same for all rows.

    A row's tokens fill consecutive columns, ending at the current one; what lies before is
    masked. New rows are prefilled apart and placed so that they end at the current column.

    Args:
        model: a causal LM whose layers all attend to everything.
        num_layers: how many it has.
        slots: rows decoded together.
        settings: how to sample.
        fmt: where the thinking ends.
        eos_ids: ids that end a text.
        count: where tokens are counted.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        num_layers: int,
        slots: int,
        settings: SamplingSettings,
        fmt: TokenFormat,
        eos_ids: frozenset[int],
        count: TokenCount,
    ) -> None:
        self.model = model
        self.num_layers = num_layers
        self.slots = slots
        self.settings = settings
        self.fmt = fmt
        self.eos_ids = eos_ids
        self.count = count
        self.device = input_device(model)
        self.hidden = torch.finfo(model.dtype).min
        self.noise = batch_noise(model)
        self.rows: list[SamplingRow | None] = []

    def run(self, rows: Sequence[SamplingRow], on_done: Callable[[int, Sampled], None]) -> None:
        """Samples all rows, calling `on_done` with each one's index and result."""
        self.on_done = on_done
        self.waiting = deque(rows)
        first = [self.waiting.popleft() for _ in range(min(self.slots, len(self.waiting)))]
        self.rows = list(first)
        self.cache, lengths, logits = self._prefill(first)
        columns = self.cache.columns
        self.lengths = lengths  # (B,) tokens of each row in the cache
        self.mask = self._empty_mask(len(first), columns)
        for slot, length in enumerate(lengths.tolist()):
            self.mask[slot, :, :, columns - length :] = 0
        self.last = torch.zeros(len(first), dtype=torch.long)
        self.states = np.array([row.state for row in first], dtype=np.uint64)
        self.steps = np.zeros(len(first), dtype=np.uint64)
        self._take(torch.arange(len(first)), logits)
        while self._refill():
            self._decode()

    def _decode(self) -> None:
        columns = self.cache.columns
        if columns >= self.mask.shape[-1]:
            grown = self._empty_mask(len(self.rows), columns)
            grown[..., :columns] = self.mask[..., :columns]
            self.mask = grown
        self.mask[..., columns] = 0
        logits = last_logits(
            self.model,
            input_ids=self.last[:, None].to(self.device),
            attention_mask=self.mask[..., : columns + 1],
            position_ids=self.lengths[:, None].to(self.device),
            past_key_values=self.cache,
            use_cache=True,
        )
        self.lengths += 1
        live = sum(row is not None for row in self.rows)
        self.count.computed += live
        self.count.padding += len(self.rows) - live
        self._take(torch.arange(len(self.rows)), logits)

    def _take(self, slots: torch.Tensor, logits: torch.Tensor) -> None:
        """Chooses the next token of the given slots from their logits (K, V)."""
        where = slots.numpy()
        draws = uniforms(self.states[where], self.steps[where])
        tokens, close = (t.cpu() for t in choose(logits, draws, self.settings, self.noise))
        for i in close.nonzero()[:, 0].tolist():
            if (row := self.rows[where[i]]) is not None:
                alone = run_alone(self.model, [*row.prompt, *row.tokens], self.count)
                tokens[i] = choose(alone, draws[i : i + 1], self.settings)[0]
        self.steps[where] += np.uint64(1)
        self.last[slots] = tokens
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            row = self.rows[slot]
            if row is not None and row.push(token, self.settings, self.fmt, self.eos_ids):
                self.rows[slot] = None
                self.on_done(row.index, row.sampled(self.eos_ids))

    def _refill(self) -> bool:
        """Replaces finished rows, or drops them; whether any row is left."""
        free = [slot for slot, row in enumerate(self.rows) if row is None]
        if not free:
            return True
        if self.waiting:
            if len(free) * _REFILL_SHARE < len(self.rows):
                return True
            new = [self.waiting.popleft() for _ in range(min(len(free), len(self.waiting)))]
            self._admit(free[: len(new)], new)
            return self._refill()
        if len(free) == len(self.rows):
            return False
        if len(free) * 4 >= len(self.rows):
            self._keep([slot for slot, row in enumerate(self.rows) if row is not None])
        return True

    def _keep(self, slots: list[int]) -> None:
        index = torch.tensor(slots)
        self.rows = [self.rows[slot] for slot in slots]
        self.cache.select(index)
        self.mask = self.mask[index.to(self.device)]
        self.lengths, self.last = self.lengths[index], self.last[index]
        self.states, self.steps = self.states[slots], self.steps[slots]

    def _admit(self, slots: list[int], new: list[SamplingRow]) -> None:
        cache, lengths, logits = self._prefill(new)
        going = [int(self.lengths[i]) for i, row in enumerate(self.rows) if row is not None]
        needed = max([cache.columns, *going])
        if needed > self.cache.columns or self.cache.columns > needed + _MASK_CHUNK // 4:
            first = max(0, self.cache.columns - needed)
            old, columns = self.cache.columns, needed
            self.cache.realign(first, columns)
            moved = self._empty_mask(len(self.rows), columns)
            moved[..., columns - (old - first) : columns] = self.mask[..., first:old]
            self.mask = moved
        index = torch.tensor(slots)
        self.cache.place(index, cache)
        columns = self.cache.columns
        for slot, length, row in zip(slots, lengths.tolist(), new, strict=True):
            self.rows[slot] = row
            self.mask[slot] = self.hidden
            self.mask[slot, :, :, columns - length : columns] = 0
            self.states[slot], self.steps[slot] = row.state, 0
        self.lengths[index] = lengths
        self._take(index, logits)

    def _prefill(self, rows: Sequence[SamplingRow]) -> tuple[SlotCache, torch.Tensor, torch.Tensor]:
        """Runs prompts: their cache, aligned at its last column, lengths (B,) and logits (B, V).

        All but the last tokens run first, shared beginnings once; then one pass gives the logits.
        """
        lengths = torch.tensor([len(row.prompt) for row in rows])
        B, P = len(rows), int(lengths.max())
        cache = SlotCache(self.num_layers)
        if P > 1:
            texts = [row.prompt[:-1] for row in rows]
            cache = prefill_shared(self.model, self.num_layers, texts, self.count)
            cache.shift(P - lengths)
        hidden = torch.arange(P) < (P - lengths)[:, None]  # (B, P)
        mask = torch.zeros(B, 1, 1, P, dtype=self.model.dtype)
        mask.masked_fill_(hidden[:, None, None], self.hidden)
        logits = last_logits(
            self.model,
            input_ids=torch.tensor([[row.prompt[-1]] for row in rows], device=self.device),
            attention_mask=mask.to(self.device),
            position_ids=(lengths - 1)[:, None].to(self.device),
            past_key_values=cache,
            use_cache=True,
        )
        self.count.computed += B
        return cache, lengths, logits

    def _empty_mask(self, rows: int, columns: int) -> torch.Tensor:
        """An additive mask (B, 1, 1, columns and some) that hides everything."""
        shape = (rows, 1, 1, columns + _MASK_CHUNK)
        return torch.full(shape, self.hidden, dtype=self.model.dtype, device=self.device)
