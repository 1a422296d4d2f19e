"""Writing a label folder: journal, Parquet shards and manifest, safe against kills at any time.

A chunk is committed by its line in the journal. A shard appears under its name by an atomic rename
and lists the chunks it took, so that a kill between that rename and the emptying of the journal
repeats nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq  # type: ignore[import-untyped]
from datasets import Dataset

from modeling_ospruner.common.durable import (
    append_durably,
    lock_folder,
    replace_file,
    sync_file,
    sync_folder,
)
from ospruner.eval.schema import FEATURES, LabelSettings, completed

from .folder import (
    FORMAT_VERSION,
    JOURNAL,
    MANIFEST,
    README,
    SHARD_KEY,
    TokenCosts,
    check_folder,
    counts_of,
    data_shards,
    folder_card,
    read_labels,
    read_manifest,
    write_prefixes,
)

__all__ = ["Chunk", "LabelFolder"]


@dataclass(frozen=True)
class Chunk:
    """What is committed at once.

    Attributes:
        rows: labelled traces.
        dropped: traces that cannot be rows: (problem id, sample index, why).
        costs: tokens.
    """

    rows: list[dict[str, Any]]
    dropped: list[tuple[str, int, str]] = field(default_factory=list)
    costs: TokenCosts = field(default_factory=TokenCosts)


class LabelFolder:
    """The folder, opened for writing by one run; a context manager.

    Args:
        path: the folder; made where it does not exist.
        settings: of the run; a folder made with others is refused.
        shard_traces: a shard is written as soon as the journal holds so many traces.
        source: where the problems come from; kept in the manifest.

    Raises:
        ValueError: the folder holds something else, labels with other settings, or is being
            written by another run.
    """

    def __init__(
        self,
        path: str | Path,
        settings: LabelSettings,
        shard_traces: int = 2048,
        source: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = Path(path)
        self.settings = settings
        self.source = dict(source or {})
        self.batch_effects: list[str] = []  # why the same seed may give other labels
        self.shard_traces = shard_traces
        self.problems: dict[str, tuple[str, str]] = {}
        self.done: set[tuple[str, int]] = set()
        self.dropped: list[tuple[str, int, str]] = []
        self.costs = TokenCosts()
        self.traces = 0
        self._pending: list[dict[str, Any]] = []  # the journal's lines
        self._compacted: set[str] = set()
        check_folder(self.path, settings)
        (self.path / "data").mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder(self.path)
        try:
            self._read()
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> LabelFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def commit(self, chunk: Chunk) -> None:
        """Makes a chunk durable: when this returns, no kill loses it."""
        record = {
            "chunk": _name(chunk),
            "rows": chunk.rows,
            "dropped": chunk.dropped,
            "costs": asdict(chunk.costs),
        }
        line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        append_durably(self.path / JOURNAL, line)
        self._take(record)
        if sum(len(line["rows"]) for line in self._pending) >= self.shard_traces:
            self.compact()

    def note_effects(self, reasons: Sequence[str]) -> None:
        """Notes why the same seed may give other labels; what is known of earlier runs stays."""
        self.batch_effects += [why for why in reasons if why not in self.batch_effects]

    def compact(self) -> None:
        """Moves the journal's chunks into a new shard."""
        if any(line["rows"] for line in self._pending):
            self._write_shard()
            replace_file(self.path / JOURNAL, b"")
            self._compacted.update(line["chunk"] for line in self._pending)
            self._pending = []
        self._write_manifest(finished=False)

    def finish(self) -> Dataset:
        """Compacts what is left, and reads the whole back.

        Raises:
            ValueError: there is no labelled trace.
        """
        self.compact()
        if not self.traces:
            reasons = sorted({why for _, _, why in self.dropped})
            raise ValueError(f"no trace could be labelled: {reasons}")
        write_prefixes(self.path)
        dataset = read_labels(self.path)
        self._write_manifest(finished=True, dataset=dataset)
        return dataset

    def _read(self) -> None:
        check_folder(self.path, self.settings)
        if not (self.path / MANIFEST).exists():
            self._write_manifest(finished=False)
        else:
            known = read_manifest(self.path)
            self.source = self.source or known.get("source", {})
            self.batch_effects = known.get("batch_effects", [])
        replace_file(self.path / README, folder_card().encode())
        for partial in (self.path / "data").glob("*.partial"):
            partial.unlink()
        for shard in data_shards(self.path):
            note = json.loads(pq.read_schema(shard).metadata[SHARD_KEY])
            columns = pq.read_table(
                shard, columns=["problem_id", "sample_index", "problem", "answer"]
            )
            self._compacted.update(note["chunks"])
            self._account(columns.to_pylist(), note["dropped"], note["costs"])
        for record in self._read_journal():
            if record["chunk"] not in self._compacted:
                self._take(record)

    def _read_journal(self) -> list[dict[str, Any]]:
        """The journal's chunks; a last line torn by a kill is cut off."""
        path = self.path / JOURNAL
        if not path.exists():
            return []
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            with path.open("r+b") as journal:
                journal.truncate(len(whole))
                sync_file(journal)
        records = []
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{path}, line {number} is damaged ({error}): delete that line; its traces "
                    "are labelled again"
                ) from error
        return records

    def _take(self, record: dict[str, Any]) -> None:
        self._pending.append(record)
        self._account(record["rows"], record["dropped"], record["costs"])

    def _account(
        self,
        rows: Sequence[Mapping[str, Any]],
        dropped: Sequence[Sequence[Any]],
        costs: Mapping[str, int],
    ) -> None:
        for row in rows:
            self.done.add((row["problem_id"], row["sample_index"]))
            self.problems[row["problem_id"]] = (row["problem"], row["answer"])
        for problem_id, sample_index, why in dropped:
            self.done.add((problem_id, sample_index))
            self.dropped.append((problem_id, sample_index, why))
        self.traces += len(rows)
        self.costs.add(TokenCosts(**costs))

    def _write_shard(self) -> None:
        costs = TokenCosts()
        for line in self._pending:
            costs.add(TokenCosts(**line["costs"]))
        note = {
            "chunks": [line["chunk"] for line in self._pending],
            "dropped": [entry for line in self._pending for entry in line["dropped"]],
            "costs": asdict(costs),
        }
        rows = [completed(row) for line in self._pending for row in line["rows"]]
        table = Dataset.from_list(rows, features=FEATURES).data.table
        table = table.replace_schema_metadata(
            {**(table.schema.metadata or {}), SHARD_KEY: json.dumps(note).encode()}
        )
        numbers = [int(shard.stem.rpartition("-")[2]) for shard in data_shards(self.path)]
        name = self.path / "data" / f"train-{max(numbers, default=-1) + 1:05d}.parquet"
        partial = name.with_suffix(".partial")
        with partial.open("wb") as file:
            pq.write_table(table, file)
            sync_file(file)
        partial.replace(name)
        sync_folder(name.parent)

    def _write_manifest(self, finished: bool, dataset: Dataset | None = None) -> None:
        manifest: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "settings": self.settings.to_dict(),
            "source": self.source,
            "deterministic": not self.batch_effects,
            "batch_effects": self.batch_effects,
            "finished": finished,
            "traces": self.traces,
            "dropped": self.dropped,
            **asdict(self.costs),
        }
        if dataset is not None:
            manifest |= counts_of(dataset)
        replace_file(self.path / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())


def _name(chunk: Chunk) -> str:
    """A chunk's name, by its traces: the same in whichever folder it stands."""
    traces = [[row["problem_id"], row["sample_index"]] for row in chunk.rows]
    traces += [list(entry[:2]) for entry in chunk.dropped]
    return hashlib.blake2b(json.dumps(traces).encode(), digest_size=8).hexdigest()
