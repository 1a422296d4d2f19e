"""Finite stopping problems with known transitions, solved exactly; Theorem 1's is one of them.

`theorem1.py` and `markov_stopping.py` beside it draw what it says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ospruner.eval.table import BoolArray, FloatArray


@dataclass(frozen=True, eq=False)
class StoppingProblem:
    """A finite stopping problem with known transitions, its S states in an order of time.

    In state s one stops and earns A_s - lambda L_s, or moves on to s' > s with probability
    P[s, s']. A state without successors is terminal: stopping there is forced.

    Attributes:
        correct: (S,) A_s, the probability that an answer given here is right.
        lengths: (S,) L_s, tokens spent on reaching the state.
        transitions: (S, S) P, strictly upper triangular; rows sum to one, or zero where terminal.
        initial: (S,) distribution of the first state.
    """

    correct: FloatArray
    lengths: FloatArray
    transitions: FloatArray
    initial: FloatArray

    @property
    def terminal(self) -> BoolArray:
        """(S,) states without successors."""
        return np.logical_not(self.transitions.any(axis=1))


def solve(problem: StoppingProblem, price: float) -> tuple[float, BoolArray]:
    """Solves the Bellman equation backwards, V_s = max(A_s - lambda L_s, sum_s' P[s, s'] V_s').

    The paper's section 3 writes values to go, without the cost of the tokens already spent; here
    that cost, which is the same on both sides of the maximum, is kept.

    Returns:
        The expected reward of the optimal policy, and (S,) where it stops (on equality, as in the
        paper).
    """
    reward = _rewards(problem, price)
    values, stop = reward.copy(), problem.terminal
    for state in np.flatnonzero(~problem.terminal)[::-1]:
        onward = problem.transitions[state] @ values
        stop[state] = reward[state] >= onward
        values[state] = max(reward[state], onward)
    return float(problem.initial @ values), stop


def policy_value(problem: StoppingProblem, stop_probability: FloatArray, price: float) -> float:
    """Expected reward of a policy that stops in state s with probability `stop_probability[s]`.

    Args:
        problem: the stopping problem.
        stop_probability: (S,) in [0, 1]; terminal states stop whatever it says.
        price: lambda >= 0.
    """
    pi, values = np.asarray(stop_probability, np.float64), _rewards(problem, price)
    for state in np.flatnonzero(~problem.terminal)[::-1]:
        onward = problem.transitions[state] @ values
        values[state] += (1.0 - pi[state]) * (onward - values[state])
    return float(problem.initial @ values)


def best_threshold(problem: StoppingProblem, price: float) -> tuple[float, float]:
    """The best rule "stop where A_s >= gamma", with A_s known exactly.

    The rule changes only at the values that A takes, so trying these and "never" is the supremum.

    Returns:
        gamma (inf for never), and the rule's expected reward.
    """
    gammas = [*np.unique(problem.correct).tolist(), math.inf]
    values = [
        policy_value(problem, (problem.correct >= gamma).astype(np.float64), price)
        for gamma in gammas
    ]
    best = int(np.argmax(values))
    return gammas[best], values[best]


def theorem1_problem(price: float, gap: float) -> StoppingProblem:
    """The problem of the paper's Theorem 1: the optimum exceeds `gap` times any threshold's value.

    Two first states look alike, A = epsilon, each with probability 1/2. Going on from the good one
    costs one token and gives a right answer; from the bad one it costs M tokens and gives a wrong
    one. Optimal: (1 - lambda + epsilon) / 2; the best threshold: epsilon. The proof (appendix A)
    takes 0 < epsilon < (1 - lambda) / (2 gap), and uses epsilon < 1 - lambda, which for gap < 1/2
    does not follow from it: both are asked for here.

    Args:
        price: lambda, in (0, 1).
        gap: K > 0.

    Returns:
        States s_g, s_b, t_g, t_b.
    """
    epsilon = (1.0 - price) / (4.0 * max(gap, 0.5))
    detour_tokens = max(1, math.ceil((1.0 - price - 2.0 * epsilon) / price))
    transitions = np.zeros((4, 4))
    transitions[0, 2] = transitions[1, 3] = 1.0
    return StoppingProblem(
        correct=np.array([epsilon, epsilon, 1.0, 0.0]),
        lengths=np.array([0.0, 0.0, 1.0, float(detour_tokens)]),
        transitions=transitions,
        initial=np.array([0.5, 0.5, 0.0, 0.0]),
    )


def _rewards(problem: StoppingProblem, price: float) -> FloatArray:
    """(S,) A_s - lambda L_s."""
    return problem.correct - price * problem.lengths
