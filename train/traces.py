"""Labelled traces in memory, as batches: one trace a row for the tail, packed for the trunk.

The trunk (the frozen layers below the tail) is the same in every epoch, so its output is kept in
memory where it fits, or in files. Padding stands at the right end of a row, where no causal layer
sees it.

A policy that is queries only reads the trunk's output at step ends alone, and the base's keys and
values in the last n layers everywhere; so these are kept, in their place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from datasets import Dataset
from torch import Tensor

from modeling_ospruner.configuration_ospruner import max_positions
from modeling_ospruner.policy_ospruner import LayerKeys
from modeling_ospruner.rules_ospruner import TRIAL_NUMBERS, TrialAnswer, TrialHistory
from ospruner.eval.schema import TraceTable
from ospruner.eval.table import BoolArray, IntArray
from ospruner.progress import Progress, silent

from .objective import AUXILIARY_TARGETS, answer_history
from .processes import Processes
from .tail import no_scores
from .trunk.batches import length_batches
from .trunk.kept import (
    Kept,
    KeptTraces,
    KeyShape,
    complete_file,
    key_shapes,
    padded,
    token_width,
    weights_of,
)
from .trunk.packing import pack, takes_packing

__all__ = ["Batch", "LabelledTraces", "States", "refuse_beyond_positions"]


class HasTrunk(Protocol):
    """What is asked of a model here; `OSPrunerForCausalLM` has it."""

    base: Any
    config: Any
    policy: Any

    def reading(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> tuple[Tensor, list[LayerKeys]]:
        """The states (B, S, H) that enter the tail, and the keys that the policy reads."""


@dataclass(frozen=True)
class States:
    """What a policy reads of B traces, without gradient.

    Attributes:
        hidden: (B, S, H) what enters the tail; for a policy that is queries only (B, T, H), at step
            ends.
        keys: for such a policy, keys and values of the base's last n layers; else none.
    """

    hidden: Tensor
    keys: Sequence[LayerKeys] = ()

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.hidden.device


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
    """N labelled traces: tokens, labels, and the trunk's states where they fit.

    Attributes:
        table: the labels.
        token_lengths: (N,) tokens of prompt and trace.
        positions: (N, T) index of each step's last token among them; 0 on padding.
        cached_bytes: size of the trunk's states held in memory; 0 where none are.
        states_folder: where they are kept instead, see `keep_states`; None for in memory.
    """

    def __init__(
        self, table: TraceTable, tokens: IntArray, token_lengths: IntArray, positions: IntArray
    ) -> None:
        self.table = table
        self.token_lengths = token_lengths
        self.positions = positions
        self.cached_bytes = 0
        self.states_folder: Path | None = None
        self._tokens = tokens
        self._answers: Dataset | None = None
        self._numbers: dict[tuple[int, int], npt.NDArray[np.float32]] = {}
        self._starts = np.concatenate([[0], np.cumsum(token_lengths)])
        steps = np.concatenate([[0], np.cumsum(table.num_steps)])
        self._step_starts: IntArray = steps
        self._kept: Kept | None = None
        self._states_of: tuple[Any, int, bool] | None = None
        self._states_for = torch.device("cpu")  # where the base computed them

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
        found = cls(table, tokens, token_lengths, positions)
        found._answers = dataset
        return found

    @cached_property
    def history(self) -> npt.NDArray[np.float32]:
        """(N, T, 4) how the answers forced so far have gone (`AUXILIARY_TARGETS`); 0 on padding.

        Raises:
            ValueError: the traces were not read from labels that hold their forced answers.
        """
        columns = ("forced_answers", "forced_logprob")
        if self._answers is None or not set(columns) <= set(self._answers.column_names):
            raise ValueError(
                "the labels hold no forced_answers and forced_logprob, of which auxiliary losses "
                "are made: label the problems anew, or leave auxiliary_weight out"
            )
        rows = self._answers.select_columns(list(columns))
        found = np.zeros((*self.table.mask.shape, len(AUXILIARY_TARGETS)), dtype=np.float32)
        for n, row in enumerate(rows):
            steps = len(row["forced_answers"])
            found[n, :steps] = answer_history(row["forced_answers"], row["forced_logprob"])
        return found

    def trial_numbers(self, rows: IntArray, every: int, max_tokens: int) -> Tensor | None:
        """What a policy reads of the answers tried at every k-th step, as when generating.

        Args:
            rows: (B,) numbers of the traces.
            every: k; 0 for a policy that tries none.
            max_tokens: cap on an answer, with which the labels were made.

        Returns:
            (B, T, 11) float32 `TRIAL_NUMBERS`, 0 on padding; None for such a policy.

        Raises:
            ValueError: the labels do not hold decoded answers with all that is read of them.
        """
        if not every:
            return None
        key = every, max_tokens
        if key not in self._numbers:
            self._numbers[key] = self._all_trial_numbers(*key)
        steps = int(self.table.num_steps[rows].max())
        return torch.from_numpy(self._numbers[key][rows, :steps])

    def _all_trial_numbers(self, every: int, max_tokens: int) -> npt.NDArray[np.float32]:
        known = set() if self._answers is None else set(self._answers.column_names)
        if self._answers is None or (lacking := sorted(set(_TRIED) - known)):
            raise ValueError(
                f"the labels hold no {', '.join(_TRIED if self._answers is None else lacking)}, of "
                "which the history of trial answers (trial_every) is made: label the problems "
                "anew, or leave trial_every out"
            )
        options = "option_probabilities" in known
        rows = self._answers.select_columns([*_TRIED, *["option_probabilities"] * options])
        found = np.zeros((*self.table.mask.shape, len(TRIAL_NUMBERS)), dtype=np.float32)
        for n, row in enumerate(rows):
            history = TrialHistory(every, max_tokens)
            chosen = options and any(one is not None for one in row["option_probabilities"] or ())
            for step, (ids, logprob, entropy) in enumerate(
                zip(*(row[name] for name in _TRIED), strict=True)
            ):
                if chosen or ids is None or entropy is None or (logprob is None and len(ids)):
                    raise ValueError(
                        f"trace {n} has at step {step + 1} no decoded answer with its tokens, "
                        "log-probability and entropy (labels of question's options have none), of "
                        "which the history of trial answers (trial_every) is made: label anew, "
                        "with decoded answers, or leave trial_every out"
                    )
                answer = TrialAnswer(tuple(ids), "closed", (logprob,) * len(ids), entropy)
                found[n, step] = history.at_step(lambda _, answer=answer: answer)  # type: ignore[misc]
        return found

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

    def input_ids(self, rows: IntArray) -> Tensor:
        """Prompt and trace of some traces, (B, S), padded with 0 at the right."""
        ids = torch.zeros(len(rows), int(self.token_lengths[rows].max()), dtype=torch.int64)
        for b, row in enumerate(rows):
            start, end = self._starts[row], self._starts[row + 1]
            ids[b, : end - start] = torch.from_numpy(self._tokens[start:end])
        return ids

    def states(self, model: HasTrunk, rows: IntArray) -> States:
        """What a model's policy reads of some traces, from memory or from the trunk.

        The trunk runs on packed traces where its layers and the device allow that.
        """
        if self._kept is None or not self.holds_states_of(model):
            return self._run_trunk(model, rows)
        kept = self._kept
        tokens = padded(kept.tokens, self._starts, rows).to(self._states_for)
        if not kept.shapes:
            return States(tokens)
        hidden = padded(kept.steps, self._step_starts, rows).to(self._states_for)
        return States(hidden, kept.keys_of(tokens))

    def holds_states_of(self, model: HasTrunk) -> bool:
        """Whether the states of a model's trunk are kept, in memory or in a file."""
        return self._states_of == _trunk_of(model)

    @torch.no_grad()
    def _run_trunk(self, model: HasTrunk, rows: IntArray) -> States:
        device = model.base.device
        queries: bool = model.policy.queries
        steps = int(self.table.num_steps[rows].max())
        positions = torch.from_numpy(self.positions[rows, :steps]).to(device)  # (B, T)
        # The masks that confine packed traces keep flash attention away, which CUDA has.
        if device.type == "cuda" or not takes_packing(model.base):
            with no_scores(model.base.get_decoder(), device):
                hidden, keys = model.reading(self.input_ids(rows).to(device))
            return States(_at(hidden, positions), keys) if queries else States(hidden)
        packed = pack([self._tokens[self._starts[row] : self._starts[row + 1]] for row in rows])
        hidden, keys = model.reading(
            packed.input_ids.to(device), position_ids=packed.position_ids.to(device)
        )  # (P, C, H)
        if not queries:
            return States(packed.unpack(hidden))
        slots = packed.places.to(device).gather(1, positions)
        unpacked = [
            LayerKeys(packed.unpack_heads(one.keys), packed.unpack_heads(one.values))
            for one in keys
        ]
        return States(hidden.flatten(0, 1)[slots], unpacked)

    def states_bytes(self, base: Any, shapes: Sequence[KeyShape] = ()) -> int:
        """The memory that the trunk's states of all traces take.

        Args:
            base: the causal LM.
            shapes: of the keys and values that the policy reads, see `key_shapes`.
        """
        hidden_size: int = base.config.get_text_config().hidden_size
        return _elements(self, hidden_size, shapes) * int(base.dtype.itemsize)

    def keep_states(self, folder: str | Path) -> None:
        """Has the trunk's states kept in a folder's files, and taken from there.

        A file's name tells the traces, the base's weights and what of its states a policy reads.
        So commands on the same labels run the base once, a command that was stopped goes on, and
        labels that have grown cost a pass over the new traces only. Where two want the same file
        at once, the second waits for the first.
        """
        self.states_folder = Path(folder)

    def cache_states(
        self,
        model: HasTrunk,
        limit_bytes: int,
        progress: Progress = silent,
        processes: Processes | None = None,
    ) -> int:
        """Runs the trunk once over all traces, where its states fit in memory or go to a file.

        Batches are fixed here (not those of an epoch), so that a resumed run sees the same bits.

        Args:
            model: whose trunk.
            limit_bytes: larger states are not kept in memory.
            progress: called with phase "trunk", in traces; the note says the size.
            processes: those that call this together, and share the file, if any.

        Returns:
            The bytes now held in memory for this model: 0 where they do not fit.

        Raises:
            ValueError: the disk has no room for the file.
        """
        if self.holds_states_of(model):
            return self.cached_bytes
        n, queries = model.config.num_policy_layers, model.policy.queries
        shapes = key_shapes(model.base, n) if queries else []
        size = self.states_bytes(model.base, shapes)
        self._kept, self._states_of, self.cached_bytes = None, None, 0
        fits = self.states_folder is None and size <= limit_bytes
        if not fits and self.states_folder is None:
            return 0
        hidden_size = model.base.config.get_text_config().hidden_size
        count, dtype = _elements(self, hidden_size, shapes), model.base.dtype

        def kept(flat: Tensor) -> Kept:
            return Kept.of(flat, int(self.token_lengths.sum()), hidden_size, shapes)

        if fits:
            states = kept(torch.empty(count, dtype=dtype, device=model.base.device))
            self._fill(states, model, progress, Processes())
        else:
            assert self.states_folder is not None
            traces, together = self._kept_traces, processes or Processes()
            read = (model.config.num_policy_layers, model.policy.queries, list(shapes))
            file = self._file_of(traces, read, model.base, "states")

            def fill(partial: Path, there: BoolArray, wrote: Callable[[IntArray], None]) -> None:
                new = kept(torch.from_file(str(partial), True, count, dtype=dtype))
                self._fill(new, model, progress, together, there, wrote)

            def copy(
                known: Path, partial: Path, theirs: KeptTraces, rows: IntArray, into: IntArray
            ) -> None:
                values = known.stat().st_size // dtype.itemsize
                old = Kept.of(
                    torch.from_file(str(known), False, values, dtype=dtype),
                    int(theirs.tokens.sum()),
                    hidden_size,
                    shapes,
                )
                new = kept(torch.from_file(str(partial), True, count, dtype=dtype))
                new.copy(into, traces.starts, old, rows, theirs.starts)

            complete_file(file, size, traces, copy, fill, together)
            states = kept(torch.from_file(str(file), True, count, dtype=dtype))
        self._kept, self._states_of = states, _trunk_of(model)
        self._states_for = model.base.device
        self.cached_bytes = size if fits else 0
        return self.cached_bytes

    @property
    def _kept_traces(self) -> KeptTraces:
        """What tells each trace in a file of states."""
        names = []
        for n, steps in enumerate(self.table.num_steps):
            digest = hashlib.sha256(self._tokens[self._starts[n] : self._starts[n + 1]].tobytes())
            for values in (self.positions, self.table.lengths):  # together: where the prompt ends
                digest.update(values[n, :steps].astype(np.int64).tobytes())
            names.append(digest.hexdigest()[:32].encode())
        return KeptTraces(np.array(names), self.token_lengths, self.table.num_steps)

    def _file_of(self, traces: KeptTraces, what: object, base: Any, suffix: str) -> Path:
        """The file of what a base's weights make of these traces."""
        kind = hashlib.sha256(repr((what, str(base.dtype), weights_of(base))).encode())
        assert self.states_folder is not None
        return self.states_folder / f"{kind.hexdigest()[:16]}-{traces.digest}.{suffix}"

    def _fill(
        self,
        kept: Kept,
        model: HasTrunk,
        progress: Progress,
        processes: Processes,
        there: BoolArray | None = None,
        wrote: Callable[[IntArray], None] = lambda rows: None,
    ) -> None:
        """Each process fills in what it computes; `kept` is theirs together.

        Args:
            kept: where to.
            model: whose trunk.
            progress: as for `cache_states`.
            processes: likewise.
            there: (N,) which traces are there already.
            wrote: told after each batch which are there now, too.
        """
        missing = np.ones(len(self), dtype=np.bool_) if there is None else ~there
        batches = [rows[missing[rows]] for rows in length_batches(self.token_lengths)]
        done = len(self) - int(missing.sum())
        size = kept.tokens.nbytes + kept.steps.nbytes
        for rows, _ in processes.turns([rows for rows in batches if len(rows)]):
            out = self._run_trunk(model, rows)
            tokens = kept.flat_keys(out.keys) if kept.shapes else out.hidden
            for b, row in enumerate(rows):
                start, end = self._starts[row], self._starts[row + 1]
                kept.tokens[start:end] = tokens[b, : end - start]
                if kept.shapes:
                    start, end = self._step_starts[row], self._step_starts[row + 1]
                    kept.steps[start:end] = out.hidden[b, : end - start]
            wrote(rows)
            done = min(done + len(rows) * processes.size, len(self))
            progress("trunk", done, len(self), f"{size / 2**20:.0f} MiB")


