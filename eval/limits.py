"""What stopping rules are measured against: hindsight, fixed rules, and exact optima.

The hindsight oracle reads the grades and no rule can beat it; the best fixed budget and the best
fixed step read nothing but the length, and a learned rule should beat them. They are chosen on one
table and applied to another. A `StoppingProblem` has known transitions, and is solved exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .intervals import Chosen, Rule
from .replay import Outcome, replay_at, replay_budget, replay_full, replay_step
from .table import BoolArray, FloatArray, TraceTable

__all__ = [
    "StoppingProblem",
    "best_fixed",
    "best_threshold",
    "budget_candidates",
    "hindsight_oracle",
    "hindsight_oracle_no_loss",
    "policy_value",
    "solve",
    "theorem1_problem",
]


def hindsight_oracle(table: TraceTable, price: float = 0.0) -> Outcome:
    """Stops each trace where A_i - lambda L_i is largest, at the earliest of equals.

    With lambda = 0 (the limit from above) this is the highest accuracy that stopping can reach, at
    the fewest tokens that reach it: the first right step, or the first step where none is right.

    Raises:
        ValueError: the price is negative or not finite.
    """
    _check_penalty(price)
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

    def __post_init__(self) -> None:
        states = len(self.correct)
        for name, array in vars(self).items():
            shape = (states, states) if name == "transitions" else (states,)
            if array.shape != shape:
                raise ValueError(f"{name} has shape {array.shape}; {states} states need {shape}")
            if not np.isfinite(array).all() or (array < 0).any():
                raise ValueError(f"{name} holds a negative or non-finite value")
        if (self.correct > 1).any():
            raise ValueError(f"correct holds {self.correct.max()}; probabilities lie in [0, 1]")
        if np.tril(self.transitions).any():
            raise ValueError("transitions goes back or stays; order the states so that s' > s")
        rows = self.transitions.sum(axis=1)
        if not (np.isclose(rows, 1.0) | (rows == 0.0)).all():
            raise ValueError(f"transitions has rows that sum to {rows}; they must sum to 1 or 0")
        if not math.isclose(self.initial.sum(), 1.0):
            raise ValueError(f"initial sums to {self.initial.sum()}; it must sum to 1")

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

    Raises:
        ValueError: the price is negative or not finite.
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
        price: of a token, >= 0.

    Raises:
        ValueError: a wrong shape, a probability outside [0, 1], or a bad price.
    """
    pi, values = np.asarray(stop_probability, np.float64), _rewards(problem, price)
    if pi.shape != values.shape or not ((pi >= 0) & (pi <= 1)).all():
        raise ValueError(
            f"stop_probability has shape {pi.shape}; it must hold {len(values)} probabilities in "
            "[0, 1]"
        )
    for state in np.flatnonzero(~problem.terminal)[::-1]:
        onward = problem.transitions[state] @ values
        values[state] += (1.0 - pi[state]) * (onward - values[state])
    return float(problem.initial @ values)


def best_threshold(problem: StoppingProblem, price: float) -> tuple[float, float]:
    """The best rule "stop where A_s >= gamma", with A_s known exactly.

    The rule changes only at the values that A takes, so trying these and "never" is the supremum.

    Returns:
        gamma (inf for never), and the rule's expected reward.

    Raises:
        ValueError: the price is negative or not finite.
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
        price: of a token, in (0, 1).
        gap: K > 0.

    Returns:
        States s_g, s_b, t_g, t_b.

    Raises:
        ValueError: the price outside (0, 1), or K not positive and finite.
    """
    if not 0.0 < price < 1.0:
        raise ValueError(f"price is {price!r}; the theorem takes (0, 1)")
    if not (math.isfinite(gap) and gap > 0):
        raise ValueError(f"gap is {gap!r}; it must be positive and finite")
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
    _check_penalty(price)
    return problem.correct - price * problem.lengths


def _check_penalty(price: float) -> None:
    if not (math.isfinite(price) and price >= 0):
        raise ValueError(f"price is {price!r}; it must be a finite number >= 0")
