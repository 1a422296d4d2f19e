"""Labelled traces as padded arrays: what replay, metrics, limits and the losses compute on."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_COLUMNS = [
    *("problem_id", "family", "step_ends", "forced_correct", "matches_final"),
    *("forced_answer_tokens", "natural_correct", "ended"),
]


@dataclass(frozen=True, repr=False, eq=False)
class TraceTable:
    """N labelled traces of up to T steps, padded at the right; trace n is row n of the dataset.

    An answer without a verdict counts as wrong.

    Attributes:
        problem_ids: the P different problems, in order of first appearance.
        problem_index: (N,) which problem each trace belongs to.
        lengths: (N, T) L_i, thinking tokens through each step; on padding the last step's.
        correct: (N, T) A_i in [0, 1]; 0 on padding.
        matches_final: (N, T) forced answer equal to the one forced at T; False on padding.
        answer_tokens: (N, T) tokens of the forced answer; 0 on padding.
        mask: (N, T) true on real steps.
        num_steps: (N,) steps of each trace, at least 1.
        natural_correct: (N,) grade of the natural answer; NaN where there is none.
        capped: (N,) cut at the token cap.
        families: family of each trace's problem.
        flops: (N, T) floating-point operations of a row that stops at each step, without what
            decides (`compute.Compute.charge`); None where they are not counted.
    """

    problem_ids: list[str]
    problem_index: IntArray
    lengths: IntArray
    correct: FloatArray
    matches_final: BoolArray
    answer_tokens: IntArray
    mask: BoolArray
    num_steps: IntArray
    natural_correct: FloatArray
    capped: BoolArray
    families: list[str]
    flops: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.num_steps)

    @property
    def last(self) -> IntArray:
        """(N,) index of each trace's last step."""
        return self.num_steps - 1

    @property
    def full_correct(self) -> FloatArray:
        """(N,) correctness of the answer forced at the trace's end."""
        return self.correct[np.arange(len(self)), self.last]

    @property
    def full_tokens(self) -> IntArray:
        """(N,) thinking tokens of the whole trace."""
        return self.lengths[np.arange(len(self)), self.last]

    def by_problem(self, values: FloatArray) -> FloatArray:
        """(P,) means over each problem's traces of (N,) values."""
        sums, counts = np.bincount(self.problem_index, values), np.bincount(self.problem_index)
        return sums / counts

    @classmethod
    def from_dataset(cls, dataset: Any) -> TraceTable:
        """Reads a `datasets.Dataset` of labelled traces (`ospruner label`), row for row.

        Rows are taken to satisfy `features.validate_row`.

        Raises:
            ValueError: a column is missing, there is no trace, a trace has no step, the entries
                per step of two columns differ, or no forced answer is graded.
        """
        if not len(dataset):
            raise ValueError("the dataset holds no traces")
        columns = dataset.select_columns(_COLUMNS).with_format("arrow")[:]
        steps = columns.column("step_ends").combine_chunks()
        num_steps = _numpy(steps.value_lengths(), 0).astype(np.int64)
        if len(empty := np.flatnonzero(num_steps < 1)):
            raise ValueError(f"trace {empty[0]} has no steps in step_ends; its end is a step")
        mask = np.arange(num_steps.max()) < num_steps[:, None]  # (N, T)

        def padded(name: str, null: float, dtype: Any) -> npt.NDArray[Any]:
            column = columns.column(name).combine_chunks()
            if not np.array_equal(_numpy(column.value_lengths(), 0), num_steps):
                raise ValueError(f"{name} and step_ends have different numbers of steps")
            out = np.zeros(mask.shape, dtype)
            out[mask] = _numpy(column.flatten(), null)
            return out

        grades = padded("forced_correct", np.nan, np.float64)
        if np.isnan(grades).sum() == mask.sum():
            raise ValueError(_told_ungraded(dataset["ungraded_reasons"]))
        lengths = padded("step_ends", 0, np.int64)
        index, problems = pd.factorize(columns.column("problem_id").to_pandas())
        return cls(
            problem_ids=list(problems),
            problem_index=index.astype(np.int64),
            lengths=np.maximum.accumulate(lengths, axis=1),
            correct=np.nan_to_num(grades, nan=0.0),
            matches_final=padded("matches_final", False, np.bool_),
            answer_tokens=padded("forced_answer_tokens", 0, np.int64),
            mask=mask,
            num_steps=num_steps,
            natural_correct=_numpy(columns.column("natural_correct"), np.nan).astype(np.float64),
            capped=np.array([ended == "cap" for ended in columns.column("ended").to_pylist()]),
            families=columns.column("family").to_pylist(),
        )


def trace_hash(table: TraceTable) -> str:
    """Tells label sets apart: problems, step ends and grades, in order."""
    digest = hashlib.blake2b("\x00".join(table.problem_ids).encode(), digest_size=16)
    by_step = (one[table.mask] for one in (table.lengths, table.correct, table.matches_final))
    for values in (table.problem_index, table.num_steps, *by_step):
        digest.update(values.tobytes())
    return digest.hexdigest()


def _told_ungraded(reasons: Iterable[Sequence[str | None]]) -> str:
    """Why no forced answer has a grade, and what to do."""
    counts = Counter(why for row in reasons for why in row)
    told = ", ".join(f"{why}: {n}" for why, n in counts.most_common() if why)
    if not told:
        return "the labels are not graded: grade them, `ospruner labels regrade FOLDER`"
    said = f"none of the {counts.total()} forced answers has a grade ({told}): "
    if counts["no answer"] > counts.total() / 2:
        return (
            f"{said}the model closed no box, so that there is nothing to grade. Look at "
            "forced_answers; give the base its own --format (`ospruner doctor BASE` names it), or "
            "a larger --set max_answer_tokens"
        )
    return f"{said}look at forced_answers and at the problems' reference answers"


def _numpy(column: Any, null: Any) -> npt.NDArray[Any]:
    """An Arrow array as numpy, nulls replaced (filling first keeps integers integers)."""
    filled = column if column.null_count == 0 else column.fill_null(null)
    return np.asarray(filled.to_numpy(zero_copy_only=False))
