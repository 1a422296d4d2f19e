"""Continuous batched sampling: finished rows are replaced while the others go on decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from modeling_ospruner.formats_ospruner import TokenFormat
from ospruner.bases import input_device
from ospruner.logits import last_logits

from ..interface import Sampled, SamplingSettings, TokenCount
from .cache import SlotCache, fast_attention
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
        self.cache: SlotCache
        self.mask: torch.Tensor  # (B, 1, 1, columns and some), additive
        self.lengths: torch.Tensor  # (B,) tokens of each row in the cache
        self.last: torch.Tensor  # (B,) tokens to be run next
        self.states: npt.NDArray[np.uint64]  # (B,) what a row's draws come from
        self.steps: npt.NDArray[np.uint64]  # (B,) how many draws it had

    def run(
        self,
        more: Callable[[int], Sequence[SamplingRow]],
        on_done: Callable[[int, Sampled], None],
    ) -> None:
        """Samples rows until there are no more.

        Args:
            more: called between two steps where rows are finished, with the number of free slots;
                gives as many new rows or fewer. The end is where it gives none and none is left.
            on_done: called with each row's index and result.
        """
        self.on_done = on_done
        self.rows = []
        with fast_attention(self.model):
            while self._refill(more):
                self._decode()

    def _decode(self) -> None:
        if self.cache.columns >= self.mask.shape[-1]:
            self._align(max(self._live_lengths()))
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
        live = len(self._live_lengths())
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

    def _refill(self, more: Callable[[int], Sequence[SamplingRow]]) -> bool:
        """Replaces finished rows, or drops them; whether any row is left."""
        while self.rows.count(None) * _REFILL_SHARE >= len(self.rows):
            live = [slot for slot, row in enumerate(self.rows) if row is not None]
            if not live:
                self.rows, self.cache = [], SlotCache(self.num_layers)  # the memory is free
            new = more(self.slots - len(live))
            if new:
                self._admit(new)
            elif live:
                self._keep(live)
                return True
            else:
                return False
        return True

    def _keep(self, slots: list[int]) -> None:
        index = torch.tensor(slots)
        self.rows = [self.rows[slot] for slot in slots]
        self.cache.select(index)
        self.mask = self.mask[index.to(self.device)]
        self.lengths, self.last = self.lengths[index], self.last[index]
        self.states, self.steps = self.states[slots], self.steps[slots]

    def _admit(self, new: Sequence[SamplingRow]) -> None:
        cache, lengths, logits = self._prefill(new)
        if self.rows:
            self._make_room(len(new), cache.columns)
        else:
            B = len(new)
            self.rows = [None] * B
            self.cache, self.mask = cache, self._empty_mask(B, cache.columns)
            self.lengths = torch.zeros(B, dtype=torch.long)
            self.last = torch.zeros(B, dtype=torch.long)
            self.states, self.steps = np.zeros(B, dtype=np.uint64), np.zeros(B, dtype=np.uint64)
        free = [slot for slot, row in enumerate(self.rows) if row is None][: len(new)]
        index = torch.tensor(free)
        if self.cache is not cache:
            self.cache.place(index, cache)
        columns = self.cache.columns
        for slot, length, row in zip(free, lengths.tolist(), new, strict=True):
            self.rows[slot] = row
            self.mask[slot] = self.hidden
            self.mask[slot, :, :, columns - length : columns] = 0
            self.states[slot], self.steps[slot] = row.state, 0
        self.lengths[index] = lengths
        self._take(index, logits)

    def _make_room(self, rows: int, columns: int) -> None:
        """Sees to it that so many rows of so many columns can be placed."""
        here = len(self.rows)
        missing = rows - self.rows.count(None)
        if missing > 0:
            self._keep([*range(here), *[0] * missing])
            self.rows[here:] = [None] * missing
        self._align(max([columns, *self._live_lengths()]))

    def _align(self, needed: int) -> None:
        """Gives the cache so many columns, where it has fewer or too many that no row sees."""
        old = self.cache.columns
        if old < needed or old > needed + _MASK_CHUNK // 4:
            first = max(0, old - needed)
            self.cache.realign(first, needed)
            moved = self._empty_mask(len(self.rows), needed)
            moved[..., needed - (old - first) : needed] = self.mask[..., first:old]
            self.mask = moved

    def _live_lengths(self) -> list[int]:
        """The tokens in the cache of each row that is not finished."""
        lengths = self.lengths.tolist()
        return [n for n, row in zip(lengths, self.rows, strict=True) if row is not None]

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
