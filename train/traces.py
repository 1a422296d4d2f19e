"""Labelled traces in memory, as batches, one trace a row; and which are computed together.

And what a policy's head says at their step ends, in one causal pass a trace. Padding stands at the
right end of a row, where no causal layer sees it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from datasets import Dataset
from torch import Tensor
from torch.utils.data import Sampler

from modeling_ospruner.configuration_ospruner import max_positions
from ospruner.eval.measured import Predicted
from ospruner.eval.table import IntArray, TraceTable
from ospruner.progress import Progress, silent

from .states import StateFiles, States, form_of, run_trunk, stacked
from .tail import step_outputs

_BUCKET_BATCHES = 16
_FORWARD_TOKENS = 16_384


@dataclass(eq=False)
class EpochBatches(Sampler[list[int]]):
    """The batches of an epoch: shuffled, then sorted by length within a few batches' rows.

    A function of its arguments and the epoch alone, so that a resumed epoch goes on with the same
    batches, and all processes see the same. (transformers' own sampler deals different batches to
    each process, so that the curve would depend on how many there are.)

    Attributes:
        token_lengths: (N,) tokens of each trace.
        rows: the traces to train on.
        size: traces a batch; the last one may be smaller.
        seed: of the run.
        epoch: counted over the whole run; whoever begins one sets it.
    """

    token_lengths: IntArray
    rows: IntArray
    size: int
    seed: int
    epoch: int = 0

    def __len__(self) -> int:
        return -(-len(self.rows) // self.size)

    def __iter__(self) -> Iterator[list[int]]:
        draws = np.random.default_rng([self.seed, self.epoch])
        order, size = draws.permutation(self.rows), self.size
        batches = []
        for start in range(0, len(order), size * _BUCKET_BATCHES):
            part = order[start : start + size * _BUCKET_BATCHES]
            part = part[np.argsort(self.token_lengths[part], kind="stable")]
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
class Batch:
    """Labels of B traces of up to T steps, padded at the right."""

    rows: IntArray  # (B,) numbers of the traces
    positions: Tensor  # (B, T) index of each step's last token in its row; 0 on padding
    lengths: Tensor  # (B, T) L_i, thinking tokens through each step
    correct: Tensor  # (B, T) A_i
    matches_final: Tensor  # (B, T) 1 where the forced answer equals the one forced at T
    mask: Tensor  # (B, T) true on real steps


class LabelledTraces:
    """N labelled traces: tokens, labels, and what tails read of them where it is kept.

    With a folder for states, commands on the same labels run the base once, a command that was
    stopped goes on, and labels that have grown cost a pass over the new traces only.

    Args:
        table: the labels.
        tokens: of each trace the ids of prompt and trace, (S,).
        positions: (N, T) index of each step's last token among them; 0 on padding.
        states: folder in which states are kept; None for in memory.
    """

    def __init__(
        self,
        table: TraceTable,
        tokens: Sequence[IntArray],
        positions: IntArray,
        states: str | Path | None = None,
    ) -> None:
        self.table, self.tokens, self.positions = table, tokens, positions
        # (N,) of prompt and trace
        self.token_lengths = np.array([len(ids) for ids in tokens], dtype=np.int64)
        self.folder = None if states is None else Path(states)
        self._kept: dict[str, dict[str, Tensor]] | StateFiles = {}
        self._kept_for: tuple[Any, int, bool] | None = None

    def __len__(self) -> int:
        return len(self.table)

    @classmethod
    def from_dataset(cls, dataset: Dataset, states: str | Path | None = None) -> LabelledTraces:
        """Reads labelled traces, of columns `features.FEATURES`, row for row.

        Raises:
            ValueError: the dataset is empty or lacks a column.
        """
        table = TraceTable.from_dataset(dataset)
        columns = dataset.select_columns(["prompt_ids", "trace_ids"]).with_format("arrow")[:]
        prompts, traces = (
            columns.column(name).combine_chunks().to_numpy(zero_copy_only=False)
            for name in ("prompt_ids", "trace_ids")
        )
        tokens = [
            np.concatenate(parts).astype(np.int64) for parts in zip(prompts, traces, strict=True)
        ]
        starts = np.array([len(prompt) for prompt in prompts])
        positions = np.where(table.mask, starts[:, None] + table.lengths - 1, 0)
        return cls(table, tokens, positions, states)

    def batch(self, rows: IntArray) -> Batch:
        """The labels of some traces, steps trimmed to their longest."""
        steps, table = int(self.table.num_steps[rows].max()), self.table

        def part(values: npt.NDArray[Any], dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(values[rows, :steps]).to(dtype)

        return Batch(
            rows=rows,
            positions=part(self.positions, torch.int64),
            lengths=part(table.lengths, torch.float32),
            correct=part(table.correct, torch.float32),
            matches_final=part(table.matches_final, torch.float32),
            mask=part(table.mask, torch.bool),
        )

    def refuse_beyond_positions(self, base: Any) -> None:
        """Refuses traces that are longer than the texts that a causal LM was made for."""
        limit = max_positions(base.config)
        if limit is None or not (beyond := np.flatnonzero(self.token_lengths > limit)).size:
            return
        n = int(beyond[0])
        problem = self.table.problem_ids[int(self.table.problem_index[n])]
        raise ValueError(
            f"{beyond.size} traces are longer than the base's {limit} positions "
            f"(max_position_embeddings), such as trace {n} (problem {problem!r}) with "
            f"{int(self.token_lengths[n])} tokens: these are no traces of this base, or were "
            "labelled beyond its positions. Label again with a lower --max-thinking-tokens, or let "
            "a verifier with a longer context judge them"
        )

    def states(self, model: Any, rows: IntArray) -> States:
        """What a model's policy reads of traces (B,): as it is kept, or from the trunk."""
        names = [self._names[row] for row in rows]
        if self.holds_states_of(model) and all(name in self._kept for name in names):
            return stacked([self._kept[name] for name in names], model.policy.head.weight.device)
        positions = torch.from_numpy(self.positions[rows, : int(self.table.num_steps[rows].max())])
        return run_trunk(model, [self.tokens[row] for row in rows], positions)

    def holds_states_of(self, model: Any) -> bool:
        """Whether `cache_states` has kept what the model's policy reads."""
        return self._kept_for == _trunk_of(model)

    def cache_states(
        self,
        model: Any,
        limit_bytes: int,
        progress: Progress = silent,
        share: tuple[int, int] = (0, 1),
        rows: IntArray | None = None,
    ) -> int:
        """Runs the trunk once over traces of which nothing is kept yet.

        Without a folder states are kept in memory, if they fit: in each process for itself.

        Args:
            model: whose trunk.
            limit_bytes: larger states are not kept in memory; they are computed for each batch.
            progress: called with phase "trunk", in traces.
            share: rank of this process, and the number of those that fill the folder together; the
                caller waits for the others.
            rows: numbers of the traces that will be read; None for all.

        Returns:
            The bytes now held in memory for this model: 0 where they do not fit.

        Raises:
            ValueError: the disk has no room for the files.
        """
        kept = self._kept
        if not self.holds_states_of(model):
            kept = {} if self.folder is None else StateFiles(self.folder / form_of(model))
        wanted = np.full(len(self), rows is None)
        wanted[[] if rows is None else rows] = True
        missing = wanted & np.array([name not in kept for name in self._names])
        total, size, seen = int(wanted.sum()), 0, 0
        done = total - int(missing.sum())
        if self.folder is not None:  # each its own, whatever the others have written yet
            missing &= np.arange(len(self)) % share[1] == share[0]
        for batch in length_batches(self.token_lengths):
            some = batch[missing[batch]]
            if not len(some):
                continue
            states = self.states(model, some)
            for b, row in enumerate(some.tolist()):
                tokens, steps = int(self.token_lengths[row]), int(self.table.num_steps[row])
                own = kept[self._names[row]] = states.of(b, tokens, steps)
                size += sum(part.nbytes for part in own.values())
            done += len(some)
            seen += int(self.token_lengths[some].sum())
            expected = size / seen * int(self.token_lengths[wanted].sum())
            if self.folder is None and max(size, expected) > limit_bytes:
                return 0
            progress("trunk", done, total, f"{size / 2**20:.0f} MiB")
        self._kept, self._kept_for = kept, _trunk_of(model)
        held = kept.values() if isinstance(kept, dict) else ()
        return sum(part.nbytes for one in held for part in one.values())

    @cached_property
    def _names(self) -> list[str]:
        """What tells each trace from others: a digest of its tokens and steps."""
        names = []
        for n, steps in enumerate(self.table.num_steps):
            digest = hashlib.sha256(self.tokens[n].tobytes())
            for values in (self.positions, self.table.lengths):  # together: where the prompt ends
                digest.update(values[n, :steps].astype(np.int64).tobytes())
            names.append(digest.hexdigest()[:32])
        return names


