"""Lambda schedules: the paper's two lists, and one made for the labels at hand.

Annealing starts "moderately high" (paper, section on progressive training). Too high a first lambda
collapses the other way: where lambda times the tokens of thinking outweighs what thinking gains,
stopping at once is optimal, and the policy's stop probabilities saturate there.
"""

from __future__ import annotations

import math

import numpy as np

from ospruner.eval.table import TraceTable

__all__ = ["GPT_OSS_PENALTIES", "R1_PENALTIES", "SCHEDULES", "automatic_penalties"]

R1_PENALTIES = (1e-4, 5e-5, 2e-5, 1e-5, 5e-6, 2e-6, 1e-6, 0.0)
"""The paper's lambdas for DeepSeek-R1-Distill-Qwen-7B, in reward a thinking token."""
GPT_OSS_PENALTIES = (2e-4, 1e-4, 5e-5, 2e-5, 1e-5, 0.0)
"""The paper's lambdas for GPT-OSS-20B and DRPO-7B."""
SCHEDULES = {"r1": R1_PENALTIES, "gpt-oss": GPT_OSS_PENALTIES, "drpo": GPT_OSS_PENALTIES}

_MANTISSAS = (1.0, 2.0, 5.0)


def automatic_penalties(table: TraceTable, stages: int = 7) -> tuple[float, ...]:
    """A falling schedule for these labels, ending with 0.

    The first lambda is the highest of the series 1, 2, 5, 10... at which thinking to the best fixed
    step still earns at least half of its gain in accuracy:
    `lambda (E[L_k] - E[L_1]) <= (acc_k - acc_1) / 2` for the step k that maximises accuracy.

    Args:
        table: labelled traces to train on.
        stages: lambdas above 0, each the next lower of the series.

    Raises:
        ValueError: thinking gains nothing on these traces, so that no lambda is low enough.
    """
    if stages < 1:
        raise ValueError(f"stages is {stages}; it must be 1 or more")
    steps = table.correct.shape[1]
    at = np.minimum(np.arange(steps), table.last[:, None])  # (N, T), a short trace's end
    accuracy = np.take_along_axis(table.correct, at, axis=1).mean(0)  # (T,)
    tokens = np.take_along_axis(table.lengths, at, axis=1).mean(0)
    best = int(accuracy.argmax())
    gain, cost = float(accuracy[best] - accuracy[0]), float(tokens[best] - tokens[0])
    if gain <= 0:
        raise ValueError(
            "no fixed step is more accurate than the first one on these traces: thinking gains "
            "nothing here, so there is no lambda to start from. Check the labels "
            "(ospruner labels stats), or give length_penalties yourself"
        )
    highest = gain / (2 * cost)
    exponent = math.floor(math.log10(highest))
    series = [m * 10.0**e for e in range(exponent, exponent - stages, -1) for m in _MANTISSAS[::-1]]
    fitting = [float(f"{value:.0e}") for value in series if value <= highest]
    return (*fitting[:stages], 0.0)
