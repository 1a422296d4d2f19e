"""Labelled traces in memory, as batches: one trace a row for the tail, packed for the trunk.

The trunk (the frozen layers below the tail) is the same in every epoch, so its output is kept in
memory where it fits. Padding stands at the right end of a row, where no causal layer sees it.

A policy that is queries only reads the trunk's output at step ends alone, and the base's keys and
values in the last n layers everywhere; so these are kept, in their place.

Packed, several traces stand in a line and each attends to itself alone: where every layer is full
or sliding attention, position ids that start again at each trace tell transformers' masks where one
ends (`masking_utils.find_packed_sequence_indices`). Recurrent layers would carry their state over
from trace to trace, so their traces go one a row.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from datasets import Dataset
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from modeling_ospruner.common.durable import (
    lock_folder,
    partial_of,
    replace_file,
    room_needed,
    sync_file,
    sync_folder,
)
from modeling_ospruner.common.progress import Progress, silent
from modeling_ospruner.configuration_ospruner import max_positions
from modeling_ospruner.loading_ospruner import fingerprint_of
from modeling_ospruner.policy_ospruner import LayerKeys, Reader, TrunkDone
from modeling_ospruner.rules_ospruner import TRIAL_NUMBERS, TrialAnswer, TrialHistory
from ospruner.eval.schema import TraceTable
from ospruner.eval.table import IntArray

from .objective import AUXILIARY_TARGETS, answer_history
from .processes import Processes
from .tail import no_scores

__all__ = [
    "Batch",
    "LabelledTraces",
    "Packed",
    "States",
    "epoch_batches",
    "key_shapes",
    "length_batches",
    "micro_batches",
    "pack",
    "refuse_beyond_positions",
    "takes_packing",
]


_BUCKET_BATCHES = 16
_FORWARD_TOKENS = 16_384
_NOTED_EVERY = 30.0  # seconds between notes of how far a file of states has come


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
        self._kept: _Kept | None = None
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
        tokens = _padded(kept.tokens, self._starts, rows).to(self._states_for)
        if not kept.shapes:
            return States(tokens)
        hidden = _padded(kept.steps, self._step_starts, rows).to(self._states_for)
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

        A file's name tells the traces, the base's weights and what of its states a policy reads. So
        commands on the same labels run the base once, and a command that was stopped goes on.
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
            ValueError: the disk has no room for the file, or another run is writing it.
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

        def kept(flat: Tensor) -> _Kept:
            return _Kept.of(flat, int(self.token_lengths.sum()), hidden_size, shapes)

        if fits:
            states = kept(torch.empty(count, dtype=dtype, device=model.base.device))
            self._fill(states, model, progress, Processes())
        else:
            assert self.states_folder is not None
            file = self.states_folder / f"{self._name_of_states(model, shapes)}.states"
            self._write_states(file, kept, model, count, progress, processes or Processes())
            states = kept(torch.from_file(str(file), True, count, dtype=dtype))
        self._kept, self._states_of = states, _trunk_of(model)
        self._states_for = model.base.device
        self.cached_bytes = size if fits else 0
        return self.cached_bytes

    def _name_of_states(self, model: HasTrunk, shapes: Sequence[KeyShape]) -> str:
        """Tells these states from those of other traces, weights, layers or types."""
        read = (model.config.num_policy_layers, model.policy.queries, list(shapes))
        digest = hashlib.sha256(
            repr((read, str(model.base.dtype), _weights_of(model.base))).encode()
        )
        for values in (self._tokens, self.token_lengths, self.table.num_steps, self.positions):
            digest.update(np.ascontiguousarray(values, dtype=np.int64).tobytes())
        return digest.hexdigest()[:32]

    def _write_states(
        self,
        file: Path,
        kept: Callable[[Tensor], _Kept],
        model: HasTrunk,
        count: int,
        progress: Progress,
        processes: Processes,
    ) -> None:
        """Fills the file, from where a killed run left it; nothing where it is complete."""
        dtype = model.base.dtype
        if not processes.sum(np.array([not file.is_file()], dtype=np.float64)).any():
            return
        partial, note = partial_of(file), file.with_suffix(".batches")
        lock = None
        if processes.main:
            file.parent.mkdir(parents=True, exist_ok=True)
            lock = lock_folder(file.parent)
            size = count * dtype.itemsize
            if not partial.is_file() or partial.stat().st_size != size:
                note.unlink(missing_ok=True)
                # Written through memory, a full disk would kill the process.
                with room_needed(file.parent), partial.open("wb") as opened:
                    os.posix_fallocate(opened.fileno(), 0, size)
        processes.wait()
        done = int(note.read_text()) if note.is_file() else 0
        processes.wait()
        noted = time.monotonic()

        def wrote(batches: int) -> None:
            nonlocal noted
            if processes.size == 1 and time.monotonic() - noted > _NOTED_EVERY:
                _make_durable(partial)
                replace_file(note, str(batches).encode())
                noted = time.monotonic()

        new = torch.from_file(str(partial), True, count, dtype=dtype)
        self._fill(kept(new), model, progress, processes, done, wrote)
        processes.wait()
        if lock is not None:
            _make_durable(partial)
            partial.replace(file)
            sync_folder(file.parent)
            note.unlink(missing_ok=True)
            lock.close()
        processes.wait()

    def _fill(
        self,
        kept: _Kept,
        model: HasTrunk,
        progress: Progress,
        processes: Processes,
        first: int = 0,
        wrote: Callable[[int], None] = lambda batches: None,
    ) -> None:
        """Each process fills in what it computes; `kept` is theirs together.

        Args:
            kept: where to.
            model: whose trunk.
            progress: as for `cache_states`.
            processes: likewise.
            first: how many batches are there already.
            wrote: told after each batch how many are there now, with one process.
        """
        batches = list(length_batches(self.token_lengths))
        done = sum(map(len, batches[:first]))
        size = kept.tokens.nbytes + kept.steps.nbytes
        for number, (rows, _) in enumerate(processes.turns(batches[first:]), first + 1):
            out = self._run_trunk(model, rows)
            tokens = kept.flat_keys(out.keys) if kept.shapes else out.hidden
            for b, row in enumerate(rows):
                start, end = self._starts[row], self._starts[row + 1]
                kept.tokens[start:end] = tokens[b, : end - start]
                if kept.shapes:
                    start, end = self._step_starts[row], self._step_starts[row + 1]
                    kept.steps[start:end] = out.hidden[b, : end - start]
            wrote(number)
            done = min(done + len(rows) * processes.size, len(self))
            progress("trunk", done, len(self), f"{size / 2**20:.0f} MiB")


def _make_durable(path: Path) -> None:
    with path.open("rb+") as opened:
        sync_file(opened)


@torch.no_grad()
def _weights_of(base: Any) -> str:
    """What tells a causal LM's weights from others: of its files, or a few values of each."""
    if (found := fingerprint_of(base)) is not None:
        return found
    digest = hashlib.sha256()
    for name, parameter in base.named_parameters():
        flat = parameter.detach().flatten()
        some = flat[torch.linspace(0, len(flat) - 1, 4).long().to(flat.device)]
        digest.update(f"{name} {tuple(parameter.shape)} {some.tolist()}".encode())
    return digest.hexdigest()


