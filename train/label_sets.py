"""The labels of a run: of one folder or a mix of several, and which problems are held out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from datasets import Dataset, DatasetDict

from ospruner.eval.schema import LabelSettings

from .labels.loading import Labels, load_labels, load_mix

__all__ = [
    "LabelSource",
    "Labels",
    "held_out_split",
    "labels_of",
    "load_labels",
    "load_mix",
    "split_labels",
]

HELD_OUT_PROBLEMS = 500
"""Problems that the paper keeps out of training, to choose lambda on."""


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


LabelSource: TypeAlias = str | Path | Dataset | DatasetDict | Labels | Sequence[str | Path]


def labels_of(source: LabelSource) -> Labels:
    """Labels that are named in any way: a folder or Hub id, several of them, or as they are."""
    if isinstance(source, Labels):
        return source
    single = isinstance(source, str | Path | Dataset | DatasetDict)
    return load_mix([source] if single else source)  # type: ignore[arg-type]


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


def _refuse_other_labels(ours: LabelSettings, theirs: LabelSettings) -> None:
    """Validation may be sampled with another seed and more often; all else must agree."""
    free = {"seed", "samples_per_problem"}
    differences = [line for line in ours.differences(theirs) if line.partition(":")[0] not in free]
    if differences:
        raise ValueError(
            f"the validation labels were made otherwise than the training labels "
            f"({'; '.join(differences)}): label both with the same settings"
        )
