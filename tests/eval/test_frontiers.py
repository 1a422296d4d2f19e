"""The area under a frontier and the share of the oracle's gap, by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from ospruner.eval.compare import worth_asking
from ospruner.eval.evaluation import Rule
from ospruner.eval.frontiers import frontiers, hull
from ospruner.eval.replay import (
    Outcome,
    hindsight_oracle,
    pool,
    replay_at,
    replay_full,
    replay_step,
)
from ospruner.eval.results import Estimate
from ospruner.eval.table import TraceTable

from .evaluations import tabled


def table_of(grades: list[list[float]]) -> TraceTable:
    """Traces whose steps take 10 tokens each."""
    correct = np.array(grades)
    lengths = np.broadcast_to(10 * np.arange(1, correct.shape[1] + 1), correct.shape)
    return tabled(np.ones(correct.shape, bool), correct=correct, lengths=lengths)


# Right from the second step on, or only at the fourth.
TABLE = table_of([[0.0, 1.0, 1.0, 1.0, 1.0]] * 6 + [[0.0, 0.0, 0.0, 1.0, 1.0]] * 4)
ORACLE = hindsight_oracle(TABLE)


def at(step: int) -> Outcome:
    return replay_step(TABLE, step)


def method(
    test: Sequence[Outcome | Sequence[Outcome]],
    validation: Sequence[Outcome | Sequence[Outcome]] | None = None,
) -> list[Rule]:
    """A method's rules with their outcomes on both, the same where only one is given."""
    both = [
        [(one,) if isinstance(one, Outcome) else tuple(one) for one in outcomes]
        for outcomes in (test, test if validation is None else validation)
    ]
    return [
        Rule("m", pool(seeds), float(k), "price", seeds if len(seeds) > 1 else (), chosen_on)
        for k, (seeds, chosen_on) in enumerate(zip(*both, strict=True))
    ]


def gap_closed(
    rules: list[Rule], price: float, table: TraceTable = TABLE, replicates: int = 200
) -> Estimate:
    frame, _ = frontiers({"m": rules}, table, table, [price], replicates)
    return Estimate(*frame.filter(like="gap@").iloc[0])


def test_the_hull_leaves_out_what_a_mixture_beats() -> None:
    # tokens 10, 20, 30, 40, 50 with accuracy 0, .6, .6, 1, 1
    points = np.array([(o.mean_tokens, o.accuracy) for o in map(at, (5, 3, 1, 4, 2))])
    assert points[hull(points), 0].tolist() == [10, 20, 40, 50]
    assert hull(points[[4, 4]]) == [0]


def test_areas_are_means_over_the_lengths_between_the_trivial_rules() -> None:
    methods = {"oracle": method([ORACLE]), "fixed": method([at(2), at(4)]), "nothing": []}
    found, chosen = frontiers(methods, TABLE, TABLE, replicates=200)
    # oracle: 28 tokens, accuracy 1; the line from (10, 0) to it, then flat to (50, 1)
    areas = [(18 * 0.5 + 22) / 40, (10 * 0.3 + 20 * 0.8 + 10) / 40, 0.5]
    assert found["area"].tolist() == pytest.approx(areas)
    assert found["method"].tolist() == list(methods)
    assert chosen == {"oracle": [0], "fixed": [0, 1], "nothing": []}
    assert found["lead"].isna().tolist() == [True, False, False]
    fixed = Estimate.of(found.loc[1], "lead")
    assert fixed.value == pytest.approx(areas[0] - areas[1])
    assert fixed.low <= fixed.value <= fixed.high
    assert fixed.low < fixed.high


def test_gap_closed() -> None:
    price = 0.005
    full, best = replay_full(TABLE), hindsight_oracle(TABLE, price)
    assert gap_closed(method([full, best, at(4)]), price).value == pytest.approx(1)
    assert gap_closed(method([full]), price).value == pytest.approx(0)
    # Step 4: reward 1 - .2, full 1 - .25, oracle 1 - .14
    fourth = gap_closed(method([at(4)]), price)
    assert fourth.value == pytest.approx(0.05 / 0.11)
    assert fourth.low <= fourth.value <= fourth.high
    # Rules that are worse than never stopping are not taken: no method is below 0 by its rules.
    bad = replay_at(TABLE, np.ones(len(TABLE), dtype=int))  # at step 2: .6 - .02, never: 1 - .05
    assert gap_closed(method([bad]), 0.001).value == 0
    # Where tokens are dear, stopping at once is the best: R = -.5 at once, 1 - 2.5 in full; the
    # oracle: at once, or step 2 where it is right (1 - 1 = 0 for 6 of 10, and -.5 for the others).
    assert gap_closed([], 0.05).value == pytest.approx((-0.5 + 1.5) / (-0.2 + 1.5))


def test_prices_suit_the_lengths() -> None:
    assert worth_asking(TABLE) == (2e-3, 8e-4, 4e-4)  # of 50 tokens
