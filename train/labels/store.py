"""Writing a label folder (`folder.py` says what stands in it), safe against kills at any time."""

from __future__ import annotations

import hashlib
import itertools
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from io import BytesIO
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from datasets import Dataset

from ospruner.durable import DamagedError, lock_folder, replace_file, write_checked
from ospruner.eval.schema import LabelSettings

from .features import FEATURES, prefix_rows
from .folder import (
    FORMAT_VERSION,
    MANIFEST,
    Shard,
    check_folder,
    read_manifest,
    read_shard,
    shards_of,
    write_card,
)

COSTS = (
    *("computed_tokens", "unique_tokens", "padding_tokens"),
    *("sampling_computed_tokens", "sampling_unique_tokens"),
)
"""What a run cost: tokens that entered the model's forward for forks, those of them that cannot be
shared, slots of padding; the first two of sampling."""

_COUNTS = ("problems", "steps", "ungraded_steps", "capped_traces")  # of a finished run
_place = itemgetter("problem_id", "sample_index")  # what tells a row from others
Lost = tuple[str, int, str]  # a trace that is no row: problem id, sample index, why


@dataclass(frozen=True)
class Chunk:
    """What is committed at once."""

    rows: list[dict[str, Any]] = field(default_factory=list)  # labelled traces
    dropped: list[Lost] = field(default_factory=list)  # that cannot be rows
    failed: list[Lost] = field(default_factory=list)  # that an error kept from being rows
    costs: Counter[str] = field(default_factory=Counter)  # tokens, by the names of COSTS

    def __len__(self) -> int:
        return len(self.rows) + len(self.dropped) + len(self.failed)

    def places(self) -> set[tuple[str, int]]:
        """Problem id and sample index of each trace."""
        return {*map(_place, self.rows), *(lost[:2] for lost in (*self.dropped, *self.failed))}