_TRIED = ("forced_answer_ids", "forced_logprob", "forced_entropy")


KeyShape = tuple[int, int, int]
"""Of one layer: KV heads, and the width of a key and of a value."""


@torch.no_grad()
def key_shapes(base: Any, num_layers: int) -> list[KeyShape]:
    """Shapes of a causal LM's keys and values in its last layers, of one token; it is run on one.

    Args:
        base: the causal LM.
        num_layers: n.
    """
    one = torch.zeros(1, 1, dtype=torch.int64, device=base.device)
    with Reader(base, num_layers, queries=True, stop_there=True) as reader:
        with suppress(TrunkDone):
            base.get_decoder()(input_ids=one, use_cache=False)
        return [(k.keys.shape[1], k.keys.shape[3], k.values.shape[3]) for k in reader.keys]


@dataclass(frozen=True)
class _Kept:
    """The trunk's states of all traces, one after the other.

    Attributes:
        tokens: (tokens, W): states, or for a policy that is queries only keys and values.
        steps: (steps, H), states at step ends, for such a policy; else (0, H).
        shapes: of its keys and values.
    """

    tokens: Tensor
    steps: Tensor
    shapes: Sequence[KeyShape]

    @classmethod
    def of(cls, flat: Tensor, tokens: int, hidden_size: int, shapes: Sequence[KeyShape]) -> _Kept:
        """Both parts of one tensor, in memory or of a file."""
        cut = tokens * _token_width(hidden_size, shapes)
        return cls(flat[:cut].view(tokens, -1), flat[cut:].view(-1, hidden_size), shapes)

    def flat_keys(self, keys: Sequence[LayerKeys]) -> Tensor:
        """(B, S, W) of each layer's keys and values (B, KV, S, D)."""
        parts = [part for one in keys for part in (one.keys, one.values)]
        return torch.cat([part.transpose(1, 2).flatten(2) for part in parts], dim=-1)

    def keys_of(self, flat: Tensor) -> list[LayerKeys]:
        """Views of what `flat_keys` gave."""
        widths = [heads * width for heads, *both in self.shapes for width in both]
        parts = flat.split(widths, dim=-1)
        return [
            LayerKeys(
                *(one.unflatten(2, (heads, -1)).transpose(1, 2) for one in parts[2 * i : 2 * i + 2])
            )
            for i, (heads, _, _) in enumerate(self.shapes)
        ]


