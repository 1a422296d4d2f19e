"""One row's way from its thinking to its answer: the same in generate and in every engine.

A row takes in the tokens that are chosen for it, one by one. After the last token of a step it is
asked to decide; from a stop, or a natural end, on it says what the next token has to be.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from .reasoning_format import BoxState, TokenFormat
from .settings_ospruner import StopPolicyConfig, StopRecord
from .stop_rules import Budget, StopRule, TrialAnswer


class Phase(Enum):
    """Where a row is."""

    THINKING = 1
    FORCING = 2
    ANSWER = 3
    DONE = 4


@dataclass
class StepEnd:
    """What a rule is told at a step end, and asks for; see `stop_rules.StepEnd`."""

    sample_index: int
    step: int
    thinking_tokens: int
    may_stop: bool
    stop_probability: Callable[[], float]
    trial_answer: Callable[[int], TrialAnswer]
    next_text: Callable[[], str]


@dataclass(frozen=True)
class RowPlan:
    """What rows have in common.

    Attributes:
        settings: how to stop.
        rule: what decides.
        token_format: the base's way of thinking.
        eos_ids: ids that end a text.
    """

    settings: StopPolicyConfig
    rule: StopRule
    token_format: TokenFormat
    eos_ids: frozenset[int]
    budget: Budget | None = field(init=False)

    def __post_init__(self) -> None:
        limit = self.settings.max_thinking_tokens
        object.__setattr__(self, "budget", None if limit is None else Budget(limit))


class StopRow:
    """One row while it is generated.

    Args:
        plan: what it has in common with others.
        prompt_ids: its prompt, without padding; steps go on from the thinking it already holds.
        sample_index: its index among all rows of the run.

    Attributes:
        phase: thinking, forced to close it, answering, or done.
        record: what happened to it.
        at_boundary: whether its last token ends a step, on which nothing is decided yet.
        forced: what is forced next.
        masked: whether its answer may not open the thinking again.
    """

    def __init__(self, plan: RowPlan, prompt_ids: Sequence[int], sample_index: int) -> None:
        token_format = plan.token_format
        span = token_format.thinking_span(prompt_ids)
        self.phase = Phase.DONE if span.closed else Phase.THINKING
        self.record = StopRecord(reason="natural" if span.closed else "length")
        self.at_boundary = False
        self.forced: deque[int] = deque()
        self.masked = False
        self._plan = plan
        self._sample_index = sample_index
        self._rule = plan.rule.for_row()
        self._boundary = token_format.boundary_state(prompt_ids[span.start :])
        self._prefilled_tokens = self._boundary.thinking_tokens
        self._length = 0  # tokens generated so far
        self._end_ids: frozenset[int] = frozenset()  # of its answer
        self._box: BoxState | None = None
        self._answer_tokens = 0

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end its text."""
        return self._plan.eos_ids

    @property
    def boxed(self) -> bool:
        """Whether its answer was opened by the box prefix."""
        return self._box is not None

    @property
    def greedy(self) -> bool:
        """Whether the next token is the model's most likely one, whatever the sampling."""
        answers = self.phase is Phase.ANSWER and self.boxed
        return answers and not self._plan.settings.answer_do_sample

    def push(self, token: int) -> bool:
        """Takes in the token chosen next; whether it completes the answer."""
        self._length += 1
        if self.phase is Phase.THINKING:
            self._think(token)
        elif self.phase is Phase.FORCING:
            self.forced.popleft()
            if not self.forced:
                self.phase = Phase.ANSWER
        elif self.phase is Phase.ANSWER:
            self._answer_tokens += 1
            closed = self._box is not None and self._box.push(token)
            full = self._answer_tokens == self._plan.settings.max_answer_tokens
            if closed or full or token in self._end_ids:
                self.phase = Phase.DONE
                return True
        return False

    def end(self) -> None:
        """Something else has ended the row."""
        self.phase = Phase.DONE
        self.at_boundary = False

    def decide(
        self,
        stop_probability: Callable[[], float],
        trial_answer: Callable[[int], TrialAnswer],
        next_text: Callable[[], str],
    ) -> None:
        """Decides on the step that has ended with the last token.

        Args:
            stop_probability: gives the learned policy's.
            trial_answer: gives an answer forced here, of at most so many tokens.
            next_text: gives the text of the most likely next token.
        """
        plan, record = self._plan, self.record
        self.at_boundary = False
        end = StepEnd(
            sample_index=self._sample_index,
            step=len(record.step_ends),
            thinking_tokens=self._length,
            may_stop=self._length >= plan.settings.min_thinking_tokens,
            stop_probability=stop_probability,
            trial_answer=trial_answer,
            next_text=next_text,
        )
        record.step_ends.append(self._length)
        stop, signal = self._rule.at_step_end(end)
        learned = "stop_probability" in plan.rule.asks
        (record.probabilities if learned else record.signals).append(
            math.nan if signal is None else signal
        )
        if signal is not None and math.isnan(signal):
            record.nan_steps += 1
            stop = False
        if stop and end.may_stop:
            record.reason = plan.rule.reason
        elif plan.budget is not None and plan.budget.at_step_end(end).stop:
            record.reason = plan.budget.reason
        else:
            return
        self._close(natural=False)

    def _think(self, token: int) -> None:
        if token in self._plan.eos_ids and token != self._plan.token_format.think_end_id:
            self.record.reason = "natural"
            self.phase = Phase.DONE
            return
        self.at_boundary = self._boundary.push(token)
        tokens = self._boundary.thinking_tokens - self._prefilled_tokens
        self.record.thinking_tokens = max(0, tokens)
        if self._boundary.ended:
            self.record.reason = "natural"
            self._close(natural=True)

    def _close(self, natural: bool) -> None:
        """Turns to the answer; after a natural end, the model has written some closing."""
        plan, settings = self._plan, self._plan.settings
        forced = settings.answer == "forced"
        written = self._boundary.closing_written if natural else 0
        suffix = plan.token_format.forced_suffix(settings.answer, written)
        if natural and not forced:
            suffix = []
        self.forced.extend(suffix)
        self.phase = Phase.FORCING if suffix else Phase.ANSWER
        closed = forced or not natural  # by us, so that the answer's message is known to be open
        self.masked = settings.mask_reentry and closed
        self._end_ids = plan.eos_ids.union(plan.token_format.answer_end_ids if closed else ())
        if forced:
            self._box = plan.token_format.box_state()
