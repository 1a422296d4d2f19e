"""The folder of a label run, as it is read: every byte is compared with what was written.

data/train-00000.parquet ...   a chunk of traces each; `regrade` writes all again, at once
prefixes/train-00000.parquet   the same, one row a labelled step; derived
manifest.json                  settings, and each chunk's file, SHA-256, lost traces and costs
.manifest.json.copy            the same again, read where the manifest is damaged
damaged/                       shards that no longer held what was written, set aside
README.md                      tells `datasets.load_dataset(FOLDER)` which files are data
.lock                          held by the run that writes

`prefixes/` holds pointers and grades, never tokens, which would be quadratic in a trace's length:
a row names its trace, whose first `end` thinking tokens are the prefix.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from datasets import Dataset, Features, List

from ospruner.durable import LOCK, DamagedError, partial_of, read_checked
from ospruner.eval.schema import (
    COLUMNS,
    FEATURES,
    LATER_COLUMNS,
    PREFIX_COLUMNS,
    PREFIX_FEATURES,
    LabelSettings,
)
from ospruner.provenance import PROVENANCE_FILE, hash_of, read_provenance

__all__ = [
    "StoredChunk",
    "TokenCosts",
    "check_folder",
    "data_hash",
    "faults_of",
    "folder_card",
    "prefix_rows",
    "read_labels",
    "read_manifest",
]


FORMAT_VERSION = 2
MANIFEST = "manifest.json"
COPY = f".{MANIFEST}.copy"
README = "README.md"
DAMAGED = "damaged"
_OWN = frozenset({"data", "prefixes", DAMAGED, MANIFEST, COPY, LOCK, README, PROVENANCE_FILE})
_AGAIN = "run `ospruner label` again with the same arguments, which"


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
class StoredChunk:
    """A chunk of traces, as the manifest lists it.

    Attributes:
        file: its shard in the folder; "" where the chunk has no row.
        sha256: of the shard's bytes.
        rows: labelled traces in it.
        dropped: traces that cannot be rows: (problem id, sample index, why).
        failed: traces that an error kept from being rows: (problem id, sample index, error).
        costs: tokens.
    """

    file: str
    sha256: str
    rows: int
    dropped: list[tuple[str, int, str]] = field(default_factory=list)
    failed: list[tuple[str, int, str]] = field(default_factory=list)
    costs: TokenCosts = field(default_factory=TokenCosts)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StoredChunk:
        """What `dataclasses.asdict` gave, through JSON."""
        lost: dict[str, Any] = {
            name: [(problem, index, why) for problem, index, why in values[name]]
            for name in ("dropped", "failed")
        }
        return cls(**{**values, **lost, "costs": TokenCosts(**values["costs"])})


def chunks_of(manifest: Mapping[str, Any]) -> list[StoredChunk]:
    """The chunks that a manifest lists, in order."""
    return [StoredChunk.from_dict(values) for values in manifest["chunks"]]


def data_hash(chunks: Iterable[StoredChunk]) -> str:
    """What `hash_files` of `ospruner.provenance` gives for the shards, from the manifest alone."""
    return hash_of(chunk.sha256 for chunk in chunks if chunk.file)


def parquet_bytes(table: pa.Table) -> bytes:
    """A table as a Parquet file whose pages carry checksums."""
    buffer = BytesIO()
    pq.write_table(table, buffer, write_page_checksum=True)
    return buffer.getvalue()


def read_labels(path: str | Path) -> Dataset:
    """The labelled traces of a folder, all shards, in memory.

    Raises:
        ValueError: the folder holds no labels, or a shard is damaged or missing.
    """
    path = Path(path)
    chunks = [chunk for chunk in chunks_of(read_manifest(path)) if chunk.file]
    if not chunks:
        raise ValueError(f"{path} holds no labelled traces: its {MANIFEST} lists no shard")
    return Dataset(pa.concat_tables([read_shard(path, chunk).data.table for chunk in chunks]))


def read_shard(path: Path, chunk: StoredChunk, columns: list[str] | None = None) -> Dataset:
    """The labelled traces of one shard.

    Raises:
        ValueError: it is damaged or missing, or its columns are not those of FEATURES.
    """
    content = content_of(path / chunk.file, chunk.sha256)
    if content is None:
        raise DamagedError(
            f"{_fault_of(path / chunk.file)}: {_AGAIN} labels its {chunk.rows} traces anew and "
            f"keeps the others; `ospruner labels check {path}` looks at every file"
        )
    table = with_later_columns(
        pq.read_table(pa.BufferReader(content), page_checksum_verification=True)
    )
    if set(table.column_names) != set(FEATURES):
        raise ValueError(
            f"{path / chunk.file} has the columns {sorted(table.column_names)}, labelled traces "
            f"have {sorted(FEATURES)}: were they made by another version of ospruner?"
        )
    names = columns or list(FEATURES)
    kinds = Features({name: FEATURES[name] for name in names})
    return Dataset(table.select(names).cast(kinds.arrow_schema))


def with_later_columns(table: pa.Table) -> pa.Table:
    """Labelled traces with nulls at each step in the columns that they were made too early for."""
    for name in LATER_COLUMNS:
        if name not in table.column_names and "step_ends" in table.column_names:
            nulls = [[None] * len(ends) for ends in table.column("step_ends").to_pylist()]
            kind = FEATURES.arrow_schema.field(name).type
            table = table.append_column(name, pa.array(nulls, kind))
    return table


def content_of(file: Path, sha256: str) -> bytes | None:
    """A file's bytes, if they are those that the manifest means; else None.

    A kill, or a run that is writing, may leave them in the partial file, about to take its place.
    """
    for place in (partial_of(file), file):
        try:
            content = place.read_bytes()
        except FileNotFoundError:
            continue
        if hashlib.sha256(content).hexdigest() == sha256:
            return content
    return None


def _fault_of(file: Path) -> str:
    """What is wrong with a shard that is not what was written."""
    if not file.is_file():
        return f"{file} is missing"
    try:
        shard = pq.ParquetFile(file, page_checksum_verification=True)
        for group in range(shard.num_row_groups):
            try:
                shard.read_row_group(group)
            except Exception as error:  # noqa: BLE001 - as below
                return f"{file} is damaged in row group {group} ({error})"
    except Exception as error:  # noqa: BLE001 - damage may raise whatever a parser can
        return f"{file} is damaged in its footer ({error})"
    return f"{file} is damaged outside its pages (its SHA-256 is not that in {MANIFEST})"


def read_manifest(path: str | Path) -> dict[str, Any]:
    """The manifest of a label folder; its copy where it is damaged.

    Raises:
        ValueError: there is none, both are damaged, or it is of another version.
    """
    file, copy = Path(path) / MANIFEST, Path(path) / COPY
    if not file.is_file():
        raise ValueError(f"{path} has no {MANIFEST}: it is no label folder")
    way_out = (
        f"put an earlier copy of {MANIFEST} in its place, or label into another folder (without "
        "it, nothing tells how the traces were made)"
    )
    try:
        manifest = read_checked(file, way_out)
    except DamagedError:
        if not copy.is_file():
            raise
        manifest = read_checked(copy, way_out)
    if manifest.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{file} has format_version {manifest.get('format_version')!r}; this version of "
            f"ospruner reads {FORMAT_VERSION}: label again, into another folder"
        )
    return manifest


def faults_of(path: str | Path) -> list[str]:
    """Everything in a label folder that is not as it was written, with what to do about it.

    Raises:
        ValueError: it is no label folder, or its manifest and the copy of it are both damaged.
    """
    path = Path(path)
    manifest = read_manifest(path)
    faults = []
    for name in (MANIFEST, COPY):
        try:
            if read_checked(path / name, "") != manifest:
                faults.append(f"{path / name} is of another moment: {_AGAIN} writes it anew")
        except (DamagedError, FileNotFoundError):
            faults.append(f"{path / name} is damaged or missing: {_AGAIN} restores it")
    chunks = [chunk for chunk in chunks_of(manifest) if chunk.file]
    for chunk in chunks:
        if content_of(path / chunk.file, chunk.sha256) is None:
            fault = _fault_of(path / chunk.file)
            faults.append(f"{fault}: {_AGAIN} labels its {chunk.rows} traces anew")
    for name, view in manifest["prefixes"].items():
        if content_of(path / name, view["sha256"]) is None:
            faults.append(f"{_fault_of(path / name)}: {_AGAIN} derives it from the traces")
    faults += [f"{file} {_STRANGER}" for file in strangers_of(path, chunks)]
    if (path / PROVENANCE_FILE).is_file():
        try:
            refuse_other_data(path, manifest)
        except ValueError as error:
            faults.append(str(error))
    return faults


_STRANGER = (
    f"is not in {MANIFEST}: it is not of this run, and `load_dataset` would read it; move it "
    "out of the folder"
)


def strangers_of(path: Path, chunks: Iterable[StoredChunk]) -> list[Path]:
    """Shards in a folder that its manifest does not list."""
    listed = {path / chunk.file for chunk in chunks if chunk.file}
    return [file for file in sorted((path / "data").glob("*.parquet")) if file not in listed]


def refuse_other_data(path: str | Path, manifest: Mapping[str, Any]) -> None:
    """Raises a ValueError where a label folder's `provenance.json` is of other data."""
    stated = read_provenance(path).data_hash
    if stated is not None and stated != (found := data_hash(chunks_of(manifest))):
        raise ValueError(
            f"{Path(path) / PROVENANCE_FILE} has data_hash {stated}, but the traces beside it "
            f"have {found}: they are not those that it tells of. Put the two that belong together "
            f"in one folder, or {_AGAIN} records these"
        )


