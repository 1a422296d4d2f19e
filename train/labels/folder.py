"""The folder of a label run: journal, Parquet shards and manifest, safe against kills at any time.

data/train-00000.parquet ...   finished shards; only `regrade` ever writes one again
prefixes/train-00000.parquet   the same, one row a labelled step; derived
journal.jsonl                  finished chunks not yet in a shard, one a line, fsynced
manifest.json                  settings, counts and token costs (derived from the two above)
README.md                      tells `datasets.load_dataset(FOLDER)` which files are data
.lock                          held by the run that writes

`prefixes/` holds pointers and grades, never tokens, which would be quadratic in a trace's length:
a row names its trace, whose first `end` thinking tokens are the prefix.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from datasets import Dataset, List

from modeling_ospruner.common.durable import LOCK, sync_file, sync_folder
from ospruner.eval.schema import (
    ADDED,
    COLUMNS,
    FEATURES,
    PREFIX_COLUMNS,
    PREFIX_FEATURES,
    LabelSettings,
    with_added_columns,
)
from ospruner.hub_cards.facts import PROVENANCE_FILE, read_object

__all__ = [
    "TokenCosts",
    "check_folder",
    "folder_card",
    "prefix_rows",
    "read_labels",
    "read_manifest",
    "write_prefixes",
]


FORMAT_VERSION = 1
MANIFEST = "manifest.json"
JOURNAL = "journal.jsonl"
README = "README.md"
SHARD_KEY = b"ospruner"
_OWN = frozenset({"data", "prefixes", MANIFEST, JOURNAL, LOCK, README, PROVENANCE_FILE})


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


def read_labels(path: str | Path) -> Dataset:
    """The labelled traces of a folder, all shards, in memory.

    Columns that an earlier version did not write yet are null.

    Raises:
        ValueError: the folder holds no labels, or its columns are not those of FEATURES.
    """
    shards = data_shards(Path(path))
    if not shards:
        raise ValueError(f"{path} holds no labelled traces: no data/*.parquet in it")
    return Dataset(pa.concat_tables([read_shard(shard).data.table for shard in shards]))


def read_shard(shard: Path) -> Dataset:
    """The labelled traces of one shard, in the columns of today.

    Raises:
        ValueError: its columns are not those of FEATURES.
    """
    table = pq.read_table(shard)
    needed, found = set(FEATURES) - set(ADDED), set(table.column_names)
    if not needed <= found <= set(FEATURES):
        raise ValueError(
            f"{shard} has the columns {sorted(found)}, labelled traces have {sorted(FEATURES)}: "
            "were they made by another version of ospruner?"
        )
    return Dataset(with_added_columns(table).cast(FEATURES.arrow_schema))


def read_manifest(path: str | Path) -> dict[str, Any]:
    """The manifest of a label folder.

    Raises:
        ValueError: there is none, or one of another version.
    """
    file = Path(path) / MANIFEST
    if not file.is_file():
        raise ValueError(f"{path} has no {MANIFEST}: it is no label folder")
    manifest = read_object(file)
    if manifest.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{file} has format_version {manifest.get('format_version')!r}; this version of "
            f"ospruner reads {FORMAT_VERSION}"
        )
    return manifest


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


def data_shards(path: Path) -> list[Path]:
    return sorted((path / "data").glob("train-*.parquet"))


def check_folder(path: str | Path, settings: LabelSettings) -> None:
    """Checks that a run with these settings may write into a folder; changes nothing.

    Raises:
        ValueError: it is no folder, or holds something else, or labels made with other settings.
    """
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file; labels go into a folder")
    found = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    if MANIFEST in found:
        stored = LabelSettings.from_dict(read_manifest(path)["settings"])
        if differences := settings.differences(stored):
            raise ValueError(
                f"{path} holds labels made with other settings ({'; '.join(differences)}):"
                " use the same settings to continue them, or another folder"
            )
        return
    # A kill while the first files were written may have left a hidden partial one.
    partial = {f".{name}.partial" for name in (MANIFEST, README)}
    strangers = [name for name in found if name not in _OWN | partial]
    if strangers or data_shards(path):
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


def write_prefixes(folder: Path) -> None:
    """Writes the view of every shard of a label folder that has none yet."""
    (folder / "prefixes").mkdir(exist_ok=True)
    first = 0
    for shard in data_shards(folder):
        path = folder / "prefixes" / shard.name
        if path.exists():
            first += pq.read_metadata(shard).num_rows
            continue
        traces = read_shard(shard)
        table: pa.Table = prefix_rows(traces, first).data.table
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            pq.write_table(table, file)
            sync_file(file)
        partial.replace(path)
        first += len(traces)
    sync_folder(folder / "prefixes")
