"""Oracles and fixed rules: by hand, and against other rules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ospruner.eval.compare import FIXED, fixed_rules
from ospruner.eval.evaluation import chosen, validation_scores
from ospruner.eval.metrics import AES_ABSOLUTE
from ospruner.eval.replay import (
    Outcome,
    budget_candidates,
    hindsight_oracle,
    hindsight_oracle_no_loss,
    replay,
    replay_at,
    replay_budget,
    replay_drop,
    replay_full,
    replay_step,
)

from .evaluations import make_table


@given(st.integers(0, 10**6), st.sampled_from([0.0, 1e-3, 1e-2, 0.1]))
@settings(deadline=None, max_examples=40)
def test_no_rule_beats_the_oracle(seed: int, penalty: float) -> None:
    table = make_table(seed)
    oracle = hindsight_oracle(table, penalty)
    best = oracle.correct - penalty * oracle.tokens
    rng = np.random.default_rng(seed)
    for outcome in (
        replay_full(table),
        replay(table, rng.random(table.mask.shape)),
        replay_at(table, rng.integers(0, 9, len(table))),
        hindsight_oracle_no_loss(table),
    ):
        assert (outcome.correct - penalty * outcome.tokens <= best + 1e-12).all()


def test_oracles_by_hand() -> None:
    steps = np.ones((3, 3), bool)
    table = replace(
        make_table(seed=0, traces=3, steps=3),
        mask=steps,
        num_steps=np.array([3, 3, 3]),
        lengths=np.array([[10, 20, 30]] * 3),
        correct=np.array([[0, 1, 1], [0, 1, 0], [0, 0, 0]], np.float64),
        answer_tokens=5 * steps,
    )
    oracle = hindsight_oracle(table)
    assert oracle.tokens.tolist() == [20, 20, 10]
    assert oracle.correct.tolist() == [1, 1, 0]
    assert oracle.helped.tolist() == [0, 1, 0]
    assert hindsight_oracle(table, 0.2).tokens.tolist() == [10, 10, 10]
    no_loss = hindsight_oracle_no_loss(table)
    assert no_loss.tokens.tolist() == [20, 10, 10]
    assert no_loss.accuracy == replay_full(table).accuracy


def test_best_fixed_rules_are_the_best_of_their_kind_on_validation() -> None:
    validation, test = make_table(seed=3, traces=40), make_table(seed=4)
    full = replay_full(validation)

    def score(outcome: Outcome) -> float:
        return float(
            AES_ABSOLUTE(outcome.accuracy, outcome.mean_tokens, full.accuracy, full.mean_tokens)
        )

    found = fixed_rules(validation, test)
    assert {name: of[0].parameter_name for name, of in found.items()} == FIXED
    for name, replayed, values in (
        ("fixed budget", replay_budget, range(int(validation.lengths.max()) + 2)),
        ("fixed step", replay_step, range(1, 10)),
        ("fixed drop", replay_drop, range(1, 10)),
    ):
        rule, _ = chosen(
            found[name], validation_scores(found[name], full, validation.problem_index)
        )
        assert rule.parameter is not None
        value = int(rule.parameter)
        assert score(replayed(validation, value)) == max(
            score(replayed(validation, one)) for one in values
        )
        assert rule.outcome.tokens.tolist() == replayed(test, value).tokens.tolist()
        assert rule.picks is not None
        assert len(set(rule.picks[:201].tolist())) > 1  # a resample chooses again


def test_budget_candidates_span_the_lengths() -> None:
    table = make_table(seed=1)
    candidates = budget_candidates(table, 20)
    assert candidates == sorted(set(candidates))
    assert candidates[0] == table.lengths[table.mask].min()
    assert candidates[-1] == table.full_tokens.max()