def _token_width(hidden_size: int, shapes: Sequence[KeyShape]) -> int:
    return sum(heads * (key + value) for heads, key, value in shapes) or hidden_size


def _elements(traces: LabelledTraces, hidden_size: int, shapes: Sequence[KeyShape]) -> int:
    steps = int(traces.table.num_steps.sum()) if shapes else 0
    tokens = int(traces.token_lengths.sum())
    return tokens * _token_width(hidden_size, shapes) + steps * hidden_size


def _padded(flat: Tensor, starts: IntArray, rows: IntArray) -> Tensor:
    """(B, S, W), padded with 0 at the right, of rows that lie one after the other in (all, W)."""
    longest = int((starts[rows + 1] - starts[rows]).max())
    out = flat.new_zeros(len(rows), longest, flat.shape[1])
    for b, row in enumerate(rows):
        start, end = starts[row], starts[row + 1]
        out[b, : end - start] = flat[start:end]
    return out


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


def _places(starts: IntArray, lengths: IntArray) -> IntArray:
    """start, start+1, ... (length of them) for each pair, one after the other."""
    before = np.repeat(np.cumsum(lengths) - lengths, lengths)
    places: IntArray = np.repeat(starts, lengths) + np.arange(int(lengths.sum())) - before
    return places


def _trunk_of(model: HasTrunk) -> tuple[Any, int, bool]:
    return model.base, model.config.num_policy_layers, model.policy.queries


_MASKED_ATTENTION = ("sdpa",)
"""Implementations with which packed traces are as alone (eager gpt_oss makes no masks for them)."""


@dataclass(frozen=True)
class Packed:
    """B token sequences in P lines of C slots.

    Attributes:
        input_ids: (P, C); 0 in empty slots.
        position_ids: (P, C), from 0 in each sequence and in the empty slots behind the last.
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
    """Whether every layer of a causal LM is attention, with masks that can confine it."""
    layers = DynamicCache(config=base.config.get_text_config()).layers
    confined = (DynamicLayer, DynamicSlidingWindowLayer)
    masked = base.config.get_text_config()._attn_implementation in _MASKED_ATTENTION
    return masked and all(type(layer) in confined for layer in layers)


def pack(sequences: Sequence[IntArray]) -> Packed:
    """Puts sequences into as few lines, as long as the longest, as first fit decreasing finds.

    Args:
        sequences: B sequences of at least one token.
    """
    lengths = np.array([len(ids) for ids in sequences])
    capacity = int(lengths.max())
    lines: list[list[int]] = []
    free: list[int] = []
    for b in np.argsort(-lengths, kind="stable").tolist():
        line = next((p for p, slots in enumerate(free) if slots >= lengths[b]), len(lines))
        if line == len(lines):
            lines.append([])
            free.append(capacity)
        lines[line].append(b)
        free[line] -= int(lengths[b])
    ids = np.zeros((len(lines), capacity), dtype=np.int64)
    positions = np.zeros_like(ids)
    places = np.zeros((len(sequences), capacity), dtype=np.int64)
    for p, members in enumerate(lines):
        start = 0
        for b in members:
            end = start + int(lengths[b])
            ids[p, start:end] = sequences[b]
            positions[p, start:end] = np.arange(end - start)
            places[b, : end - start] = p * capacity + np.arange(start, end)
            start = end
        positions[p, start:] = np.arange(capacity - start)
    return Packed(torch.from_numpy(ids), torch.from_numpy(positions), torch.from_numpy(places))
