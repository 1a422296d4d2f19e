"""The folder of a label run: shards, a manifest that lists them, a card that `datasets` reads.

data/train-00000.parquet ...      labelled traces, some a shard; pages carry checksums
prefixes/train-00000.parquet ...  the same, one row a labelled step; derived when a run ends
manifest.json                     settings, lost traces, costs, and each shard with its SHA-256
README.md                         names the shards to `load_dataset(FOLDER)`, with a hash of them
data/train-00000.unlisted ...     shards that are damaged, or that a kill left behind
.lock                             held by the run that writes

A shard counts once the manifest lists it: it is written and takes its name, then the manifest takes
the place of the old one. A kill between the two leaves a shard that nothing lists and nobody reads.
Shards never change, and no two have one name: what is sorted or graded again gets new ones.

`datasets` knows a local folder by its last name and its card's configurations, not by its data:
the hash of the data in each of them makes it read what is on the disk now.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from datasets import Dataset
from huggingface_hub import DatasetCardData

from ospruner.durable import LOCK, DamagedError, read_checked, replace_file
from ospruner.eval.results import markdown_table
from ospruner.eval.schema import LabelSettings
from ospruner.provenance import PROVENANCE_FILE, hash_of, read_provenance

from .features import COLUMNS, FEATURES, LATER_COLUMNS, PREFIX_COLUMNS, prefix_rows

FORMAT_VERSION = 3
MANIFEST = "manifest.json"
_README = "README.md"
_OWN = {"data", "prefixes", MANIFEST, LOCK, _README, PROVENANCE_FILE}
_AGAIN = "run `ospruner label` again with the same arguments, which"
_CARD = """
# Labelled traces

One row is one reasoning trace with the answer forced, and graded, at the end of each of its steps.
`load_dataset(FOLDER)` gives the traces; `load_dataset(FOLDER, "prefixes")` one row a labelled step,
derived from them: pointers and grades, no tokens. Settings, counts and token costs stand in
`manifest.json`."""


@dataclass(frozen=True)
class Shard:
    """A file of labelled traces, as the manifest lists it: its path, SHA-256, and rows."""

    file: str
    sha256: str
    rows: int

    @property
    def view(self) -> str:
        """The path of the same traces, one row a labelled step."""
        return self.file.replace("data/", "prefixes/")


def read_manifest(path: str | Path) -> dict[str, Any]:
    """The manifest of a label folder, in today's form.

    Raises:
        ValueError: there is none, it is damaged, or of another version.
    """
    file = Path(path) / MANIFEST
    if not file.is_file():
        raise ValueError(f"{path} has no {MANIFEST}: it is no label folder")
    way_out = f"put an earlier copy of {MANIFEST} in its place, or label into another folder"
    manifest = read_checked(file, f"{way_out} (without it, nothing tells how the traces were made)")
    version = manifest.get("format_version")
    if version == 2:  # its shards held what was lost, and costs, as well
        chunks, manifest["format_version"] = manifest.pop("chunks"), FORMAT_VERSION
        shards = [{k: c[k] for k in ("file", "sha256", "rows")} for c in chunks if c["file"]]
        return {**manifest, "shards": shards}
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{file} has format_version {version!r}; this version of ospruner reads 2 and "
            f"{FORMAT_VERSION}: read it with the ospruner that wrote it, or label again"
        )
    return manifest


def shards_of(manifest: Mapping[str, Any]) -> list[Shard]:
    """The shards that a manifest lists, in order."""
    return [Shard(**values) for values in manifest["shards"]]


def data_hash(manifest: Mapping[str, Any]) -> str:
    """What `provenance.hash_files` gives for the shards, from the manifest alone."""
    return hash_of(shard["sha256"] for shard in manifest["shards"])


def read_labels(path: str | Path, manifest: Mapping[str, Any] | None = None) -> Dataset:
    """The labelled traces that a manifest lists, the folder's own by default, in memory.

    Raises:
        ValueError: the folder holds no labels, or a shard is damaged or missing.
    """
    shards = shards_of(read_manifest(path) if manifest is None else manifest)
    if not shards:
        raise ValueError(f"{path} holds no labelled traces: its {MANIFEST} lists no shard")
    return Dataset(pa.concat_tables([read_shard(Path(path), shard) for shard in shards]))


def read_shard(path: Path, shard: Shard) -> pa.Table:
    """The labelled traces of one shard.

    Raises:
        DamagedError: its bytes are not those that were written, or it is missing.
        ValueError: its columns are not those of FEATURES.
    """
    file = path / shard.file
    content = file.read_bytes() if file.is_file() else b""
    if hashlib.sha256(content).hexdigest() != shard.sha256:
        what = "damaged, its SHA-256 is not that in" if content else "missing, though it is in"
        raise DamagedError(
            f"{file} is {what} {MANIFEST}: {_AGAIN} labels its {shard.rows} traces anew and keeps "
            "the others"
        )
    table = pq.read_table(pa.BufferReader(content))
    for name in LATER_COLUMNS:  # labels from before it was kept
        if name not in table.column_names and "step_ends" in table.column_names:
            nulls = [[None] * len(ends) for ends in table.column("step_ends").to_pylist()]
            kind = FEATURES.arrow_schema.field(name).type
            table = table.append_column(name, pa.array(nulls, kind))
    if set(table.column_names) != set(FEATURES):
        raise ValueError(
            f"{file} has the columns {sorted(table.column_names)}, labelled traces have "
            f"{sorted(FEATURES)}: were they made by another version of ospruner?"
        )
    return table.select(list(FEATURES)).cast(FEATURES.arrow_schema)


def card_configs(
    shards: Mapping[str, Sequence[Shard]], viewed: Mapping[str, Sequence[Shard]]
) -> list[Any]:
    """The `configs` of a card's YAML, by split the shards, and those whose view is there."""
    kinds = (("default", "file", shards), ("prefixes", "view", viewed))
    return [
        {
            "config_name": name,
            "description": " ".join(
                f"{split}: {hash_of(one.sha256 for one in some)}" for split, some in splits.items()
            ),
            **({"default": True} if name == "default" else {}),
            "data_files": [
                {"split": split, "path": list(map(attrgetter(place), some))}
                for split, some in splits.items()
            ],
        }
        for name, place, splits in kinds
        if any(splits.values())
    ]