def counts_of(dataset: Dataset) -> dict[str, int]:
    columns = dataset.select_columns(["problem_id", "step_ends", "forced_correct", "ended"])
    table = columns.with_format("arrow")[:]
    grades = table.column("forced_correct").combine_chunks().flatten()
    return {
        "problems": len(table.column("problem_id").unique()),
        "steps": len(grades),
        "ungraded_steps": grades.null_count,
        "capped_traces": table.column("ended").to_pylist().count("cap"),
    }


def check_folder(path: str | Path, settings: LabelSettings) -> None:
    """Checks that a run with these settings may write into a folder; changes nothing.

    Raises:
        ValueError: it is no folder, or holds something else, or labels made with other settings,
            or a shard that is in no chunk.
    """
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file; labels go into a folder")
    found = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    if MANIFEST in found:
        manifest = read_manifest(path)
        stored = LabelSettings.from_dict(manifest["settings"])
        if differences := settings.differences(stored):
            raise ValueError(
                f"{path} holds labels made with other settings ({'; '.join(differences)}):"
                " use the same settings to continue them, or another folder"
            )
        if strangers := strangers_of(path, chunks_of(manifest)):
            raise ValueError(f"{strangers[0]} {_STRANGER}")
        return
    # A kill while the first files were written may have left the copy, or a hidden partial file.
    partial = {partial_of(path / name).name for name in (MANIFEST, COPY, README)}
    others = [name for name in found if name not in _OWN | partial]
    if others or strangers_of(path, ()):
        raise ValueError(
            f"{path} holds another run's files ({', '.join(found[:5])}): use an empty folder"
        )


