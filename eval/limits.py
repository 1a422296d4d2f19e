"""What stopping rules are measured against: hindsight, and fixed rules.

The hindsight oracle reads the grades and no rule can beat it; the best fixed budget and the best
fixed step read nothing but the length, and a learned rule should beat them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from .intervals import Rule
from .methods import ORACLE
from .replay import Outcome, replay_at, replay_budget, replay_step
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


FIXED = {"fixed budget": "tokens", "fixed step": "step", "fixed drop": "at the end"}
"""Rules that read nothing but lengths, and what their parameters are."""


def replay_drop(table: TraceTable, paragraphs: int) -> Outcome:
    """Leaves out so many last steps of each trace, but for the first.

    Where a model writes its answer down at the end of its thinking, this is what a rule saves that
    has learnt nothing else. No rule knows beforehand where the end is.
    """
    return replay_at(table, np.maximum(table.last - paragraphs, 0))


def budget_candidates(table: TraceTable, count: int = 64) -> list[int]:
    """Budgets worth trying: quantiles of the lengths at step ends, the longest trace included."""
    lengths = table.lengths[table.mask]
    quantiles = np.quantile(lengths, np.linspace(0, 1, count), method="higher")
    return [int(budget) for budget in np.unique(np.append(quantiles, lengths.max()))]


def fixed_rules(validation: TraceTable, test: TraceTable) -> dict[str, list[Rule]]:
    """Of each kind in `FIXED` the rules to choose from, with their outcomes on both tables."""
    steps = range(1, int(validation.num_steps.max()) + 1)
    kinds: dict[str, tuple[Callable[[TraceTable, int], Outcome], Iterable[int]]] = {
        "fixed budget": (replay_budget, budget_candidates(validation)),
        "fixed step": (replay_step, steps),
        "fixed drop": (replay_drop, steps),
    }
    return {
        name: [
            Rule(name, does(test, v), float(v), FIXED[name], validation=(does(validation, v),))
            for v in values
        ]
        for name, (does, values) in kinds.items()
    }


def oracle_rules(validation: TraceTable, test: TraceTable) -> list[Rule]:
    """The hindsight oracle at prices from next to nothing to more than an answer is worth."""
    prices = np.append(0.0, np.geomspace(1e-3, 1e2, 31) / test.full_tokens.mean()).tolist()
    return [
        Rule(
            ORACLE,
            hindsight_oracle(test, price),
            price,
            "price",
            validation=(hindsight_oracle(validation, price),),
        )
        for price in prices
    ]
