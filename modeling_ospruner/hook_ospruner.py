"""Stopping inside `generate`: the hook.

It is a logits processor with a stopping criterion. What was written is looked at as soon as it is
chosen; the decision after a step's last token and the first forced token fall into the same decode
step. Until its stop, every row is what plain generate would have written.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)

from .capture_ospruner import Capture
from .reasoning_format import TokenFormat
from .row_ospruner import Phase, RowPlan, StopRow
from .settings_ospruner import StopPolicyConfig, StopRecord
from .stop_rules import StopRule, TrialAnswer
from .trial_answers import TrialAnswers


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
        self.plan = RowPlan(settings, rule, token_format, eos_ids)
        self.rows: list[StopRow] = []
        self._capture = capture
        self._trials = trials
        self._decode = decode
        self._warned = False
        self._released = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """One decode step: decides where steps have ended, and shapes the scores (B, V)."""
        if not self.rows:
            self._start(input_ids)
        for i, row in enumerate(self.rows):
            if row.at_boundary:
                self._decide(i, row, scores)
        self._release()
        return self._shape(scores)

    def _start(self, input_ids: torch.Tensor) -> None:
        first = self.plan.settings.first_sample_index
        for i, ids in enumerate(input_ids.tolist()):
            self.rows.append(StopRow(self.plan, ids, first + i))
        if self._trials is not None:
            self._trials.check()

    def _decide(self, i: int, row: StopRow, scores: torch.Tensor) -> None:
        def trial_answer(max_tokens: int) -> TrialAnswer:
            assert self._trials is not None  # the rule asks for trial answers
            answer, tokens = self._trials.answer(i, max_tokens)
            row.record.probe_tokens += tokens
            return answer

        row.decide(
            stop_probability=lambda: self._probability(i),
            trial_answer=trial_answer,
            next_text=lambda: self._text([int(scores[i].argmax())]),
        )
        if row.record.nan_steps:
            self._warn_of_nan()

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

    def _shape(self, scores: torch.Tensor) -> torch.Tensor:
        """Masks markers in answers, then leaves one token where it is forced, or greedy."""
        forced = [i for i, row in enumerate(self.rows) if row.phase is Phase.FORCING]
        answers = [i for i, row in enumerate(self.rows) if row.phase is Phase.ANSWER]
        if not forced and not answers:
            return scores
        device = scores.device
        scores = scores.clone()
        reentry = list(self.plan.token_format.reentry_ids)
        if reentry and (masked := [i for i in answers if self.rows[i].masked]):
            scores[torch.tensor(masked, device=device)[:, None], reentry] = -torch.inf
        greedy = [i for i in answers if self.rows[i].greedy]
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
        others = [False] * len(self.rows) if ended is None else ended.tolist()
        done = []
        for i, token in enumerate(input_ids[:, -1].tolist()):
            if self.rows[i].push(token):
                done.append(i)
            if others[i]:
                self.rows[i].end()
        return done

    def records(self) -> list[StopRecord]:
        """One record a row, after generate has ended."""
        return [row.record for row in self.rows]

    def _release(self) -> None:
        if self._released:
            return
        thinking = [i for i, row in enumerate(self.rows) if row.phase is Phase.THINKING]
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
