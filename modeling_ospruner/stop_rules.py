"""What may stop a row at the end of a step: the learned policy, a budget, training-free rules.

A `StopRule` is what generate is given; it makes one `RowRule` a row, which is asked at each step
end and asks back for what it needs. Training-free rules try an answer: it is decoded greedily on a
copy of the row's cache, so that the row itself goes on as if nothing had happened.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

from .checks_ospruner import check_integer, check_number
from .draws_ospruner import uniform

Ask = Literal["stop_probability", "trial_answer", "text"]
DEFAULT_TRIAL_TOKENS = 32


@dataclass(frozen=True)
class TrialAnswer:
    """A forced answer tried at a step end.

    Attributes:
        ids: its tokens after the box prefix; the one that closed the box is included, one that
            ended the text is not.
        ended: "closed" by the brace that closes the box, "eos", or "length" at its cap.
        logprobs: natural log-probability of each of `ids` under the model's plain (temperature 1)
            distribution.
        entropy: in nats, of the distribution at the first token over its 20 most likely tokens,
            renormalised.
        text: what `ids` say, without the closing brace; empty without a tokenizer.
    """

    ids: tuple[int, ...]
    ended: Literal["closed", "eos", "length"]
    logprobs: tuple[float, ...]
    entropy: float
    text: str = ""


class StepEnd(Protocol):
    """A row at the end of a step: what a rule is told, and may ask for."""

    @property
    def sample_index(self) -> int:
        """The row's index among all rows of the run."""

    @property
    def step(self) -> int:
        """The step's index, from 0."""

    @property
    def thinking_tokens(self) -> int:
        """L_i, the tokens generated through the step's end."""

    @property
    def may_stop(self) -> bool:
        """Whether `min_thinking_tokens` is reached; if not, a stop is ignored."""

    def stop_probability(self) -> float:
        """The learned policy's pi_i."""

    def trial_answer(self, max_tokens: int) -> TrialAnswer:
        """An answer forced here, of at most so many tokens; the row is left as it is."""

    def next_text(self) -> str:
        """The text of the token that the model finds most likely to come next."""


class Verdict(NamedTuple):
    """What a rule says at a step end.

    Attributes:
        stop: whether the row stops thinking here.
        signal: what it measured; None where it did not measure. NaN never stops a row.
    """

    stop: bool
    signal: float | None = None


class RowRule(Protocol):
    """A rule at work on one row."""

    def at_step_end(self, end: StepEnd) -> Verdict:
        """Called at each step end, in order."""


@runtime_checkable
class StopRule(Protocol):
    """Something that may stop rows. It holds settings only; what it remembers is in its rows."""

    @property
    def reason(self) -> Literal["policy", "budget"]:
        """What `StopRecord.reason` says of the rows it stopped."""

    @property
    def asks(self) -> frozenset[Ask]:
        """What its rows ask for: generate prepares it, or refuses by name what it cannot give."""

    def for_row(self) -> RowRule:
        """The rule for a row that starts thinking."""


@dataclass(frozen=True)
class LearnedPolicy:
    """The trained policy (the paper's section 3): stops with probability pi_i, or from a threshold.

    Attributes:
        mode: "sample" stops where `uniform(seed, sample_index, step)` lies below pi_i,
            "threshold" where pi_i reaches the threshold.
        threshold: in [0, 1].
        seed: of the draws.
    """

    mode: Literal["sample", "threshold"]
    threshold: float
    seed: int = 0
    reason: ClassVar[Literal["policy"]] = "policy"

    @property
    def asks(self) -> frozenset[Ask]:
        """Its stop probability."""
        return frozenset({"stop_probability"})

    def for_row(self) -> RowRule:
        """Itself: it remembers nothing."""
        return self

    def at_step_end(self, end: StepEnd) -> Verdict:
        """Draws, or compares with the threshold."""
        probability = end.stop_probability()
        if self.mode == "threshold":
            return Verdict(probability >= self.threshold, probability)
        return Verdict(uniform(self.seed, end.sample_index, end.step) < probability, probability)


@dataclass(frozen=True)
class Budget:
    """Stops at the first step end with at least so many thinking tokens (s1's budget, at a step).

    Attributes:
        tokens: 1 or more.
    """

    tokens: int
    reason: ClassVar[Literal["budget"]] = "budget"

    def __post_init__(self) -> None:
        check_integer("Budget", "tokens", self.tokens, 1)

    @property
    def asks(self) -> frozenset[Ask]:
        """Nothing."""
        return frozenset()

    def for_row(self) -> RowRule:
        """Itself: it remembers nothing."""
        return self

    def at_step_end(self, end: StepEnd) -> Verdict:
        """Compares; its signal is the number of thinking tokens."""
        return Verdict(end.thinking_tokens >= self.tokens, float(end.thinking_tokens))


