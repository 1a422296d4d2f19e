"""Label runs in units that any worker can do: an unfinished one is done again, a poisoned row once.

    parts/layout.json        how many units there are
    parts/unit-0007/         a label folder while the unit is worked on
    parts/unit-0007.json     how often its worker ended in it, and in each trace alone

A problem's unit follows from the hash of its id. A unit's traces are one stream, of which at most a
chunk is begun and not committed; where workers ended in it twice, the next one does that chunk one
by one, and a trace on which workers end again has failed for that reason.
"""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from modeling_ospruner.formats_ospruner import TokenFormat
from ospruner.durable import DamagedError, read_checked, write_checked
from ospruner.engines.interface import Engine
from ospruner.eval.schema import LabelSettings

from .making import label
from .rows import TraceKey
from .writer import Chunk, LabelFolder, NoTracesError

__all__ = ["PARTS", "Worker", "do_unit", "merge_units", "open_units", "unit_of", "unit_size"]

PARTS = "parts"
MAX_UNITS = 10_000
_CHUNKS = 8  # of a unit, at most
_TOGETHER = 2  # how often a unit is begun with all its traces in one stream
_ALONE = 2  # how often a trace may end its worker when done alone


@dataclass(frozen=True)
class Worker:
    """What a worker has loaded.

    Attributes:
        engine: runs the base.
        tokenizer: the base's.
        fmt: the base's reasoning format.
        settings: of the run.
    """

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    fmt: TokenFormat
    settings: LabelSettings


