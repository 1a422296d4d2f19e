"""Which traces are computed together: an epoch's batches, their parts, and several in a line.

Traces in a line attend to themselves alone: where every layer is full or sliding attention,
position ids that start again at each trace tell transformers' masks where one ends
(`masking_utils.find_packed_sequence_indices`). Recurrent layers would carry their state over from
trace to trace, so their traces go one a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ospruner.eval.table import IntArray

_BUCKET_BATCHES = 16
_FORWARD_TOKENS = 16_384


class EpochBatches(Sampler[list[int]]):
    """The batches of an epoch: shuffled, then sorted by length within a few batches' rows.

    A function of its arguments and the epoch alone, so that a resumed epoch goes on with the same
    batches, and all processes see the same. (transformers' own sampler deals different batches to
    each process, so that the curve would depend on how many there are.)

    Args:
        token_lengths: (N,) tokens of each trace.
        rows: the traces to train on.
        batch_size: traces a batch; the last one may be smaller.
        seed: of the run.

    Attributes:
        rows: as given.
        epoch: counted over the whole run; whoever begins one sets it.
    """

    def __init__(self, token_lengths: IntArray, rows: IntArray, batch_size: int, seed: int) -> None:
        self._lengths, self.rows = token_lengths, rows
        self._batch_size, self._seed = batch_size, seed
        self.epoch = 0

    def __len__(self) -> int:
        return -(-len(self.rows) // self._batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        draws = np.random.default_rng([self._seed, self.epoch])
        order, size = draws.permutation(self.rows), self._batch_size
        batches = []
        for start in range(0, len(order), size * _BUCKET_BATCHES):
            part = order[start : start + size * _BUCKET_BATCHES]
            part = part[np.argsort(self._lengths[part], kind="stable")]
            batches += [part[i : i + size].tolist() for i in range(0, len(part), size)]
        yield from (batches[i] for i in draws.permutation(len(batches)))


def micro_batches(
    token_lengths: IntArray, rows: IntArray, max_tokens: int, processes: int = 1
) -> list[IntArray]:
    """Cuts a batch into parts, so that no process takes more than `max_tokens` slots at once.

    A slot is a token or padding; each process may take one trace, however long. All processes get
    as many parts.

    Args:
        token_lengths: (N,) tokens of each trace.
        rows: the batch's traces, best of similar lengths one after another.
        max_tokens: slots of each process.
        processes: those that share each part, trace by trace in turn.
    """
    parts, start, longest = [], 0, 0
    for end, row in enumerate(rows):
        longest = max(longest, int(token_lengths[row]))
        if end - start >= processes and -(-(end + 1 - start) // processes) * longest > max_tokens:
            parts.append(rows[start:end])
            start, longest = end, int(token_lengths[row])
    return [*parts, rows[start:]]


def length_batches(token_lengths: IntArray, max_tokens: int = _FORWARD_TOKENS) -> list[IntArray]:
    """All rows, longest first, in batches of at most `max_tokens` slots (one row at least)."""
    return micro_batches(token_lengths, np.argsort(-token_lengths, kind="stable"), max_tokens)


@dataclass(frozen=True)
class Packed:
    """B token sequences in P lines of C slots.

    Attributes:
        input_ids: (P, C); 0 in empty slots.
        position_ids: (P, C), from 0 in each sequence and in the empty slots behind the last; where
            each sequence has its line, from 0 in each line.
        places: (B, S) slot of each token in the flattened lines; 0 beyond a sequence's end.
    """

    input_ids: Tensor
    position_ids: Tensor
    places: Tensor

    def unpack(self, hidden: Tensor) -> Tensor:
        """(B, S, H), padded at the right, from the lines' (P, C, H)."""
        return hidden.flatten(0, 1)[self.places.to(hidden.device)]

    def unpack_heads(self, keys: Tensor) -> Tensor:
        """(B, KV, S, D) from the lines' (P, KV, C, D)."""
        return self.unpack(keys.transpose(1, 2)).transpose(1, 2)


def takes_packing(base: Any) -> bool:
    """Whether every layer of a causal LM is attention, with masks that can confine it.

    (To sdpa they do; eager gpt_oss makes no masks of position ids.)
    """
    config = base.config.get_text_config()
    confined = (DynamicLayer, DynamicSlidingWindowLayer)
    layers = DynamicCache(config=config).layers
    return config._attn_implementation == "sdpa" and all(type(one) in confined for one in layers)


def pack(sequences: Sequence[IntArray], together: bool = True) -> Packed:
    """Puts sequences into as few lines, as long as the longest, as first fit decreasing finds.

    Args:
        sequences: B sequences of at least one token.
        together: whether they may share lines; else each has its own, in order.
    """
    lengths = np.array([len(ids) for ids in sequences])
    capacity = int(lengths.max())
    lines: list[list[int]] = []
    for b in np.argsort(-lengths, kind="stable").tolist() if together else range(len(lengths)):
        fitting = (one for one in lines if lengths[[*one, b]].sum() <= capacity)
        line = next(fitting, None) if together else None
        if line is None:
            lines.append([b])
        else:
            line.append(b)
    ids = np.zeros((len(lines), capacity), dtype=np.int64)
    positions = np.tile(np.arange(capacity), (len(lines), 1))
    places = np.zeros((len(sequences), capacity), dtype=np.int64)
    for p, members in enumerate(lines):
        start = 0
        for b in members:
            end = start + int(lengths[b])
            ids[p, start:end] = sequences[b]
            places[b, : end - start] = p * capacity + np.arange(start, end)
            if together:  # the next sequence, or what is empty, begins anew
                positions[p, end:] = np.arange(capacity - end)
            start = end
    return Packed(torch.from_numpy(ids), torch.from_numpy(positions), torch.from_numpy(places))
