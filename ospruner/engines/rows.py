"""The state of one trace being sampled, and of one answer being forked, token by token."""

import math
from collections.abc import Callable, Sequence
from typing import Literal

from modeling_ospruner.formats_ospruner import TokenFormat
from modeling_ospruner.stopping_ospruner import mix64
from ospruner.formats import ends_alone

from .interface import AnswerStop, ForkedAnswer, Sampled, SamplingSettings, TraceRequest, row_state


class SamplingRow:
    """One trace being sampled; `fmt` says where its thinking ends."""

    def __init__(self, request: TraceRequest, seed: int, fmt: TokenFormat) -> None:
        self.request = request
        self.tokens: list[int] = []  # end marker and end-of-text token included
        self._draws_from = row_state(seed, request.key)
        self._fmt = fmt
        self.thinking = ends_alone(fmt).boundary_state()
        self.finished = self._capped = False

    @property
    def text(self) -> list[int]:
        """Its prompt and what was sampled."""
        return [*self.request.prompt_ids, *self.tokens]

    def draw(self, number: int) -> int:
        """64 bits of a draw."""
        return mix64(self._draws_from ^ number)

    def push(self, token: int, settings: SamplingSettings, eos_ids: frozenset[int]) -> None:
        """Takes the next sampled token, and notes whether the row is finished."""
        self.tokens.append(token)
        state = self.thinking
        if token in eos_ids and token != self._fmt.think_end_id:
            self.finished = True
        elif state.ended:
            answered = len(self.tokens) - state.thinking_tokens - state.end_tokens
            self.finished = answered >= settings.max_answer_tokens
        else:
            state.push(token)
            self._capped = not state.ended and state.thinking_tokens >= settings.max_new_tokens
            self.finished = self._capped

    def sampled(self, eos_ids: frozenset[int]) -> Sampled:
        """The finished row's result."""
        state = self.thinking
        end = state.thinking_tokens + state.end_tokens
        answer = self.tokens[end:] if state.ended else []
        if answer and answer[-1] in eos_ids:
            answer = answer[:-1]
        several = state.ended and self._fmt.end_marker is not None
        marker = self.tokens[state.thinking_tokens : end] if several else []
        trace = self.tokens[: state.thinking_tokens]
        return Sampled(trace, answer, "cap" if self._capped else "natural", marker)


class Branch:
    """One fork: the answer so far."""

    def __init__(
        self,
        stop: Callable[[], AnswerStop] | None,  # makes the rule that completes the answer
        kept: Sequence[int] = (),  # the text before it: prompt, thinking up to the cut, suffix
        options: Sequence[int] = (),  # as in `ForkRequest`
    ) -> None:
        self.kept, self.options = kept, options
        self.ids: list[int] = []
        self.answer: ForkedAnswer | None = None  # the whole, once it is complete
        self._logprobs: list[float] = []
        self._entropies: list[float] = []
        self._rule = stop() if stop is not None else None

    def push(
        self, token: int, logprob: float, entropy: float, limit: int, eos_ids: frozenset[int]
    ) -> None:
        """Takes the next token; sets `answer` where it completes it."""
        ended: Literal["closed", "eos", "length"] | None = None
        self._entropies.append(entropy)
        if token in eos_ids:
            ended = "eos"
        else:
            self.ids.append(token)
            self._logprobs.append(logprob)
            if self._rule is not None and self._rule.push(token):
                ended = "closed"
            elif len(self.ids) >= limit:
                ended = "length"
        if ended is not None:
            first, whole = self._entropies[0], math.fsum(self._entropies)
            self.answer = ForkedAnswer(self.ids, ended, self._logprobs, first, whole)
