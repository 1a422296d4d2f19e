"""Several traces in a line, each of which attends to itself alone.

Where every layer is full or sliding attention, position ids that start again at each trace tell
transformers' masks where one ends (`masking_utils.find_packed_sequence_indices`). Recurrent layers
would carry their state over from trace to trace, so their traces go one a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ospruner.eval.table import IntArray


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
