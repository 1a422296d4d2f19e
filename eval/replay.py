"""Exact expected accuracy and length of stopping rules on labelled traces, without generating.

A rule becomes an `Outcome`: what each trace is expected to cost and to earn under it. `evaluation`
summarises outcomes; `online` makes its own by generating, and they are summarised alike. Rules are
measured against fixed ones, which read nothing but lengths, and against hindsight, which no rule
can beat.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from .table import FloatArray, TraceTable


@dataclass(frozen=True, eq=False)
class Outcome:
    """What each of N traces costs and earns under one rule (expectations where it draws)."""

    correct: FloatArray  # (N,) accuracy
    tokens: FloatArray  # (N,) thinking tokens
    answer_tokens: FloatArray  # (N,) tokens of the forced answer
    helped: FloatArray  # (N,) right where the full trace is wrong
    harmed: FloatArray  # (N,) wrong where the full trace is right
    truncated: FloatArray  # (N,) thinking was cut at the token cap
    # (N,) tokens that the rule read or generated to decide (trial answers with what is forced
    # before them, what a verifier reads); reported, charged in `flops` alone
    probe_tokens: FloatArray
    seconds: FloatArray  # (N,) wall-clock time; NaN where it was not measured
    # (N,) floating-point operations of all that was computed; NaN where not counted
    flops: FloatArray
    stopped: FloatArray  # (N,) whether it was stopped before its own end
    stopped_answer: FloatArray  # (N,) answer tokens where it was; 0 elsewhere
    # (N,) whether an answer after a stop thinks on; NaN where that was not looked at
    rethought: FloatArray

    @classmethod
    def against(cls, right: FloatArray, **known: Any) -> Outcome:
        """What is known of traces, of which in full `right` (N,) are right; all else is NaN."""
        correct, unknown = known["correct"], np.full(len(right), np.nan)
        known |= {"helped": correct * (1.0 - right), "harmed": (1.0 - correct) * right}
        return cls(*(np.asarray(known.get(f.name, unknown), np.float64) for f in fields(cls)))

    def __len__(self) -> int:
        return len(self.correct)

    @property
    def accuracy(self) -> float:
        """Mean accuracy over traces (Pass@1, where each problem has as many traces)."""
        return float(self.correct.mean())

    @property
    def mean_tokens(self) -> float:
        """Mean thinking tokens over traces."""
        return float(self.tokens.mean())

    def columns(self) -> FloatArray:
        """(N, K) the fields side by side, in the order of their definition."""
        return np.column_stack([vars(self)[f.name] for f in fields(self)])


def replay(
    table: TraceTable,
    probabilities: npt.ArrayLike,
    threshold: float | None = None,
    read_tokens: npt.NDArray[Any] | None = None,
) -> Outcome:
    """Replays a policy from its stop probabilities: the exact expectation (the paper's Eq. 1-3).

    Arguments and errors are those of `stop_weights`; of a policy that is a model of its own,
    `read_tokens` (N, T) are those that it has read where a trace stops at each step.
    """
    weights = stop_weights(table, probabilities, threshold)
    return _outcome(table, lambda column: (weights * column).sum(axis=1), read_tokens)


def stop_weights(
    table: TraceTable, probabilities: npt.ArrayLike, threshold: float | None = None
) -> FloatArray:
    """(N, T) the probability that a policy stops at each step; rows sum to one, 0 on padding.

    P(tau = i) = [prod_{j<i} (1 - pi_j)] pi_i, as `stopping` has it from logits.

    Args:
        table: N labelled traces of up to T steps.
        probabilities: (N, T) stop probability at each step; NaN means "continue", as it does when
            generating; the last step's and the padding's are not read.
        threshold: in [0, 1]: stops at the first step whose probability is at least that; None
            stops with the probability given (mode "sample" of generate).

    Raises:
        ValueError: shapes differ, or a probability or the threshold is outside [0, 1].
    """
    pi = np.asarray(probabilities, np.float64)
    if pi.shape != (shape := table.mask.shape):
        raise ValueError(f"probabilities has shape {pi.shape}; the traces and steps are {shape}")
    if threshold is not None and not 0 <= threshold <= 1:
        raise ValueError(f"threshold is {threshold}; it must lie in [0, 1]")
    steps, last = np.arange(pi.shape[1]), table.last[:, None]
    # The last step's stop is forced: whatever stands there, or on padding, is not a probability.
    pi = np.where(steps < last, pi, np.nan)
    if (wrong := (pi < 0) | (pi > 1)).any():
        raise ValueError(
            f"probabilities holds {pi[wrong][0]}; stop probabilities lie in [0, 1] "
            "(apply a sigmoid if these are logits)"
        )
    stops = np.nan_to_num(pi) if threshold is None else (pi >= threshold).astype(np.float64)
    stops[steps == last] = 1.0
    survival = np.cumprod(1.0 - stops, axis=1)
    return np.concatenate([np.ones_like(stops[:, :1]), survival[:, :-1]], 1) * stops


def replay_at(
    table: TraceTable,
    step_index: npt.ArrayLike,
    probe_tokens: FloatArray | None = None,
    probe_flops: FloatArray | None = None,
) -> Outcome:
    """Stops trace n at step `step_index[n]` (0-based; an index beyond its end is its end).

    Args:
        table: N labelled traces of up to T steps.
        step_index: (N,) integers >= 0.
        probe_tokens: (N, T) tokens that the rule has spent on deciding at each step; None for none.
        probe_flops: (N, T) operations of the same.

    Raises:
        ValueError: another shape, or a negative index.
    """
    index, rows = np.asarray(step_index), np.arange(len(table))
    if index.shape != rows.shape or (index < 0).any():
        raise ValueError(f"step_index has shape {index.shape}; it must hold {len(rows)} steps >= 0")
    index = np.minimum(index, table.last)
    return _outcome(table, lambda column: column[rows, index], probe_tokens, probe_flops)


def _outcome(
    table: TraceTable,
    at_stop: Callable[[npt.NDArray[Any]], npt.NDArray[Any]],
    probe_tokens: npt.NDArray[Any] | None = None,
    probe_flops: FloatArray | None = None,
) -> Outcome:
    """What columns (N, T) come to where traces stop, or are expected to."""
    ends = np.arange(table.mask.shape[1]) == table.last[:, None]
    columns = {
        "correct": table.correct,
        "tokens": table.lengths,
        "answer_tokens": table.answer_tokens,
        "truncated": ends & table.capped[:, None],
        "probe_tokens": np.zeros(ends.shape) if probe_tokens is None else probe_tokens,
        "stopped": ~ends,
        "stopped_answer": np.where(ends, 0, table.answer_tokens),
    }
    if table.flops is not None:
        columns["flops"] = table.flops + (0.0 if probe_flops is None else probe_flops)
    found = {name: at_stop(column) for name, column in columns.items()}
    return Outcome.against(table.full_correct, **found)


def replay_full(table: TraceTable) -> Outcome:
    """Never stops early: the answer forced at each trace's end."""
    return replay_at(table, table.last)


def replay_budget(table: TraceTable, budget_tokens: int) -> Outcome:
    """Stops at the first step end that reaches the budget: the smallest i with L_i >= budget.

    The paragraph in which the budget runs out is finished (a soft end), so that a trace may spend
    more than the budget by less than a paragraph, and the labels tell its answer exactly. A trace
    shorter than the budget ends naturally.

    Raises:
        ValueError: a negative budget.
    """
    if budget_tokens < 0:
        raise ValueError(f"budget_tokens is {budget_tokens}; it must be at least 0")
    return replay_at(table, (table.lengths < budget_tokens).sum(axis=1))


def replay_step(table: TraceTable, step: int) -> Outcome:
    """Stops at the given step (1 is the first), or at the natural end of shorter traces."""
    return replay_at(table, np.full(len(table), step - 1))


def replay_drop(table: TraceTable, paragraphs: int) -> Outcome:
    """Leaves out so many last steps of each trace, but for the first.

    Where a model writes its answer down at the end of its thinking, this is what a rule saves that
    has learnt nothing else. No rule knows beforehand where the end is.
    """
    return replay_at(table, np.maximum(table.last - paragraphs, 0))


def hindsight_oracle(table: TraceTable, price: float = 0.0) -> Outcome:
    """Stops each trace where A_i - lambda L_i is largest, at the earliest of equals.

    With lambda = 0 (the limit from above) this is the highest accuracy that stopping can reach, at
    the fewest tokens that reach it: the first right step, or the first step where none is right.

    Raises:
        ValueError: the price is negative or not finite.
    """
    if not (math.isfinite(price) and price >= 0):
        raise ValueError(f"price is {price!r}; it must be a finite number >= 0")
    reward = np.where(table.mask, table.correct - price * table.lengths, -np.inf)
    return replay_at(table, reward.argmax(axis=1))


def hindsight_oracle_no_loss(table: TraceTable) -> Outcome:
    """The shortest stops that leave no trace less right than in full: first i with A_i >= A_T.

    Traces wrong at their end stop at their first step, so that accuracy is the full trace's or, by
    luck of that first answer, a little more: how much length could go at no loss, gaining nothing.
    """
    kept = table.mask & (table.correct >= table.full_correct[:, None])
    return replay_at(table, kept.argmax(axis=1))


def pool(outcomes: Sequence[Outcome]) -> Outcome:
    """The mean outcome of several policies (training seeds) on the same traces."""
    return Outcome(*np.mean([outcome.columns() for outcome in outcomes], axis=0).T)
