"""What rules without training measure at each step end: one function a rule, with its source.

A generator takes the step ends of one row in order (`StepEnd`), and what says that two answers are
the same; it gives one number a step end, NaN where it measures nothing. What remembers nothing is a
plain function of one step's end. None looks ahead, so that it runs on labelled traces and in
generate alike. What differs from the original is said where it does.
Everywhere a step is a paragraph, and a trial answer is forced into a box and decoded greedily.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

Same = Callable[[str, str], bool]
"""Whether two answers mean the same."""

TRIAL_TOKENS = 32
ENTROPY_TOKENS = 20
"""How many of the most likely tokens an entropy is taken over."""

_BIT = math.log(2)


@dataclass(frozen=True)
class TrialAnswer:
    """A forced answer tried at a step end."""

    # Tokens after the box prefix, with one that closed the box, without one that ended the text.
    ids: tuple[int, ...]
    # "closed" by the brace that closes the box, "eos", or "length" at its cap.
    ended: Literal["closed", "eos", "length"]
    # Natural log-probability of each of `ids` under the model's plain (temperature 1) distribution.
    logprobs: tuple[float, ...]
    # In nats, of the distribution at the first token over its 20 most likely tokens, renormalised.
    entropy: float
    text: str = ""  # what `ids` say, without the closing brace; empty without a tokenizer
    # The sum of the same over all tokens of the answer, that of its end included: the chain rule
    # along the greedy answer. NaN where it is not known.
    whole_entropy: float = math.nan

    @property
    def said(self) -> str:
        """The text of a complete answer; "" of any other."""
        return "" if self.ended == "length" else self.text.strip()

    @property
    def confidence(self) -> float:
        """Geometric mean of its tokens' probabilities; NaN where it has none or is not complete."""
        if self.ended == "length" or not self.logprobs:
            return math.nan
        return math.exp(math.fsum(self.logprobs) / len(self.logprobs))


@dataclass(frozen=True)
class StepEnd:
    """A row at the end of a step: what a rule is told, and may ask for, of labels and generate."""

    row: int  # which of the rows
    step: int  # the step's index, from 0
    thinking_tokens: int  # L_i, the tokens generated through the step's end
    may_stop: bool  # whether `min_thinking_tokens` is reached; if not, a stop is ignored
    # Gives an answer forced here, of at most so many tokens; the row is left as it is.
    trial_answer: Callable[[int], TrialAnswer]
    next_text: Callable[[], str]  # gives the text of the token that most likely comes next
    step_text: Callable[[], str]  # gives the text of the step that has ended here
    # Gives the mean entropy, in nats, at which the thinking's tokens so far were drawn, each over
    # the ENTROPY_TOKENS most likely tokens at temperature 1.
    thinking_entropy: Callable[[], float]


def tokens(end: StepEnd) -> float:
    """The thinking tokens so far (s1's budget, at a step's end)."""
    return end.thinking_tokens


def steps(end: StepEnd) -> float:
    """The number of steps so far."""
    return end.step + 1


def answers_tried(
    ends: Iterable[StepEnd],
    max_tokens: int = TRIAL_TOKENS,
    every_tokens: int = 1,
    transition_words: tuple[str, ...] = (),
    trials: float = math.inf,
) -> Iterator[TrialAnswer | None]:
    """The answer tried at each step end; None where none is.

    Args:
        ends: of one row.
        max_tokens: cap on a trial answer.
        every_tokens: thinking tokens, at least, from one trial answer to the next.
        transition_words: if given, answers are tried only where the most likely next token is one
            of these words, such as ("Wait", "Alternatively").
        trials: at most so many answers are tried.
    """
    last = 0  # thinking tokens at the last trial answer
    for end in ends:
        due = trials > 0 and end.may_stop and end.thinking_tokens - last >= every_tokens
        if due and transition_words:
            due = end.next_text().strip() in transition_words
        if due:
            last, trials = end.thinking_tokens, trials - 1
        yield end.trial_answer(max_tokens) if due else None


