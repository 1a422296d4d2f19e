"""Some traces step by step, for the report's viewer: text, grades, and where each method stops."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from modeling_ospruner.configuration_ospruner import PRICE_RAMPS, PriceRange

from ..intervals import Rule
from ..table import TraceTable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["PricesShown", "median_stop", "trace_view", "trace_views"]


@dataclass(frozen=True)
class PricesShown:
    """What a policy of every price is willing to pay along the traces.

    Attributes:
        indifference: (N, T) prices of indifference; inf above all that it knows.
        chosen: the price of a token at which it stopped.
        known: the prices that it knows.
    """

    indifference: npt.NDArray[np.float64]
    chosen: float
    known: PriceRange

    def view(self, n: int, steps: int) -> dict[str, Any]:
        """Of one trace: prices (None for inf), and their places and the chosen one's, in [0, 1]."""
        prices = self.indifference[n, :steps].tolist()
        finite = [price if price < math.inf else None for price in prices]
        return {
            "price": self.chosen,
            "place": round(self.known.place(self.chosen) / PRICE_RAMPS, 4),
            "prices": [None if price is None else float(f"{price:.2e}") for price in finite],
            "places": [
                1.0 if price is None else round(self.known.place(price) / PRICE_RAMPS, 4)
                for price in finite
            ],
        }


def trace_views(
    traces: Any,
    table: TraceTable,
    rules: Sequence[Rule],
    probabilities: Mapping[int, npt.NDArray[np.float32]],
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    prices: Mapping[int, PricesShown] | None = None,
) -> list[dict[str, Any]]:
    """JSON-ready views of some labelled traces, evenly spread over the table.

    Args:
        traces: the labelled traces, a `datasets.Dataset`.
        table: the same as arrays.
        rules: rules on the table; the first is the full trace.
        probabilities: number of a rule -> the stop probabilities (N, T) it decided by.
        tokenizer: the base's.
        count: how many traces, at most.
        prices: number of a rule -> what it is willing to pay, of policies of every price.
    """
    shown = prices or {}
    chosen = np.unique(np.linspace(0, len(table) - 1, min(count, len(table))).astype(int))
    views = []
    for n in chosen.tolist() if count else []:
        row, steps = traces[n], int(table.num_steps[n])
        methods = []
        for number, rule in enumerate(rules):
            pi = probabilities[number][n, :steps] if number in probabilities else None
            methods.append(
                {
                    "name": rule.name,
                    "group": rule.method,
                    "setting": rule.name.removeprefix(rule.method).strip(),
                    "stop": _stop(rule, pi, table, n),
                    "tokens": float(rule.outcome.tokens[n]),
                    "correct": float(rule.outcome.correct[n]),
                    "pi": None if pi is None else [round(float(p), 4) for p in pi],
                    **(shown[number].view(n, steps) if number in shown else {}),
                }
            )
        views.append(trace_view(row, methods, tokenizer))
    return views


def trace_view(
    row: Mapping[str, Any],
    methods: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """One labelled trace with what methods do on it.

    Args:
        row: the trace, columns as in `schema.FEATURES`.
        methods: for each, "name", its "group" and its "setting" there, "stop" (step index),
            "tokens", "correct", "pi" (or None); and what `PricesShown.view` gives.
        tokenizer: the base's.
    """
    starts = [0, *row["step_ends"][:-1]]
    return {
        "id": f"{row['problem_id']}/{row['sample_index']}",
        "problem": row["problem"],
        "reference": row["answer"],
        "family": row["family"],
        "ended": row["ended"],
        "steps": [
            {
                "text": str(tokenizer.decode(row["trace_ids"][start:end])).strip("\n"),
                "tokens": end,
                "answer": answer,
                "correct": grade,
            }
            for start, end, answer, grade in zip(
                starts,
                row["step_ends"],
                row["forced_answers"],
                row["forced_correct"],
                strict=True,
            )
        ],
        "methods": list(methods),
    }


def median_stop(pi: npt.NDArray[Any]) -> int:
    """The step by whose end a policy has stopped with probability 1/2; the last step stops all."""
    going_on = np.cumprod(1.0 - np.nan_to_num(pi[:-1].astype(np.float64)))
    return int((going_on > 0.5).sum())


def _stop(rule: Rule, pi: npt.NDArray[np.float32] | None, table: TraceTable, n: int) -> int:
    """Where a rule stops: its one step, or the median one of a stochastic rule."""
    lengths = table.lengths[n, : table.num_steps[n]]
    exact = np.flatnonzero(lengths == rule.outcome.tokens[n])
    if exact.size or pi is None:
        return int(exact[0])
    return median_stop(pi)
