"""How long-running work tells what is done: a callback, so that library code never prints."""

import math
import time
from typing import Protocol

from rich import progress as bars
from rich.console import Console


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


UNITS = dict.fromkeys(("grade", "sample", "fork", "trunk"), "traces") | {"train": "batches"}
SECONDS_A_LINE = 20.0


class PhaseBars(bars.Progress):
    """One bar a phase, drawn while the context is open; call it as a `Progress`.

    Where nobody draws (a pipe, a file), lines say what has begun, where it is, and what is done.
    """

    def __init__(self, console: Console, name: str = "") -> None:
        super().__init__(
            bars.TextColumn("{task.description:<26}", markup=False),
            bars.BarColumn(bar_width=24),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.fields[unit]}"),
            bars.TimeElapsedColumn(),
            bars.TimeRemainingColumn(),
            bars.TextColumn("{task.fields[note]}", markup=False),
            console=console,
            disable=not console.is_terminal,
        )
        self.name = name  # what the phases belong to, written before each phase's name
        self._told: dict[str, float] = {}  # when a phase's last line was printed
        self._of_phase: dict[str, bars.TaskID] = {}

    def __call__(self, phase: str, done: int, total: int, note: str = "") -> None:
        """Show the state of one phase."""
        label = f"{self.name}: {phase}" if self.name else phase
        if label not in self._of_phase:
            kind = phase.rpartition(": ")[2]  # a job's phase bears its name
            self._of_phase[label] = self.add_task(label, unit=UNITS.get(kind, kind), note="")
        task = self._of_phase[label]
        self.update(task, completed=done, total=total, note=note)
        now, last = time.monotonic(), self._told.get(label, -math.inf)
        if self.disable and last < math.inf and (done >= total or now - last >= SECONDS_A_LINE):
            self._told[label] = math.inf if done >= total else now
            said = f"{label}: {done} of {total} {self.tasks[task].fields['unit']} {note}"
            self.console.print(said.rstrip(), markup=False)
