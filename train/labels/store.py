"""Writing a label folder (`folder.py` says what stands in it), safe against kills at any time."""

from __future__ import annotations

import hashlib
import itertools
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from datasets import Dataset

from ospruner.durable import DamagedError, lock_folder, replace_file, write_checked
from ospruner.eval.schema import LabelSettings
from ospruner.provenance import hash_of

from .card import folder_card, prefix_rows
from .features import FEATURES
from .folder import (
    FORMAT_VERSION,
    MANIFEST,
    README,
    Shard,
    check_folder,
    read_manifest,
    read_shard,
    shards_of,
)

_KEY = ("problem_id", "sample_index")

COSTS = (
    "computed_tokens",
    "unique_tokens",
    "padding_tokens",
    "sampling_computed_tokens",
    "sampling_unique_tokens",
)
"""What a run cost: tokens that entered the model's forward for forks, those of them that cannot be
shared, slots of padding; the first two of sampling."""

_COUNTS = ("problems", "steps", "ungraded_steps", "capped_traces")  # of a finished run

Lost = tuple[str, int, str]
"""A trace that is no row: problem id, sample index, why."""


@dataclass(frozen=True)
class Chunk:
    """What is committed at once.

    Attributes:
        rows: labelled traces.
        dropped: traces that cannot be rows.
        failed: traces that an error kept from being rows.
        costs: tokens, by the names of COSTS.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    dropped: list[Lost] = field(default_factory=list)
    failed: list[Lost] = field(default_factory=list)
    costs: Counter[str] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self.rows) + len(self.dropped) + len(self.failed)

    def places(self) -> set[tuple[str, int]]:
        """Problem id and sample index of each trace."""
        rows = {(row["problem_id"], row["sample_index"]) for row in self.rows}
        return rows | {lost[:2] for lost in (*self.dropped, *self.failed)}


class LabelStore:
    """The folder, opened for writing by one run; a context manager.

    A shard that is no longer what was written is renamed, with a warning, and its traces are no
    longer among `done`: whoever continues the run labels them again.

    Args:
        path: the folder; made where it does not exist.
        settings: of the run; a folder made with others is refused.
        source: where the problems come from; kept in the manifest.

    Attributes:
        done: (problem id, sample index) of the traces that are rows, were dropped, or failed.
        problems: (text, reference) of the problems of the rows, by id.
        manifest: what it says; written with what is committed.

    Raises:
        ValueError: the folder holds something else, labels with other settings, or is being
            written by another run.
    """

    def __init__(
        self,
        path: str | Path,
        settings: LabelSettings,
        source: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = Path(path)
        self.problems: dict[str, tuple[str, str]] = {}
        self.done: set[tuple[str, int]] = set()
        self.manifest: dict[str, Any] = {
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
        self._lock = lock_folder(self.path)
        try:
            self._open(settings)
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> LabelStore:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._write_card()  # a commit may have been interrupted before it
        finally:
            self._lock.close()

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
        rows = [row for row in chunk.rows if tuple(row[name] for name in _KEY) not in self.done]
        changes: dict[str, Any] = {
            name: self.manifest[name] + [one for one in lost if one[:2] not in self.done]
            for name, lost in (("dropped", chunk.dropped), ("failed", chunk.failed))
        }
        changes |= {name: self.manifest[name] + chunk.costs[name] for name in COSTS}
        added = [pa.Table.from_pylist(rows, FEATURES.arrow_schema)] if rows else []
        self._exchange([None] * len(self.shards) + added, **changes)
        self._account(rows)
        self.done |= chunk.places()

    def forget_failed(self) -> None:
        """Takes failed traces out of `done`, to be tried again."""
        self.done -= {(one[0], one[1]) for one in self.manifest["failed"]}
        self._write_manifest(failed=[])

    def rewrite(self, change: Callable[[list[dict[str, Any]]], None]) -> None:
        """Changes the rows of all shards at once; they stay those of the same traces.

        Args:
            change: changes a shard's rows in place.
        """
        tables = []
        for shard in self.shards:
            before = read_shard(self.path, shard)
            rows = before.to_pylist()
            change(rows)
            after = pa.Table.from_pylist(rows, FEATURES.arrow_schema)
            tables.append(None if after.equals(before) else after)
        self._exchange(tables)

    def finish(self, order: Mapping[tuple[str, int], int] | None = None) -> Dataset:
        """Sorts the rows, derives the view of prefixes, and gives the whole.

        Args:
            order: the place of each trace, by problem id and sample index; others come first, as
                they stand. A shard keeps its number of rows.

        Raises:
            ValueError: there is no labelled trace: all were dropped, or failed.
        """
        if not self.shards:
            lost = (*self.manifest["dropped"], *self.manifest["failed"])
            raise ValueError(f"no trace could be labelled: {sorted({one[2] for one in lost})}")
        whole = pa.concat_tables([read_shard(self.path, shard) for shard in self.shards])
        ends = itertools.accumulate((shard.rows for shard in self.shards), initial=0)
        bounds = list(itertools.pairwise(ends))
        keys = zip(*(whole.column(name).to_pylist() for name in _KEY), strict=True)
        places = np.array([(order or {}).get(key, -1) for key in keys])
        wanted = np.argsort(places, kind="stable")
        moved = [wanted[slice(*one)] for one in bounds]
        self._exchange(
            [
                None if (rows == np.arange(*one)).all() else whole.take(rows)
                for rows, one in zip(moved, bounds, strict=True)
            ]
        )
        whole = whole if (wanted == np.arange(len(wanted))).all() else whole.take(wanted)
        (self.path / "prefixes").mkdir(exist_ok=True)
        for shard, (first, last) in zip(self.shards, bounds, strict=True):
            if not (self.path / shard.view).exists():
                rows = prefix_rows(whole.slice(first, last - first), first)
                _write_parquet(self.path / shard.view, rows)
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
            self.done |= {(one[0], one[1]) for one in lost}
            listed = self.shards
        whole = [shard for shard in self.shards if self._is_whole(shard)]
        if whole != listed:
            shutil.rmtree(self.path / "prefixes", ignore_errors=True)  # traces change numbers
            self._write_manifest(shards=[asdict(shard) for shard in whole])
        counted = {self.path / shard.file for shard in whole}
        for file in set(self.path.glob("data/train-*.parquet")) - counted:
            file.replace(file.with_suffix(".unlisted"))
        self._write_card()

    def _is_whole(self, shard: Shard) -> bool:
        """Whether a shard is what was written; takes note of its traces."""
        try:
            table = read_shard(self.path, shard)
        except DamagedError:
            warnings.warn(
                f"{self.path / shard.file} is damaged: what is left of it is renamed to .unlisted, "
                f"and its {shard.rows} traces are labelled again",
                stacklevel=5,
            )
            return False
        self._account(table.select([*_KEY, "problem", "answer"]).to_pylist())
        return True

    def _account(self, rows: Iterable[Mapping[str, Any]]) -> None:
        for row in rows:
            self.done.add((row["problem_id"], row["sample_index"]))
            self.problems[row["problem_id"]] = (row["problem"], row["answer"])

    def _exchange(self, tables: Sequence[pa.Table | None], **changes: Any) -> None:
        """Gives shards other contents, and adds some: all at once, with the manifest.

        After a failure the folder is as it was: shards that nothing lists do not count.

        Args:
            tables: new contents of each shard, where None leaves it as it is, and of new ones.
            changes: what else changes in the manifest.
        """
        if not changes and all(table is None for table in tables):
            return
        taken = [path.stem for path in self.path.glob("data/train-*")]
        free = itertools.count(1 + max((int(one.rpartition("-")[2]) for one in taken), default=-1))
        before, after = self.shards, list[Shard]()
        for shard, table in itertools.zip_longest(before, tables):
            if table is not None:
                name = f"data/train-{next(free):05d}.parquet"
                shard = Shard(name, _write_parquet(self.path / name, table), len(table))
            after.append(shard)
        self._write_manifest(shards=[asdict(shard) for shard in after], **changes)
        for shard in set(before).difference(after):
            (self.path / shard.file).unlink()
            (self.path / shard.view).unlink(missing_ok=True)

    def _write_card(self) -> None:
        """Names the shards that the manifest on the disk lists, whatever a failure has left."""
        shards = shards_of(read_manifest(self.path))
        viewed = [shard for shard in shards if (self.path / shard.view).exists()]
        card = folder_card(
            {
                "default": ([one.file for one in shards], hash_of(one.sha256 for one in shards)),
                "prefixes": ([one.view for one in viewed], hash_of(one.sha256 for one in viewed)),
            }
        ).encode()
        file = self.path / README
        if not file.is_file() or file.read_bytes() != card:
            replace_file(file, card)

    def _write_manifest(self, **changes: Any) -> None:
        self.manifest |= {"finished": False} | changes
        if not self.manifest["finished"]:
            for name in _COUNTS:
                self.manifest.pop(name, None)
        self.manifest["deterministic"] = not self.manifest["batch_effects"]
        self.manifest["traces"] = sum(shard.rows for shard in self.shards)
        self.manifest["shards"] = self.manifest.pop("shards")  # last, for they are many
        write_checked(self.path / MANIFEST, self.manifest)
        self._write_card()


def _write_parquet(file: Path, table: pa.Table) -> str:
    """Writes a table durably, its pages with checksums; the SHA-256 of the file."""
    buffer = BytesIO()
    pq.write_table(table, buffer, write_page_checksum=True)
    replace_file(file, buffer.getvalue())
    return hashlib.sha256(buffer.getvalue()).hexdigest()
