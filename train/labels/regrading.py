"""Grading the stored answers of a label folder again, without generating anything."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq  # type: ignore[import-untyped]
from datasets import Dataset

from modeling_ospruner.common.durable import sync_file, sync_folder
from modeling_ospruner.common.progress import Progress, silent
from ospruner.eval.schema import FEATURES, LabelSettings

from .folder import data_shards, read_manifest, read_shard
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


def regrade(path: str | Path, progress: Progress = silent) -> Regraded:
    """Grades every stored answer of a label folder again and writes the shards anew.

    Each shard is replaced atomically; a run that was killed is simply started again.

    Args:
        path: the label folder.
        progress: called with phase "grade", in traces.

    Raises:
        ValueError: it is no label folder, holds no traces, or is being written.
    """
    path = Path(path)
    settings = LabelSettings.from_dict(read_manifest(path)["settings"])
    result = Regraded()
    with LabelFolder(path, settings) as folder:
        folder.compact()
        for view in (path / "prefixes").glob("*.parquet"):
            view.unlink()
        done = 0
        for shard in data_shards(path):
            traces = read_shard(shard)
            rows = traces.to_list()
            before = [list(row["forced_correct"]) for row in rows]
            grade_rows(rows)
            for row, old in zip(rows, before, strict=True):
                result.steps += len(old)
                for was, now in zip(old, row["forced_correct"], strict=True):
                    if was != now:
                        result.changed[str(was), str(now)] += 1
                result.ungraded.update(why for why in row["ungraded_reasons"] if why)
            _replace(shard, rows)
            done += len(rows)
            progress("grade", done, folder.traces)
        folder.finish()
    return result


def _replace(shard: Path, rows: list[dict[str, object]]) -> None:
    """Writes a shard's rows anew, its note on chunks and costs kept."""
    table = Dataset.from_list(rows, features=FEATURES).data.table
    metadata = {**(table.schema.metadata or {})}
    metadata |= {
        key: value
        for key, value in (pq.read_schema(shard).metadata or {}).items()
        if key not in metadata and key != b"ARROW:schema"
    }
    partial = shard.with_suffix(".partial")
    with partial.open("wb") as file:
        pq.write_table(table.replace_schema_metadata(metadata), file)
        sync_file(file)
    partial.replace(shard)
    sync_folder(shard.parent)
