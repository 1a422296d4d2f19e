"""Exact expected accuracy and length of stopping rules on labelled traces, without generating.

A rule becomes an `Outcome`: what each trace is expected to cost and to earn under it. `results`
summarises outcomes; `online` makes its own by generating, and they are summarised alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
import numpy.typing as npt

from .table import FloatArray, IntArray, TraceTable

__all__ = [
    "Outcome",
    "pool",
    "replay",
    "replay_at",
    "replay_budget",
    "replay_full",
    "replay_step",
]


@dataclass(frozen=True, eq=False)
class Outcome:
    """What each of N traces costs and earns under one rule (expectations where it is stochastic).

    Attributes:
        correct: (N,) accuracy.
        tokens: (N,) thinking tokens.
        answer_tokens: (N,) tokens of the forced answer.
        helped: (N,) right where the full trace is wrong.
        harmed: (N,) wrong where the full trace is right.
        truncated: (N,) thinking was cut at the token cap.
        probe_tokens: (N,) tokens that the rule read or generated to decide (trial answers with what
            is forced before them, what a verifier reads); reported, charged in `flops` alone.
        seconds: (N,) wall-clock time; NaN where it was not measured.
        flops: (N,) floating-point operations of all that was computed; NaN where not counted.
    """

    correct: FloatArray
    tokens: FloatArray
    answer_tokens: FloatArray
    helped: FloatArray
    harmed: FloatArray
    truncated: FloatArray
    probe_tokens: FloatArray
    seconds: FloatArray
    flops: FloatArray

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

    def of_rows(self, rows: IntArray) -> Outcome:
        """The outcome on some of the traces, by their numbers."""
        return Outcome(*self.columns()[rows].T)

    def columns(self) -> FloatArray:
        """(N, K) the fields side by side, in the order of their definition."""
        return np.column_stack([vars(self)[f.name] for f in fields(self)])


def replay(
    table: TraceTable,
    probabilities: npt.ArrayLike,
    mode: Literal["sample", "threshold"] = "sample",
    threshold: float | None = None,
) -> Outcome:
    """Replays a policy from its stop probabilities.

    Args:
        table: N labelled traces of up to T steps.
        probabilities: (N, T) stop probability at each step; NaN means "continue"; the last step's
            and the padding's are not read.
        mode: "sample" stops with the probability given (Eq. 1-3, the exact expectation);
            "threshold" stops at the first step whose probability is at least `threshold`.
        threshold: in [0, 1]; with mode "threshold" only.

    Raises:
        ValueError: shapes differ, a probability or the threshold is outside [0, 1], an unknown
            mode, or a threshold missing or given needlessly.
    """
    import torch  # here: it takes seconds to import, and reports need none of it

    from .stopping import stop_distribution_from_probabilities, threshold_stop

    pi = np.asarray(probabilities)
    if pi.shape != table.mask.shape:
        raise ValueError(
            f"probabilities has shape {pi.shape}; the table's traces and steps are "
            f"{table.mask.shape}"
        )
    # The last step's stop is forced: whatever stands there, or on padding, is not a probability.
    free = np.arange(pi.shape[1]) < table.last[:, None]
    values = torch.from_numpy(np.where(free, pi, 0.0).astype(np.float64))
    mask = torch.from_numpy(table.mask)
    if mode == "threshold":
        if threshold is None:
            raise ValueError("threshold is None; mode 'threshold' needs one in [0, 1]")
        return replay_at(table, threshold_stop(values, threshold, mask).numpy())
    if mode != "sample":
        raise ValueError(f"mode is {mode!r}; it must be 'sample' or 'threshold'")
    if threshold is not None:
        raise ValueError(f"threshold is {threshold}, but mode 'sample' has none; leave it out")
    return _expect(table, stop_distribution_from_probabilities(values, mask).numpy())


def replay_at(
    table: TraceTable,
    step_index: npt.ArrayLike,
    probe_tokens: FloatArray | None = None,
    probe_flops: FloatArray | None = None,
) -> Outcome:
    """Stops trace n at step `step_index[n]` (0-based; an index beyond its end is its end).

    Args:
        table: N labelled traces.
        step_index: (N,) integers >= 0.
        probe_tokens: (N,) tokens that the rule spent on deciding; None for nothing.
        probe_flops: (N,) operations that it spent on deciding; None for nothing.

    Raises:
        ValueError: a shape other than (N,), or a negative index.
    """
    index = np.asarray(step_index)
    if index.shape != (len(table),) or (index < 0).any():
        raise ValueError(
            f"step_index has shape {index.shape}; it must hold {len(table)} steps >= 0"
        )
    rows, index = np.arange(len(table)), np.minimum(index, table.last)
    correct, full = table.correct[rows, index], table.full_correct
    return Outcome(
        correct=correct,
        tokens=table.lengths[rows, index].astype(np.float64),
        answer_tokens=table.answer_tokens[rows, index].astype(np.float64),
        helped=correct * (1.0 - full),
        harmed=(1.0 - correct) * full,
        truncated=(table.capped & (index == table.last)).astype(np.float64),
        probe_tokens=np.zeros(len(table)) if probe_tokens is None else probe_tokens,
        seconds=_none(table),
        flops=_none(table)
        if table.flops is None
        else table.flops[rows, index] + (0.0 if probe_flops is None else probe_flops),
    )


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
    """Stops at the given step (1 is the first), or at the natural end of shorter traces.

    Raises:
        ValueError: step < 1.
    """
    if step < 1:
        raise ValueError(f"step is {step}; the first step is 1")
    return replay_at(table, np.full(len(table), step - 1))


def pool(outcomes: Sequence[Outcome]) -> Outcome:
    """The mean outcome of several policies (training seeds) on the same traces.

    Raises:
        ValueError: no outcomes, or outcomes of different numbers of traces.
    """
    if len({len(outcome) for outcome in outcomes}) != 1:
        raise ValueError(
            f"outcomes of {[len(outcome) for outcome in outcomes]} traces; pooling takes at least "
            "one outcome, all on the same traces"
        )
    return Outcome(*np.mean([outcome.columns() for outcome in outcomes], axis=0).T)


def _expect(table: TraceTable, weights: FloatArray) -> Outcome:
    """Expectations over the stopping step under `weights` (N, T), whose rows sum to one."""
    correct = (weights * table.correct).sum(axis=1)
    full = table.full_correct
    to_the_end = weights[np.arange(len(table)), table.last]
    return Outcome(
        correct=correct,
        tokens=(weights * table.lengths).sum(axis=1),
        answer_tokens=(weights * table.answer_tokens).sum(axis=1),
        helped=correct * (1.0 - full),
        harmed=(1.0 - correct) * full,
        truncated=to_the_end * table.capped,
        probe_tokens=np.zeros(len(table)),
        seconds=_none(table),
        flops=_none(table) if table.flops is None else (weights * table.flops).sum(axis=1),
    )


def _none(table: TraceTable) -> FloatArray:
    """(N,) of what was not measured."""
    return np.full(len(table), np.nan)
