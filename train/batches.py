"""Which traces are computed together: an epoch's batches, and their parts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler

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