def entropy(ends: Iterable[StepEnd], same: Same, **trials: Any) -> Iterator[float]:
    """Entropy, in nats, of the trial answer's first token: one forward, for that needs no more."""
    for answer in answers_tried(ends, **{"max_tokens": 1, **trials}):
        yield math.nan if answer is None else answer.entropy


def confidence(ends: Iterable[StepEnd], same: Same, **trials: Any) -> Iterator[float]:
    """Geometric mean of the probabilities of the trial answer's tokens, the brace included.

    DEER (arXiv 2504.15895) is this with "Wait", 20 tokens and ten trials, as its authors'
    `vllm-deer.py` with the paper's mean. The original looks for "Wait" anywhere, ours where a
    paragraph would begin with it; its trial answer leaves the thinking open.
    """
    for answer in answers_tried(ends, **trials):
        yield math.nan if answer is None else answer.confidence


def _runs(
    ends: Iterable[StepEnd], same: Same, hesitation: tuple[str, ...] = (), **trials: Any
) -> Iterator[list[int] | None]:
    """How long the runs of equal answers are, the last of which may grow; [] where none is said.

    A run of length 0 stands before the first. None where no answer is tried.
    """
    runs, previous = [0], ""
    for answer in answers_tried(ends, **trials):
        if answer is None:
            yield None
            continue
        hesitates = any(word in answer.text.lower() for word in hesitation)
        text = "" if hesitates else answer.said
        if text and previous and same(previous, text):
            runs[-1] += 1
        elif text:
            runs.append(1)
        previous = text
        yield runs if text else []


def agreement(
    ends: Iterable[StepEnd], same: Same, hesitation: tuple[str, ...] = (), **trials: Any
) -> Iterator[float]:
    """How many trial answers in a row, to this one, are the same (arXiv 2506.02536).

    An answer that is empty, incomplete, or holds a word of `hesitation` agrees with none. Dynasor
    (`dynasor/core/cot.py`) is this every 64 tokens with such words; the original samples its probes
    at temperature .6, in the middle of a paragraph, too.
    """
    for runs in _runs(ends, same, hesitation, **trials):
        yield math.nan if runs is None else float([0, *runs][-1])


def run_jump(
    ends: Iterable[StepEnd], same: Same, significance: float = 0.05, **trials: Any
) -> Iterator[float]:
    """ES-CoT (arXiv 2509.14004): by how much the run of equal answers exceeds the one before.

    r_1 .. r_n are the lengths of the runs of equal answers, the last still growing, and
    d_i = r_{i+1} - r_i. The signal is d_{n-1} where it is above the earlier differences in a
    one-sided t-test, else 0. Where the paper leaves it open: a run of length 0 stands before the
    first, so that an answer which never changes can stop; with fewer than two earlier differences
    the jump alone decides; an incomplete answer ends its run and is none.
    """
    from scipy.stats import ttest_1samp  # here: it is slow to import, and one rule's

    for runs in _runs(ends, same, **trials):
        *earlier, last = [b - a for a, b in pairwise(runs or ())] or [0]
        if len({*earlier}) < 2:  # nothing varies
            above = len(earlier) < 2 or last > earlier[0]
        else:
            above = ttest_1samp(earlier, last, alternative="less").pvalue < significance
        yield math.nan if runs is None else float(last if runs and above else 0)


def whole_entropy(ends: Iterable[StepEnd], same: Same, **trials: Any) -> Iterator[float]:
    """HALT-CoT: entropy of the answer, in bits: the highest of the last two.

    The original takes the entropy over a given set of candidates, whose probabilities it reads off
    their first tokens. Questions with open answers have no such set: ours is the chain rule's along
    the greedy answer, over all its tokens and its end.
    """
    before = math.nan
    for answer in answers_tried(ends, **trials):
        if answer is None:
            yield math.nan
            continue
        here = math.nan if answer.ended == "length" else answer.whole_entropy / _BIT
        yield math.nan if math.isnan(before) else max(here, before)
        before = here


