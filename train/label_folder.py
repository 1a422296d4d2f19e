"""The folder of a label run: journal, Parquet shards and manifest, safe against kills at any time.

    data/train-00000.parquet ...   finished shards; never written again
    journal.jsonl                  finished chunks not yet in a shard, one a line, fsynced
    manifest.json                  settings, counts and token costs (derived from the two above)
    README.md                      tells `datasets.load_dataset(FOLDER)` which files are data
    .lock                          held by the run that writes

A chunk is committed by its line in the journal. A shard appears under its name by an atomic rename
and lists the chunks it took, so that a kill between that rename and the emptying of the journal
repeats nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from datasets import Dataset

from ospruner.eval.columns import ADDED, FEATURES, completed, with_added_columns
from ospruner.eval.schema import LabelSettings
from ospruner.hub_cards.facts import PROVENANCE_FILE

from .durable import LOCK, lock_folder, replace_file, sync_file, sync_folder

__all__ = ["Chunk", "LabelFolder", "TokenCosts", "read_labels", "read_manifest"]

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
JOURNAL = "journal.jsonl"
_README = "README.md"
_KEY = b"ospruner"
_OWN = frozenset({"data", MANIFEST, JOURNAL, LOCK, _README, PROVENANCE_FILE})
_CARD = """\
---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*.parquet
---
# Labelled traces

One row is one reasoning trace with the answer forced, and graded, at the end of each of its steps.
The columns are those of `ospruner.eval.schema.FEATURES`; settings and counts stand in
`manifest.json`. Load with `datasets.load_dataset`.
"""


@dataclass
class TokenCosts:
    """Tokens that a label run cost; sums over its chunks.

    Attributes:
        computed_tokens: tokens that entered the model's forward for forks, prompts included.
        unique_tokens: nodes of the trie over the forks' requests, which had to be computed.
        padding_tokens: slots of padding beside the computed ones.
        sampling_computed_tokens: the same for sampling the traces.
        sampling_unique_tokens: the same for sampling the traces.
    """

    computed_tokens: int = 0
    unique_tokens: int = 0
    padding_tokens: int = 0
    sampling_computed_tokens: int = 0
    sampling_unique_tokens: int = 0

    def add(self, other: TokenCosts) -> None:
        """Adds another chunk's costs."""
        for name, value in asdict(other).items():
            setattr(self, name, vars(self)[name] + value)


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

    Raises:
        ValueError: the folder holds something else, labels with other settings, or is being
            written by another run.
    """

    def __init__(self, path: str | Path, settings: LabelSettings, shard_traces: int = 2048) -> None:
        self.path = Path(path)
        self.settings = settings
        self.shard_traces = shard_traces
        self.problems: dict[str, tuple[str, str]] = {}
        self.done: set[tuple[str, int]] = set()
        self.dropped: list[tuple[str, int, str]] = []
        self.costs = TokenCosts()
        self.traces = 0
        self._pending: list[dict[str, Any]] = []  # the journal's lines
        self._compacted: set[int] = set()
        self._next_chunk = 0
        _refuse_strangers(self.path)
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
            "chunk": self._next_chunk,
            "rows": chunk.rows,
            "dropped": chunk.dropped,
            "costs": asdict(chunk.costs),
        }
        with (self.path / JOURNAL).open("ab") as journal:
            journal.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
            sync_file(journal)
        self._take(record)
        if sum(len(line["rows"]) for line in self._pending) >= self.shard_traces:
            self.compact()

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
        dataset = read_labels(self.path)
        self._write_manifest(finished=True, dataset=dataset)
        return dataset

    def _read(self) -> None:
        manifest = self.path / MANIFEST
        if manifest.exists():
            stored = read_manifest(self.path)
            differences = self.settings.differences(LabelSettings.from_dict(stored["settings"]))
            if differences:
                raise ValueError(
                    f"{self.path} holds labels made with other settings ({'; '.join(differences)}):"
                    " use the same settings to continue them, or another folder"
                )
        else:
            self._write_manifest(finished=False)
            replace_file(self.path / _README, _CARD.encode())
        for partial in (self.path / "data").glob("*.partial"):
            partial.unlink()
        for shard in _shards(self.path):
            note = json.loads(pq.read_schema(shard).metadata[_KEY])
            columns = pq.read_table(
                shard, columns=["problem_id", "sample_index", "problem", "answer"]
            )
            self._compacted.update(note["chunks"])
            self._account(columns.to_pylist(), note["dropped"], note["costs"])
        for record in self._read_journal():
            if record["chunk"] not in self._compacted:
                self._take(record)
        self._next_chunk = (
            max([*self._compacted, *(line["chunk"] for line in self._pending)], default=-1) + 1
        )

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
        self._next_chunk = record["chunk"] + 1
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
            {**(table.schema.metadata or {}), _KEY: json.dumps(note).encode()}
        )
        numbers = [int(shard.stem.rpartition("-")[2]) for shard in _shards(self.path)]
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
            "finished": finished,
            "traces": self.traces,
            "dropped": self.dropped,
            **asdict(self.costs),
        }
        if dataset is not None:
            manifest |= _counts(dataset)
        replace_file(self.path / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())


def read_labels(path: str | Path) -> Dataset:
    """The labelled traces of a folder, all shards, in memory.

    Columns that an earlier version did not write yet are null.

    Raises:
        ValueError: the folder holds no labels, or its columns are not those of FEATURES.
    """
    shards = _shards(Path(path))
    if not shards:
        raise ValueError(f"{path} holds no labelled traces: no data/*.parquet in it")
    tables = []
    for shard in shards:
        table = pq.read_table(shard)
        needed, found = set(FEATURES) - set(ADDED), set(table.column_names)
        if not needed <= found <= set(FEATURES):
            raise ValueError(
                f"{shard} has the columns {sorted(found)}, labelled traces have "
                f"{sorted(FEATURES)}: were they made by another version of ospruner?"
            )
        tables.append(with_added_columns(table).cast(FEATURES.arrow_schema))
    return Dataset(pa.concat_tables(tables))


def read_manifest(path: str | Path) -> dict[str, Any]:
    """The manifest of a label folder.

    Raises:
        ValueError: there is none, or one of another version.
    """
    file = Path(path) / MANIFEST
    if not file.is_file():
        raise ValueError(f"{path} has no {MANIFEST}: it is no label folder")
    manifest: dict[str, Any] = json.loads(file.read_text("utf-8"))
    if manifest.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{file} has format_version {manifest.get('format_version')!r}; this version of "
            f"ospruner reads {FORMAT_VERSION}"
        )
    return manifest


def _counts(dataset: Dataset) -> dict[str, int]:
    columns = dataset.select_columns(["problem_id", "step_ends", "forced_correct", "ended"])
    table = columns.with_format("arrow")[:]
    grades = table.column("forced_correct").combine_chunks().flatten()
    return {
        "problems": len(table.column("problem_id").unique()),
        "steps": len(grades),
        "ungraded_steps": grades.null_count,
        "capped_traces": table.column("ended").to_pylist().count("cap"),
    }


def _shards(path: Path) -> list[Path]:
    return sorted((path / "data").glob("train-*.parquet"))


def _refuse_strangers(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file; labels go into a folder")
    found = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    if MANIFEST in found:
        return
    strangers = [name for name in found if name not in _OWN]
    if strangers or _shards(path):
        raise ValueError(
            f"{path} holds another run's files ({', '.join(found[:5])}): use an empty folder"
        )
