"""Labels from where they lie: a folder, the Hub, memory; with how they were made."""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from datasets import Dataset, DatasetDict, concatenate_datasets
from huggingface_hub import snapshot_download

from ospruner.durable import differences
from ospruner.eval.problems.problem import text_key
from ospruner.eval.schema import LabelSettings
from ospruner.provenance import PROVENANCE_FILE, check_place, hash_of, is_hub_id

from .folder import MANIFEST, data_hash, read_labels, read_manifest, refuse_other_data

_ENDINGS = re.compile(r"\.(?:jsonl(?:\.gz)?|parquet)$")
_SHARES = {"train": 0.8, "validation": 0.1, "test": 0.1}
# What of the settings may differ between the runs of a mix; of the format, what a task shapes.
_OF_A_PART = (
    *("task", "temperature", "top_p", "top_k", "seed", "samples_per_problem"),
    *("max_new_tokens", "max_answer_tokens", "imported_from", "reasoning_format", "prompt_date"),
)


@dataclass(frozen=True)
class Labels:
    """Labelled traces and how they were made."""

    traces: Dataset  # columns `features.FEATURES`
    settings: LabelSettings  # of their run; of a mix the first run's
    data_hash: str  # of their shards; of a split also of its name
    source: str = ""  # what the problems were, in a word; the folder's name where it is not known
    # Of a mix, each run's labels by the name of its problems, in the order of the traces.
    parts: Mapping[str, Labels] = field(default_factory=dict)


LabelSource: TypeAlias = str | Path | Dataset | DatasetDict | Labels | Sequence[str | Path]
"""A folder of `ospruner label`, a data set's id on the Hub, what `load_splits` gave of one, loaded
labels, or several folders or ids (`load_mix`)."""


def load_splits(source: str | Path) -> DatasetDict:
    """The labels of a folder or of the Hub (`load_labels`) by splits; each says how it was made.

    Published splits have their names. Labels of problems that belong to a split other than "train"
    are that split; all others are split by problem into train, validation and test (.8, .1, .1) by
    a hash of its id (`split_of`), so that problems stay where they are when others are added, and
    all copies of a text on one side. A split without a trace is left out.
    """
    manifests = _manifests_of(source)
    splits = {name: _read(folder, source, one) for name, (folder, one) in manifests.items()}
    if len(splits) == 1:
        (labels,), ((_, manifest),) = splits.values(), manifests.values()
        of = str(manifest.get("source", {}).get("split") or "train").partition("[")[0]
        splits = split_by_text(labels) if of == "train" else {of: labels}
    return DatasetDict({name: labels.traces for name, labels in splits.items()})


def split_by_text(labels: Labels, shares: Mapping[str, float] = _SHARES) -> dict[str, Labels]:
    """Labels of one run by problem on sides, by `split_of`; a side without a trace is left out.

    A problem that has several ids is where the first of them is.
    """
    traces, firsts = labels.traces, dict[str, str]()
    ids = zip(traces["problem"], traces["problem_id"], strict=True)
    whose = [firsts.setdefault(text_key(text), name) for text, name in ids]
    sides, found = np.array([split_of(name, shares) for name in whose]), {}
    for side in shares:
        if len(rows := np.flatnonzero(sides == side)):
            hashed = hashlib.sha256(f"{labels.data_hash}/{side}".encode()).hexdigest()
            found[side] = _told(replace(labels, traces=traces.select(rows), data_hash=hashed))
    return found


def load_labels(source: LabelSource) -> Labels:
    """Labels with how they were made, of several splits all.

    Raises:
        ValueError: the folder holds no labels, damaged ones, labels of another version, or a
            record of other data; or rows in memory that do not say how they were made.
        OSError: the Hub has no such data set.
    """
    if isinstance(source, Labels):
        return source
    if isinstance(source, Dataset):
        return _remembered(source)
    if isinstance(source, DatasetDict):
        parts = [_remembered(part) for part in source.values()]
    elif isinstance(source, str | Path):
        found = _manifests_of(source).values()
        parts = [_read(folder, source, manifest) for folder, manifest in found]
    else:
        return load_mix(source)
    if len(parts) == 1:
        return parts[0]
    traces = concatenate_datasets([part.traces for part in parts])
    hashed = hash_of(part.data_hash for part in parts)
    return _told(replace(parts[0], traces=traces, data_hash=hashed))


