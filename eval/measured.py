"""Rules without training on labelled traces: what they measure at every step, and their outcomes.

Labels say what the trial answers of generate would have been, so that a rule is measured once, as
if it never stopped, and every threshold is then a comparison of arrays.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ospruner.rules.families import Family, StopRule
from ospruner.rules.signals import Same, TrialAnswer

from .compute import Compute
from .replay import Outcome, replay_at
from .table import FloatArray, TraceTable

__all__ = ["Measured", "Split", "family_thresholds", "measure", "replay_rule", "spread_values"]

COUNT = 64
"""Thresholds of each method, the two ends included, where its signal takes as many values."""

_ANSWER_COLUMNS = (
    "forced_answers",
    "forced_answer_tokens",
    "forced_logprob",
    "forced_entropy",
    "forced_answer_entropy",
)


@dataclass(frozen=True, eq=False)
class Split:
    """Labelled traces, and what rules need to read them.

    Attributes:
        dataset: the traces.
        table: the same as arrays; charged where `compute` is given (`Compute.charge`).
        suffix_tokens: tokens forced before an answer (`TokenFormat.forced_suffix`).
        decode: text of token ids, for rules that read the thinking; None where it is not at hand.
        compute: what is computed; None counts no operations.
        same: whether two answers mean the same (`Task.same`).
        thinking_entropy: gives the (N, T) mean entropies of the thinking up to each step, which
            labels do not keep (`thinking.thinking_entropies`); None where no base is at hand.
    """

    dataset: Any
    table: TraceTable
    suffix_tokens: int = 0
    decode: Callable[[list[int]], str] | None = None
    compute: Compute | None = None
    same: Same = operator.eq
    thinking_entropy: Callable[[], FloatArray] | None = None


@dataclass(frozen=True, eq=False)
class Measured:
    """What a rule measures on N traces of up to T steps, as if it never stopped.

    Attributes:
        signals: (N, T); NaN where it measures nothing, at each trace's end and on padding.
        probe_tokens: (N, T) tokens of all trial answers up to each step, those forced before them
            included: also of the one at which it stops, as generate decodes the answer anew.
        probe_flops: (N, T) operations of the same; 0 where they are not counted.
    """

    signals: FloatArray
    probe_tokens: FloatArray
    probe_flops: FloatArray

    def outcome(self, table: TraceTable, family: Family, threshold: float) -> Outcome:
        """What the rule of a threshold does."""
        reached = family.reached(self.signals, threshold)
        stops = np.where(reached.any(axis=1), reached.argmax(axis=1), table.last)
        rows = np.arange(len(table))
        return replay_at(
            table, stops, self.probe_tokens[rows, stops], self.probe_flops[rows, stops]
        )


class _LabelledEnd:
    """A step end of a labelled trace, as `StepEnd`; counts what its trial answers generate.

    A transition word is one that the trace itself went on with. Generate looks at the most likely
    next token instead, before it is sampled: under greedy decoding the two are the same.
    """

    may_stop = True

    def __init__(self, split: Split, row: int, answers: dict[str, list[Any]]) -> None:
        self.step = 0
        self.probe_tokens = 0
        self.probe_flops = 0.0
        self._split = split
        self._row = row
        self._answers = answers
        self._lengths = split.table.lengths[row].tolist()
        self._trace: list[int] | None = None

    @property
    def thinking_tokens(self) -> int:
        """L_i."""
        return int(self._lengths[self.step])

    def next_text(self) -> str:
        """The text of the token that the trace went on with."""
        return self._text(self.thinking_tokens, self.thinking_tokens + 1)

    def step_text(self) -> str:
        """The text of the step that has ended here."""
        return self._text(self._lengths[self.step - 1] if self.step else 0, self.thinking_tokens)

    def thinking_entropy(self) -> float:
        """What a pass of the base found."""
        if self._split.thinking_entropy is None:
            raise ValueError(
                "a rule goes by the entropy of the thinking, which labels do not keep: let the "
                "base be at hand (base=)"
            )
        return float(self._split.thinking_entropy()[self._row, self.step])

    def _text(self, start: int, end: int) -> str:
        decode = self._split.decode
        if decode is None:
            raise ValueError("a rule reads the thinking, and the base's tokenizer is not at hand")
        if self._trace is None:
            self._trace = self._split.dataset[self._row]["trace_ids"]
        return decode(self._trace[start:end])

    def trial_answer(self, max_tokens: int) -> TrialAnswer:
        """The answer that was forced here when labelling, cut to so many tokens."""
        split = self._split
        at = {name: self._answers[name][self._row][self.step] for name in _ANSWER_COLUMNS}
        tokens = min(at["forced_answer_tokens"], max_tokens)
        self.probe_tokens += split.suffix_tokens + tokens
        if split.compute is not None:
            self.probe_flops += split.compute.trial(self._row, self.thinking_tokens, tokens)
        complete = bool(at["forced_answers"]) and tokens == at["forced_answer_tokens"]
        logprob, entropy, whole = (
            math.nan if at[name] is None else at[name] for name in _ANSWER_COLUMNS[2:]
        )
        return TrialAnswer(
            ids=(0,) * tokens,  # no rule reads which tokens they are
            ended="closed" if complete else "length",
            logprobs=() if math.isnan(logprob) else (logprob,) * tokens,
            entropy=entropy,
            text=at["forced_answers"] if complete else "",
            whole_entropy=whole,
        )


def measure(split: Split, family: Family, rule: StopRule | None = None) -> Measured:
    """What a family measures at every step of labelled traces.

    Args:
        split: the traces.
        family: the rule, its threshold open.
        rule: with settings of its own; None for the family's.

    Raises:
        ValueError: the labels, or what stands beside them, lack what it reads.
    """
    table, rule = split.table, rule or family(family.never, same=split.same)
    if table.flops is not None and split.compute is None and "trial_answer" in family.asks:
        raise ValueError(
            "the table is charged for what it computes, and trial answers have no price: give the "
            "Split the Compute that charged it"
        )
    answers: dict[str, list[Any]] = {}
    if "trial_answer" in family.asks:
        answers = split.dataset.select_columns(list(_ANSWER_COLUMNS))[:]
    if family.reads and all(x is None for row in answers[family.reads] for x in row):
        raise ValueError(
            f"{family.reads} is null: these labels are of a version that did not keep it; label "
            f"again to replay {family.method}"
        )
    signals = np.full(table.mask.shape, np.nan)
    tokens, flops = np.zeros(table.mask.shape), np.zeros(table.mask.shape)
    for n in range(len(table)):
        end = _LabelledEnd(split, n, answers)
        for step, signal in enumerate(rule.measure(_passed(end, int(table.last[n])))):
            signals[n, step] = signal
            tokens[n, step:], flops[n, step:] = end.probe_tokens, end.probe_flops
    return Measured(signals, tokens, flops)


def _passed(end: _LabelledEnd, last: int) -> Iterator[_LabelledEnd]:
    """The step ends of a trace in order; the natural end needs no decision."""
    for end.step in range(last):
        yield end


def replay_rule(split: Split, rule: StopRule) -> Outcome:
    """What a rule does on labelled traces; see `measure`."""
    return measure(split, rule.family, rule).outcome(split.table, rule.family, rule.threshold)


def family_thresholds(family: Family, measured: Measured, count: int = COUNT) -> tuple[float, ...]:
    """Thresholds from "at once" to "never", through values that the signal takes on these traces.

    A grid written down by hand suits the scale of one signal and misses that of another.

    Args:
        family: the rule.
        measured: what it measures on the traces to choose on.
        count: thresholds, the two ends included; fewer where the signal takes fewer values.
    """
    signals = measured.signals
    within = signals[(signals > family.low) & (signals < family.high)]
    values = {*spread_values(within, count - 2), family.at_once, family.never}
    return tuple(sorted(values, reverse=family.never < family.at_once))


def spread_values(signals: npt.ArrayLike, count: int) -> list[float]:
    """Up to so many of the values that a signal takes, evenly spread by rank; NaN is none.

    Equal values count once, so that a signal that is mostly saturated is still resolved.

    Args:
        signals: of any shape.
        count: at least 1.

    Raises:
        ValueError: count < 1.
    """
    if count < 1:
        raise ValueError(f"count is {count}; it must be at least 1")
    values = np.asarray(signals, np.float64)
    different = np.unique(values[~np.isnan(values)])
    if not different.size:
        return []
    places = np.linspace(0, len(different) - 1, min(count, len(different)))
    return [float(value) for value in different[np.round(places).astype(int)]]
