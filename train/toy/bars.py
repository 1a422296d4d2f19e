"""Rich progress bars for the commands on the embedded reasoner."""

from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

UNITS = {"sample": "traces", "fork": "traces", "trunk": "traces", "train": "batches"}


class PhaseBars:
    """One bar a phase, drawn while the context is open; call it as `ospruner.train.progress` says.

    Attributes:
        name: What the phases belong to, written before each phase's name.
    """

    def __init__(self, console: Console, name: str = "") -> None:
        self.name = name
        self._progress = Progress(
            TextColumn("{task.description:<26}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "PhaseBars":
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def __call__(self, phase: str, done: int, total: int, note: str = "") -> None:
        """Show the state of one phase."""
        label = f"{self.name}: {phase}" if self.name else phase
        if label not in self._tasks:
            unit = UNITS.get(phase, phase)
            self._tasks[label] = self._progress.add_task(label, unit=unit, note="")
        self._progress.update(self._tasks[label], completed=done, total=total, note=note)
