"""The folder of one training run.

run.json         what is trained on what; a folder with another is refused
checkpoint.pt    weights, optimiser and place, replaced atomically, with a checksum of them
log.jsonl        one line an epoch, each with its checksum
lam1e-3/ ...     a policy at each stage's end (or probe/, convergence/)
lam1e-3.validation.npy ...   its stop probabilities on the validation traces
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ospruner.durable import (
    DamagedError,
    append_durably,
    checked_line,
    lock_folder,
    read_checked,
    replacing,
    sync_folder,
    write_checked,
)
from ospruner.eval.schema import TraceTable

from .traces import Batch

__all__ = ["RunFolder", "labels_hash", "read_checkpoint", "state_hash"]


_RUN = "run.json"
_CHECKPOINT = "checkpoint.pt"
_CHECKSUM = "checksum"
_LOG = "log.jsonl"
_FAILED_BATCH = "failed_batch.npz"


class RunFolder:
    """The folder, opened by the one run that writes it; a context manager.

    Args:
        path: the folder; made where it does not exist.
        identity: what makes two runs the same: JSON values, by name.
        writes: False in all but the first of several processes, which then read and write nothing
            but the checkpoint that they load.

    Raises:
        ValueError: the folder holds something else, or a run with another identity (the
            difference is named), or is being written by another process.
    """

    def __init__(self, path: str | Path, identity: Mapping[str, Any], writes: bool = True) -> None:
        self.path = Path(path)
        self.writes = writes
        self._lock: IO[bytes] | None = None
        if not writes:
            return
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file; a training run needs a folder")
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder(self.path)
        try:
            self._claim(json.loads(json.dumps(identity)))
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()

    def _claim(self, identity: dict[str, Any]) -> None:
        file = self.path / _RUN
        if file.is_file():
            stored = read_checked(file, "put it back, or train into another folder")
            differences = [
                f"{name}: {identity.get(name)!r} here, {stored.get(name)!r} there"
                for name in sorted({*identity, *stored})
                if identity.get(name) != stored.get(name)
            ]
            if differences:
                raise ValueError(
                    f"{self.path} holds another training run ({'; '.join(differences)}): use the "
                    "same settings and labels to continue it, or another folder"
                )
            return
        strangers = sorted(e.name for e in self.path.iterdir() if not e.name.startswith("."))
        if strangers:
            raise ValueError(
                f"{self.path} holds another run's files ({', '.join(strangers[:5])}): use an "
                "empty folder"
            )
        write_checked(file, identity)

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        """Replaces the checkpoint; remembers how long the log is."""
        if not self.writes:
            return
        log = self.path / _LOG
        state = {**state, "log_bytes": log.stat().st_size if log.exists() else 0}
        with replacing(self.path / _CHECKPOINT) as file:
            torch.save({**state, _CHECKSUM: state_hash(state)}, file)

    def load_checkpoint(self) -> dict[str, Any] | None:
        """The last checkpoint, None where there is none; cuts the log to what it had then.

        Raises:
            DamagedError: it no longer holds what was written.
        """
        file, log = self.path / _CHECKPOINT, self.path / _LOG
        state = read_checkpoint(file) if file.is_file() else None
        if self.writes and log.exists():
            with log.open("r+b") as lines:
                lines.truncate(state["log_bytes"] if state is not None else 0)
        return state

    def log(self, entry: Mapping[str, Any]) -> None:
        """Appends one line to the log."""
        if not self.writes:
            return
        append_durably(self.path / _LOG, checked_line(entry))

    def save_policy(self, name: str, save: Callable[[Path], None]) -> Path:
        """Has a policy saved; its folder appears as a whole.

        Args:
            name: of the folder.
            save: writes into the folder that it is given.
        """
        final, partial = self.path / name, self.path / f".{name}.partial"
        if not self.writes:
            return final
        for left in (partial, final):  # `final` where a kill came between this and the checkpoint
            if left.exists():
                shutil.rmtree(left)
        partial.mkdir()
        save(partial)
        partial.replace(final)
        sync_folder(self.path)
        return final

    def save_batch(self, rows: npt.NDArray[np.int64], batch: Batch, logits: Tensor) -> Path:
        """Keeps a batch on which training failed, for inspection with `numpy.load`.

        Args:
            rows: (B,) numbers of the traces.
            batch: their labels.
            logits: (B, T) stop logits.
        """
        file = self.path / _FAILED_BATCH
        if not self.writes:
            return file
        with replacing(file) as opened:
            np.savez(
                opened,
                rows=rows,
                logits=logits.detach().float().cpu().numpy(),
                lengths=batch.lengths.numpy(),
                correct=batch.correct.numpy(),
                mask=batch.mask.numpy(),
            )
        return file

    def save_array(self, name: str, values: np.ndarray[Any, Any]) -> Path:
        """Saves an array, atomically."""
        file = self.path / f"{name}.npy"
        if not self.writes:
            return file
        with replacing(file) as opened:
            np.save(opened, values, allow_pickle=False)
        return file


def read_checkpoint(file: Path) -> dict[str, Any]:
    """What a run has saved, on the CPU.

    Raises:
        DamagedError: it no longer holds what was written.
    """
    way_out = "delete it, and the run begins anew with the same labels and settings"
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        stated = state.pop(_CHECKSUM)
        whole = stated == state_hash(state)
    # Whatever a flipped bit makes of a zip of pickles and tensors, it is damage.
    except Exception as error:
        raise DamagedError(
            f"{file} is damaged ({type(error).__name__}: {error}): {way_out}"
        ) from error
    if not whole:
        raise DamagedError(f"{file} is damaged (its checksum does not fit its tensors): {way_out}")
    return state


def state_hash(state: Any) -> str:
    """SHA-256 of nested dicts, lists and tuples of tensors and plain values; no copy is made."""
    digest = hashlib.sha256()

    def take(value: Any) -> None:
        if isinstance(value, Tensor):
            digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
            flat = value.detach().cpu().contiguous().view(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
        elif isinstance(value, Mapping):
            digest.update(f"mapping of {len(value)}".encode())
            for key, one in value.items():
                take(key)
                take(one)
        elif isinstance(value, list | tuple):
            digest.update(f"{len(value)} values".encode())
            for one in value:
                take(one)
        else:
            digest.update(f"{type(value).__name__} {value!r}".encode())

    take(state)
    return digest.hexdigest()


def labels_hash(table: TraceTable) -> str:
    """Tells label sets apart: problems, step ends and grades, in order."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update("\x00".join(table.problem_ids).encode())
    for values in (
        table.problem_index,
        table.num_steps,
        table.lengths[table.mask],
        table.correct[table.mask],
        table.matches_final[table.mask],
    ):
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()