@dataclass(frozen=True, kw_only=True)
class _TrialRule(ABC):
    """A rule that judges trial answers, and when to try one.

    Attributes:
        max_tokens: cap on a trial answer.
        every_tokens: thinking tokens, at least, from one trial answer to the next.
        transition_words: if given, answers are tried only where the most likely next token is one
            of these words, such as ("Wait", "Alternatively"); at every step end otherwise.
    """

    max_tokens: int = DEFAULT_TRIAL_TOKENS
    every_tokens: int = 1
    transition_words: tuple[str, ...] = ()
    reason: ClassVar[Literal["policy"]] = "policy"

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_integer(name, "max_tokens", self.max_tokens, 1)
        check_integer(name, "every_tokens", self.every_tokens, 1)
        words = self.transition_words
        if not isinstance(words, tuple) or not all(isinstance(w, str) and w for w in words):
            raise TypeError(
                f"{name}: transition_words is {words!r}; it must be a tuple of words, such as "
                "('Wait', 'Alternatively')"
            )

    @property
    def asks(self) -> frozenset[Ask]:
        """Trial answers, and the next token's text where it watches for words."""
        return frozenset({"trial_answer", "text"} if self.transition_words else {"trial_answer"})

    def for_row(self) -> RowRule:
        """The rule with an empty memory."""
        return _TrialRow(self, self._new_judge())

    @abstractmethod
    def _new_judge(self) -> Callable[[TrialAnswer], Verdict]:
        """What judges one row's trial answers, in order."""


class _TrialRow:
    """Tries answers where the rule wants them, and has them judged."""

    def __init__(self, rule: _TrialRule, judge: Callable[[TrialAnswer], Verdict]) -> None:
        self._rule = rule
        self._judge = judge
        self._last = 0  # thinking tokens at the last trial answer

    def at_step_end(self, end: StepEnd) -> Verdict:
        """Judges a trial answer, where one is due."""
        rule = self._rule
        if not end.may_stop or end.thinking_tokens - self._last < rule.every_tokens:
            return Verdict(False)
        if rule.transition_words and end.next_text().strip() not in rule.transition_words:
            return Verdict(False)
        self._last = end.thinking_tokens
        return self._judge(end.trial_answer(rule.max_tokens))


@dataclass(frozen=True)
class AnswerEntropy(_TrialRule):
    """Stops where the answer's first token is certain: its entropy is at most a threshold.

    HALT-CoT's signal; it costs one forward of the closing and the box prefix.

    Attributes:
        threshold: in nats; 0 or more, at most ln 20 = 2.996, the highest possible.
        max_tokens: 1: the first token says it all.
    """

    threshold: float = 0.4
    max_tokens: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(type(self).__name__, "threshold", self.threshold, 0, math.log(20))

    def _new_judge(self) -> Callable[[TrialAnswer], Verdict]:
        return lambda answer: Verdict(answer.entropy <= self.threshold, answer.entropy)


@dataclass(frozen=True)
class TrialConfidence(_TrialRule):
    """Stops where the trial answer is confident: its tokens' probabilities have a high mean.

    DEER's signal, the geometric mean exp(1/n sum_j log p_j) over the answer's tokens, the closing
    brace included. DEER tries answers where the model is about to write a transition word: give
    `transition_words`. An answer that is not complete within `max_tokens` stops nothing.

    Attributes:
        threshold: in (0, 1].
    """

    threshold: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(type(self).__name__, "threshold", self.threshold, 0, 1, open_low=True)

    def _new_judge(self) -> Callable[[TrialAnswer], Verdict]:
        def judge(answer: TrialAnswer) -> Verdict:
            if not answer.logprobs:
                return Verdict(False)
            mean = math.exp(math.fsum(answer.logprobs) / len(answer.logprobs))
            return Verdict(answer.ended != "length" and mean >= self.threshold, mean)

        return judge


def _same_text(one: str, other: str) -> bool:
    return one == other


@dataclass(frozen=True)
class Agreement(_TrialRule):
    """Stops when the last k trial answers agree (Dynasor, ES-CoT).

    Its signal is the number of trial answers in a row, to this one, that agree with their
    predecessor. An answer that is empty, or not complete within `max_tokens`, agrees with none.

    Attributes:
        count: k, 2 or more.
        equal: whether two answers' texts are the same answer. Default: the same string.
    """

    count: int = 3
    equal: Callable[[str, str], bool] = _same_text

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(type(self).__name__, "count", self.count, 2)
        if not callable(self.equal):
            raise TypeError(f"Agreement: equal is {self.equal!r}; it must take two texts")

    @property
    def asks(self) -> frozenset[Ask]:
        """Trial answers with their texts."""
        return frozenset({"trial_answer", "text"})

    def _new_judge(self) -> Callable[[TrialAnswer], Verdict]:
        previous: str | None = None
        run = 0

        def judge(answer: TrialAnswer) -> Verdict:
            nonlocal previous, run
            text = answer.text.strip()
            if answer.ended == "length" or not text:
                previous, run = None, 0
            else:
                agrees = previous is not None and self.equal(previous, text)
                previous, run = text, run + 1 if agrees else 1
            return Verdict(run >= self.count, float(run))

        return judge
