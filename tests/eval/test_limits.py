"""Oracles, fixed rules and exact optima: by hand, and by trying every policy."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ospruner.eval.intervals import Resampled
from ospruner.eval.limits import (
    StoppingProblem,
    best_fixed,
    best_threshold,
    budget_candidates,
    hindsight_oracle,
    hindsight_oracle_no_loss,
    policy_value,
    solve,
    theorem1_problem,
)
from ospruner.eval.metrics import AES_ABSOLUTE
from ospruner.eval.replay import Outcome, replay, replay_at, replay_budget, replay_full, replay_step
from ospruner.eval.table import TraceTable


def make_table(seed: int, traces: int = 60, steps: int = 9) -> TraceTable:
    rng = np.random.default_rng(seed)
    num_steps = rng.integers(1, steps + 1, traces)
    mask = np.arange(steps) < num_steps[:, None]
    lengths = np.where(mask, rng.integers(1, 30, mask.shape).cumsum(axis=1), 0)
    return TraceTable(
        problem_ids=[f"p{i}" for i in range(traces)],
        problem_index=np.arange(traces),
        lengths=np.maximum.accumulate(lengths, axis=1),
        correct=((rng.random(mask.shape) < 0.5) & mask).astype(np.float64),
        matches_final=np.zeros_like(mask),
        answer_tokens=5 * mask,
        mask=mask,
        num_steps=num_steps,
        natural_correct=np.full(traces, np.nan),
        natural_answer_tokens=np.full(traces, 5),
        capped=np.zeros(traces, bool),
        families=[""] * traces,
        ungraded=np.zeros(traces, np.int64),
    )


@pytest.mark.parametrize("penalty", [1e-5, 0.1, 0.5, 0.999])
@pytest.mark.parametrize("gap", [0.1, 1.0, 1e6])
def test_theorem_1(penalty: float, gap: float) -> None:
    problem = theorem1_problem(penalty, gap)
    epsilon = problem.correct[0]
    optimum, stop = solve(problem, penalty)
    assert optimum == pytest.approx((1 - penalty + epsilon) / 2, rel=1e-12)
    assert stop.tolist() == [False, True, True, True]
    _, threshold_value = best_threshold(problem, penalty)
    assert threshold_value == pytest.approx(epsilon, rel=1e-12)
    assert optimum > gap * threshold_value


def random_problem(seed: int, states: int = 6) -> StoppingProblem:
    rng = np.random.default_rng(seed)
    transitions = np.triu(rng.random((states, states)), k=1)
    transitions[rng.random(states) < 0.3] = 0.0
    rows = transitions.sum(axis=1, keepdims=True)
    transitions = np.divide(transitions, rows, out=np.zeros_like(transitions), where=rows > 0)
    return StoppingProblem(
        correct=rng.random(states),
        lengths=rng.integers(0, 20, states).cumsum().astype(float),
        transitions=transitions,
        initial=rng.dirichlet(np.ones(states)),
    )


@pytest.mark.parametrize("seed", range(10))
def test_solution_is_the_best_of_all_deterministic_policies(seed: int) -> None:
    problem, penalty = random_problem(seed), 0.01
    values = [
        policy_value(problem, np.array(stops, float), penalty)
        for stops in itertools.product([0, 1], repeat=len(problem.correct))
    ]
    optimum, stop = solve(problem, penalty)
    assert optimum == pytest.approx(max(values), abs=1e-12)
    kept = policy_value(problem, stop.astype(np.float64), penalty)
    assert kept == pytest.approx(optimum, abs=1e-12)
    assert best_threshold(problem, penalty)[1] <= optimum + 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_policy_value_equals_simulation(seed: int) -> None:
    problem = random_problem(seed, states=4)
    pi = np.random.default_rng(seed).random(4)
    total = 0.0
    paths: list[tuple[tuple[int, ...], float]] = [
        ((s,), float(problem.initial[s])) for s in range(4)
    ]
    while paths:
        path, weight = paths.pop()
        s = path[-1]
        stop = 1.0 if problem.terminal[s] else pi[s]
        total += weight * stop * (problem.correct[s] - 0.02 * problem.lengths[s])
        for t in range(4):
            if weight * (1 - stop) * problem.transitions[s, t] > 0:
                paths.append(((*path, t), weight * (1 - stop) * problem.transitions[s, t]))
    assert policy_value(problem, pi, 0.02) == pytest.approx(total, abs=1e-12)


def test_linear_trace_as_problem_equals_replay() -> None:
    """One trace is a chain of states: the solver and replay must tell the same expectation."""
    table = make_table(seed=5, traces=1, steps=30)
    steps = int(table.num_steps[0])
    assert steps > 2
    problem = StoppingProblem(
        correct=table.correct[0, :steps],
        lengths=table.lengths[0, :steps].astype(float),
        transitions=np.eye(steps, k=1),
        initial=np.eye(steps)[0],
    )
    pi = np.random.default_rng(0).random(table.mask.shape)
    outcome = replay(table, pi)
    assert policy_value(problem, pi[0, :steps], 0.003) == pytest.approx(
        outcome.accuracy - 0.003 * outcome.mean_tokens, abs=1e-12
    )
    oracle = hindsight_oracle(table, 0.003)
    assert solve(problem, 0.003)[0] == pytest.approx(
        oracle.accuracy - 0.003 * oracle.mean_tokens, abs=1e-12
    )


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
    validation, test = make_table(seed=3, traces=200), make_table(seed=4)
    full = replay_full(validation)

    def score(outcome: Outcome) -> float:
        return float(
            AES_ABSOLUTE(outcome.accuracy, outcome.mean_tokens, full.accuracy, full.mean_tokens)
        )

    budget, step = best_fixed("tokens", validation, test), best_fixed("step", validation, test)
    assert (budget.parameter_name, step.parameter_name) == ("tokens", "step")
    for rule, replayed, values in (
        (budget, replay_budget, range(int(validation.lengths.max()) + 2)),
        (step, replay_step, range(1, 10)),
    ):
        assert rule.parameter is not None
        chosen = int(rule.parameter)
        assert score(replayed(validation, chosen)) == max(
            score(replayed(validation, value)) for value in values
        )
        assert rule.outcome.tokens.tolist() == replayed(test, chosen).tokens.tolist()


def test_best_fixed_rules_are_chosen_again_in_each_resample() -> None:
    validation, test = make_table(seed=3, traces=20), make_table(seed=4)
    chosen = best_fixed("step", validation, test)
    assert chosen.choice is not None
    assert len(set(chosen.choice.picks(200).tolist())) > 1
    held = replace(chosen, choice=None)
    frame = Resampled([chosen, held], replay_full(test), test.problem_index).frame()
    assert frame["tokens"][0] == frame["tokens"][1]
    wide, narrow = frame["tokens_high"] - frame["tokens_low"]
    assert wide > narrow


def test_budget_candidates_span_the_lengths() -> None:
    table = make_table(seed=1)
    candidates = budget_candidates(table, 20)
    assert candidates == sorted(set(candidates))
    assert candidates[0] == table.lengths[table.mask].min()
    assert candidates[-1] == table.full_tokens.max()


def test_errors() -> None:
    for penalty in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="price"):
            theorem1_problem(penalty, 2.0)
    with pytest.raises(ValueError, match="gap is 0"):
        theorem1_problem(0.5, 0)
    with pytest.raises(ValueError, match="price is -1"):
        hindsight_oracle(make_table(0), -1)
    good = random_problem(0)
    for message, changed in (
        ("transitions goes back", {"transitions": np.eye(6)}),
        ("initial sums to", {"initial": good.initial * 2}),
        ("correct holds 2", {"correct": good.correct * 0 + 2}),
        ("lengths has shape", {"lengths": good.lengths[1:]}),
        ("lengths holds a negative", {"lengths": -1 - good.lengths}),
    ):
        with pytest.raises(ValueError, match=message):
            replace(good, **changed)
    with pytest.raises(ValueError, match="stop_probability"):
        policy_value(good, np.full(6, 1.5), 0.1)
