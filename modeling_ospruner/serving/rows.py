"""The state of one row being sampled, and of one answer being forked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from modeling_ospruner.reasoning_format import TokenFormat

from .engine import AnswerStop, ForkedAnswer, Sampled, SamplingSettings
from .sampling import row_state


@dataclass
class Row:
    """One prompt being sampled.

    Attributes:
        index: its place among the prompts.
        prompt: its prompt.
        state: what its draws come from.
        thinking: whether it is before the end marker.
        tokens: everything sampled, end marker and end-of-text token included.
    """

    index: int
    prompt: Sequence[int]
    state: int
    thinking: bool = True
    tokens: list[int] = field(default_factory=list)
    trace_length: int = 0
    ended: Literal["natural", "cap"] = "natural"

    @classmethod
    def start(cls, index: int, prompt: Sequence[int], key: str, seed: int) -> Row:
        """A row that has sampled nothing yet."""
        return cls(index, prompt, row_state(seed, key))

    def push(
        self, token: int, settings: SamplingSettings, fmt: TokenFormat, eos_ids: frozenset[int]
    ) -> bool:
        """Takes the next sampled token; whether the row is finished."""
        self.tokens.append(token)
        if token in eos_ids and token != fmt.think_end_id:
            return True
        if not self.thinking:
            return len(self.tokens) - self.trace_length - 1 >= settings.max_answer_tokens
        if token == fmt.think_end_id:
            self.thinking = False
            return False
        self.trace_length += 1
        if self.trace_length >= settings.max_new_tokens:
            self.ended = "cap"
            return True
        return False

    def sampled(self, eos_ids: frozenset[int]) -> Sampled:
        """The finished row's result."""
        answer = [] if self.thinking else self.tokens[self.trace_length + 1 :]
        if answer and answer[-1] in eos_ids:
            answer = answer[:-1]
        return Sampled(self.tokens[: self.trace_length], answer, self.ended)


class Branch:
    """One fork: the answer so far, and how it ended.

    Args:
        cut: how many thinking tokens it keeps.
        stop: makes the rule that completes the answer.
    """

    def __init__(self, cut: int, stop: Callable[[], AnswerStop] | None) -> None:
        self.cut = cut
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.entropy = 0.0
        self.ended: Literal["closed", "eos", "length"] | None = None
        self._rule = stop() if stop is not None else None

    def push(self, token: int, logprob: float, limit: int, eos_ids: frozenset[int]) -> None:
        """Takes the next token; sets `ended` where it completes the answer."""
        if token in eos_ids:
            self.ended = "eos"
            return
        self.ids.append(token)
        self.logprobs.append(logprob)
        if self._rule is not None and self._rule.push(token):
            self.ended = "closed"
        elif len(self.ids) >= limit:
            self.ended = "length"

    def finished(self) -> ForkedAnswer:
        """The answer.

        Raises:
            RuntimeError: it is not complete.
        """
        if self.ended is None:
            raise RuntimeError(f"the fork at {self.cut} thinking tokens is not finished")
        return ForkedAnswer(self.ids, self.ended, self.logprobs, self.entropy)
