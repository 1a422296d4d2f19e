"""Exactly solved stopping problems, and the two pictures of them: what they claim holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from ospruner.eval.replay import hindsight_oracle, replay

from .evaluations import make_table

LoadScript = Callable[[str], ModuleType]


@pytest.fixture
def exact(load_script: LoadScript) -> Any:
    """The script docs/examples/optimal_stopping.py."""
    return load_script("docs/examples/optimal_stopping.py")


@pytest.mark.parametrize("penalty", [1e-5, 0.1, 0.5, 0.999])
@pytest.mark.parametrize("gap", [0.1, 1.0, 1e6])
def test_theorem_1(exact: Any, penalty: float, gap: float) -> None:
    problem = exact.theorem1_problem(penalty, gap)
    epsilon = problem.correct[0]
    optimum, stop = exact.solve(problem, penalty)
    assert optimum == pytest.approx((1 - penalty + epsilon) / 2, rel=1e-12)
    assert stop.tolist() == [False, True, True, True]
    _, threshold_value = exact.best_threshold(problem, penalty)
    assert threshold_value == pytest.approx(epsilon, rel=1e-12)
    assert optimum > gap * threshold_value


def random_problem(exact: Any, seed: int, states: int = 6) -> Any:
    rng = np.random.default_rng(seed)
    transitions = np.triu(rng.random((states, states)), k=1)
    transitions[rng.random(states) < 0.3] = 0.0
    rows = transitions.sum(axis=1, keepdims=True)
    transitions = np.divide(transitions, rows, out=np.zeros_like(transitions), where=rows > 0)
    return exact.StoppingProblem(
        correct=rng.random(states),
        lengths=rng.integers(0, 20, states).cumsum().astype(float),
        transitions=transitions,
        initial=rng.dirichlet(np.ones(states)),
    )


@pytest.mark.parametrize("seed", range(10))
def test_solution_is_the_best_of_all_deterministic_policies(exact: Any, seed: int) -> None:
    problem, penalty = random_problem(exact, seed), 0.01
    values = [
        exact.policy_value(problem, np.array(stops, float), penalty)
        for stops in itertools.product([0, 1], repeat=len(problem.correct))
    ]
    optimum, stop = exact.solve(problem, penalty)
    assert optimum == pytest.approx(max(values), abs=1e-12)
    kept = exact.policy_value(problem, stop.astype(np.float64), penalty)
    assert kept == pytest.approx(optimum, abs=1e-12)
    assert exact.best_threshold(problem, penalty)[1] <= optimum + 1e-12


def test_linear_trace_as_problem_equals_replay(exact: Any) -> None:
    """One trace is a chain of states: the solver and replay must tell the same expectation."""
    table = make_table(seed=5, traces=1, steps=30)
    steps = int(table.num_steps[0])
    assert steps > 2
    problem = exact.StoppingProblem(
        correct=table.correct[0, :steps],
        lengths=table.lengths[0, :steps].astype(float),
        transitions=np.eye(steps, k=1),
        initial=np.eye(steps)[0],
    )
    pi = np.random.default_rng(0).random(table.mask.shape)
    outcome = replay(table, pi)
    assert exact.policy_value(problem, pi[0, :steps], 0.003) == pytest.approx(
        outcome.accuracy - 0.003 * outcome.mean_tokens, abs=1e-12
    )
    oracle = hindsight_oracle(table, 0.003)
    assert exact.solve(problem, 0.003)[0] == pytest.approx(
        oracle.accuracy - 0.003 * oracle.mean_tokens, abs=1e-12
    )


def test_theorem_1_holds_for_every_k_and_is_drawn(load_script: LoadScript, tmp_path: Path) -> None:
    example = load_script("docs/examples/theorem1.py")
    for price in (0.01, 0.5, 0.99):
        for ratio, gap in zip(example.ratios(price), example.GAPS, strict=True):
            assert ratio > gap
    example.main(tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_a_trained_policy_approaches_the_optimum_and_no_threshold_does(
    load_script: LoadScript,
) -> None:
    example = load_script("docs/examples/markov_stopping.py")
    values = {name: np.array(v) for name, v in example.values(example.make_problem()).items()}
    best = values["Bellman optimum"]
    assert (values["trained policy"] <= best + 1e-9).all()
    assert (best - values["trained policy"] < 0.01).all()
    lost = best - values["best threshold"]
    assert lost.max() > 0.03
    assert (best - values["trained policy"] < lost).sum() >= len(best) - 1
