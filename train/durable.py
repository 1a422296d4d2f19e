"""Files that survive kills: fsync, atomic replacement, and a lock on a run's folder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

__all__ = ["LOCK", "lock_folder", "replace_file", "sync_file", "sync_folder"]

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
