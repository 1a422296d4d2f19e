"""Exactly solved stopping problems, and the two pictures of them: what they claim holds."""

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
    return load_script("docs/examples/optimal_stopping.py")


@pytest.mark.parametrize("penalty", [1e-5, 0.1, 0.5, 0.999])
@pytest.mark.parametrize("gap", [0.1, 1.0, 1e6])
def test_theorem_1(exact: Any, penalty: float, gap: float) -> None:
    problem = exact.theorem1_problem(penalty, gap)
    epsilon = problem.correct[0]
    optimum, stop = exact.solve(problem, penalty)
    assert optimum == pytest.approx((1 - penalty + epsilon) / 2, rel=1e-12)
    assert stop.tolist() == [False, True, True, True]
    _, found = exact.best_threshold(problem, penalty)
    assert found == pytest.approx(epsilon, rel=1e-12)
    assert optimum > gap * found


def test_linear_trace_as_problem_equals_replay(exact: Any) -> None:
    """One trace is a chain of states: the solver and replay must tell the same expectation."""
    table = make_table(seed=5, traces=1, steps=30)
    steps = int(table.num_steps[0])
    assert steps > 2
    correct, lengths = table.correct[0, :steps], table.lengths[0, :steps].astype(float)
    problem = exact.StoppingProblem(correct, lengths, np.eye(steps, k=1), np.eye(steps)[0])
    pi = np.random.default_rng(0).random(table.mask.shape)
    found = exact.policy_value(problem, pi[0, :steps], 0.003), exact.solve(problem, 0.003)[0]
    for value, one in zip(found, (replay(table, pi), hindsight_oracle(table, 0.003)), strict=True):
        assert value == pytest.approx(one.accuracy - 0.003 * one.mean_tokens, abs=1e-12)


def test_theorem_1_is_drawn(load_script: LoadScript, tmp_path: Path) -> None:
    load_script("docs/examples/theorem1.py").main(file := tmp_path / "t.png")
    assert file.read_bytes().startswith(b"\x89PNG")


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