def write_card(path: Path) -> None:
    """Writes a folder's README: what `load_dataset` reads, and what each column holds.

    It names the shards that the manifest on the disk lists, whatever a failure has left.
    """
    shards = shards_of(read_manifest(path))
    viewed = [shard for shard in shards if (path / shard.view).exists()]
    configs = card_configs({"train": shards}, {"train": viewed})
    head = DatasetCardData(configs=configs).to_yaml() if configs else ""
    parts = [f"---\n{head}\n---{_CARD}"]
    for title, columns in (("Columns", COLUMNS), ("Columns of `prefixes`", PREFIX_COLUMNS)):
        rows = [[f"`{name}`", f"`{kind}`", what] for name, (kind, what) in columns.items()]
        parts += [f"## {title}", markdown_table(["column", "type", "what it holds"], rows)]
    file, card = path / _README, ("\n\n".join(parts) + "\n").encode()
    if not file.is_file() or file.read_bytes() != card:
        replace_file(file, card)


def refuse_other_data(path: str | Path, manifest: Mapping[str, Any]) -> None:
    """Raises a ValueError where a label folder's `provenance.json` is of other data."""
    file, found = Path(path) / PROVENANCE_FILE, data_hash(manifest)
    stated = read_provenance(path).data_hash if file.is_file() else None
    if stated not in (None, found):
        raise ValueError(
            f"{file} has data_hash {stated}, but the traces beside it have {found}: they are not "
            "those that it tells of. Put the two that belong together in one folder, or "
            f"{_AGAIN} records these"
        )


def refuse_damage(path: str | Path, manifest: Mapping[str, Any]) -> None:
    """Raises a DamagedError where a shard, or the view of it, is not what was written."""
    derived, first = prefix_rows(read_labels(path, manifest).data.table), 0
    for shard in shards_of(manifest):
        try:
            view = pq.read_table(Path(path) / shard.view, page_checksum_verification=True)
        except (OSError, pa.ArrowException):
            view = pa.table({})
        if not len(view) or not view.equals(derived.slice(first, len(view))):
            raise DamagedError(
                f"{Path(path) / shard.view} is damaged or missing: remove prefixes/, and {_AGAIN} "
                "derives it anew"
            )
        first += len(view)


def check_folder(path: str | Path, settings: LabelSettings) -> None:
    """Checks that a run with these settings may write into a folder; changes nothing.

    Raises:
        ValueError: it is no folder, or holds something else, or labels made with other settings.
    """
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file; labels go into a folder")
    found = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    others = [name for name in found if name not in _OWN and not name.endswith(".partial")]
    if MANIFEST in found:
        stored = LabelSettings.from_dict(read_manifest(path)["settings"])
        if differences := settings.differences(stored):
            raise ValueError(
                f"{path} holds labels made with other settings ({'; '.join(differences)}):"
                " use the same settings to continue them, or another folder"
            )
    elif others:
        raise ValueError(
            f"{path} holds another run's files ({', '.join(others[:5])}): use an empty folder"
        )
