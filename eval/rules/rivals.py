"""Training-free rules of other papers, as their authors define them; see docs/eval.md for sources.

They run in generate like any `StopRule`, and are replayed from labels. What differs from the
original is said where it does. A step is a paragraph, and a trial answer is forced into a box and
decoded greedily.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar, Literal

from modeling_ospruner.configuration_ospruner import check_integer, check_number
from modeling_ospruner.rules_ospruner import (
    Agreement,
    Ask,
    RowRule,
    StepEnd,
    TrialAnswer,
    TrialConfidence,
    TrialRule,
    Verdict,
)

from ..grading.boxed import equal

__all__ = [
    "Deer",
    "Dynasor",
    "HaltCot",
    "Puma",
    "Refrain",
    "RunJump",
    "ThinkJustEnough",
    "same_answer",
    "similarity",
    "student_tail",
]

_BIT = math.log(2)


def same_answer(one: str, other: str) -> bool:
    """Whether two answers are the same to the grader."""
    return bool(equal(one, other))


@dataclass(frozen=True)
class Dynasor(Agreement):
    """Dynasor-CoT: the last k answers, tried every 64 tokens, are equal and none hesitates.

    An answer whose text holds one of `UNCERTAIN` counts as none (`dynasor/core/cot.py`). The
    original samples its probes at temperature .6, in the middle of a paragraph, too.

    Attributes:
        max_tokens: 20, as there.
        every_tokens: 64, as there; ours waits for the paragraph's end.
    """

    equal: Callable[[str, str], bool] = same_answer
    max_tokens: int = field(default=20, kw_only=True)
    every_tokens: int = field(default=64, kw_only=True)

    UNCERTAIN: ClassVar = ("wait", "hold", "but", "okay", "no", "hmm")

    def _new_judge(self) -> Callable[[TrialAnswer], Verdict]:
        judge = super()._new_judge()

        def certain(answer: TrialAnswer) -> Verdict:
            if any(word in answer.text.lower() for word in self.UNCERTAIN):
                answer = dataclasses.replace(answer, text="")
            return judge(answer)

        return certain


@dataclass(frozen=True)
class RunJump(TrialRule):
    """ES-CoT: the run of equal answers has become longer than the one before by a jump.

    Answers are tried at each step; r_1 .. r_n are the lengths of the runs of equal ones, the last
    still growing, and d_i = r_{i+1} - r_i. It stops where d_{n-1} is at least `jump`, and above the
    earlier differences in a one-sided t-test (arXiv 2509.14004).

    Where the paper's definition leaves it open: a run of length 0 stands before the first, so that
    an answer which never changes can stop; with fewer than two earlier differences the jump alone
    decides; an incomplete answer ends its run and is none.

    Attributes:
        jump: d_min, 1 or more.
        significance: of the t-test, in (0, 1).
    """

    jump: int = 10
    significance: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(type(self).__name__, "jump", self.jump, 1)
        check_number(type(self).__name__, "significance", self.significance, 0, 1, open_low=True)

    @property
    def asks(self) -> frozenset[Ask]:
        """Trial answers with their texts."""
        return frozenset({"trial_answer", "text"})

    def _new_judge(self) -> Callable[[TrialAnswer], Verdict]:
        runs = [0]
        previous: str | None = None

        def judge(answer: TrialAnswer) -> Verdict:
            nonlocal previous
            text = answer.text.strip()
            if answer.ended == "length" or not text:
                previous = None
                return Verdict(False, 0.0)
            if previous is not None and same_answer(previous, text):
                runs[-1] += 1
            else:
                runs.append(1)
            previous = text
            differences = [b - a for a, b in pairwise(runs)]
            last = differences.pop()
            found = float(last) if self._significant(last, differences) else 0.0
            return Verdict(found >= self.jump, found)

        return judge

    def _significant(self, last: int, earlier: Sequence[int]) -> bool:
        """Whether the mean of the earlier differences is below the last one."""
        m = len(earlier)
        if m < 2:
            return True
        mean = math.fsum(earlier) / m
        deviation = math.sqrt(math.fsum((d - mean) ** 2 for d in earlier) / (m - 1))
        if deviation == 0:
            return last > mean
        return student_tail((last - mean) * math.sqrt(m) / deviation, m - 1) < self.significance


def student_tail(t: float, freedom: int) -> float:
    """P(T > t) of Student's distribution (Abramowitz and Stegun, 26.7.3 and 26.7.4).

    Args:
        t: the statistic.
        freedom: degrees of freedom, 1 or more.
    """
    angle = math.atan2(t, math.sqrt(freedom))
    cosine2 = math.cos(angle) ** 2
    odd = freedom % 2
    term = math.sin(angle) * (math.cos(angle) if odd else 1.0)
    total = 0.0
    for k in range(freedom // 2):
        total += term
        term *= cosine2 * (2 * k + 1 + odd) / (2 * k + 2 + odd)
    within = 2 / math.pi * (angle + total) if odd else total
    return (1 - within) / 2


@dataclass(frozen=True)
class HaltCot(TrialRule):
    """HALT-CoT: the entropy of the answer is below a threshold at two steps in a row.

    The original takes the entropy over a given set of candidates, whose probabilities it reads off
    their first tokens. Questions with open answers have no such set. Here the entropy is the chain
    rule's along the greedy answer, over all its tokens and its end: our reading.

    Attributes:
        threshold: theta, in bits, 0 or more.
        streak: steps in a row, as in the authors' code.
    """

    threshold: float = 0.6
    streak: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(type(self).__name__, "threshold", self.threshold, 0, math.inf)
        check_integer(type(self).__name__, "streak", self.streak, 1)

    def _new_judge(self) -> Callable[[TrialAnswer], Verdict]:
        # The highest of the last `streak` entropies: below theta where all of them are.
        last: list[float] = []

        def judge(answer: TrialAnswer) -> Verdict:
            complete = answer.ended != "length"
            last.append(answer.whole_entropy / _BIT if complete else math.inf)
            del last[: -self.streak]
            highest = max(last) if len(last) == self.streak else math.inf
            return Verdict(highest < self.threshold, highest if highest < math.inf else None)

        return judge


@dataclass(frozen=True)
class Deer(TrialConfidence):
    """DEER: a trial answer before "Wait" is more confident than a threshold; ten trials at most.

    As `vllm-deer.py` of the authors, with the paper's geometric mean. The original looks for "Wait"
    anywhere; ours where a paragraph would begin with it. Its trial answer leaves the thinking open.

    Attributes:
        threshold: lambda, in (0, 1]; confidence must lie above it.
        trials: at most so many answers are tried.
        max_tokens: 20, as there.
        transition_words: "Wait", as there.
    """

    trials: int = 10
    max_tokens: int = field(default=20, kw_only=True)
    transition_words: tuple[str, ...] = field(default=("Wait",), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(type(self).__name__, "trials", self.trials, 1)

    def for_row(self) -> RowRule:
        """The rule with all its trials left."""
        return _Counted(super().for_row(), self.trials)

    def _new_judge(self) -> Callable[[TrialAnswer], Verdict]:
        judge = super()._new_judge()

        def above(answer: TrialAnswer) -> Verdict:
            stop, signal = judge(answer)
            return Verdict(stop and signal != self.threshold, signal)

        return above


class _Counted:
    """A row's rule that measures at most so often."""

    def __init__(self, rule: RowRule, left: int) -> None:
        self._rule = rule
        self._left = left

    def at_step_end(self, end: StepEnd) -> Verdict:
        """Asks the rule while it may still measure."""
        if not self._left:
            return Verdict(False)
        verdict = self._rule.at_step_end(end)
        self._left -= verdict.signal is not None
        return verdict


