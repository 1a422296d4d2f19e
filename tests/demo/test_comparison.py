"""The demo's choices, on labels made up for the purpose."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ospruner.demo.comparison import Comparison, Predictions, compare_methods
from ospruner.eval.table import TraceTable


def table_of(seed: int, traces: int = 60, steps: int = 6) -> TraceTable:
    rng = np.random.default_rng(seed)
    mask = np.ones((traces, steps), bool)
    return TraceTable(
        problem_ids=[f"{seed}-{n}" for n in range(traces)],
        problem_index=np.arange(traces),
        lengths=np.tile(10 * np.arange(1, steps + 1), (traces, 1)),
        correct=(rng.random(mask.shape) < 0.5).astype(np.float64),
        matches_final=np.zeros_like(mask),
        answer_tokens=np.ones(mask.shape, np.int64),
        mask=mask,
        num_steps=np.full(traces, steps),
        natural_correct=np.full(traces, np.nan),
        natural_answer_tokens=np.ones(traces, np.int64),
        capped=np.zeros(traces, bool),
        families=[""] * traces,
        ungraded=np.zeros(traces, np.int64),
    )


def choices(found: Comparison) -> list[str]:
    """Everything that was chosen: the policy, each rival's threshold, the budget."""
    return [found.chosen.name, *(f"{rival.name} {rival.parameter!r}" for rival in found.rivals)]


def test_shuffled_test_labels_change_no_choice() -> None:
    validation, test = table_of(0), table_of(1)
    rng = np.random.default_rng(2)

    def said() -> list[npt.NDArray[np.float32]]:
        return [rng.random(test.mask.shape, np.float32) for _ in range(2)]  # two seeds

    predictions = [
        Predictions("os-pruner", 1e-3, said(), said()),
        Predictions("os-pruner", 1e-4, said(), said()),
        Predictions("probe", 0.0, said(), said()),
        Predictions("convergence", 0.0, said(), said()),
    ]
    found = compare_methods(validation, test, predictions)
    for seed in range(3):
        mixed = np.random.default_rng(seed).permutation(test.correct.ravel())
        shuffled = replace(test, correct=mixed.reshape(test.correct.shape))
        other = compare_methods(validation, shuffled, predictions)
        assert choices(other) == choices(found)
        assert [r.accuracy for r in other.results] != [r.accuracy for r in found.results]
    # They do depend on the validation labels.
    wrong = replace(validation, correct=1 - validation.correct)
    assert choices(compare_methods(wrong, test, predictions)) != choices(found)
    thresholds = [rival.parameter for rival in found.rivals if "AES" in rival.method]
    assert len(thresholds) == 2
    assert all(value is not None and 0 <= value <= 1 for value in thresholds)
