"""A process with a known optimum: a trained policy approaches it, the best threshold does not.

    python docs/examples/markov_stopping.py markov.png

A trace walks through T steps. A state is (step, confidence, kind): the probability that an answer
given now is right rises with confidence; a "live" trace gains confidence step by step, a "stuck"
one keeps it. What is worth doing depends on where the trace is going, which correctness alone does
not say: at the same correctness a live trace should go on, a stuck one stop. The Bellman equation
gives the optimum exactly (`optimal_stopping.solve`). A policy with a logit for each state is
trained with the exact objective (Eq. 3) on sampled traces, lambda annealed from high to low as in
the paper's progressive training, and its value is computed exactly, too.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from optimal_stopping import StoppingProblem, best_threshold, policy_value, solve

from ospruner.eval.report.pictures import FRONTIER_COLOUR, INK, MUTED, STYLES, furnish
from ospruner.eval.table import FloatArray
from ospruner.train.objective import expected_reward

STEPS, LEVELS, TOKENS = 8, 5, 100  # steps, levels of confidence, tokens a step
STUCK, LIVE = 0, 1
RISE = {STUCK: 0.03, LIVE: 0.55}  # probability that confidence rises in a step
# Moderately high at first: where stopping at once is best, logits saturate and learn no more.
LAMBDAS = (8e-4, 6e-4, 5e-4, 4e-4, 3e-4, 2e-4)


def state(step: int, level: int, kind: int) -> int:
    """The number of a state."""
    return (step * LEVELS + level) * 2 + kind


def make_problem() -> StoppingProblem:
    """The process as a finite stopping problem."""
    count = STEPS * LEVELS * 2
    correct, lengths = np.zeros(count), np.zeros(count)
    moves, initial = np.zeros((count, count)), np.zeros(count)
    for step in range(STEPS):
        for level in range(LEVELS):
            for kind in (STUCK, LIVE):
                s = state(step, level, kind)
                correct[s] = 0.15 + 0.8 * level / (LEVELS - 1)
                lengths[s] = TOKENS * (step + 1)
                if step + 1 < STEPS:
                    higher = min(level + 1, LEVELS - 1)
                    moves[s, state(step + 1, higher, kind)] += RISE[kind]
                    moves[s, state(step + 1, level, kind)] += 1 - RISE[kind]
    for level, share in enumerate((0.4, 0.3, 0.2, 0.1)):
        initial[state(0, level, STUCK)] = initial[state(0, level, LIVE)] = share / 2
    return StoppingProblem(correct, lengths, moves, initial)


def sample_traces(problem: StoppingProblem, count: int, seed: int) -> torch.Tensor:
    """(count, STEPS) states of sampled traces."""
    rng = np.random.default_rng(seed)
    traces = np.zeros((count, STEPS), np.int64)
    traces[:, 0] = rng.choice(len(problem.initial), size=count, p=problem.initial)
    cumulative = problem.transitions.cumsum(axis=1)
    for step in range(1, STEPS):
        draws = rng.random((count, 1))
        traces[:, step] = (cumulative[traces[:, step - 1]] < draws).sum(axis=1)
    return torch.from_numpy(traces)


def train(problem: StoppingProblem, traces: int = 4000, epochs: int = 250) -> list[FloatArray]:
    """Stop probabilities by state (S,), one policy for each lambda of LAMBDAS, annealed."""
    states = sample_traces(problem, traces, seed=0)
    correct = torch.from_numpy(problem.correct).float()[states]
    lengths = torch.from_numpy(problem.lengths).float()[states]
    mask = torch.ones_like(states, dtype=torch.bool)
    logits = torch.zeros(len(problem.correct), requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.1)
    policies = []
    for price in LAMBDAS:
        for _ in range(epochs):
            loss = -expected_reward(logits[states], correct, lengths, price, mask).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        policies.append(torch.sigmoid(logits.detach()).double().numpy())
    return policies


def values(problem: StoppingProblem) -> dict[str, list[float]]:
    """The exact expected reward of each kind of rule at each lambda."""
    policies = train(problem)
    never = np.zeros(len(problem.correct))
    return {
        "Bellman optimum": [solve(problem, p)[0] for p in LAMBDAS],
        "trained policy": [
            policy_value(problem, pi, p) for pi, p in zip(policies, LAMBDAS, strict=True)
        ],
        "best threshold": [best_threshold(problem, p)[1] for p in LAMBDAS],
        "full trace": [policy_value(problem, never, p) for p in LAMBDAS],
    }


def main(path: Path) -> None:
    """Prints the values and draws them."""
    found = values(make_problem())
    print(f"{'λ':>18}", *(f"{p:>8g}" for p in LAMBDAS))
    for name, of_rule in found.items():
        print(f"{name:>18}", *(f"{value:>8.4f}" for value in of_rule))
    figure = Figure(figsize=(5.6, 4.0), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    looks = {
        "Bellman optimum": {"color": INK, "ls": "-", "lw": 3.5, "alpha": 0.25},
        "trained policy": {"color": FRONTIER_COLOUR, "marker": "o"},
        "best threshold": {"color": STYLES[0][0], "marker": STYLES[0][1]},
        "full trace": {"color": MUTED, "ls": (0, (4, 3))},
    }
    for name, of_rule in found.items():
        axes.plot(LAMBDAS, of_rule, label=name, **{"lw": 1.3, "ms": 5} | looks[name])
    axes.set_xscale("log")
    furnish(axes, "λ, reward lost per token", "expected reward")
    axes.legend(frameon=False, fontsize=8.5, labelcolor=INK)
    figure.savefig(path)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "markov.png"))
