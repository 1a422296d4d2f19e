"""Files that survive kills: fsync, atomic replacement, and a lock on a run's folder."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

__all__ = [
    "LOCK",
    "append_durably",
    "lock_folder",
    "replace_file",
    "room_needed",
    "sync_file",
    "sync_folder",
]

LOCK = ".lock"


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


def append_durably(path: Path, content: bytes) -> None:
    """Appends to a file; a failure leaves the file as it was."""
    with path.open("ab", buffering=0) as file:
        before = os.fstat(file.fileno()).st_size
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        except BaseException:
            file.truncate(before)
            raise


def replace_file(path: Path, content: bytes) -> None:
    """Writes a whole file atomically and durably."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        sync_file(file)
    partial.replace(path)
    sync_folder(path.parent)


def sync_file(file: IO[bytes]) -> None:
    """Makes what was written to a file durable."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Makes renames in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