def thinking_entropy(end: StepEnd) -> float:
    """Think Just Enough (arXiv 2510.08146): mean entropy of the thinking so far, in bits.

    Over the 20 most likely tokens. The original decides once, after a first bounded piece of
    reasoning, and takes its threshold from correct examples; ours decides at each step's end.
    """
    return end.thinking_entropy() / _BIT


def similarity(one: Counter[str], other: Counter[str]) -> float:
    """Cosine of two texts' word counts; 0 where one has no words."""
    product = sum(count * other[word] for word, count in one.items())
    norms = math.sqrt(sum(n * n for n in one.values()) * sum(n * n for n in other.values()))
    return product / norms if norms else 0.0


def _words(text: str) -> Counter[str]:
    return Counter(re.findall(r"\w+", text.lower()))


REFLECTION = re.compile(
    "wait|let me check|hold on|have made a mistake|double[ -]check|is that correct|let me re-read|"
    "alternatively|let me try|let me consider|what if we try|from a different angle|not sure|"
    "looks like|that seems|hmm|perhaps|maybe i|not certain|it seems|i suspect|my guess is|"
    "earlier we saw|from before|recall that|let me go back|previous result|remember that we found"
)
"""REFRAIN's words of reflection."""

_ANSWERED = re.compile(r"answer is|answer should be|\\boxed")


def repetition(ends: Iterable[StepEnd], same: Same) -> Iterator[float]:
    """REFRAIN's discriminator (arXiv 2510.10103, Algorithm 1): a reflective step repeats another.

    The similarity to the most similar step before, at a step that holds one of `REFLECTION` after
    an earlier step held an answer. The original embeds steps with a sentence encoder, and moves its
    threshold from problem to problem with a bandit; ours compares word counts, at one threshold.
    """
    seen: list[Counter[str]] = []
    answered = False
    for end in ends:
        text = end.step_text().lower()
        words, reflects = _words(text), answered and REFLECTION.search(text)
        yield max(similarity(words, before) for before in seen) if reflects else math.nan
        seen.append(words)
        answered = answered or _ANSWERED.search(text) is not None


def repeats(ends: Iterable[StepEnd], same: Same) -> Iterator[float]:
    """How many earlier steps said the same, word for word: the plainest rule against loops."""
    seen: Counter[str] = Counter()
    for end in ends:
        said = " ".join(re.findall(r"\w+", end.step_text().lower()))
        yield float(seen[said]) if said else math.nan
        seen[said] += 1


def confirmed(
    ends: Iterable[StepEnd],
    same: Same,
    max_tokens: int = TRIAL_TOKENS,
    redundancy: float = 0.35,
    drop: float = 0.03,
    first_step: int = 10,
) -> Iterator[float]:
    """PUMA-like: confidence of an answer that a second redundant step confirms.

    A step is redundant if it repeats the one before (similarity of at least `redundancy`). Answers
    are tried at redundant steps; the second of two that follow each other with the same answer
    confirms the first, unless it is less confident by more than `drop` (arXiv 2605.17672,
    `configs/DS-7B.conf`). Before the tenth step nothing stops. The original's detector of
    redundancy is a trained sentence encoder, and it breaks loops; ours compares word counts.
    """
    before, held = Counter[str](), None  # a step's words, and a redundant one's complete answer
    for end in ends:
        words, previous = _words(end.step_text()), before
        before, signal = words, math.nan
        if similarity(words, previous) >= redundancy and end.may_stop:
            answer = end.trial_answer(max_tokens)
            complete = answer.said and not math.isnan(answer.confidence)
            if held and complete and same(held.said, answer.said) and end.step + 1 >= first_step:
                sure = answer.confidence >= held.confidence - drop
                signal = held.confidence if sure else math.nan
            held = answer if complete else None
        yield signal
