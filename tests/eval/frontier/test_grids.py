"""Grids of thresholds come from a method's own signal, and run from at once to never."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ospruner.eval.frontier.grids import COUNT, policy_grid, rule_grid, spread_values
from ospruner.eval.replay import replay, replay_full, replay_step
from ospruner.eval.rules.families import FAMILIES, parse_rule
from ospruner.eval.rules.replayed import measured, replay_rule

from ..rules.test_families import labelled
from .test_areas import table_of


def test_values_are_spread_by_rank_and_equals_count_once() -> None:
    assert spread_values([3.0, 1.0, math.nan, 2.0], 10) == [1.0, 2.0, 3.0]
    assert spread_values(np.arange(101), 5) == [0, 25, 50, 75, 100]
    # Of a thousand values nearly all of which are one, the rest is still resolved.
    assert len(spread_values(np.append(np.zeros(1000), np.arange(1, 60)), 60)) == 60
    assert spread_values([math.nan], 3) == []
    with pytest.raises(ValueError, match="count is 0"):
        spread_values([1.0], 0)


def test_a_policy_s_thresholds_are_its_own() -> None:
    rng = np.random.default_rng(0)
    table = table_of(rng.integers(0, 2, (50, 6)).astype(float).tolist())
    pi = 0.001 * rng.random(table.mask.shape)  # never near one half
    grid = policy_grid(table, pi)
    assert len(grid) == COUNT >= 60
    assert grid[0] == 1.0 > grid[1]
    assert grid[1] <= 0.001
    assert grid[-1] == 0.0
    tokens = [replay(table, pi, "threshold", threshold).mean_tokens for threshold in grid]
    assert tokens == sorted(tokens, reverse=True)
    assert tokens[0] == replay_full(table).mean_tokens
    assert tokens[-1] == replay_step(table, 1).mean_tokens
    assert len(set(tokens)) > 30
    # What stands at the forced last step is no choice, and gives no threshold.
    odd = pi.copy()
    odd[:, -1] = 0.9
    assert policy_grid(table, odd) == grid


# Two traces of four steps hold no texts, and are over before Dynasor has two answers.
ELSEWHERE = {"deer", "dynasor", "just-enough", "refrain", "puma"}


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ELSEWHERE])
def test_a_rule_s_numbers_run_from_never_to_at_once(name: str) -> None:
    dataset, table = labelled()
    grid = rule_grid(name, dataset, table)
    outcomes = [
        replay_rule(dataset, table, parse_rule(f"{name}:{value!r}").rule, 4) for value in grid
    ]
    tokens = [outcome.mean_tokens for outcome in outcomes]
    assert tokens == sorted(tokens)
    assert tokens[-1] == replay_full(table).mean_tokens
    assert tokens[0] < tokens[-1]
    if FAMILIES[name].whole:
        assert all(float(value).is_integer() for value in grid)


def test_what_a_rule_measures() -> None:
    dataset, table = labelled()
    entropy = measured(dataset, table, parse_rule("entropy:0").rule)
    np.testing.assert_array_equal(entropy, [[1.5, 0.3, 0.1, np.nan], [0.9, 0.5, np.nan, np.nan]])
    assert rule_grid("entropy", dataset, table)[1:-1] == (1.5, 0.9, 0.5, 0.3, 0.1)
    runs = measured(dataset, table, parse_rule("agreement:9").rule)
    np.testing.assert_array_equal(runs, [[1, 1, 2, np.nan], [0, 1, np.nan, np.nan]])
    with pytest.raises(ValueError, match="rule 'luck' is not known"):
        rule_grid("luck", dataset, table)
