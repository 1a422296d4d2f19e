"""What a training run refuses before it starts, and how it tells that memory ran out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from .packing import LabelledTraces
from .settings import TrainSettings

__all__ = [
    "is_out_of_memory",
    "refuse_shared_problems",
    "refuse_unlike_targets",
    "usable_rows",
]

MIN_TRACES = 8


def usable_rows(traces: LabelledTraces, settings: TrainSettings) -> npt.NDArray[np.int64]:
    """The traces that are trained on: those that ended by themselves.

    Raises:
        ValueError: too few of them, or labels that are all equal.
    """
    table = traces.table
    rows = np.flatnonzero(~table.capped)
    if len(rows) < max(MIN_TRACES, settings.batch_size):
        raise ValueError(
            f"there are {len(rows)} training traces that ended naturally "
            f"({int(table.capped.sum())} were cut at the cap); training needs at least "
            f"{MIN_TRACES}, and batch_size ({settings.batch_size}): label more problems"
        )
    mask = table.mask[rows]
    convergence = settings.method == "convergence"
    name = "matches_final" if convergence else "forced_correct"
    values = (table.matches_final if convergence else table.correct)[rows][mask]
    if (values == values[0]).all():
        raise ValueError(
            f"{name} is {values[0]} at every step of all {len(rows)} training traces: there is "
            "nothing to learn from labels that are all equal (check the grading, or choose "
            "problems that the base sometimes solves)"
        )
    return rows


def refuse_shared_problems(train: LabelledTraces, validation: LabelledTraces) -> None:
    """Raises a ValueError where training and validation share a problem."""
    shared = set(train.table.problem_ids) & set(validation.table.problem_ids)
    if shared:
        raise ValueError(
            f"{len(shared)} problems are in both the training and the validation traces, such as "
            f"{min(shared)!r}: split by problem (ospruner.eval.schema.split_of)"
        )


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch could not allocate memory; on the CPU that is a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def refuse_unlike_targets(targets: Sequence[TrainSettings], out_dirs: Sequence[object]) -> None:
    """Raises a ValueError where targets cannot be trained on the same batches and states."""
    if not targets or len(targets) != len(out_dirs) or len(set(out_dirs)) < len(out_dirs):
        raise ValueError(
            f"{len(targets)} targets for the folders {[str(f) for f in out_dirs]}: give at least "
            "one target, and each a folder of its own"
        )
    for name in ("batch_size", "seed", "num_policy_layers", "tuning", "cache_limit_bytes"):
        values = {vars(settings)[name] for settings in targets}
        if len(values) > 1:
            raise ValueError(
                f"targets trained together must share {name}; they have {sorted(values)}"
            )