_TRIED = ("forced_answer_ids", "forced_logprob", "forced_entropy")


def _elements(traces: LabelledTraces, hidden_size: int, shapes: Sequence[KeyShape]) -> int:
    steps = int(traces.table.num_steps.sum()) if shapes else 0
    tokens = int(traces.token_lengths.sum())
    return tokens * token_width(hidden_size, shapes) + steps * hidden_size


def _at(hidden: Tensor, positions: Tensor) -> Tensor:
    """(B, T, H) of (B, S, H)."""
    return hidden.gather(1, positions[..., None].expand(-1, -1, hidden.shape[-1]))


def refuse_beyond_positions(base: Any, traces: LabelledTraces) -> None:
    """Refuses traces that are longer than the texts that a causal LM was made for.

    Raises:
        ValueError: naming the first and its length.
    """
    limit = max_positions(base.config)
    if limit is None or not (beyond := np.flatnonzero(traces.token_lengths > limit)).size:
        return
    n = int(beyond[0])
    problem = traces.table.problem_ids[int(traces.table.problem_index[n])]
    raise ValueError(
        f"{beyond.size} traces are longer than the base's {limit} positions "
        f"(max_position_embeddings), such as trace {n} (problem {problem!r}) with "
        f"{int(traces.token_lengths[n])} tokens: these are no traces of this base, or were "
        f"labelled beyond its positions. Label again with a lower --max-tokens"
    )


def _places(starts: IntArray, lengths: IntArray) -> IntArray:
    """start, start+1, ... (length of them) for each pair, one after the other."""
    before = np.repeat(np.cumsum(lengths) - lengths, lengths)
    places: IntArray = np.repeat(starts, lengths) + np.arange(int(lengths.sum())) - before
    return places


def _trunk_of(model: HasTrunk) -> tuple[Any, int, bool]:
    return model.base, model.config.num_policy_layers, model.policy.queries
