"""The area under a frontier and the share of the oracle's gap, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from ospruner.eval.frontier.areas import (
    Family,
    area_differences,
    areas,
    best_rule,
    frontier_of,
    gap_closed,
)
from ospruner.eval.limits import hindsight_oracle
from ospruner.eval.replay import Outcome, replay_at, replay_full, replay_step
from ospruner.eval.table import TraceTable


def table_of(grades: list[list[float]]) -> TraceTable:
    """Traces whose steps take 10 tokens each."""
    columns: dict[str, list[Any]] = {
        "problem_id": [f"p{n}" for n in range(len(grades))],
        "family": [""] * len(grades),
        "step_ends": [[10 * (t + 1) for t in range(len(row))] for row in grades],
        "forced_correct": grades,
        "matches_final": [[value == row[-1] for value in row] for row in grades],
        "forced_answer_tokens": [[1] * len(row) for row in grades],
        "natural_correct": [row[-1] for row in grades],
        "natural_answer_tokens": [1] * len(grades),
        "ended": ["natural"] * len(grades),
    }
    return TraceTable.from_dataset(Dataset.from_dict(columns))


# Right from the second step on, or only at the fourth.
TABLE = table_of([[0.0, 1.0, 1.0, 1.0, 1.0]] * 6 + [[0.0, 0.0, 0.0, 1.0, 1.0]] * 4)
ORACLE = hindsight_oracle(TABLE)


def at(step: int) -> Outcome:
    return replay_step(TABLE, step)


def test_the_hull_leaves_out_what_a_mixture_beats() -> None:
    # tokens 10, 20, 30, 40, 50 with accuracy 0, .6, .6, 1, 1
    outcomes = [at(step) for step in (5, 3, 1, 4, 2)]
    assert [outcomes[k].mean_tokens for k in frontier_of(outcomes)] == [10, 20, 40, 50]
    assert frontier_of([at(2), at(2)]) == [0]


def test_areas_are_means_over_the_lengths_between_the_trivial_rules() -> None:
    nothing = Family("nothing", [], [])
    fixed = Family("fixed", [at(2), at(4)], [at(2), at(4)])
    best = Family("oracle", [ORACLE], [ORACLE])
    found = areas([best, fixed, nothing], TABLE, TABLE, replicates=200)
    # oracle: 28 tokens, accuracy 1; the line from (10, 0) to it, then flat to (50, 1)
    assert found[0] == pytest.approx([(18 * 0.5 + 22) / 40, (10 * 0.3 + 20 * 0.8 + 10) / 40, 0.5])
    differences = area_differences(found, ["oracle", "fixed", "nothing"])
    assert list(differences) == ["fixed", "nothing"]
    one = differences["fixed"]
    assert one.value == pytest.approx(found[0, 0] - found[0, 1])
    assert one.low <= one.value <= one.high
    assert one.low < one.high


def test_the_frontier_is_chosen_on_validation() -> None:
    # A rule that is good on test only is not on the frontier; one good on validation only hurts.
    bad = replay_at(TABLE, np.zeros(len(TABLE), dtype=int))
    worse = Outcome(**{**vars(ORACLE), "correct": bad.correct})
    lucky = Family("lucky", [worse], [ORACLE])
    fooled = Family("fooled", [ORACLE], [worse])
    nothing = Family("nothing", [], [])
    found = areas([lucky, fooled, nothing], TABLE, TABLE, replicates=1)[0]
    assert found[0] == pytest.approx(found[2])
    assert found[1] < found[2] - 0.1


def test_gap_closed() -> None:
    penalty = 0.005
    full, best = replay_full(TABLE), hindsight_oracle(TABLE, penalty)
    rules = [full, best, at(4)]
    assert gap_closed(Family("x", rules, rules), TABLE, TABLE, penalty).value == pytest.approx(1)
    only = Family("x", [full], [full])
    assert gap_closed(only, TABLE, TABLE, penalty).value == pytest.approx(0)
    # Step 4: reward 1 - .2, full 1 - .25, oracle 1 - .14
    fourth = gap_closed(Family("x", [at(4)], [at(4)]), TABLE, TABLE, penalty)
    assert fourth.value == pytest.approx(0.05 / 0.11)
    assert fourth.low <= fourth.value <= fourth.high


def test_a_method_may_always_do_nothing() -> None:
    """Rules that are worse than never stopping are not taken: no method is below 0 by its rules."""
    penalty = 0.001
    bad = replay_at(TABLE, np.ones(len(TABLE), dtype=int))  # at step 2: .6 - .02, never: 1 - .05
    family = Family("bad", [bad], [bad])
    assert best_rule(family, TABLE, penalty) == 0
    assert gap_closed(family, TABLE, TABLE, penalty).value == 0
    # Where tokens are dear, stopping at once is the best: 0 - .1 against .6 - .2 - ... at 0.05.
    assert best_rule(Family("x", [], []), TABLE, 0.05) == 1
    once = gap_closed(Family("x", [], []), TABLE, TABLE, 0.05)
    # R = -.5 at once, 1 - 2.5 in full; the oracle: at once for all, or step 2 where it is right
    # (1 - 1 = 0 for 6 of 10, and -.5 for the others).
    assert once.value == pytest.approx((-0.5 + 1.5) / (-0.2 + 1.5))
    good = Family("good", [bad, at(4)], [bad, at(4)])
    assert best_rule(good, TABLE, 0.005) == 2 + 1


def test_shuffled_test_labels_change_no_choice() -> None:
    rng = np.random.default_rng(0)
    grades = rng.integers(0, 2, (40, 6)).astype(float).tolist()
    validation, test = table_of(grades[:20]), table_of(grades[20:])
    shuffled = replace(test, correct=rng.permutation(test.correct))
    steps = range(1, 7)
    on_validation = [replay_step(validation, k) for k in steps]
    for penalty in (0.0, 0.001, 0.01):
        chosen = []
        for table in (test, shuffled):
            family = Family("steps", on_validation, [replay_step(table, k) for k in steps])
            chosen.append((best_rule(family, validation, penalty), frontier_of(on_validation)))
        assert chosen[0] == chosen[1]


def test_in_each_resample_the_choice_is_made_again() -> None:
    """On validation two rules differ by one problem, on test by all: the interval holds both."""
    table = table_of([[0.0, 1.0, 1.0, 1.0]] * 20)
    first = replay_step(table, 2)
    other = Outcome(**{**vars(first), "correct": first.correct.copy()})
    first.correct[0], other.correct[1] = 0, 0  # each is wrong on one problem
    other.correct[2] = 0  # and this one on one more
    right, wrong = (Outcome(**{**vars(first), "correct": np.full(20, x)}) for x in (1.0, 0.0))
    penalty = 0.02
    family = Family("close", [first, other], [right, wrong])
    assert best_rule(family, table, penalty) == 2
    closed = gap_closed(family, table, table, penalty, replicates=400)
    assert closed.value == pytest.approx(1)  # with the oracle, which stops there, too
    assert closed.low < 0  # where the draw of validation problems prefers the other
    found = areas([family], table, table, replicates=400)
    assert found[1:].max() == pytest.approx(found[0, 0])
    assert found[1:].min() < found[0, 0] - 0.1


def test_training_seeds_are_resampled() -> None:
    good = at(4)
    bad = Outcome(**{**vars(good), "correct": np.zeros(len(TABLE))})
    seeds = Family("seeds", [[good, good]], [[good, bad]])
    mean = Family("mean", [good], [Outcome(*((good.columns() + bad.columns()) / 2).T)])
    with_seeds, without = (
        gap_closed(family, TABLE, TABLE, 0.005, replicates=400) for family in (seeds, mean)
    )
    assert with_seeds.value == pytest.approx(without.value)
    # Both seeds are the good one in a quarter of the draws: as in `test_gap_closed`.
    assert with_seeds.high >= 0.05 / 0.11
    assert without.high < 0.05 / 0.11