def _trunk_of(model: Any) -> tuple[Any, int, bool]:
    return model.base, len(model.policy.layers), model.policy.queries


def predict_outputs(model: Any, traces: LabelledTraces, progress: Progress = silent) -> Predicted:
    """What a policy says at the step ends of labelled traces.

    Args:
        model: base and policy: `OSPrunerForCausalLM`, or a `Verifier`.
        traces: N labelled traces of up to T steps, of this base. They keep the trunk's states, of
            2 GiB at most, for the next policy on the same base.
        progress: called with phase "trunk" while they are computed.

    Raises:
        ValueError: a trace is longer than the base's positions.
    """
    traces.refuse_beyond_positions(model.base)
    traces.cache_states(model, 2**31, progress)
    outputs = head_outputs(partial(step_outputs, model.policy), model, traces)
    return Predicted(outputs, traces.table.mask, model.config.prices, model.config.price)


@torch.no_grad()
def head_outputs(
    outputs_of: Callable[[States, Tensor], Tensor],
    model: Any,
    traces: LabelledTraces,
    share: tuple[int, int] = (0, 1),
) -> npt.NDArray[np.float32]:
    """(N, T, K) of the head, 0 on padding and on the traces of other processes.

    Args:
        outputs_of: (B, T, K) from the trunk's states and positions (B, T).
        model: whose trunk.
        traces: N labelled traces.
        share: rank of this process, and the number of those that share the work.
    """
    width = model.policy.head.out_features
    out = np.zeros((*traces.table.mask.shape, width), dtype=np.float32)
    for rows in length_batches(traces.token_lengths)[share[0] :: share[1]]:
        batch, states = traces.batch(rows), traces.states(model, rows)
        positions = batch.positions.to(states.hidden.device)
        said = outputs_of(states, positions).float().cpu()  # (B, T, K)
        out[rows, : said.shape[1]] = said.masked_fill(~batch.mask[..., None], 0.0).numpy()
    return out
