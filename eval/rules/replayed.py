"""Any `StopRule` on labelled traces: its stops, or what it measures.

A rule that generate runs is replayed as it is: the labels say what its trial answers would have
been, so that replay and generation cannot differ in what a rule means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from modeling_ospruner.rules_ospruner import (
    AnswerEntropy,
    Budget,
    StopRule,
    TrialAnswer,
    TrialConfidence,
)

from ..compute import Compute
from ..replay import Outcome, replay_at, replay_budget, replay_step
from ..table import FloatArray, TraceTable
from .families import AtStep
from .rivals import HaltCot, Puma

__all__ = ["measured", "replay_rule"]


class _LabelledEnd:
    """A step end of a labelled trace, as `StepEnd`; counts what its trial answers generate."""

    may_stop = True

    def __init__(
        self,
        answers: dict[str, list[Any]],
        row: int,
        lengths: Sequence[int],
        suffix_tokens: int,
        text: Callable[[int, int], str] | None,
        thinking_entropy: FloatArray | None,
        compute: Compute | None,
    ) -> None:
        self.sample_index = row
        self.step = 0
        self.probe_tokens = 0
        self.probe_flops = 0.0
        self._answers = answers
        self._lengths = lengths
        self._suffix_tokens = suffix_tokens
        self._text = text
        self._thinking_entropy = thinking_entropy
        self._compute = compute

    @property
    def thinking_tokens(self) -> int:
        """L_i."""
        return self._lengths[self.step]

    def stop_probability(self, numbers: Sequence[float] = ()) -> float:
        """Not from labels alone."""
        raise ValueError("a rule asks for stop probabilities: replay the policy with `replay`")

    def next_text(self) -> str:
        """The text of the token that the trace went on with."""
        return self._text_of(self.thinking_tokens, self.thinking_tokens + 1)

    def step_text(self) -> str:
        """The text of the step that has ended here."""
        return self._text_of(self._lengths[self.step - 1] if self.step else 0, self.thinking_tokens)

    def thinking_entropy(self) -> float:
        """What a pass of the base found."""
        if self._thinking_entropy is None:
            raise ValueError(
                "a rule goes by the entropy of the thinking, which labels do not keep: give "
                "replay_rule what a pass of the base finds (rules.thinking.thinking_entropies)"
            )
        return float(self._thinking_entropy[self.sample_index, self.step])

    def _text_of(self, start: int, end: int) -> str:
        if self._text is None:
            raise ValueError("a rule reads the thinking: give replay_rule the tokenizer's decode")
        return self._text(start, end)

    def trial_answer(self, max_tokens: int) -> TrialAnswer:
        """The answer that was forced here when labelling, cut to so many tokens."""
        at = {name: values[self.sample_index][self.step] for name, values in self._answers.items()}
        tokens = min(at["forced_answer_tokens"], max_tokens)
        self.probe_tokens += self._suffix_tokens + tokens
        if self._compute is not None:
            self.probe_flops += self._compute.trial(self.sample_index, self.thinking_tokens, tokens)
        complete = bool(at["forced_answers"]) and tokens == at["forced_answer_tokens"]
        return TrialAnswer(
            ids=(0,) * tokens,  # no rule reads which tokens they are
            ended="closed" if complete else "length",
            logprobs=() if at["forced_logprob"] is None else (at["forced_logprob"],) * tokens,
            entropy=math.nan if at["forced_entropy"] is None else at["forced_entropy"],
            text=at["forced_answers"] if complete else "",
            whole_entropy=math.nan
            if at["forced_answer_entropy"] is None
            else at["forced_answer_entropy"],
        )


_ANSWER_COLUMNS = (
    "forced_answers",
    "forced_answer_tokens",
    "forced_logprob",
    "forced_entropy",
    "forced_answer_entropy",
)


_READS: dict[type, str] = {
    AnswerEntropy: "forced_entropy",
    HaltCot: "forced_answer_entropy",
    Puma: "forced_logprob",
    TrialConfidence: "forced_logprob",
}


def replay_rule(
    dataset: Any,
    table: TraceTable,
    rule: StopRule,
    suffix_tokens: int,
    decode: Callable[[list[int]], str] | None = None,
    compute: Compute | None = None,
    thinking_entropy: FloatArray | None = None,
) -> Outcome:
    """Replays any rule that decides by lengths, trial answers and transition words.

    A transition word is one that the trace itself went on with. Generate looks at the most likely
    next token instead, before it is sampled: under greedy decoding the two are the same.

    Every trial answer is counted in full (`probe_tokens` and `flops` of the outcome), the tokens
    forced before it included, and also the one at which the rule stops: generate decodes the forced
    answer anew.

    Args:
        dataset: the labelled traces.
        table: the same as arrays.
        rule: what generate would be given.
        suffix_tokens: tokens forced before an answer (`TokenFormat.forced_suffix`).
        decode: text of token ids, for rules that read the thinking.
        compute: what trial answers cost, where the table is charged.
        thinking_entropy: (N, T) mean entropy in nats of the thinking up to each step, for rules
            that go by it.

    Raises:
        ValueError: the rule asks for what labels do not tell.
    """
    if isinstance(rule, Budget):
        return replay_budget(table, rule.tokens)
    if isinstance(rule, AtStep):
        return replay_step(table, rule.step)
    if table.flops is not None and compute is None and "trial_answer" in rule.asks:
        raise ValueError(
            "the table is charged for what it computes, and trial answers have no price: give "
            "replay_rule the Compute that charged it"
        )
    stops, probes, flops = table.last.copy(), np.zeros(len(table)), np.zeros(len(table))
    ends = _labelled_ends(dataset, table, rule, suffix_tokens, decode, thinking_entropy, compute)
    for row, end in enumerate(ends):
        judge = rule.for_row()
        for step in range(int(table.last[row])):  # the natural end needs no decision
            end.step = step
            if judge.at_step_end(end).stop:
                stops[row] = step
                break
        probes[row], flops[row] = end.probe_tokens, end.probe_flops
    return replay_at(table, stops, probes, flops)


def measured(
    dataset: Any,
    table: TraceTable,
    rule: StopRule,
    decode: Callable[[list[int]], str] | None = None,
    thinking_entropy: FloatArray | None = None,
) -> FloatArray:
    """(N, T) what a rule measures at each step, as if it never stopped; NaN where it does not.

    Args:
        dataset: the labelled traces.
        table: the same as arrays.
        rule: the rule; what it measures must not depend on its threshold.
        decode: text of token ids, for rules that read the thinking.
        thinking_entropy: as in `replay_rule`.

    Raises:
        ValueError: see `replay_rule`.
    """
    signals = np.full(table.mask.shape, np.nan)
    ends = _labelled_ends(dataset, table, rule, 0, decode, thinking_entropy, None)
    for row, end in enumerate(ends):
        judge = rule.for_row()
        for step in range(int(table.last[row])):
            end.step = step
            signal = judge.at_step_end(end).signal
            signals[row, step] = math.nan if signal is None else signal
    return signals


def _labelled_ends(
    dataset: Any,
    table: TraceTable,
    rule: StopRule,
    suffix_tokens: int,
    decode: Callable[[list[int]], str] | None,
    thinking_entropy: FloatArray | None,
    compute: Compute | None,
) -> Iterator[_LabelledEnd]:
    """What each row of labels tells a rule.

    Raises:
        ValueError: the labels lack what the rule reads.
    """
    columns = dataset.select_columns(list(_ANSWER_COLUMNS))[:]
    answers = {name: columns[name] for name in _ANSWER_COLUMNS}
    for kind, name in _READS.items():
        if isinstance(rule, kind) and all(x is None for row in answers[name] for x in row):
            raise ValueError(
                f"{name} is null: these labels are of a version that did not keep it; label again "
                f"to replay {kind.__name__}"
            )
    reads = decode is not None and "text" in rule.asks and "trace_ids" in dataset.column_names
    traces = dataset.select_columns(["trace_ids"]) if reads else None
    for row in range(len(table)):
        text = None
        if decode is not None and traces is not None:
            text = partial(_text, decode, traces[row]["trace_ids"])
        lengths = table.lengths[row].tolist()
        yield _LabelledEnd(answers, row, lengths, suffix_tokens, text, thinking_entropy, compute)


def _text(decode: Callable[[list[int]], str], trace_ids: list[int], start: int, end: int) -> str:
    return decode(trace_ids[start:end])
