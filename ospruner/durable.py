"""Files that survive kills and tell of damage: fsync, replacement, checksums, a folder's lock."""

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

LOCK = ".lock"
_CHECKSUM = "checksum"


class DamagedError(ValueError):
    """A file no longer holds what was written to it."""


def lock_folder(path: Path) -> IO[bytes]:
    """Locks a folder for the one run that writes it, until the file returned is closed.

    The system releases the lock when the process ends, even by a kill.

    Raises:
        ValueError: another run holds it.
    """
    lock = (path / LOCK).open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise ValueError(
            f"{path} is being written by another run: wait for it, or use another folder"
        ) from error
    return lock


def differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """A line for each name whose values differ, with both; a value that is missing is None."""
    pairs = {name: (here.get(name), there.get(name)) for name in {**here, **there}}
    return [f"{name}: {a!r} here, {b!r} there" for name, (a, b) in pairs.items() if a != b]


def refuse_strangers(path: Path, own: Sequence[str] = (".",)) -> None:
    """Raises ValueError where a folder holds what does not begin as a run's own files do."""
    if others := sorted(one.name for one in path.glob("*") if not one.name.startswith(tuple(own))):
        raise ValueError(
            f"{path} holds another run's files ({', '.join(others[:5])}): use an empty folder"
        )


@contextmanager
def room_needed(path: Path) -> Iterator[None]:
    """Says in words that a folder's disk is full.

    Raises:
        ValueError: writing failed for want of space.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise ValueError(
            f"no room left to write in {path} ({error.strerror}): make some and run again; what "
            "was finished before is kept"
        ) from error


def replace_file(path: Path, content: bytes) -> None:
    """Writes a whole file, which takes the path's place atomically and durably.

    Whatever fails leaves the path as it was, and no partial file behind.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)  # makes the renaming durable
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_checked(path: Path, values: Mapping[str, Any]) -> None:
    """Writes JSON values with a checksum of them, as `replace_file` does."""
    checked = {**values, _CHECKSUM: _checksum_of(values)}
    text = json.dumps(checked, indent=2, ensure_ascii=False) + "\n"
    replace_file(path, text.encode())


def read_checked(path: Path, way_out: str) -> dict[str, Any]:
    """What `write_checked` wrote; `way_out` says what to do where it is damaged.

    Raises:
        DamagedError: the values are not those that were written.
    """
    why = "or was edited by hand: its checksum does not fit what it says"
    try:
        values: dict[str, Any] = json.loads(path.read_bytes())
        if values.pop(_CHECKSUM) == _checksum_of(values):
            return values
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"or not ours ({type(error).__name__}: {error})"
    raise DamagedError(f"{path} is damaged, {why}: {way_out}")


def _checksum_of(values: Mapping[str, Any]) -> str:
    """Of the values, not of their spelling: reading and writing them keeps it."""
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
