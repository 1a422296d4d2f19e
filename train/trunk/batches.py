"""Which traces are computed together: an epoch's batches, their parts, and passes over all."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ospruner.eval.table import IntArray

__all__ = ["epoch_batches", "length_batches", "micro_batches"]


_BUCKET_BATCHES = 16
_FORWARD_TOKENS = 16_384


def epoch_batches(
    token_lengths: IntArray, rows: IntArray, batch_size: int, seed: int, epoch: int
) -> list[IntArray]:
    """The batches of one epoch: shuffled, then sorted by length within a few batches' rows.

    A function of its arguments alone, so that a resumed epoch goes on with the same batches.

    Args:
        token_lengths: (N,) tokens of each trace.
        rows: the traces to train on.
        batch_size: traces a batch; the last one may be smaller.
        seed: of the run.
        epoch: counted over the whole run.
    """
    draws = np.random.default_rng([seed, epoch])
    order = draws.permutation(rows)
    bucket = batch_size * _BUCKET_BATCHES
    batches = []
    for start in range(0, len(order), bucket):
        part = order[start : start + bucket]
        part = part[np.argsort(token_lengths[part], kind="stable")]
        batches += [part[i : i + batch_size] for i in range(0, len(part), batch_size)]
    return [batches[i] for i in draws.permutation(len(batches))]


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
        processes: those that share each part, as `Processes.share` does.
    """
    parts, start = [], 0
    longest = 0
    for end, row in enumerate(rows):
        longest = max(longest, int(token_lengths[row]))
        if end - start >= processes and -(-(end + 1 - start) // processes) * longest > max_tokens:
            parts.append(rows[start:end])
            start, longest = end, int(token_lengths[row])
    return [*parts, rows[start:]]


def length_batches(
    token_lengths: IntArray, max_tokens: int = _FORWARD_TOKENS
) -> Iterator[IntArray]:
    """All rows, longest first, in batches of at most `max_tokens` slots (one row at least)."""
    order = np.argsort(-token_lengths, kind="stable")
    start = 0
    while start < len(order):
        count = max(1, max_tokens // int(token_lengths[order[start]]))
        yield order[start : start + count]
        start += count