def folder_card() -> str:
    """The README of a label folder: what `load_dataset` reads, and what each column holds."""
    lines = [
        "---",
        "configs:",
        "- config_name: default",
        "  default: true",
        "  data_files:",
        "  - split: train",
        "    path: data/*.parquet",
        "- config_name: prefixes",
        "  data_files:",
        "  - split: train",
        "    path: prefixes/*.parquet",
        "---",
        "",
        "# Labelled traces",
        "",
        "One row is one reasoning trace with the answer forced, and graded, at the end of each of",
        'its steps. `load_dataset(FOLDER)` gives the traces; `load_dataset(FOLDER, "prefixes")`',
        "one row a labelled step, derived from them: pointers and grades, no tokens. Settings,",
        "counts and token costs stand in `manifest.json`.",
    ]
    for title, columns in (("Columns", COLUMNS), ("Columns of `prefixes`", PREFIX_COLUMNS)):
        lines += ["", f"## {title}", "", "| column | type | |", "| --- | --- | --- |"]
        lines += [
            f"| `{name}` | `{_type(kind)}` | {what} |" for name, (kind, what) in columns.items()
        ]
    return "\n".join(lines) + "\n"


def _type(kind: Any) -> str:
    return f"list<{_type(kind.feature)}>" if isinstance(kind, List) else str(kind.dtype)


_COPIED = {  # column of a trace's list -> column of a prefix
    "step_ends": "end",
    "forced_answers": "forced_answer",
    "forced_correct": "correct",
    "matches_final": "matches_final",
    "forced_answer_tokens": "answer_tokens",
    "forced_logprob": "logprob",
    "forced_entropy": "entropy",
    "ungraded_reasons": "ungraded_reason",
}


def prefix_rows(traces: Dataset, first: int = 0) -> Dataset:
    """One row for each labelled step of the given traces.

    Args:
        traces: labelled traces, in the columns of today.
        first: number of the first of them in the whole dataset.
    """
    rows = []
    columns = ["problem_id", "sample_index", "family", "ended", *_COPIED]
    for number, trace in enumerate(traces.select_columns(columns), start=first):
        steps = len(trace["step_ends"])
        for step in range(steps):
            rows.append(
                {
                    "trace": number,
                    "problem_id": trace["problem_id"],
                    "sample_index": trace["sample_index"],
                    "family": trace["family"],
                    "step": step + 1,
                    "steps": steps,
                    "fraction": trace["step_ends"][step] / trace["step_ends"][-1],
                    "ended": trace["ended"],
                    **{new: trace[old][step] for old, new in _COPIED.items()},
                }
            )
    return Dataset.from_list(rows, features=PREFIX_FEATURES)
