"""What cannot be trained on, or not so: refused before the run begins."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from ospruner.bases import max_positions
from ospruner.eval.table import IntArray, TraceTable, classifier_targets

from .traces import LabelledTraces

__all__ = [
    "is_out_of_memory",
    "refuse_beyond_positions",
    "refuse_shared_problems",
    "refuse_ungraded",
    "usable_rows",
    "warn_of_logit_step",
]

MIN_TRACES = 8
LARGEST_LOGIT_STEP = 0.5
_BY_THE_MODEL = ("no answer", "too long")  # why an answer has no verdict, whatever grades it


def usable_rows(table: TraceTable, method: str) -> IntArray:
    """The traces that are trained on: those that ended by themselves.

    Raises:
        ValueError: too few of them, or labels that are all equal.
    """
    rows = np.flatnonzero(~table.capped)
    if len(rows) < MIN_TRACES:
        raise ValueError(
            f"there are {len(rows)} training traces that ended naturally "
            f"({int(table.capped.sum())} were cut at the cap); training needs at least "
            f"{MIN_TRACES}: label more problems"
        )
    targets = classifier_targets(method, table.correct, table.matches_final, table.mask)
    name = "forced_correct" if targets is table.correct else "matches_final"
    values = targets[rows][table.mask[rows]]
    if (values == values[0]).all():
        raise ValueError(
            f"{name} makes the label {values[0]:g} at every step of all {len(rows)} training "
            "traces: there is nothing to learn from labels that are all equal (check the grading, "
            "or choose problems that the base sometimes solves)"
        )
    return rows


def refuse_shared_problems(train: TraceTable, validation: TraceTable) -> None:
    """Raises a ValueError where training and validation share a problem."""
    if shared := set(train.problem_ids) & set(validation.problem_ids):
        raise ValueError(
            f"{len(shared)} problems are in both the training and the validation traces, such as "
            f"{min(shared)!r}: split by problem"
        )


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


def refuse_beyond_positions(base: Any, traces: LabelledTraces) -> None:
    """Refuses traces that are longer than the texts that a causal LM was made for.

    Raises:
        ValueError: naming the first and its length.
    """
    limit = max_positions(base.config)
    if limit is None or not (beyond := np.flatnonzero(traces.token_lengths > limit)).size:
        return
    n = int(beyond[0])
    problem = traces.table.problem_ids[int(traces.table.problem_index[n])]
    raise ValueError(
        f"{beyond.size} traces are longer than the base's {limit} positions "
        f"(max_position_embeddings), such as trace {n} (problem {problem!r}) with "
        f"{int(traces.token_lengths[n])} tokens: these are no traces of this base, or were "
        f"labelled beyond its positions. Label again with a lower --max-tokens"
    )


def warn_of_logit_step(rate: float, magnitude: float) -> None:
    """Warns where one optimiser step may move a stop logit too far.

    AdamW's first steps move each weight by the learning rate, whatever the gradient's size: a logit
    by the head's rate times the sum of its inputs' magnitudes. That sum grows with the base's width
    and the size of its states, so that a rate that suits one base is too high for another.

    Args:
        rate: of the head.
        magnitude: that sum.
    """
    if (step := rate * magnitude) > LARGEST_LOGIT_STEP:
        warnings.warn(
            f"one optimiser step may move a stop logit by {step:.2g}: head_learning_rate ({rate:g})"
            f" times the sum of its inputs' magnitudes ({magnitude:.0f}). Above "
            f"{LARGEST_LOGIT_STEP:g} the head saturates before the layers learn: take "
            f"{0.1 / magnitude:.0e}",
            stacklevel=3,
        )


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch could not allocate memory; on the CPU that is a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
