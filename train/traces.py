"""Labelled traces in memory, as batches: one trace a row for the tail, packed for the trunk.

Padding stands at the right end of a row, where no causal layer sees it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from datasets import Dataset
from torch import Tensor

from ospruner.eval.table import IntArray, TraceTable
from ospruner.progress import Progress, silent

from .batches import length_batches
from .states import HasTrunk, KeptStates, States, form_of, run_trunk, stacked

__all__ = ["Batch", "LabelledTraces"]


@dataclass(frozen=True)
class Batch:
    """Labels of B traces of up to T steps, padded at the right.

    Attributes:
        rows: (B,) numbers of the traces.
        positions: (B, T) index of each step's last token in its row; 0 on padding.
        lengths: (B, T) L_i, thinking tokens through each step.
        correct: (B, T) A_i.
        matches_final: (B, T) 1 where the forced answer equals the one forced at T.
        mask: (B, T) true on real steps.
    """

    rows: IntArray
    positions: Tensor
    lengths: Tensor
    correct: Tensor
    matches_final: Tensor
    mask: Tensor


class LabelledTraces:
    """N labelled traces: tokens, labels, and what tails read of them where it is kept.

    Attributes:
        table: the labels.
        token_lengths: (N,) tokens of prompt and trace.
        positions: (N, T) index of each step's last token among them; 0 on padding.
        states_folder: where states are kept, see `keep_states`; None for in memory.
    """

    def __init__(
        self, table: TraceTable, tokens: IntArray, token_lengths: IntArray, positions: IntArray
    ) -> None:
        self.table = table
        self.token_lengths = token_lengths
        self.positions = positions
        self.states_folder: Path | None = None
        self._tokens = tokens
        self._starts = np.concatenate([[0], np.cumsum(token_lengths)])
        self._kept: KeptStates | None = None
        self._kept_for: tuple[Any, int, bool] | None = None

    def __len__(self) -> int:
        return len(self.table)

    @classmethod
    def from_dataset(cls, dataset: Dataset | LabelledTraces) -> LabelledTraces:
        """Reads labelled traces row for row; what is already read is returned as it is.

        Raises:
            ValueError: the dataset is empty or lacks a column.
        """
        if isinstance(dataset, LabelledTraces):
            return dataset
        table = TraceTable.from_dataset(dataset)
        columns = dataset.select_columns(["prompt_ids", "trace_ids"]).with_format("arrow")[:]
        prompts = columns.column("prompt_ids").combine_chunks()
        traces = columns.column("trace_ids").combine_chunks()
        prompt_lengths = prompts.value_lengths().to_numpy().astype(np.int64)
        trace_lengths = traces.value_lengths().to_numpy().astype(np.int64)
        token_lengths = prompt_lengths + trace_lengths
        starts = np.concatenate([[0], np.cumsum(token_lengths)])[:-1]
        tokens = np.empty(int(token_lengths.sum()), dtype=np.int64)
        tokens[_places(starts, prompt_lengths)] = prompts.flatten().to_numpy()
        tokens[_places(starts + prompt_lengths, trace_lengths)] = traces.flatten().to_numpy()
        positions = np.where(table.mask, prompt_lengths[:, None] + table.lengths - 1, 0)
        return cls(table, tokens, token_lengths, positions)

    def batch(self, rows: IntArray) -> Batch:
        """The labels of some traces, steps trimmed to their longest."""
        steps = int(self.table.num_steps[rows].max())
        table = self.table

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

    def tokens_of(self, row: int) -> IntArray:
        """(S,) prompt and trace of one trace."""
        return self._tokens[self._starts[row] : self._starts[row + 1]]

    def input_ids(self, rows: IntArray) -> Tensor:
        """Prompt and trace of some traces, (B, S), padded with 0 at the right."""
        ids = torch.zeros(len(rows), int(self.token_lengths[rows].max()), dtype=torch.int64)
        for b, row in enumerate(rows):
            own = self.tokens_of(row)
            ids[b, : len(own)] = torch.from_numpy(own)
        return ids

    def states(self, model: HasTrunk, rows: IntArray) -> States:
        """What a model's policy reads of some traces: as it is kept, or from the trunk.

        Args:
            model: base and policy.
            rows: (B,) numbers of the traces.
        """
        if not self.holds_states_of(model):
            return self._run_trunk(model, rows)
        assert self._kept is not None
        return stacked([self._kept.read(int(row)) for row in rows], model.base.device)

    def holds_states_of(self, model: HasTrunk) -> bool:
        """Whether all that the model's policy reads of these traces is kept."""
        return self._kept_for is not None and self._kept_for == _trunk_of(model)

    def _run_trunk(self, model: HasTrunk, rows: IntArray) -> States:
        steps = int(self.table.num_steps[rows].max())
        texts = [self.tokens_of(row) for row in rows]
        return run_trunk(model, texts, torch.from_numpy(self.positions[rows, :steps]))

    def keep_states(self, folder: str | Path) -> None:
        """Has what tails read of the traces kept in a folder, a file a trace.

        So commands on the same labels run the base once, a command that was stopped goes on, and
        labels that have grown cost a pass over the new traces only.
        """
        self.states_folder = Path(folder)

    def cache_states(
        self,
        model: HasTrunk,
        limit_bytes: int,
        progress: Progress = silent,
        rank: int = 0,
        processes: int = 1,
    ) -> int:
        """Runs the trunk once over all traces of which nothing is kept yet.

        Without a folder states are kept in memory, if they fit: in each process for itself.

        Args:
            model: whose trunk.
            limit_bytes: larger states are not kept in memory; they are computed for each batch.
            progress: called with phase "trunk", in traces.
            rank: of this process among those that fill the folder together; the caller waits for
                the others.
            processes: how many there are.

        Returns:
            The bytes now held in memory for this model: 0 where they do not fit.

        Raises:
            ValueError: the disk has no room for the files.
        """
        if self.holds_states_of(model):
            assert self._kept is not None
            return self._kept.held_bytes
        kept = KeptStates(form_of(model), self._names(), self.states_folder)
        missing = np.array([not kept.has(row) for row in range(len(self))])
        done, size, seen = len(self) - int(missing.sum()), 0, 0
        if self.states_folder is not None:  # each its own, whatever the others have written yet
            missing &= np.arange(len(self)) % processes == rank
        batches = [rows[missing[rows]] for rows in length_batches(self.token_lengths)]
        batches = [rows for rows in batches if len(rows)]
        for rows in batches:
            states = self._run_trunk(model, rows)
            for b, row in enumerate(rows):
                tokens = int(self.token_lengths[row])
                size += kept.write(int(row), states.of(b, tokens, int(self.table.num_steps[row])))
            done += len(rows)
            seen += int(self.token_lengths[rows].sum())
            expected = size / seen * int(self.token_lengths.sum())
            if self.states_folder is None and max(size, expected) > limit_bytes:
                return 0
            progress("trunk", done, len(self), f"{size / 2**20:.0f} MiB")
        self._kept, self._kept_for = kept, _trunk_of(model)
        return kept.held_bytes

    def _names(self) -> list[str]:
        """What tells each trace from others: a digest of its tokens and steps."""
        names = []
        for n, steps in enumerate(self.table.num_steps):
            digest = hashlib.sha256(self.tokens_of(n).tobytes())
            for values in (self.positions, self.table.lengths):  # together: where the prompt ends
                digest.update(values[n, :steps].astype(np.int64).tobytes())
            names.append(digest.hexdigest()[:32])
        return names


def _trunk_of(model: HasTrunk) -> tuple[Any, int, bool]:
    return model.base, len(model.policy.layers), model.policy.queries


def _places(starts: IntArray, lengths: IntArray) -> IntArray:
    """start, start+1, ... (length of them) for each pair, one after the other."""
    before = np.repeat(np.cumsum(lengths) - lengths, lengths)
    places: IntArray = np.repeat(starts, lengths) + np.arange(int(lengths.sum())) - before
    return places