@dataclass(frozen=True)
class ThinkJustEnough:
    """Think Just Enough: the mean entropy of the thinking so far is at most a threshold.

    Entropies are over the 20 most likely tokens (arXiv 2510.08146). The original decides once,
    after a first bounded piece of reasoning; ours at each step's end.

    Attributes:
        threshold: tau, in bits, 0 or more; the original takes it from correct examples.
    """

    threshold: float
    reason: ClassVar[Literal["policy"]] = "policy"

    def __post_init__(self) -> None:
        check_number(type(self).__name__, "threshold", self.threshold, 0, math.inf)

    @property
    def asks(self) -> frozenset[Ask]:
        """The thinking's entropy."""
        return frozenset({"thinking_entropy"})

    def for_row(self) -> RowRule:
        """Itself: it remembers nothing."""
        return self

    def at_step_end(self, end: StepEnd) -> Verdict:
        """Compares."""
        entropy = end.thinking_entropy() / _BIT
        return Verdict(entropy <= self.threshold, entropy)


def similarity(one: Counter[str], other: Counter[str]) -> float:
    """Cosine of two texts' word counts; 0 where one has no words."""
    product = sum(count * other[word] for word, count in one.items())
    norms = math.sqrt(sum(n * n for n in one.values()) * sum(n * n for n in other.values()))
    return product / norms if norms else 0.0


def _words(text: str) -> Counter[str]:
    return Counter(re.findall(r"\w+", text.lower()))