class LabelStore:
    """The folder, opened for writing by one run; a context manager.

    A shard that is no longer what was written is renamed, with a warning, and its traces are no
    longer among `done`: whoever continues the run labels them again. The manifest keeps `source`,
    which says where the problems come from.

    Raises:
        ValueError: the folder holds something else, labels with other settings, or is being
            written by another run.
    """

    def __init__(
        self, path: str | Path, settings: LabelSettings, source: Mapping[str, Any] | None = None
    ) -> None:
        self.path = Path(path)
        self.problems: dict[str, tuple[str, str]] = {}  # text and reference of those of rows, by id
        # Problem id and sample index of the traces that are rows, were dropped, or failed.
        self.done: set[tuple[str, int]] = set()
        self.manifest: dict[str, Any] = {  # is written with what is committed
            "format_version": FORMAT_VERSION,
            "settings": settings.to_dict(),
            "source": dict(source or {}),
            "deterministic": True,
            "batch_effects": [],
            "finished": False,
            "traces": 0,
            "dropped": [],
            "failed": [],
            **dict.fromkeys(COSTS, 0),
            "shards": [],
        }
        check_folder(self.path, settings)
        (self.path / "data").mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            stack.enter_context(lock_folder(self.path))
            self._open(settings)
            stack.callback(write_card, self.path)  # a commit may be interrupted before it
            self._leave = stack.pop_all().close

    def __enter__(self) -> LabelStore:
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    @property
    def shards(self) -> list[Shard]:
        """What the manifest lists."""
        return shards_of(self.manifest)

    def note_effects(self, why: str | None) -> None:
        """Takes note of an engine's `batch_effects`; they are written with the next commit."""
        if why and why not in self.manifest["batch_effects"]:
            self.manifest["batch_effects"].append(why)

    def commit(self, chunk: Chunk) -> None:
        """Makes a chunk durable: when this returns, no kill loses it. Known traces are left out."""
        rows = [row for row in chunk.rows if _place(row) not in self.done]
        changes: dict[str, Any] = {
            name: self.manifest[name] + [one for one in lost if one[:2] not in self.done]
            for name, lost in (("dropped", chunk.dropped), ("failed", chunk.failed))
        }
        changes |= {name: self.manifest[name] + chunk.costs[name] for name in COSTS}
        table = pa.Table.from_pylist(rows, FEATURES.arrow_schema)
        self._exchange({len(self.shards): table} if rows else {}, **changes)
        self._account(rows)
        self.done |= chunk.places()

    def forget_failed(self) -> None:
        """Takes failed traces out of `done`, to be tried again."""
        self.done -= {(problem_id, sample) for problem_id, sample, _ in self.manifest["failed"]}
        self._write_manifest(failed=[])

    def rewrite(self, change: Callable[[list[dict[str, Any]]], None]) -> None:
        """Changes the rows of all shards at once, those of each in place, of the same traces."""
        changed = {}
        for number, shard in enumerate(self.shards):
            before = read_shard(self.path, shard)
            rows = before.to_pylist()
            change(rows)
            after = pa.Table.from_pylist(rows, FEATURES.arrow_schema)
            if not after.equals(before):
                changed[number] = after
        self._exchange(changed)

    def finish(self, order: Mapping[tuple[str, int], int] | None = None) -> Dataset:
        """Sorts the rows, derives the view of prefixes, and gives the whole.

        The order is the place of each trace, by problem id and sample index; others come first, as
        they stand. A shard keeps its number of rows.

        Raises:
            ValueError: there is no labelled trace: all were dropped, or failed.
        """
        if not self.shards:
            lost = (*self.manifest["dropped"], *self.manifest["failed"])
            raise ValueError(f"no trace could be labelled: {sorted({one[2] for one in lost})}")
        tables = [read_shard(self.path, shard) for shard in self.shards]
        whole = pa.concat_tables(tables)
        keys = map(_place, whole.select(["problem_id", "sample_index"]).to_pylist())
        wanted = np.argsort([(order or {}).get(key, -1) for key in keys], kind="stable")
        firsts = [0, *itertools.accumulate(map(len, tables))]
        moved = {
            number: whole.take(rows)
            for number, rows in enumerate(np.split(wanted, firsts[1:-1]))
            if (rows != firsts[number] + np.arange(len(rows))).any()
        }
        self._exchange(moved)
        tables = [moved.get(number, table) for number, table in enumerate(tables)]
        (self.path / "prefixes").mkdir(exist_ok=True)
        for shard, table, first in zip(self.shards, tables, firsts, strict=False):
            if not (self.path / shard.view).exists():
                _write_parquet(self.path / shard.view, prefix_rows(table, first))
        whole = pa.concat_tables(tables)
        grades = whole.column("forced_correct").combine_chunks().flatten()
        capped = whole.column("ended").to_pylist().count("cap")
        problems = len(whole.column("problem_id").unique())
        counts = zip(_COUNTS, (problems, len(grades), grades.null_count, capped), strict=True)
        self._write_manifest(finished=True, **dict(counts))
        return Dataset(whole)

    def _open(self, settings: LabelSettings) -> None:
        for partial in self.path.rglob(".*.partial"):
            partial.unlink()
        listed = None
        if (self.path / MANIFEST).exists():
            check_folder(self.path, settings)  # another run may have begun it since
            given, self.manifest = self.manifest, read_manifest(self.path)
            self.manifest["source"] |= given["source"]
            if settings.base_fingerprint is not None:
                self.manifest["settings"] = given["settings"]
            lost = (*self.manifest["dropped"], *self.manifest["failed"])
            self.done |= {(problem_id, sample) for problem_id, sample, _ in lost}
            listed = self.shards
        whole = []
        for shard in self.shards:
            try:
                table = read_shard(self.path, shard)
            except DamagedError:
                warnings.warn(
                    f"{self.path / shard.file} is damaged: what is left of it is renamed to "
                    f".unlisted, and its {shard.rows} traces are labelled again",
                    stacklevel=3,
                )
                continue
            whole.append(shard)
            rows = table.select(["problem_id", "sample_index", "problem", "answer"]).to_pylist()
            self._account(rows)
        if whole != listed:
            shutil.rmtree(self.path / "prefixes", ignore_errors=True)  # traces change numbers
            self._write_manifest(shards=[asdict(shard) for shard in whole])
        counted = {self.path / shard.file for shard in whole}
        for file in set(self.path.glob("data/train-*.parquet")) - counted:
            file.replace(file.with_suffix(".unlisted"))
        write_card(self.path)

    def _account(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.done.update(map(_place, rows))
        self.problems |= {row["problem_id"]: (row["problem"], row["answer"]) for row in rows}

    def _exchange(self, tables: Mapping[int, pa.Table], **changes: Any) -> None:
        """Gives shards other contents by their numbers, and the manifest other values: all at once.

        A new number adds a shard. After a failure the folder is as it was: shards that nothing
        lists do not count.
        """
        if not changes and not tables:
            return
        taken = [path.stem for path in self.path.glob("data/train-*")]
        free = itertools.count(1 + max((int(one.rpartition("-")[2]) for one in taken), default=-1))
        before, after = self.shards, dict(enumerate(self.shards))
        for number, table in tables.items():
            name = f"data/train-{next(free):05d}.parquet"
            after[number] = Shard(name, _write_parquet(self.path / name, table), len(table))
        self._write_manifest(shards=[asdict(shard) for shard in after.values()], **changes)
        for shard in set(before).difference(after.values()):
            (self.path / shard.file).unlink()
            (self.path / shard.view).unlink(missing_ok=True)

    def _write_manifest(self, **changes: Any) -> None:
        kept = {name: value for name, value in self.manifest.items() if name not in _COUNTS}
        self.manifest = kept | {"finished": False} | changes
        self.manifest["deterministic"] = not self.manifest["batch_effects"]
        self.manifest["traces"] = sum(shard.rows for shard in self.shards)
        self.manifest["shards"] = self.manifest.pop("shards")  # last, for they are many
        write_checked(self.path / MANIFEST, self.manifest)
        write_card(self.path)


def _write_parquet(file: Path, table: pa.Table) -> str:
    """Writes a table durably, its pages with checksums; the SHA-256 of the file."""
    buffer = BytesIO()
    pq.write_table(table, buffer, write_page_checksum=True)
    replace_file(file, buffer.getvalue())
    return hashlib.sha256(buffer.getvalue()).hexdigest()
