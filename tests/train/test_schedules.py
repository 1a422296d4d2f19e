"""Lambda schedules: the paper's lists as printed, and the automatic one against its definition."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ospruner.eval.table import TraceTable
from ospruner.train.settings import GPT_OSS_PENALTIES, R1_PENALTIES, automatic_penalties

from .conftest import MakeLabels


def test_the_papers_lists() -> None:
    assert R1_PENALTIES == (1e-4, 5e-5, 2e-5, 1e-5, 5e-6, 2e-6, 1e-6, 0)
    assert GPT_OSS_PENALTIES == (2e-4, 1e-4, 5e-5, 2e-5, 1e-5, 0)


@pytest.mark.parametrize("stages", [1, 4, 7])
def test_automatic_schedule(make_labels: MakeLabels, stages: int) -> None:
    table = TraceTable.from_dataset(make_labels(50))
    penalties = automatic_penalties(table, stages)
    assert len(penalties) == stages + 1
    assert penalties[-1] == 0
    assert all(a > b for a, b in itertools.pairwise(penalties))
    assert {f"{p:.0e}"[0] for p in penalties[:-1]} <= {"1", "2", "5"}

    # The first one by brute force, one trace at a time.
    def at_step(k: int) -> tuple[float, float]:
        steps = [min(k, last) for last in table.last]
        rows = range(len(table))
        return (
            float(np.mean([table.correct[n, steps[n]] for n in rows])),
            float(np.mean([table.lengths[n, steps[n]] for n in rows])),
        )

    points = [at_step(k) for k in range(table.correct.shape[1])]
    accuracy, tokens = max(points, key=lambda point: point[0])
    bound = (accuracy - points[0][0]) / (2 * (tokens - points[0][1]))
    assert bound / 2.5 < penalties[0] <= bound


def test_thinking_that_gains_nothing(make_labels: MakeLabels) -> None:
    rows = make_labels(20).map(lambda row: {"forced_correct": [1.0] * len(row["step_ends"])})
    with pytest.raises(ValueError, match="thinking gains nothing here"):
        automatic_penalties(TraceTable.from_dataset(rows))
    with pytest.raises(ValueError, match="stages is 0"):
        automatic_penalties(TraceTable.from_dataset(rows), 0)
