"""Prices of a token to train for: the paper's lists, and what follows from the labels.

Annealing starts "moderately high" (paper, section on progressive training). Too high a first price
collapses the other way: where the price times the tokens of thinking outweighs what thinking gains,
stopping at once is optimal, and the policy's stop probabilities saturate there.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np

from ospruner.eval.table import TraceTable

R1_PRICES = (1e-4, 5e-5, 2e-5, 1e-5, 5e-6, 2e-6, 1e-6, 0.0)
"""The paper's prices for DeepSeek-R1-Distill-Qwen-7B, in reward a thinking token."""
GPT_OSS_PRICES = (2e-4, 1e-4, 5e-5, 2e-5, 1e-5, 0.0)
"""The paper's prices for GPT-OSS-20B and DRPO-7B."""
SCHEDULES = {"r1": R1_PRICES, "gpt-oss": GPT_OSS_PRICES, "drpo": GPT_OSS_PRICES}

_ROUND = [float(f"{m}e{e}") for e in range(-40, 40) for m in (1, 2, 5)]
_RANGE_RATIO = 200
_ANNEALED = 7  # prices above 0 of an automatic schedule


def chosen_prices(
    given: str | Sequence[float], every_price: bool, table: TraceTable
) -> tuple[float, ...]:
    """The prices that `StopConfig.prices` names.

    Args:
        given: "auto", a name of `SCHEDULES`, numbers with commas between them, or numbers.
        every_price: whether they are the two ends of a range, or a falling schedule.
        table: labelled traces to train on, for "auto".

    Raises:
        ValueError: they are no range, no falling schedule, or thinking gains nothing on the traces.
    """
    what = (
        "'auto', or the lowest and the highest price above 0, such as 5e-5,1e-2 (head 'price')"
        if every_price
        else f"'auto', one of {sorted(SCHEDULES)}, or prices >= 0 that fall strictly, such as "
        "1e-4,5e-5,0 (head 'fixed': training anneals from a high price to low ones, as a low one "
        "from scratch collapses to 'never stop')"
    )
    if isinstance(given, str):
        text = given.strip()
        if text == "auto":
            return automatic_range(table) if every_price else automatic_schedule(table)
        if text in SCHEDULES and not every_price:
            return SCHEDULES[text]
    try:
        numbers = given.split(",") if isinstance(given, str) else given
        prices = tuple(float(number) for number in numbers)
    except ValueError:
        raise ValueError(f"prices is {given!r}; it must be {what}") from None
    falling = all(before > price for before, price in itertools.pairwise((math.inf, *prices)))
    is_range = len(prices) == 2 and 0 < prices[0] < prices[1] < math.inf
    if not (is_range if every_price else prices and falling and prices[-1] >= 0):
        raise ValueError(f"prices is {list(prices)}; it must be {what}")
    return prices


def automatic_schedule(table: TraceTable) -> tuple[float, ...]:
    """A falling schedule for these labels, ending with 0.

    The first price is the highest of the series 1, 2, 5, 10... at which thinking to the best fixed
    step still earns at least half of its gain in accuracy:
    `price (E[L_k] - E[L_1]) <= (acc_k - acc_1) / 2` for the step k that maximises accuracy.
    """
    highest = _worth_of_thinking(table) / 2
    fitting = [price for price in _ROUND if price <= highest]
    return (*fitting[-_ANNEALED:][::-1], 0.0)


def automatic_range(table: TraceTable) -> tuple[float, float]:
    """Lowest and highest price to train one policy for, on these labels.

    The high end is the next of the series 1, 2, 5, 10... above twice the worth of thinking,
    `(acc_k - acc_1) / (E[L_k] - E[L_1])` with the step k that maximises accuracy: from that worth
    on, no fixed step but the first pays. The low end is a two-hundredth of it, where all thinking
    together costs a few hundredths of what it gains, so that next to everything that helps pays.
    """
    worth = 2 * _worth_of_thinking(table)
    high = next(price for price in _ROUND if price >= worth)
    return float(f"{high / _RANGE_RATIO:.1e}"), high


def _worth_of_thinking(table: TraceTable) -> float:
    """What a token gains in accuracy, from the first step to the best fixed one.

    Raises:
        ValueError: nothing.
    """
    at = np.minimum(np.arange(table.correct.shape[1]), table.last[:, None])  # (N, T), a trace's end
    accuracy = np.take_along_axis(table.correct, at, axis=1).mean(0)  # (T,)
    tokens = np.take_along_axis(table.lengths, at, axis=1).mean(0)
    best = int(accuracy.argmax())
    gain, cost = float(accuracy[best] - accuracy[0]), float(tokens[best] - tokens[0])
    if gain <= 0:
        raise ValueError(
            "no fixed step is more accurate than the first one on these traces: thinking gains "
            "nothing here, so there is no price to start from. Check the labels, or give prices "
            "yourself"
        )
    return gain / cost


def prices_of_batch(
    ends: tuple[float, float], count: int, seed: int, step: int
) -> tuple[float, ...]:
    """The prices that a run's step (from 0) is taken on, a function of the arguments alone.

    0, and one of each of `count` - 1 even parts of the logarithmic range, drawn from its part.
    """
    low, high = ends
    parts = count - 1
    shares = (np.arange(parts) + np.random.default_rng([seed, step]).random(parts)) / parts
    return (0.0, *(float(low * (high / low) ** share) for share in shares))
