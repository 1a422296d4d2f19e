"""The labels of a run: of one folder or a mix of several, and which problems are held out."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]
from datasets import Dataset, concatenate_datasets
from huggingface_hub import snapshot_download

from ospruner.eval.schema import LabelSettings
from ospruner.provenance import PROVENANCE_FILE, hash_of, is_hub_id

from .labels.folder import (
    MANIFEST,
    chunks_of,
    data_hash,
    read_labels,
    read_manifest,
    refuse_other_data,
)

__all__ = [
    "LabelSource",
    "Labels",
    "held_out_split",
    "labels_of",
    "load_labels",
    "refuse_ungraded",
    "split_labels",
]

_BY_THE_MODEL = ("no answer", "too long")  # why an answer has no verdict, whatever grades it
HELD_OUT_PROBLEMS = 500
"""Problems that the paper keeps out of training, to choose lambda on."""


@dataclass(frozen=True)
class Labels:
    """Labelled traces and how they were made.

    Attributes:
        traces: columns `schema.FEATURES`.
        settings: of their run; of a mix the first run's, with `LabelSettings.domains`.
        data_hash: of their shards.
        source: what the problems were, in a word; the folder's name where it is not known.
        parts: of a mix, each run's labels by the domain's name; else empty.
    """

    traces: Dataset
    settings: LabelSettings
    data_hash: str
    source: str = ""
    parts: Mapping[str, Labels] = field(default_factory=dict)


def load_labels(source: str | Path) -> Labels:
    """The labels of a folder, or of a data set on the Hub.

    Args:
        source: a folder of `ospruner label`, or a data set's id.

    Raises:
        ValueError: the folder holds no labels, damaged ones, labels of another version, or a
            record of other data.
        OSError: the Hub has no such data set.
    """
    folder = Path(source)
    if not folder.is_dir():
        if folder.exists() or not is_hub_id(str(source)):
            what = "a file" if folder.exists() else "nothing"
            raise ValueError(
                f"labels is {str(source)!r}, where {what} is: give a folder of `ospruner label`, "
                "or a data set's id on the Hub"
            )
        wanted = [MANIFEST, PROVENANCE_FILE, "data/*.parquet"]
        found = snapshot_download(str(source), repo_type="dataset", allow_patterns=wanted)
        folder = Path(found)
    manifest = read_manifest(folder)
    if (folder / PROVENANCE_FILE).is_file():
        refuse_other_data(folder, manifest)
    settings = LabelSettings.from_dict(manifest["settings"])
    of = Path(str(manifest.get("source", {}).get("dataset") or source)).name
    source_name = of.partition(".")[0]
    return Labels(read_labels(folder), settings, data_hash(chunks_of(manifest)), source_name)


_OF_A_DOMAIN = {
    "task",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "samples_per_problem",
    "max_new_tokens",
    "max_answer_tokens",
    "imported_from",
    "reasoning_format",
}
"""What of the settings may differ between the runs of a mix; of the format, what a task shapes."""


def load_mix(sources: Sequence[str | Path]) -> Labels:
    """The labels of several folders as one: of different tasks or problems, by one base.

    Traces get the column `domain`, and problems their domain's name before their id. A domain is
    named by its task or, where runs share one, by what the problems were.

    Args:
        sources: as `load_labels` takes them; one stands for itself.

    Raises:
        ValueError: none, one that is given twice, labels of different bases, formats or strides,
            or two of one task and one data set; or see `load_labels`.
    """
    if not sources:
        raise ValueError("no labels: give at least one folder of `ospruner label`")
    loaded = [load_labels(source) for source in sources]
    if len(loaded) == 1:
        return loaded[0]
    names = _domain_names(sources, loaded)
    first = loaded[0]
    for source, other in zip(sources[1:], loaded[1:], strict=True):
        lines = first.settings.differences(other.settings)
        lines = [line for line in lines if line.partition(":")[0] not in _OF_A_DOMAIN]
        ours, theirs = (one.settings.reasoning_format for one in (first, other))
        lines += [
            f"reasoning_format's {name}: {ours.get(name)!r} here, {theirs.get(name)!r} there"
            for name in sorted({*ours, *theirs} - {"box_prefix", "answer_end"})
            if ours.get(name) != theirs.get(name)
        ]
        if lines:
            raise ValueError(
                f"{sources[0]} and {source} cannot be mixed ({'; '.join(lines)}): one policy reads "
                "one base's thinking in one format, and decides at one stride; label all of them "
                "alike"
            )
    parts = dict(zip(names, loaded, strict=True))
    settings = dataclasses.replace(
        first.settings, domains={name: dict(one.settings.task) for name, one in parts.items()}
    )
    traces = concatenate_datasets([_of_domain(one.traces, name) for name, one in parts.items()])
    return Labels(traces, settings, hash_of(one.data_hash for one in loaded), "mix", parts)


def _domain_names(sources: Sequence[str | Path], loaded: Sequence[Labels]) -> list[str]:
    tasks = [str(one.settings.task["name"]) for one in loaded]
    names = [
        task if tasks.count(task) == 1 else one.source
        for task, one in zip(tasks, loaded, strict=True)
    ]
    hashes = [one.data_hash for one in loaded]
    for place, name in enumerate(names):
        before = next((k for k in range(place) if names[k] == name), None)
        if hashes.index(hashes[place]) < place or before is not None:
            twice = hashes.index(hashes[place]) if before is None else before
            raise ValueError(
                f"labels: {sources[twice]} and {sources[place]} are both of {name!r}: give each "
                "folder once, and one folder for each data set (more problems go into the same "
                "folder, by the same command)"
            )
    return names


def _of_domain(traces: Dataset, name: str) -> Dataset:
    """Traces with their domain, and ids that no other domain has."""
    table = traces.with_format("arrow")[:]
    ids = pa.array([f"{name}/{one}" for one in table.column("problem_id").to_pylist()])
    table = table.set_column(table.column_names.index("problem_id"), "problem_id", ids)
    return Dataset(table.append_column("domain", pa.array([name] * len(table), pa.string())))


def held_out_split(problem_ids: Sequence[str], held_out: int | None, seed: int) -> list[bool]:
    """Which traces are held out: all those of some problems, drawn with the seed.

    Args:
        problem_ids: of each trace.
        held_out: how many problems; None for 500 as in the paper, or a fifth of fewer than 2,500.
        seed: another seed chooses other problems.

    Raises:
        ValueError: no problem would be left on one side.
    """
    problems = sorted(set(problem_ids))
    count = min(HELD_OUT_PROBLEMS, len(problems) // 5) if held_out is None else held_out
    if not 1 <= count < len(problems):
        raise ValueError(
            f"held_out is {count}, of {len(problems)} problems: at least one must be held out and "
            "one left to train on. Label more problems, or give a validation set"
        )
    chosen = set(random.Random(seed).sample(problems, count))
    return [problem in chosen for problem in problem_ids]


LabelSource = str | Path | Labels | Sequence[str | Path]


def labels_of(source: LabelSource) -> Labels:
    """Labels that are named in any way: a folder or Hub id, several of them, or as they are."""
    if isinstance(source, Labels):
        return source
    return load_mix([source] if isinstance(source, str | Path) else source)


def split_labels(
    labels: Labels,
    others: Labels | None,
    *,
    held_out: int | None = None,
    seed: int = 0,
    limit: int | None = None,
) -> tuple[Dataset, Dataset]:
    """Training and validation traces.

    Args:
        labels: to train on.
        others: of other problems, to validate on; None to hold problems out of `labels`.
        held_out: how many problems of each domain; see `held_out_split`.
        seed: which problems.
        limit: only the first so many traces of each domain.

    Raises:
        ValueError: the others were made otherwise, or are of other domains.
    """
    traces = labels.traces
    of = np.array(traces["domain"] if labels.parts else [""] * len(traces))
    places = [np.flatnonzero(of == name)[:limit] for name in dict.fromkeys(of.tolist())]
    if others is not None and held_out is not None:
        raise ValueError(
            f"held_out is {held_out}, but with validation labels no problem is held out: leave one "
            "of them out"
        )
    if others is not None:
        if set(others.parts) != set(labels.parts):
            raise ValueError(
                f"the validation labels are of the domains {sorted(others.parts) or 'of one task'},"
                f" the training labels of {sorted(labels.parts) or 'one task'}: give labels of the "
                "same domains"
            )
        for name, part in (labels.parts or {"": labels}).items():
            _refuse_other_labels(part.settings, others.parts.get(name, others).settings)
        return traces.select(np.concatenate(places)), others.traces
    ids = np.array(traces["problem_id"])
    split: dict[bool, list[npt.NDArray[np.int64]]] = {True: [], False: []}
    for rows in places:
        held = np.array(held_out_split(ids[rows].tolist(), held_out, seed))
        for side, found in split.items():
            found.append(rows[held == side])
    training, validating = (traces.select(np.concatenate(split[side])) for side in (False, True))
    return training, validating


def refuse_ungraded(traces: Dataset, bound: float) -> None:
    """Refuses labels of a grader that was broken, or cannot read these answers."""
    reasons = Counter(why for row in traces["ungraded_reasons"] for why in row)
    steps = reasons.total()
    failed = {why: n for why, n in reasons.items() if why is not None and why not in _BY_THE_MODEL}
    share = sum(failed.values()) / steps
    if share > bound:
        counts = ", ".join(f"{why}: {n}" for why, n in sorted(failed.items()))
        raise ValueError(
            f"{share:.1%} of the {steps} forced answers could not be graded ({counts}), and at most"
            f" {bound:.1%} may be: they would be trained on as wrong. Grade them again (`ospruner "
            "labels regrade FOLDER`, which tests the grader first), or raise max_ungraded"
        )


def _refuse_other_labels(ours: LabelSettings, theirs: LabelSettings) -> None:
    """Validation may be sampled with another seed and more often; all else must agree."""
    free = {"seed", "samples_per_problem"}
    differences = [line for line in ours.differences(theirs) if line.partition(":")[0] not in free]
    if differences:
        raise ValueError(
            f"the validation labels were made otherwise than the training labels "
            f"({'; '.join(differences)}): label both with the same settings"
        )