def _manifests_of(source: str | Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Folder and manifest of each split: of a label run one, of published splits one each."""
    name, folder = str(source), Path(source)
    if folder.is_file() or not (folder.is_dir() or is_hub_id(name)):
        what = "a file" if folder.is_file() else "nothing"
        raise ValueError(
            f"labels is {name!r}, where {what} is: give a folder of `ospruner label`, or a data "
            "set's id on the Hub"
        )
    if not folder.is_dir():
        check_place("labels", name)
        wanted = ["*" + MANIFEST, "*" + PROVENANCE_FILE, "*data/*.parquet"]
        folder = Path(snapshot_download(name, repo_type="dataset", allow_patterns=wanted))
    parts = sorted(file.parent for file in folder.glob(f"*/{MANIFEST}"))
    if parts and not (folder / MANIFEST).is_file():
        return {part.name: (part, read_manifest(part)) for part in parts}
    return {"train": (folder, read_manifest(folder))}


def _read(folder: Path, source: str | Path, manifest: Mapping[str, Any]) -> Labels:
    """The labels of one manifest."""
    refuse_other_data(folder, manifest)
    of = Path(str(manifest.get("source", {}).get("dataset") or source)).name
    traces, settings = read_labels(folder, manifest), LabelSettings.from_dict(manifest["settings"])
    return _told(Labels(traces, settings, data_hash(manifest), _ENDINGS.sub("", of)))


def _told(labels: Labels) -> Labels:
    """The labels, whose traces say how they were made wherever they go (`Dataset.info`)."""
    made = {"settings": labels.settings.to_dict(), "data_hash": labels.data_hash}
    made["source"] = labels.source
    labels.traces.info.description = json.dumps({"ospruner_labels": made})
    return labels


def _remembered(traces: Dataset) -> Labels:
    try:
        made = json.loads(traces.info.description)["ospruner_labels"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            "these rows do not say how they were made: take them from `ospruner.label`, or give "
            "the folder of the labels, or their id on the Hub"
        ) from error
    settings = LabelSettings.from_dict(made["settings"])
    return Labels(traces, settings, made["data_hash"], made["source"])


def load_mix(sources: Sequence[LabelSource]) -> Labels:
    """Labels of several tasks or sources of problems as one, by one base; one stands for itself.

    Problems get the name of their source before their id or, where it tells the runs apart, of
    their task.

    Raises:
        ValueError: none, one that is given twice, labels of different bases, formats or strides,
            or two of one name; or see `load_labels`.
    """
    if not sources:
        raise ValueError("no labels: give at least one folder of `ospruner label`")
    loaded = [load_labels(source) for source in sources]
    if len(loaded) == 1:
        return loaded[0]
    first, names = loaded[0], _names_of(loaded)
    for name, other in zip(names[1:], loaded[1:], strict=True):
        lines = first.settings.differences(other.settings, _OF_A_PART)
        formats = ({**one.settings.reasoning_format} for one in (first, other))
        free = dict.fromkeys(("box_prefix", "answer_end"))
        lines += [f"reasoning_format's {one}" for one in differences(*(x | free for x in formats))]
        if lines:
            raise ValueError(
                f"the labels of {names[0]} and {name} cannot be mixed ({'; '.join(lines)}): one "
                "policy reads one base's thinking in one format, and decides at one stride; label "
                "all of them alike"
            )
    parts = {name: _named(one, name) for name, one in zip(names, loaded, strict=True)}
    traces = concatenate_datasets([one.traces for one in parts.values()])
    hashed = hash_of(one.data_hash for one in loaded)
    return Labels(traces, first.settings, hashed, "mix", parts)


def _names_of(loaded: Sequence[Labels]) -> list[str]:
    tasks = [str(one.settings.task["name"]) for one in loaded]
    names = [
        task if tasks.count(task) == 1 else one.source
        for task, one in zip(tasks, loaded, strict=True)
    ]
    for values in ([one.data_hash for one in loaded], names):
        value, count = Counter(values).most_common(1)[0]
        if count > 1:
            raise ValueError(
                f"labels: {count} of them are of {names[values.index(value)]!r}: give each "
                "folder once, and one folder for each data set (more problems go into the same "
                "folder, by the same command)"
            )
    return names


def _named(labels: Labels, name: str) -> Labels:
    """Labels whose problems have ids that no other part has."""
    table = labels.traces.with_format("arrow")[:]
    ids = pa.array([f"{name}/{one}" for one in table.column("problem_id").to_pylist()])
    table = table.set_column(table.column_names.index("problem_id"), "problem_id", ids)
    return replace(labels, traces=Dataset(table))


def split_of(problem_id: str, fractions: Mapping[str, float] = _SHARES) -> str:
    """The split a problem belongs to, by hash: stable when problems are added or reordered.

    Every trace of a problem falls in the same split. The shares of the splits sum to one.
    """
    digest = hashlib.blake2b(f"0\x00{problem_id}".encode(), digest_size=8).digest()
    u = int.from_bytes(digest, "big") / 2**64
    names = [name for name, share in fractions.items() if share > 0]
    place = bisect(list(accumulate(fractions[name] for name in names)), u)
    return names[min(place, len(names) - 1)]  # their sum may be just below one
