"""Some traces step by step, for the report's viewer: text, grades, and where each method stops."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from modeling_ospruner.configuration_ospruner import PRICE_RAMPS, PriceRange
from ospruner.durable import replace_file

from ..intervals import Rule
from ..table import TraceTable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["PricesShown", "median_stop", "read_views", "save_views", "trace_views"]

TRACES_FILE = "traces.json"
"""Beside a comparison's results: what `trace_views` gave."""


def save_views(views: Sequence[dict[str, Any]], folder: Path) -> None:
    """Keeps views in a comparison's folder."""
    text = json.dumps(list(views), ensure_ascii=False, allow_nan=False, indent=1)
    replace_file(folder / TRACES_FILE, (text + "\n").encode())


def read_views(folder: Path) -> list[dict[str, Any]]:
    """What `save_views` kept; nothing where it kept nothing."""
    path = folder / TRACES_FILE
    found: list[dict[str, Any]] = json.loads(path.read_text("utf-8")) if path.is_file() else []
    return found


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
        return {
            "price": self.chosen,
            "place": self._place(self.chosen),
            "prices": [float(f"{price:.2e}") if price < math.inf else None for price in prices],
            "places": [self._place(price) if price < math.inf else 1.0 for price in prices],
        }

    def _place(self, price: float) -> float:
        return round(self.known.place(price) / PRICE_RAMPS, 4)


def trace_views(
    traces: Any,
    table: TraceTable,
    rules: Sequence[Rule],
    probabilities: Mapping[int, npt.NDArray[np.float32]],
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    prices: Mapping[int, PricesShown],
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
    chosen = np.unique(np.linspace(0, len(table) - 1, min(count, len(table))).astype(int))
    views = []
    for n in chosen.tolist() if count else []:
        row, steps = traces[n], int(table.num_steps[n])
        methods = []
        for number, rule in enumerate(rules):
            pi = probabilities[number][n, :steps] if number in probabilities else None
            # A stochastic rule stops at no one step.
            exact = np.flatnonzero(table.lengths[n, :steps] == rule.outcome.tokens[n])
            found = {
                "name": rule.name,
                "group": rule.method,
                "setting": rule.name.removeprefix(rule.method).strip(),
                "stop": median_stop(pi) if pi is not None and not exact.size else int(exact[0]),
                "tokens": float(rule.outcome.tokens[n]),
                "correct": float(rule.outcome.correct[n]),
                "pi": None if pi is None else [round(float(p), 4) for p in pi],
            }
            methods.append(found | (prices[number].view(n, steps) if number in prices else {}))
        ends = row["step_ends"]
        texts = [row["trace_ids"][i:k] for i, k in zip([0, *ends], ends, strict=False)]
        graded = zip(texts, ends, row["forced_answers"], row["forced_correct"], strict=True)
        views.append(
            {
                "id": f"{row['problem_id']}/{row['sample_index']}",
                "problem": row["problem"],
                "reference": row["answer"],
                "family": row["family"],
                "ended": row["ended"],
                "steps": [
                    {
                        "text": str(tokenizer.decode(ids)).strip("\n"),
                        "tokens": end,
                        "answer": answer,
                        "correct": grade,
                    }
                    for ids, end, answer, grade in graded
                ],
                "methods": methods,
            }
        )
    return views


def median_stop(pi: npt.NDArray[Any]) -> int:
    """The step by whose end a policy has stopped with probability 1/2; the last step stops all."""
    going_on = np.cumprod(1.0 - np.nan_to_num(pi[:-1].astype(np.float64)))
    return int((going_on > 0.5).sum())