@dataclass(frozen=True)
class Refrain:
    """REFRAIN's discriminator: a reflective step that repeats an earlier one.

    It stops at a step that holds one of `REFLECTION`, after an earlier step held one of `ANSWERED`,
    and whose similarity to some earlier step is at least a threshold (arXiv 2510.10103, Algorithm
    1). The original embeds steps with a sentence encoder, and moves its threshold from problem to
    problem with a bandit; ours compares word counts, at one threshold.

    Attributes:
        threshold: tau, in [0, 1].
    """

    threshold: float
    reason: ClassVar[Literal["policy"]] = "policy"

    REFLECTION: ClassVar = (
        "wait", "let me check", "hold on", "have made a mistake", "double check", "double-check",
        "is that correct", "let me re-read", "alternatively", "let me try", "let me consider",
        "what if we try", "from a different angle", "not sure", "looks like", "that seems", "hmm",
        "perhaps", "maybe i", "not certain", "it seems", "i suspect", "my guess is",
        "earlier we saw", "from before", "recall that", "let me go back", "previous result",
        "remember that we found",
    )  # fmt: skip
    ANSWERED: ClassVar = ("answer is", "answer should be", "\\boxed")

    def __post_init__(self) -> None:
        check_number(type(self).__name__, "threshold", self.threshold, 0, 1)

    @property
    def asks(self) -> frozenset[Ask]:
        """The steps' texts."""
        return frozenset({"text"})

    def for_row(self) -> RowRule:
        """The rule with no step seen yet."""
        return _RefrainRow(self)


class _RefrainRow:
    """REFRAIN on one row."""

    def __init__(self, rule: Refrain) -> None:
        self._rule = rule
        self._seen: list[Counter[str]] = []
        self._answered = False

    def at_step_end(self, end: StepEnd) -> Verdict:
        """Compares a reflective step with all before it."""
        text = end.step_text().lower()
        words, signal = _words(text), None
        if self._answered and any(cue in text for cue in self._rule.REFLECTION):
            signal = max(similarity(words, before) for before in self._seen)
        self._seen.append(words)
        self._answered |= any(cue in text for cue in self._rule.ANSWERED)
        return Verdict(signal is not None and signal >= self._rule.threshold, signal)


@dataclass(frozen=True, kw_only=True)
class Puma(TrialRule):
    """PUMA-like: answers tried at redundant steps are confident, equal and no less so once more.

    A step is a candidate if it repeats the one before. It stops at the second of two candidates
    that follow each other with the same answer, the first with at least `confidence`, the second
    with at most `drop` less (arXiv 2605.17672, `configs/DS-7B.conf`). The original's detector of
    redundancy is a trained sentence encoder, and it breaks loops; ours compares word counts.

    Attributes:
        redundancy: least similarity to the step before, in [0, 1].
        confidence: geometric mean of the first answer's probabilities, in [0, 1].
        drop: by which the second may be less confident.
        first_step: before which nothing stops, counted from 1; the original waits for the tenth.
    """

    redundancy: float = 0.35
    confidence: float = 0.98
    drop: float = 0.03
    first_step: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("redundancy", "confidence", "drop"):
            check_number(type(self).__name__, name, vars(self)[name], 0, 1)
        check_integer(type(self).__name__, "first_step", self.first_step, 1)

    @property
    def asks(self) -> frozenset[Ask]:
        """The steps' texts, and trial answers."""
        return frozenset({"text", "trial_answer"})

    def for_row(self) -> RowRule:
        """The rule with no step seen yet."""
        return _PumaRow(self, super().for_row())

    def _new_judge(self) -> Callable[[TrialAnswer], Verdict]:
        first: tuple[str, float] | None = None

        def judge(answer: TrialAnswer) -> Verdict:
            nonlocal first
            text = answer.text.strip()
            if answer.ended == "length" or not text or not answer.logprobs:
                first = None
                return Verdict(False, 0.0)
            sure = math.exp(math.fsum(answer.logprobs) / len(answer.logprobs))
            verified = (
                first is not None and same_answer(first[0], text) and sure >= first[1] - self.drop
            )
            signal = first[1] if verified and first is not None else 0.0
            first = (text, sure)
            return Verdict(verified and signal >= self.confidence, signal)

        return judge


class _PumaRow:
    """PUMA on one row."""

    def __init__(self, rule: Puma, trial: RowRule) -> None:
        self._rule = rule
        self._trial = trial
        self._before: Counter[str] | None = None

    def at_step_end(self, end: StepEnd) -> Verdict:
        """Tries an answer where the step repeats the one before."""
        words, before = _words(end.step_text()), self._before
        self._before = words
        if before is None or similarity(words, before) < self._rule.redundancy:
            return Verdict(False)
        stop, signal = self._trial.at_step_end(end)
        return Verdict(stop and end.step + 1 >= self._rule.first_step, signal)
