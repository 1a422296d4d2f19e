"""One evaluation: what rules do on the traces of one model and benchmark, trace by trace."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from .intervals import Resampled, Rule
from .methods import FRONTIER
from .metrics import AES_ABSOLUTE, AesVariant
from .replay import Outcome
from .results import NAMED, best_rows, frame_of
from .table import FloatArray, IntArray, TraceTable


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Rules on N traces of one model and benchmark.

    Attributes:
        settings: "model", "benchmark", "answer" ("forced" or "free"), "mode" ("replay" or
            "online"), and whatever else has to agree before two runs may be mixed. JSON-ready.
        rules: the first is the full trace, to which reductions refer.
        limits: what no rule can reach, or none should need.
        problem_index: (N,) the problem of each trace.
        natural_correct: (N,) grade of the answer after the trace's own end; NaN where there is
            none. It is never mixed with forced answers.
    """

    settings: dict[str, Any]
    rules: list[Rule]
    limits: list[Rule]
    problem_index: IntArray
    natural_correct: FloatArray

    def __post_init__(self) -> None:
        if missing := [name for name in NAMED if not self.settings.get(name)]:
            raise ValueError(f"settings lacks {missing}; an evaluation is named by {list(NAMED)}")

    def __len__(self) -> int:
        return len(self.problem_index)

    @property
    def full(self) -> Outcome:
        """The full traces."""
        return self.rules[0].outcome

    @cached_property
    def resampled(self) -> Resampled:
        """Rules and limits on the same resamples of the problems: made once, however often read."""
        return Resampled(self.rules, self.full, self.problem_index, self.limits)

    def frame(
        self, variant: AesVariant = AES_ABSOLUTE, prices: Sequence[float] = ()
    ) -> pd.DataFrame:
        """Rules and limits with their numbers and intervals; see `Results`."""
        return self.resampled.frame(variant, prices)

    def differences(self, variant: AesVariant = AES_ABSOLUTE) -> pd.DataFrame:
        """Paired differences of one method's best rule to every other method's.

        The one is OS-Pruner where it is there, else the first after the full trace.
        """
        best = best_rows(self.frame(variant))
        places = dict(zip(best["method"], best.index.tolist(), strict=True))
        methods = [method for method in places if method != self.rules[0].method]
        if not methods:
            return frame_of([], "differences")
        ours = places.pop(FRONTIER if FRONTIER in places else methods[0])
        return self.resampled.differences(ours, list(places.values()), variant)


def trace_hash(table: TraceTable) -> str:
    """A short hash of the labels: which traces, which steps, which grades."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update("\x00".join(table.problem_ids).encode())
    for array in (table.problem_index, table.lengths, table.correct):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
