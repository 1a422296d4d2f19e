"""The trunk's states of all traces as they are kept: in memory, or in a file that resumes."""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from modeling_ospruner.loading_ospruner import fingerprint_of
from modeling_ospruner.policy_ospruner import LayerKeys, Reader, TrunkDone
from ospruner.durable import (
    partial_of,
    replace_file,
    room_needed,
    sync_file,
    sync_folder,
)
from ospruner.eval.table import BoolArray, FloatArray, IntArray

__all__ = [
    "Kept",
    "KeptTraces",
    "KeyShape",
    "complete_file",
    "key_shapes",
    "padded",
    "token_width",
    "weights_of",
]


class Sharing(Protocol):
    """Processes that share a file; `Processes` is that."""

    size: int

    @property
    def main(self) -> bool:
        """Whether this one writes."""

    def sum(self, values: FloatArray) -> FloatArray:
        """Over the processes."""

    def wait(self) -> None:
        """Until all are here."""


@dataclass(frozen=True)
class KeptTraces:
    """Whose states a file holds.

    Attributes:
        names: (N,) of each trace: a digest of its tokens and steps.
        tokens: (N,) tokens of prompt and trace.
        steps: (N,) steps.
    """

    names: npt.NDArray[np.bytes_]
    tokens: IntArray
    steps: IntArray

    @property
    def digest(self) -> str:
        """Tells all of them, in order."""
        return hashlib.sha256(self.names.tobytes()).hexdigest()[:16]

    @property
    def starts(self) -> tuple[IntArray, IntArray]:
        """(N + 1,) where each trace's tokens begin among those of all, and where its steps do."""
        tokens, steps = (np.concatenate([[0], np.cumsum(one)]) for one in (self.tokens, self.steps))
        return tokens, steps

    @classmethod
    def of_file(cls, file: Path) -> KeptTraces | None:
        """Those of a complete file, where they are noted.

        Raises:
            ValueError: the note cannot be read.
        """
        note = file.with_suffix(".npz")
        try:
            with np.load(note) as found:
                return cls(found["names"], found["tokens"], found["steps"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(
                f"{note}, which tells the traces in {file.name}, cannot be read ({error}): "
                "delete both files, and the base runs over these traces again"
            ) from error

    def write(self, file: Path) -> None:
        """Notes them beside a file."""
        held = io.BytesIO()
        np.savez(held, names=self.names, tokens=self.tokens, steps=self.steps)
        replace_file(file.with_suffix(".npz"), held.getvalue())


_NOTED_EVERY = 30.0  # seconds between notes of how far a file has come


Fill = Callable[[Path, BoolArray, Callable[[IntArray], None]], None]
"""Given the partial file, (N,) which traces are in it, and what to tell which are after a batch."""

Copy = Callable[[Path, Path, "KeptTraces", IntArray, IntArray], None]
"""Given another file, the partial one, the other's traces, and the same traces' numbers in both."""


def complete_file(
    file: Path,
    size: int,
    traces: KeptTraces,
    copy: Copy,
    fill: Fill,
    processes: Sharing,
) -> None:
    """Has a file of states filled, from where a killed run left it; nothing where it is complete.

    What another file of the same kind holds of the same traces is copied: labels that have grown
    cost the base a pass over the new ones only. Where another run is filling the file, this one
    waits for that, and goes on should it be killed.

    Args:
        file: which, `KIND-TRACES.suffix`; its folder is made.
        size: in bytes.
        traces: whose states it holds.
        copy: copies what another file holds.
        fill: fills in the others.
        processes: those that call this together.

    Raises:
        ValueError: the disk has no room for the file.
    """
    if not processes.sum(np.array([not file.is_file()], dtype=np.float64)).any():
        return
    partial, note = partial_of(file), file.with_suffix(".done")
    with ExitStack() as stack:
        if processes.main:
            file.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_locked(partial))
            begun = note.is_file() and partial.stat().st_size == size
            if not file.is_file() and not begun:
                note.unlink(missing_ok=True)
                # Written through memory, a full disk would kill the process.
                with room_needed(file.parent), partial.open("wb") as opened:
                    os.posix_fallocate(opened.fileno(), 0, size)
                copied = _copy_known(file, partial, traces, copy)
                replace_file(note, copied.tobytes())
        processes.wait()
        if not processes.sum(np.array([not file.is_file()], dtype=np.float64)).any():
            partial.unlink(missing_ok=True)  # another run has completed it meanwhile
            return
        _fill(file, partial, note, traces, fill, processes)
    processes.wait()


def _copy_known(file: Path, partial: Path, traces: KeptTraces, copy: Copy) -> BoolArray:
    """(N,) the traces whose states other files of the same kind hold, now in the partial one."""
    known = np.zeros(len(traces.names), dtype=np.bool_)
    kind = file.name.split("-")[0]
    for other in sorted(file.parent.glob(f"{kind}-*{file.suffix}")):
        theirs = KeptTraces.of_file(other)
        if theirs is None:
            continue
        _, ours, in_other = np.intersect1d(traces.names, theirs.names, return_indices=True)
        new = ~known[ours]
        copy(other, partial, theirs, in_other[new], ours[new])
        known[ours] = True
    return known


def _fill(
    file: Path, partial: Path, note: Path, traces: KeptTraces, fill: Fill, processes: Sharing
) -> None:
    done = np.frombuffer(note.read_bytes(), dtype=np.bool_).copy()
    processes.wait()
    noted = time.monotonic()

    def wrote(rows: IntArray) -> None:
        nonlocal noted
        done[rows] = True
        if processes.size == 1 and time.monotonic() - noted > _NOTED_EVERY:
            _make_durable(partial)
            replace_file(note, done.tobytes())
            noted = time.monotonic()

    fill(partial, done.copy(), wrote)
    processes.wait()
    if processes.main:
        traces.write(file)
        _make_durable(partial)
        partial.replace(file)
        sync_folder(file.parent)
        note.unlink(missing_ok=True)


@contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """The file that is being filled, which another run may hold: then when that has ended."""
    while True:
        with partial.open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Completed meanwhile, it bears another name, and the next run has made its own.
            here = partial.stat().st_ino if partial.is_file() else None
            if here == os.fstat(lock.fileno()).st_ino:
                yield
                return


def _make_durable(path: Path) -> None:
    with path.open("rb+") as opened:
        sync_file(opened)


@torch.no_grad()
def weights_of(base: Any) -> str:
    """What tells a causal LM's weights from others: of its files, or a few values of each."""
    if (found := fingerprint_of(base)) is not None:
        return found
    digest = hashlib.sha256()
    for name, parameter in base.named_parameters():
        flat = parameter.detach().flatten()
        some = flat[torch.linspace(0, len(flat) - 1, 4).long().to(flat.device)]
        digest.update(f"{name} {tuple(parameter.shape)} {some.tolist()}".encode())
    return digest.hexdigest()


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
class Kept:
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
    def of(cls, flat: Tensor, tokens: int, hidden_size: int, shapes: Sequence[KeyShape]) -> Kept:
        """Both parts of one tensor, in memory or of a file."""
        cut = tokens * token_width(hidden_size, shapes)
        return cls(flat[:cut].view(tokens, -1), flat[cut:].view(-1, hidden_size), shapes)

    def copy(
        self,
        into: IntArray,
        starts: Sequence[IntArray],
        known: Kept,
        rows: IntArray,
        known_starts: Sequence[IntArray],
    ) -> None:
        """Takes over what another file holds of some traces.

        Args:
            into: their numbers here.
            starts: where traces' tokens begin here, and where their steps do.
            known: the other's.
            rows: their numbers there.
            known_starts: likewise there.
        """
        parts = [(self.tokens, known.tokens), (self.steps, known.steps)]
        for (new, old), ours, theirs in zip(parts, starts, known_starts, strict=True):
            if not len(new):
                continue
            for to, row in zip(into, rows, strict=True):
                new[ours[to] : ours[to + 1]] = old[theirs[row] : theirs[row + 1]]

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


def token_width(hidden_size: int, shapes: Sequence[KeyShape]) -> int:
    """Numbers kept of each token."""
    return sum(heads * (key + value) for heads, key, value in shapes) or hidden_size


def padded(flat: Tensor, starts: IntArray, rows: IntArray) -> Tensor:
    """(B, S, W), padded with 0 at the right, of rows that lie one after the other in (all, W)."""
    longest = int((starts[rows + 1] - starts[rows]).max())
    out = flat.new_zeros(len(rows), longest, flat.shape[1])
    for b, row in enumerate(rows):
        start, end = starts[row], starts[row + 1]
        out[b, : end - start] = flat[start:end]
    return out