def unit_of(problem_id: str, units: int) -> int:
    """The unit that a problem belongs to, by hash: the same in every run."""
    digest = hashlib.blake2b(problem_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % units


def unit_size(traces: int, workers: int, chunk_traces: int) -> int:
    """Traces in a unit: one unit a worker, which waits in each for its last trace.

    Eight chunks at most: the others cannot take over what a slow worker has begun.
    """
    return max(1, min(-(-traces // workers), _CHUNKS * chunk_traces))


def open_units(
    out_dir: Path,
    settings: LabelSettings,
    traces: Sequence[TraceKey],
    unit_traces: int,
    retry_failed: bool = False,
) -> dict[int, list[TraceKey]]:
    """The units that have something to do, with their unfinished traces.

    Args:
        out_dir: the label folder of the whole run.
        settings: of the run.
        traces: all that are wanted.
        unit_traces: traces in a unit, about; a folder that has units keeps their number.
        retry_failed: try those again that failed in an earlier run.

    Raises:
        ValueError: the folder holds something else or other settings, or is being written.
    """
    with LabelFolder(out_dir, settings) as folder:
        if retry_failed:
            folder.forget_failed()
        done = folder.done
    layout = out_dir / PARTS / "layout.json"
    if layout.exists():
        units = read_checked(layout, f"remove it if no unit stands in {layout.parent}")["units"]
    else:
        units = min(MAX_UNITS, max(1, len(traces) // unit_traces))
        layout.parent.mkdir(exist_ok=True)
        write_checked(layout, {"units": units})
    todo: dict[int, list[TraceKey]] = {}
    for key in traces:
        if (key.problem.id, key.sample_index) not in done:
            todo.setdefault(unit_of(key.problem.id, units), []).append(key)
    return dict(sorted(todo.items()))


def do_unit(
    out_dir: Path, unit: int, keys: Sequence[TraceKey], worker: Worker, chunk_traces: int
) -> None:
    """Labels the traces of a unit in its own folder; what that holds already is kept.

    A trace that raises an error is recorded as failed, and so is one that ends its worker.

    Args:
        out_dir: the label folder of the whole run.
        unit: which unit.
        keys: its traces, by `open_units`.
        worker: the engine and what belongs to it.
        chunk_traces: traces that may be begun and not committed: what its end may cost.

    Raises:
        OSError: the engine's servers are gone, or the disk is full.
        ValueError: the unit is being written by another worker.
        Exception: that of the first trace, where every one of several raises one.
    """
    diary = _Diary(out_dir, unit)
    if not diary.unfinished(keys, worker):
        return
    diary.begin()
    try:
        if diary.begun > _TOGETHER:
            _do_alone(diary, keys, worker, chunk_traces)
        _label(diary.folder, keys, keys, worker, chunk_traces)
    finally:
        diary.end()


def _do_alone(diary: _Diary, keys: Sequence[TraceKey], worker: Worker, chunk_traces: int) -> None:
    """Does one by one what the last worker may have begun, for that is what it may have ended in.

    Traces are begun in order: no others than the first unfinished ones were.
    """
    deadly: list[tuple[str, int, str]] = []
    for key in diary.unfinished(keys, worker)[:chunk_traces]:
        if diary.alone[key.name] >= _ALONE:
            why = f"the worker ended {_ALONE} times while doing it alone"
            deadly.append((key.problem.id, key.sample_index, why))
            continue
        diary.begin_alone(key)
        try:
            _label(diary.folder, keys, [key], worker, 1)
        finally:
            diary.end_alone(key)
    if deadly:
        with LabelFolder(diary.folder, worker.settings) as folder:
            folder.commit(Chunk([], failed=deadly))


def merge_units(
    out_dir: Path,
    settings: LabelSettings,
    finished: bool,
    source: Mapping[str, Any] | None = None,
) -> Dataset | None:
    """Takes what the units hold into the run's own folder, in the units' order.

    Args:
        out_dir: the label folder of the whole run.
        settings: of the run.
        finished: whether all units are done; their folders are then removed.
        source: where the problems come from; kept in the manifest.

    Returns:
        The labelled traces; None where not all units are done.
    """
    with LabelFolder(out_dir, settings, source) as folder:
        for unit in sorted(path for path in (out_dir / PARTS).glob("unit-*") if path.is_dir()):
            with LabelFolder(unit, settings) as part:
                folder.adopt(part)
            shutil.rmtree(unit)
        if not finished:
            return None
        dataset = folder.finish()
    shutil.rmtree(out_dir / PARTS)
    return dataset


def _label(
    folder: Path,
    keys: Sequence[TraceKey],
    wanted: Sequence[TraceKey],
    worker: Worker,
    chunk_traces: int,
) -> None:
    with suppress(NoTracesError):  # why none of the unit's traces is a row stands in its folder
        label(
            list({key.problem.id: key.problem for key in keys}.values()),
            worker.engine,
            worker.tokenizer,
            worker.fmt,
            worker.settings,
            folder,
            chunk_traces=chunk_traces,
            traces=wanted,
        )


class _Diary:
    """What a unit's workers began: on disk before they begin it, since they may end in it.

    Attributes:
        folder: the unit's label folder.
        begun: how often the unit was begun by a worker that has not ended it.
        alone: the same of each trace that was begun alone.
    """

    def __init__(self, out_dir: Path, unit: int) -> None:
        self.folder = out_dir / PARTS / f"unit-{unit:04d}"
        self._file = self.folder.with_suffix(".json")
        noted: dict[str, Any] = {"begun": 0, "alone": {}}
        with suppress(FileNotFoundError, DamagedError):  # at worst a worker ends in it once more
            noted = read_checked(self._file, "")
        self.begun: int = noted["begun"]
        self.alone: Counter[str] = Counter(noted["alone"])

    def begin(self) -> None:
        """Notes that the unit is begun."""
        self.begun += 1
        self._write()

    def end(self) -> None:
        """Notes that the worker lives on."""
        self.begun = 0
        self._write()

    def begin_alone(self, key: TraceKey) -> None:
        """Notes that a trace is begun alone."""
        self.alone[key.name] += 1
        self._write()

    def end_alone(self, key: TraceKey) -> None:
        """Notes that the worker lives on after this trace."""
        del self.alone[key.name]
        self._write()

    def unfinished(self, keys: Sequence[TraceKey], worker: Worker) -> list[TraceKey]:
        """Those of the traces that the unit's folder does not hold."""
        with LabelFolder(self.folder, worker.settings) as folder:
            return [key for key in keys if (key.problem.id, key.sample_index) not in folder.done]

    def _write(self) -> None:
        write_checked(self._file, {"begun": self.begun, "alone": self.alone})
