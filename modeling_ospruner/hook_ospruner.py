"""Stopping inside `generate`: the hook.

It is a logits processor with a stopping criterion. What was written is looked at as soon as it is
chosen; the decision after a step's last token and the first forced token fall into the same decode
step. Until its stop, every row is what plain generate would have written.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)

from .capture_ospruner import Capture
from .reasoning_format import BoundaryState, BoxState, TokenFormat
from .settings_ospruner import StopPolicyConfig, StopRecord
from .stop_rules import Budget, RowRule, StopRule, TrialAnswer
from .trial_answers import TrialAnswers


class _Phase(Enum):
    THINKING = 1
    FORCING = 2
    ANSWER = 3
    DONE = 4


class _Row:
    """One row of the batch while it is generated."""

    def __init__(self, boundary: BoundaryState, rule: RowRule, thinking: bool) -> None:
        self.phase = _Phase.THINKING if thinking else _Phase.DONE
        self.record = StopRecord(reason="length" if thinking else "natural")
        self.boundary = boundary
        self.prefilled_tokens = boundary.thinking_tokens
        self.rule = rule
        self.at_boundary = False
        self.forced: deque[int] = deque()
        self.masked = False
        self.end_ids: frozenset[int] = frozenset()  # of its answer
        self.box: BoxState | None = None
        self.answer_tokens = 0


@dataclass
class _StepEnd:
    """What a rule is told at a step end, and asks of the hook; see `StepEnd`."""

    sample_index: int
    step: int
    thinking_tokens: int
    may_stop: bool
    stop_probability: Callable[[], float]
    trial_answer: Callable[[int], TrialAnswer]
    next_text: Callable[[], str]


class StopHook(LogitsProcessor):
    """Decides at step ends and forces what follows; see the module.

    Args:
        settings: how to stop.
        rule: what decides.
        token_format: the base's way of thinking.
        eos_ids: ids that end a text.
        capture: gives the learned policy's probabilities; for a rule that asks for them.
        trials: gives trial answers; for a rule that asks for them.
        decode: from token ids to text; for a rule that asks for texts.
    """

    def __init__(
        self,
        settings: StopPolicyConfig,
        rule: StopRule,
        token_format: TokenFormat,
        eos_ids: frozenset[int],
        capture: Capture | None = None,
        trials: TrialAnswers | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.settings = settings
        self.rule = rule
        self.token_format = token_format
        self.eos_ids = eos_ids
        self.rows: list[_Row] = []
        self._capture = capture
        self._trials = trials
        self._decode = decode
        limit = settings.max_thinking_tokens
        self._budget = None if limit is None else Budget(limit)
        self._length = 0  # tokens generated so far
        self._warned = False
        self._released = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """One decode step: decides where steps have ended, and shapes the scores (B, V)."""
        if not self.rows:
            self._start(input_ids)
        for i, row in enumerate(self.rows):
            if row.at_boundary:
                row.at_boundary = False
                self._decide(i, row, scores)
        self._release()
        return self._shape(scores)

    def _start(self, input_ids: torch.Tensor) -> None:
        for ids in input_ids.tolist():
            # Steps go on from an assistant prefill, the thinking that a prompt already holds.
            span = self.token_format.thinking_span(ids)
            boundary = self.token_format.boundary_state(ids[span.start :])
            self.rows.append(_Row(boundary, self.rule.for_row(), not span.closed))
        if self._trials is not None:
            self._trials.check()

    def _decide(self, i: int, row: _Row, scores: torch.Tensor) -> None:
        settings, record = self.settings, row.record

        def trial_answer(max_tokens: int) -> TrialAnswer:
            assert self._trials is not None  # the rule asks for trial answers
            answer, tokens = self._trials.answer(i, max_tokens)
            record.probe_tokens += tokens
            return answer

        end = _StepEnd(
            sample_index=settings.first_sample_index + i,
            step=len(record.step_ends),
            thinking_tokens=self._length,
            may_stop=self._length >= settings.min_thinking_tokens,
            stop_probability=lambda: self._probability(i),
            trial_answer=trial_answer,
            next_text=lambda: self._text([int(scores[i].argmax())]),
        )
        record.step_ends.append(self._length)
        stop, signal = row.rule.at_step_end(end)
        learned = "stop_probability" in self.rule.asks
        (record.probabilities if learned else record.signals).append(
            math.nan if signal is None else signal
        )
        if signal is not None and math.isnan(signal):
            record.nan_steps += 1
            self._warn_of_nan()
            stop = False
        if stop and end.may_stop:
            record.reason = self.rule.reason
        elif self._budget is not None and self._budget.at_step_end(end).stop:
            record.reason = self._budget.reason
        else:
            return
        self._close(row, natural=False)

    def _probability(self, i: int) -> float:
        """The learned policy's for one row."""
        assert self._capture is not None  # the rule asks for stop probabilities
        return self._capture.probability(i)

    def _text(self, ids: Sequence[int]) -> str:
        assert self._decode is not None  # the rule asks for texts
        return self._decode(ids)

    def _warn_of_nan(self) -> None:
        if not self._warned:
            warnings.warn(
                "the stopping policy gave NaN: rows continue. Its weights, or the base's "
                "hidden states, are broken; StopRecord.nan_steps counts the steps",
                stacklevel=2,
            )
        self._warned = True

    def _close(self, row: _Row, natural: bool) -> None:
        """Turns a row to its answer; after a natural end, the model has written some closing."""
        forced = self.settings.answer == "forced"
        written = row.boundary.closing_written if natural else 0
        suffix = self.token_format.forced_suffix(self.settings.answer, written)
        if natural and not forced:
            suffix = []
        row.forced.extend(suffix)
        row.phase = _Phase.FORCING if suffix else _Phase.ANSWER
        closed = forced or not natural  # by us, so that the answer's message is known to be open
        row.masked = self.settings.mask_reentry and closed
        row.end_ids = self.eos_ids.union(self.token_format.answer_end_ids if closed else ())
        if forced:
            row.box = self.token_format.box_state()

    def _shape(self, scores: torch.Tensor) -> torch.Tensor:
        """Masks markers in answers, then leaves one token where it is forced, or greedy."""
        forced = [i for i, row in enumerate(self.rows) if row.phase is _Phase.FORCING]
        answers = [i for i, row in enumerate(self.rows) if row.phase is _Phase.ANSWER]
        if not forced and not answers:
            return scores
        device = scores.device
        scores = scores.clone()
        reentry = list(self.token_format.reentry_ids)
        if reentry and (masked := [i for i in answers if self.rows[i].masked]):
            scores[torch.tensor(masked, device=device)[:, None], reentry] = -torch.inf
        greedy = [] if self.settings.answer_do_sample else [i for i in answers if self.rows[i].box]
        if not forced and not greedy:
            return scores
        rows = torch.tensor(forced + greedy, device=device)
        ids = [self.rows[i].forced[0] for i in forced]
        chosen = torch.cat(
            [
                torch.tensor(ids, dtype=torch.long, device=device),
                scores[rows[len(ids) :]].argmax(-1),
            ]
        )
        scores[rows] = -torch.inf
        scores[rows, chosen] = 0.0
        return scores

    def finish(self, input_ids: torch.Tensor, ended: torch.Tensor | None = None) -> list[int]:
        """After a token was chosen in each row: takes it in.

        Args:
            input_ids: (B, S).
            ended: rows (B,) that something else ends with this token.

        Returns:
            The rows that have completed their answer.
        """
        self._length += 1
        others = [False] * len(self.rows) if ended is None else ended.tolist()
        done = []
        for i, token in enumerate(input_ids[:, -1].tolist()):
            row = self.rows[i]
            if row.phase is _Phase.THINKING:
                self._think(row, token)
            elif row.phase is _Phase.FORCING:
                row.forced.popleft()
                if not row.forced:
                    row.phase = _Phase.ANSWER
            elif row.phase is _Phase.ANSWER:
                row.answer_tokens += 1
                closed = row.box is not None and row.box.push(token)
                full = row.answer_tokens == self.settings.max_answer_tokens
                if closed or full or token in row.end_ids:
                    row.phase = _Phase.DONE
                    done.append(i)
            if others[i]:
                row.phase = _Phase.DONE
                row.at_boundary = False
        return done

    def _think(self, row: _Row, token: int) -> None:
        if token in self.eos_ids and token != self.token_format.think_end_id:
            row.record.reason = "natural"
            row.phase = _Phase.DONE
            return
        row.at_boundary = row.boundary.push(token)
        row.record.thinking_tokens = max(0, row.boundary.thinking_tokens - row.prefilled_tokens)
        if row.boundary.ended:
            row.record.reason = "natural"
            self._close(row, natural=True)

    def records(self) -> list[StopRecord]:
        """One record a row, after generate has ended."""
        return [row.record for row in self.rows]

    def _release(self) -> None:
        if self._released:
            return
        thinking = [i for i, row in enumerate(self.rows) if row.phase is _Phase.THINKING]
        if self._capture is not None:
            self._capture.only(thinking)
        if not thinking:
            self._released = True
            for source in (self._capture, self._trials):
                if source is not None:
                    source.close()


class AnswerEnd(StoppingCriteria):
    """Ends a row as soon as its answer is complete, or where one of `others` ends it.

    The others are the caller's own criteria: a row that they end is not looked at any more.
    """

    def __init__(self, hook: StopHook, others: StoppingCriteriaList) -> None:
        self.hook = hook
        self.others = others
        self._none: torch.Tensor | None = None

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """Which rows (B,) end with their last token."""
        ended = self.others(input_ids, scores, **kwargs) if len(self.others) else None
        done = self.hook.finish(input_ids, ended)
        if self._none is None:
            self._none = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        if not done:
            return self._none if ended is None else ended
        result = self._none.clone() if ended is None else ended.clone()
        result[done] = True
        return result
