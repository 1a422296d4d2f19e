"""How long-running work tells what is done: a callback, so that library code never prints."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Progress", "silent"]


class Progress(Protocol):
    """Called as work advances; a rich bar can be attached."""

    def __call__(self, phase: str, done: int, total: int, note: str = "") -> None:
        """Takes the state of one phase.

        Args:
            phase: what is being done ("sample", "fork", "grade", "trunk", "train", "validate").
            done: units done in this phase, resumed ones included.
            total: units in all.
            note: a few words worth showing, such as the loss.
        """


def silent(phase: str, done: int, total: int, note: str = "") -> None:
    """The callback that shows nothing."""
