"""Grading the stored answers of a label folder again, without generating anything."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ospruner.eval.problems.registry import open_task
from ospruner.eval.schema import LabelSettings
from ospruner.progress import Progress, silent
from ospruner.provenance import PROVENANCE_FILE, read_provenance, write_provenance

from .folder import data_hash, read_labels, read_manifest
from .rows import grade_rows
from .writer import LabelFolder

__all__ = ["Regraded", "regrade"]


@dataclass
class Regraded:
    """What grading again changed.

    Attributes:
        steps: forced answers graded.
        changed: of these, how many went from one grade to another: ("0.0", "1.0") -> count.
        ungraded: forced answers without a verdict now, by reason.
    """

    steps: int = 0
    changed: Counter[tuple[str, str]] = field(default_factory=Counter)
    ungraded: Counter[str] = field(default_factory=Counter)


def regrade(path: str | Path, progress: Progress = silent, allow_code: bool = False) -> Regraded:
    """Grades every stored answer of a label folder again.

    The new shards take the old ones' places at once, when all are graded: a run that was killed
    before has changed nothing, and is simply started again.

    Args:
        path: the label folder.
        progress: called with phase "grade", in traces.
        allow_code: whether programs that the model wrote may be run, as the task `code` does.

    Raises:
        ValueError: it is no label folder, holds no traces, or is being written; or the grader
            is broken.
    """
    path = Path(path)
    settings = LabelSettings.from_dict(read_manifest(path)["settings"])
    task = open_task(settings.task, allow_code)
    task.check()
    result = Regraded()
    read_labels(path)  # a damaged shard is refused: opening to write would set it aside
    with LabelFolder(path, settings) as folder:
        done = 0

        def change(rows: list[dict[str, Any]]) -> None:
            nonlocal done
            before = [list(row["forced_correct"]) for row in rows]
            grade_rows(rows, task)
            for row, old in zip(rows, before, strict=True):
                result.steps += len(old)
                for was, now in zip(old, row["forced_correct"], strict=True):
                    if was != now:
                        result.changed[str(was), str(now)] += 1
                result.ungraded.update(why for why in row["ungraded_reasons"] if why)
            done += len(rows)
            progress("grade", done, folder.traces)

        folder.rewrite(change)
        folder.finish()
        if (path / PROVENANCE_FILE).is_file():
            regraded = replace(read_provenance(path), data_hash=data_hash(folder.chunks))
            write_provenance(path, regraded)
    return result
