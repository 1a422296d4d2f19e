"""Writing a label folder, safe against kills at any time: one Parquet file a chunk, and a manifest.

A chunk's partial file is made durable, then the manifest that lists it, then it takes its name. A
kill leaves a partial file that no manifest lists, which is removed, or one that is listed, which
takes its name when the run goes on.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from datasets import Dataset

from ospruner.durable import (
    lock_folder,
    partial_of,
    replace_file,
    replacing,
    sync_file,
    sync_folder,
    write_checked,
)
from ospruner.eval.schema import FEATURES, LabelSettings

from .folder import (
    COPY,
    DAMAGED,
    FORMAT_VERSION,
    MANIFEST,
    README,
    StoredChunk,
    TokenCosts,
    check_folder,
    chunks_of,
    content_of,
    counts_of,
    folder_card,
    parquet_bytes,
    prefix_rows,
    read_labels,
    read_manifest,
    read_shard,
)

__all__ = ["Chunk", "LabelFolder", "NoTracesError"]


class NoTracesError(ValueError):
    """A finished run has no labelled trace: all were dropped, or failed."""


@dataclass(frozen=True)
class Chunk:
    """What is committed at once.

    Attributes:
        rows: labelled traces.
        dropped: traces that cannot be rows: (problem id, sample index, why).
        failed: traces that an error kept from being rows: (problem id, sample index, error).
        costs: tokens.
    """

    rows: list[dict[str, Any]]
    dropped: list[tuple[str, int, str]] = field(default_factory=list)
    failed: list[tuple[str, int, str]] = field(default_factory=list)
    costs: TokenCosts = field(default_factory=TokenCosts)

    def add(self, other: Chunk) -> None:
        """Adds what another chunk holds, but for its costs."""
        self.rows.extend(other.rows)
        self.dropped.extend(other.dropped)
        self.failed.extend(other.failed)


class LabelFolder:
    """The folder, opened for writing by one run; a context manager.

    What a kill left half done is completed. A damaged shard is set aside, with a warning, and its
    traces are no longer among `done`.

    Args:
        path: the folder; made where it does not exist.
        settings: of the run; a folder made with others is refused.
        source: where the problems come from; kept in the manifest.

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
        self.settings = settings
        self.source = dict(source or {})
        self.batch_effects: list[str] = []  # why the same seed may give other labels
        self.chunks: list[StoredChunk] = []
        self.problems: dict[str, tuple[str, str]] = {}
        self.done: set[tuple[str, int]] = set()
        self._views: dict[str, dict[str, Any]] = {}  # of `prefixes/`, as the manifest has them
        check_folder(self.path, settings)
        (self.path / "data").mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder(self.path)
        try:
            self._open()
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> LabelFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    @property
    def traces(self) -> int:
        """Labelled traces that the folder holds."""
        return sum(chunk.rows for chunk in self.chunks)

    def commit(self, chunk: Chunk) -> None:
        """Makes a chunk durable: when this returns, no kill loses it."""
        content = b""
        if chunk.rows:
            content = parquet_bytes(Dataset.from_list(chunk.rows, features=FEATURES).data.table)
        lost = (chunk.dropped, chunk.failed)
        self._store(content, StoredChunk("", "", len(chunk.rows), *lost, chunk.costs))

    def note_effects(self, reasons: Sequence[str]) -> None:
        """Notes why the same seed may give other labels; what is known of earlier runs stays."""
        self.batch_effects += [why for why in reasons if why not in self.batch_effects]

    def adopt(self, other: LabelFolder) -> None:
        """Takes what another folder holds of traces that this one lacks."""
        self._take_fingerprint(other.settings)
        self.note_effects(other.batch_effects)
        for chunk in other.chunks:
            content = content_of(other.path / chunk.file, chunk.sha256) if chunk.file else b""
            assert content is not None  # the other folder was opened, which sets damage aside
            if not self._keys(other.path, chunk) & self.done:
                self._store(content, chunk)

    def forget_failed(self) -> None:
        """Takes failed traces out of `done`, to be tried again."""
        self.done -= {(problem, index) for c in self.chunks for problem, index, _ in c.failed}
        kept = [replace(chunk, failed=[]) for chunk in self.chunks]
        self.chunks = [chunk for chunk in kept if chunk.file or chunk.dropped]
        self._write_manifest()

    def rewrite(self, change: Callable[[list[dict[str, Any]]], None]) -> None:
        """Changes the rows of all chunks, which stay those of the same traces.

        Args:
            change: changes a chunk's rows in place.
        """

        def changed(chunk: StoredChunk) -> bytes:
            rows = read_shard(self.path, chunk).to_list()
            change(rows)
            return parquet_bytes(Dataset.from_list(rows, features=FEATURES).data.table)

        self._rewrite({n: chunk for n, chunk in enumerate(self.chunks) if chunk.file}, changed)

    def _rewrite(
        self, numbers: Mapping[int, StoredChunk], content_of: Callable[[StoredChunk], bytes]
    ) -> None:
        """Gives the shards of some chunks other contents, all at once.

        The new shards are written beside the old ones; the manifest that lists them makes all
        valid at once. A kill before it leaves the old ones, a kill after it the new ones.
        """
        before, chunks = self.chunks, list(self.chunks)
        partials = []
        try:
            for number, chunk in numbers.items():
                content = content_of(chunk)
                chunks[number] = replace(chunk, sha256=_sha256(content))
                partials.append(partial_of(self.path / chunk.file))
                with partials[-1].open("wb") as file:
                    file.write(content)
                    sync_file(file)
            self.chunks = chunks
            self._write_manifest()
        except BaseException:
            self.chunks = before
            for partial in partials:
                partial.unlink(missing_ok=True)
            raise
        self.chunks = [self._settled(chunk) for chunk in chunks]

    def sort(self, order: Mapping[tuple[str, int], int]) -> None:
        """Puts the rows of the whole folder in order; a shard keeps its number of rows.

        Args:
            order: the place of each trace, by problem id and sample index; others come first, as
                they stand.
        """
        if not self.traces:
            return
        table = read_labels(self.path).data.table
        columns = (table.column(name).to_pylist() for name in ("problem_id", "sample_index"))
        found = [order.get(key, -1) for key in zip(*columns, strict=True)]
        wanted = sorted(range(len(found)), key=found.__getitem__)
        moved: dict[int, StoredChunk] = {}
        rows_of: dict[str, list[int]] = {}
        first = 0
        for n, chunk in enumerate(self.chunks):
            last = first + chunk.rows
            if wanted[first:last] != list(range(first, last)):
                moved[n] = chunk
                rows_of[chunk.file] = wanted[first:last]
            first = last
        if moved:
            self._rewrite(moved, lambda chunk: parquet_bytes(table.take(rows_of[chunk.file])))

    def finish(self) -> Dataset:
        """Derives the view of prefixes, and reads the whole back.

        Raises:
            NoTracesError: there is no labelled trace.
        """
        if not self.traces:
            lost = [lost for chunk in self.chunks for lost in (*chunk.dropped, *chunk.failed)]
            reasons = sorted({why for _, _, why in lost})
            raise NoTracesError(f"no trace could be labelled: {reasons}")
        self._write_views()
        dataset = read_labels(self.path)
        self._write_manifest(counts_of(dataset))
        return dataset

    def _open(self) -> None:
        check_folder(self.path, self.settings)
        replace_file(self.path / README, folder_card().encode())
        if not (self.path / MANIFEST).exists():
            self._write_manifest()
            return
        manifest = read_manifest(self.path)
        if not self._is_copied():
            self._write(manifest)
        self.source = {**manifest["source"], **self.source}
        self.batch_effects = list(manifest["batch_effects"])
        self._take_fingerprint(LabelSettings.from_dict(manifest["settings"]))
        self._views = manifest["prefixes"]
        stored = chunks_of(manifest)
        settled = [self._settled(chunk) for chunk in stored]
        self.chunks = [chunk for chunk in settled if chunk.file or chunk.dropped or chunk.failed]
        for partial in (self.path / "data").glob(".*.partial"):
            partial.unlink()
        for chunk in self.chunks:
            self._account(chunk)
        if self.chunks != stored:
            self._write_manifest()

    def _take_fingerprint(self, theirs: LabelSettings) -> None:
        if self.settings.base_fingerprint is None:
            self.settings = replace(self.settings, base_fingerprint=theirs.base_fingerprint)

    def _is_copied(self) -> bool:
        copy = self.path / COPY
        return copy.is_file() and copy.read_bytes() == (self.path / MANIFEST).read_bytes()

    def _settled(self, chunk: StoredChunk) -> StoredChunk:
        """A chunk whose shard stands under its name; without its rows where the shard is lost."""
        if not chunk.file:
            return chunk
        file = self.path / chunk.file
        partial = partial_of(file)
        if partial.exists() and _sha256(partial.read_bytes()) == chunk.sha256:
            partial.replace(file)
            sync_folder(file.parent)
        if content_of(file, chunk.sha256) is not None:
            return chunk
        if file.exists():
            (self.path / DAMAGED).mkdir(exist_ok=True)
            file.replace(self.path / DAMAGED / file.name)
            warnings.warn(
                f"{file} is damaged: it is set aside in {self.path / DAMAGED}, and its "
                f"{chunk.rows} traces are labelled again",
                stacklevel=2,
            )
        return StoredChunk("", "", 0, chunk.dropped, chunk.failed)

    def _store(self, content: bytes, chunk: StoredChunk) -> None:
        """Adds a chunk under the next name."""
        if not content:
            self.chunks.append(chunk)
            self._write_manifest()
        else:
            taken = [path.stem for path in self.path.glob("d*/train-*.parquet")]  # data, damaged
            number = 1 + max((int(name.rpartition("-")[2]) for name in taken), default=-1)
            name = f"data/train-{number:05d}.parquet"
            chunk = replace(chunk, file=name, sha256=_sha256(content))
            self._put(content, chunk, len(self.chunks))
        self._account(self.chunks[-1])

    def _put(self, content: bytes, chunk: StoredChunk, number: int) -> None:
        """Writes a chunk's shard and lists it as the `number`th."""
        with replacing(self.path / chunk.file) as file:
            file.write(content)
            sync_file(file)  # the manifest must never list what is not on the disk
            before = list(self.chunks)
            self.chunks[number : number + 1] = [chunk]
            try:
                self._write_manifest()
            except BaseException:
                self.chunks = before
                raise

    def _keys(self, path: Path, chunk: StoredChunk) -> set[tuple[str, int]]:
        keys = {(problem_id, index) for problem_id, index, _ in (*chunk.dropped, *chunk.failed)}
        if chunk.file:
            rows = read_shard(path, chunk, ["problem_id", "sample_index", "problem", "answer"])
            for row in rows:
                keys.add((row["problem_id"], row["sample_index"]))
                self.problems[row["problem_id"]] = (row["problem"], row["answer"])
        return keys

    def _account(self, chunk: StoredChunk) -> None:
        self.done |= self._keys(self.path, chunk)

    def _write_views(self) -> None:
        """Derives the view of each shard that has none yet."""
        (self.path / "prefixes").mkdir(exist_ok=True)
        views = {}
        first = 0
        for chunk in self.chunks:
            if not chunk.file:
                continue
            name = chunk.file.replace("data/", "prefixes/")
            view = self._views.get(name, {})
            made_of = {"of": chunk.sha256, "first": first}
            known = {key: view.get(key) for key in made_of} == made_of
            if not known or content_of(self.path / name, view["sha256"]) is None:
                rows = prefix_rows(read_shard(self.path, chunk), first)
                content = parquet_bytes(rows.data.table)
                replace_file(self.path / name, content)
                view = {"sha256": _sha256(content), **made_of}
            views[name] = view
            first += chunk.rows
        for file in (self.path / "prefixes").iterdir():
            if f"prefixes/{file.name}" not in views:
                file.unlink()
        self._views = views

    def _write_manifest(self, counts: Mapping[str, int] | None = None) -> None:
        costs = TokenCosts()
        for chunk in self.chunks:
            costs.add(chunk.costs)
        manifest: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "settings": self.settings.to_dict(),
            "source": self.source,
            "deterministic": not self.batch_effects,
            "batch_effects": self.batch_effects,
            "finished": counts is not None,
            "traces": self.traces,
            "dropped": [drop for chunk in self.chunks for drop in chunk.dropped],
            "failed": [fail for chunk in self.chunks for fail in chunk.failed],
            **asdict(costs),
            **(counts or {}),
            "chunks": [asdict(chunk) for chunk in self.chunks],
            "prefixes": self._views,
        }
        self._write(manifest)

    def _write(self, manifest: Mapping[str, Any]) -> None:
        for name in (COPY, MANIFEST):
            write_checked(self.path / name, manifest)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
