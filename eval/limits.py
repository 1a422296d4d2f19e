"""What stopping rules are measured against: hindsight, and fixed rules.

The hindsight oracle reads the grades and no rule can beat it; the best fixed budget and the best
fixed step read nothing but the length, and a learned rule should beat them. They are chosen on one
table and applied to another.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from .intervals import Chosen, Rule
from .replay import Outcome, replay_at, replay_budget, replay_full, replay_step
from .table import TraceTable


def hindsight_oracle(table: TraceTable, price: float = 0.0) -> Outcome:
    """Stops each trace where A_i - lambda L_i is largest, at the earliest of equals.

    With lambda = 0 (the limit from above) this is the highest accuracy that stopping can reach, at
    the fewest tokens that reach it: the first right step, or the first step where none is right.

    Raises:
        ValueError: the price is negative or not finite.
    """
    if not (math.isfinite(price) and price >= 0):
        raise ValueError(f"price is {price!r}; it must be a finite number >= 0")
    reward = np.where(table.mask, table.correct - price * table.lengths, -np.inf)
    return replay_at(table, reward.argmax(axis=1))


def hindsight_oracle_no_loss(table: TraceTable) -> Outcome:
    """The shortest stops that leave no trace less right than in full: first i with A_i >= A_T.

    Traces wrong at their end stop at their first step, so that accuracy is the full trace's or, by
    luck of that first answer, a little more: how much length could go at no loss, gaining nothing.
    """
    kept = table.mask & (table.correct >= table.full_correct[:, None])
    return replay_at(table, kept.argmax(axis=1))


def budget_candidates(table: TraceTable, count: int = 200) -> list[int]:
    """Budgets worth trying: quantiles of the lengths at step ends, the longest trace included.

    Raises:
        ValueError: count < 1.
    """
    if count < 1:
        raise ValueError(f"count is {count}; it must be at least 1")
    lengths = table.lengths[table.mask]
    quantiles = np.quantile(lengths, np.linspace(0, 1, count), method="higher")
    return [int(budget) for budget in np.unique(np.append(quantiles, lengths.max()))]


def best_fixed(unit: Literal["tokens", "step"], validation: TraceTable, test: TraceTable) -> Rule:
    """The token budget, or the step, with the highest AES on validation, applied to other traces.

    Its intervals contain the choice: each resample chooses again.

    Args:
        unit: of a budget "tokens", or "step" (1 is the first).
        validation: the traces that choose, of other problems.
        test: the traces that the rule is measured on.
    """
    replayed = replay_budget if unit == "tokens" else replay_step
    name = "best fixed budget" if unit == "tokens" else "best fixed step"
    values = [*range(1, int(validation.num_steps.max()) + 1)]
    if unit == "tokens":
        values = budget_candidates(validation)
    candidates = [
        Rule(name, replayed(test, v), float(v), unit, validation=(replayed(validation, v),))
        for v in values
    ]
    return Chosen(candidates, replay_full(validation), validation.problem_index).taken()
