"""What may stop a row at the end of a step: the learned policy, a budget, training-free rules.

A `StopRule` is what generate is given; it makes one `RowRule` a row, which is asked at each step
end and asks back for what it needs. Training-free rules try an answer: it is decoded greedily on a
copy of the row's cache, so that the row's own cache and the random state stay as they are. Draws
are counter-based: the same numbers in any batch and engine.
"""

from __future__ import annotations

import copy
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from .configuration_ospruner import MODES, check_choice, check_integer, check_number
from .formats_ospruner import TokenFormat

_MASK64 = (1 << 64) - 1


def mix64(value: int) -> int:
    """The finaliser of splitmix64 (Steele et al., 2014): a 64-bit integer from any integer."""
    z = (value + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def uniform(seed: int, sample_index: int, step: int) -> float:
    """The draw in [0, 1) that decides one step of one sample: a row stops if it is below pi.

    It depends on nothing else, so that a row's decisions are the same in any batch and engine.

    Args:
        seed: the policy's seed.
        sample_index: the row's index among all rows of the run.
        step: the step's index, from 0.
    """
    return (
        mix64(mix64(mix64(seed) ^ (sample_index & _MASK64)) ^ (step & _MASK64)) >> 11
    ) * 2.0**-53


Ask = Literal["stop_probability", "trial_answer", "text", "thinking_entropy"]
DEFAULT_TRIAL_TOKENS = 32
ENTROPY_TOKENS = 20
"""How many of the most likely tokens an answer's entropy is taken over."""


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
        whole_entropy: the sum of the same over all tokens of the answer, that of its end included:
            the chain rule along the greedy answer. NaN where it is not known.
    """

    ids: tuple[int, ...]
    ended: Literal["closed", "eos", "length"]
    logprobs: tuple[float, ...]
    entropy: float
    text: str = ""
    whole_entropy: float = math.nan


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

    def stop_probability(self, numbers: Sequence[float] = ()) -> float:
        """The learned policy's pi_i; one that tries answers needs the `TRIAL_NUMBERS` of them."""

    def trial_answer(self, max_tokens: int) -> TrialAnswer:
        """An answer forced here, of at most so many tokens; the row is left as it is."""

    def next_text(self) -> str:
        """The text of the token that the model finds most likely to come next."""

    def step_text(self) -> str:
        """The text of the step that has ended here."""

    def thinking_entropy(self) -> float:
        """Mean entropy, in nats, at which the thinking's tokens so far were drawn.

        Each over the ENTROPY_TOKENS most likely tokens at temperature 1.
        """


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
        threshold: in [0, 1]; of mode "threshold", and None in mode "sample".
        seed: of the draws in mode "sample".
        step_stride: asked at every k-th step end only, as it was trained.
        window: of mode "threshold": how many of the last probabilities are looked at together.
        by: "vote" stops where more than half of `window` probabilities reach the threshold
            (TERMINATOR), "mean" where their mean does, of fewer at the beginning (Thought
            Calibration).
        trial_every: at each k-th step end where it is asked an answer is tried, whose history it
            reads (`TrialHistory`), as it was trained; 0 for never.
        trial_max_tokens: cap on such an answer, as it was trained.
    """

    mode: Literal["sample", "threshold"]
    threshold: float | None = None
    seed: int = 0
    step_stride: int = 1
    window: int = 1
    by: Literal["vote", "mean"] = "vote"
    trial_every: int = 0
    trial_max_tokens: int = DEFAULT_TRIAL_TOKENS
    reason: ClassVar[Literal["policy"]] = "policy"

    def __post_init__(self) -> None:
        owner = type(self).__name__
        check_integer(owner, "window", self.window, 1)
        check_integer(owner, "trial_every", self.trial_every, 0)
        check_integer(owner, "trial_max_tokens", self.trial_max_tokens, 1)
        check_choice(owner, "by", self.by, ("vote", "mean"))
        if self.window > 1 and self.mode == "sample":
            raise ValueError(
                f"{owner}: window is {self.window}, but mode 'sample' draws at each step: leave it "
                "out, or give a threshold"
            )
        check_choice(owner, "mode", self.mode, MODES)
        if (self.threshold is None) is (self.mode == "threshold"):
            raise ValueError(
                f"{owner}: mode is {self.mode!r} and threshold {self.threshold}; a threshold "
                "belongs to mode 'threshold', and to no other"
            )
        if self.threshold is not None:
            check_number(owner, "threshold", self.threshold, 0, 1)

    @property
    def asks(self) -> frozenset[Ask]:
        """Its stop probability, and the trial answers that it reads."""
        if self.trial_every:
            return frozenset({"stop_probability", "trial_answer"})
        return frozenset({"stop_probability"})

    def for_row(self) -> RowRule:
        """Itself, which remembers nothing, or one with an empty window and no trial answers."""
        return self if self.window == 1 and not self.trial_every else _LearnedRow(self)

    def at_step_end(self, end: StepEnd) -> Verdict:
        """Draws, or compares with the threshold."""
        if (end.step + 1) % self.step_stride:
            return Verdict(False)
        return self.verdict(end, end.stop_probability())

    def verdict(self, end: StepEnd, probability: float) -> Verdict:
        """What follows from one probability."""
        if self.threshold is not None:
            return Verdict(probability >= self.threshold, probability)
        return Verdict(uniform(self.seed, end.sample_index, end.step) < probability, probability)


def window_score(probabilities: Sequence[float], window: int, by: Literal["vote", "mean"]) -> float:
    """What a threshold is compared with: one that is reached exactly where the window says stop.

    Args:
        probabilities: the last ones, `window` at most; NaN stops nothing.
        window: how many there may be.
        by: as in `LearnedPolicy`.
    """
    clean = [0.0 if math.isnan(p) else p for p in probabilities]
    if by == "mean":
        return math.fsum(clean) / len(clean)
    votes = window // 2 + 1  # so many of the highest must reach it
    return sorted(clean, reverse=True)[votes - 1] if len(clean) >= votes else 0.0


class _LearnedRow:
    """The learned policy on one row, by the last few probabilities or with trial answers."""

    def __init__(self, rule: LearnedPolicy) -> None:
        self._rule = rule
        self._last: list[float] = []
        self._history = None
        if rule.trial_every:
            self._history = TrialHistory(rule.trial_every, rule.trial_max_tokens)

    def at_step_end(self, end: StepEnd) -> Verdict:
        """Compares the window's score with the threshold; measures the step's probability.

        Answers are tried before `min_thinking_tokens`, too: they belong to the history.
        """
        rule = self._rule
        if (end.step + 1) % rule.step_stride:
            return Verdict(False)
        numbers = () if self._history is None else self._history.at_step(end.trial_answer)
        probability = end.stop_probability(numbers) if numbers else end.stop_probability()
        if rule.window == 1:
            return rule.verdict(end, probability)
        self._last = [*self._last, probability][-rule.window :]
        score = window_score(self._last, rule.window, rule.by)
        assert rule.threshold is not None  # of mode "threshold"
        return Verdict(score >= rule.threshold, self._last[-1])


TRIAL_NUMBERS = (
    "tried",
    "repeats",
    "run",
    "log_run",
    "distinct",
    "log_trials",
    "length",
    "confidence",
    "least_confidence",
    "entropy",
    "since",
)
"""What a policy with trial answers reads of them, all 0 before the first: 1; whether the one held
(the last) equals the one before; 1 - 1/r and ln r of the r equal ones in a row; 1 - 1/d of the d
different ones so far; ln of how many; the held one's tokens over their cap; its confidence, the
exponential of its tokens' mean log-probability; the least confidence among the r; the entropy at
its first token over ln 20; and the steps since, as a share of those from one trial to the next.
Answers are equal where their token ids are."""


class TrialHistory:
    """The `TRIAL_NUMBERS` of one row, from step to step.

    Args:
        every: k, an answer is tried at each k-th step.
        max_tokens: cap on an answer.
    """

    def __init__(self, every: int, max_tokens: int) -> None:
        self._every = every
        self._max_tokens = max_tokens
        self._since = 0  # steps
        self._trials = self._run = 0
        self._held: tuple[int, ...] = ()
        self._seen: set[tuple[int, ...]] = set()
        self._least = 1.0
        self._of_held = (0.0, 0.0, 0.0)  # length, confidence, entropy

    def at_step(self, trial_answer: Callable[[int], TrialAnswer]) -> tuple[float, ...]:
        """The numbers at the next step.

        Args:
            trial_answer: forces an answer there, of at most so many tokens; called where one is
                due.
        """
        self._since += 1
        if self._since % self._every == 0:
            self._since = 0
            self._take(trial_answer(self._max_tokens))
        if not self._trials:
            return (0.0,) * len(TRIAL_NUMBERS)
        length, confidence, entropy = self._of_held
        return (
            1.0,
            float(self._run > 1),
            1 - 1 / self._run,
            math.log(self._run),
            1 - 1 / len(self._seen),
            math.log(self._trials),
            length,
            confidence,
            self._least,
            entropy,
            self._since / self._every,
        )

    def _take(self, answer: TrialAnswer) -> None:
        repeats = self._trials > 0 and answer.ids == self._held
        confidence = 0.0
        if answer.logprobs:
            confidence = math.exp(math.fsum(answer.logprobs) / len(answer.logprobs))
        self._trials += 1
        self._run = self._run + 1 if repeats else 1
        self._least = min(self._least, confidence) if repeats else confidence
        self._held = answer.ids
        self._seen.add(answer.ids)
        entropy = answer.entropy / math.log(ENTROPY_TOKENS)
        self._of_held = (len(answer.ids) / self._max_tokens, confidence, entropy)


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
class TrialRule(ABC):
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

    def __init__(self, rule: TrialRule, judge: Callable[[TrialAnswer], Verdict]) -> None:
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
class AnswerEntropy(TrialRule):
    """Stops where the answer's first token is certain: its entropy is at most a threshold.

    It costs one forward of the closing and the box prefix.

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
class TrialConfidence(TrialRule):
    """Stops where the trial answer is confident: its tokens' probabilities have a high mean.

    DEER's signal, the geometric mean exp(1/n sum_j log p_j) over the answer's tokens, the closing
    brace included. An answer that is not complete within `max_tokens` stops nothing.

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
class Agreement(TrialRule):
    """Stops when the last k trial answers agree (answer consistency, arXiv 2506.02536).

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


_ATTENTION = (DynamicLayer, DynamicSlidingWindowLayer)
_STATIC = (StaticLayer, StaticSlidingWindowLayer)
_RECURRENT = (
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely tokens, and their natural log-probabilities at temperature 1.

    Args:
        logits: (..., V).

    Returns:
        Token ids and log-probabilities, (...).
    """
    tokens = logits.argmax(-1)
    best = logits.gather(-1, tokens[..., None])[..., 0].float()
    return tokens, best - logits.float().logsumexp(-1)


def last_logits(base: Any, **arguments: Any) -> torch.Tensor:
    """One forward; the logits (B, V) after each row's last token.

    Those of other tokens are not computed: of a long prompt they would fill gigabytes.

    Args:
        base: a causal LM.
        arguments: of its forward.
    """
    if base._supports_logits_to_keep():
        arguments["logits_to_keep"] = 1
    logits: torch.Tensor = base(**arguments).logits[:, -1]
    return logits


def top_entropy(logits: torch.Tensor) -> torch.Tensor:
    """Entropy in nats (...) over the ENTROPY_TOKENS most likely tokens of logits (..., V)."""
    kept = logits.float().topk(min(ENTROPY_TOKENS, logits.shape[-1]), dim=-1).values
    logs = kept.log_softmax(-1)
    return -(logs.exp() * logs).sum(-1)


def fork_row(cache: Cache, row: int, config: Any) -> DynamicCache:
    """A copy of one row of a cache, which may grow and be written to by itself.

    Args:
        cache: a dynamic or static cache of any number of rows.
        row: its index.
        config: the base's configuration.

    Raises:
        ValueError: the cache, or one of its layers, is of a kind that cannot be copied by rows.
    """
    if type(cache) not in (DynamicCache, StaticCache) or cache.offloading:
        raise ValueError(
            f"trial answers cannot copy a row of a {type(cache).__name__}"
            f"{' with offloading' if type(cache) is DynamicCache else ''}: leave "
            "cache_implementation out (or 'static'), or use a stop rule without trial answers"
        )
    forked = DynamicCache(config=config)
    layers: list[Any] = cache.layers
    for i, layer in enumerate(layers):
        kind = type(layer)
        if kind not in (*_ATTENTION, *_STATIC, *_RECURRENT):
            raise ValueError(
                f"trial answers cannot copy a row of a cache layer {kind.__name__} (layer {i}): "
                "use a stop rule without trial answers"
            )
        if kind in _STATIC:
            _fill(forked.layers[i], layer, row)
            continue
        own = copy.copy(layer)
        if kind is not LinearAttentionLayer and layer.is_initialized:
            # Dynamic layers never write into these tensors: growing makes new ones.
            own.keys, own.values = layer.keys[row : row + 1], layer.values[row : row + 1]
        if kind in _RECURRENT:
            for name, value in vars(layer).items():
                if isinstance(value, dict):
                    setattr(own, name, {k: _row_of(v, row) for k, v in value.items()})
        forked.layers[i] = own
    return forked


def _row_of(value: Any, row: int) -> Any:
    return value[row : row + 1].clone() if isinstance(value, torch.Tensor) else value


def _fill(target: Any, source: Any, row: int) -> None:
    """Puts what a static layer holds of one row into an empty dynamic one."""
    length = int(source.get_seq_length())
    held = min(length, source.max_cache_len)
    if length:
        target.update(
            source.keys[row : row + 1, :, :held].clone(),
            source.values[row : row + 1, :, :held].clone(),
        )
    if isinstance(target, DynamicSlidingWindowLayer):
        target.cumulative_length = length


class TrialAnswers:
    """A context in which rows of a running generate can be asked for answers.

    It only looks on as the base's forwards of this thread pass, to know the cache and the
    positions.

    Args:
        base: the causal LM.
        token_format: the base's way of thinking.
        eos_ids: ids that end a text.
        masked_ids: ids that an answer must not hold.
        masks: whether an answer must not complete a marker of several tokens that would open the
            thinking again.
        decode: from token ids to text; None leaves `TrialAnswer.text` empty.
    """

    def __init__(
        self,
        base: Any,
        token_format: TokenFormat,
        eos_ids: frozenset[int],
        masked_ids: Sequence[int] = (),
        decode: Callable[[Sequence[int]], str] | None = None,
        masks: bool = False,
    ) -> None:
        self._marker = token_format.start_marker if masks else None
        self._base = base
        self._format = token_format
        self._eos_ids = eos_ids
        self._masked = list(masked_ids)
        self._decode = decode
        self._thread = threading.get_ident()
        self._handle: Any = None
        self._cache: Cache | None = None
        self._columns = 0
        self._positions: torch.Tensor | None = None  # of the last column, (B or 1,)
        self._axes = 2  # of the position ids: (B, S)
        self._looking = True

    def __enter__(self) -> TrialAnswers:
        self._handle = self._base.register_forward_pre_hook(self._look, with_kwargs=True)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stops looking on, and forgets the cache."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = self._cache = self._positions = None

    def _look(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() != self._thread or not self._looking:
            return
        self._cache = kwargs.get("past_key_values")
        self._columns += kwargs["input_ids"].shape[1]
        positions = kwargs.get("position_ids")
        self._axes = 2 if positions is None else positions.dim()
        self._positions = None if positions is None else positions[..., -1].reshape(-1)

    def check(self) -> None:
        """Tries to copy a row.

        Raises:
            ValueError: the base's cache cannot be copied by rows.
        """
        self._fork(0)

    def _fork(self, row: int) -> DynamicCache:
        if self._cache is None:
            raise ValueError(
                f"trial answers need past_key_values, which {type(self._base).__name__} does not "
                "use: use a stop rule without trial answers"
            )
        if self._axes != 2:
            raise ValueError(
                f"trial answers need position_ids (B, S), and {type(self._base).__name__} has "
                f"{self._axes} axes: use a stop rule without trial answers"
            )
        return fork_row(self._cache, row, self._base.config)

    @torch.no_grad()
    def answer(self, row: int, max_tokens: int) -> tuple[TrialAnswer, int]:
        """Forces an answer after a row's last token, and decodes it greedily.

        Args:
            row: the row's index.
            max_tokens: cap on the answer.

        Returns:
            The answer, and the number of tokens it took: those forced and those decoded.
        """
        cache = self._fork(row)
        position = self._columns
        if self._positions is not None:
            position = int(self._positions[row % len(self._positions)]) + 1
        pads = self._columns - position
        suffix = self._format.forced_suffix("forced")
        recurrent = any(isinstance(layer, LinearAttentionLayer) for layer in cache.layers)
        # Recurrent layers go on from a state one token at a time; attention takes them at once.
        pieces = [[token] for token in suffix] if recurrent else [suffix]
        box = self._format.box_state()
        reopening = None if self._marker is None else self._marker.state()
        ids: list[int] = []
        logprobs: list[float] = []
        ended: Literal["closed", "eos", "length"] = "length"
        self._looking = False
        try:
            for piece in pieces:
                logits = self._feed(piece, position, pads, cache)
                position += len(piece)
            entropy, whole = float(top_entropy(logits)), 0.0
            while len(ids) < max_tokens:
                whole += float(top_entropy(logits))
                more = () if reopening is None else reopening.completing()
                token, logprob = self._choose(logits, more)
                if reopening is not None:
                    reopening.push(token)
                if token in self._eos_ids:
                    ended = "eos"
                    break
                ids.append(token)
                logprobs.append(logprob)
                if box.push(token):
                    ended = "closed"
                    break
                if len(ids) < max_tokens:
                    logits = self._feed([token], position, pads, cache)
                    position += 1
        finally:
            self._looking = True
        said = self._text(ids, ended)
        answer = TrialAnswer(tuple(ids), ended, tuple(logprobs), entropy, said, whole)
        return answer, len(suffix) + len(ids) + (ended == "eos")

    def _choose(self, logits: torch.Tensor, masked: Sequence[int]) -> tuple[int, float]:
        """The token that a forced answer would take, and its plain log-probability."""
        plain = logits.float()
        allowed = plain.clone()
        allowed[[*self._masked, *masked]] = -torch.inf
        token = int(allowed.argmax())
        return token, float(plain[token] - plain.logsumexp(-1))

    def _text(self, ids: Sequence[int], ended: str) -> str:
        if self._decode is None:
            return ""
        text = self._decode(ids)
        return self._format.answer_content(text) if ended == "closed" else text

    def _feed(
        self, token_ids: Sequence[int], position: int, pads: int, cache: DynamicCache
    ) -> torch.Tensor:
        """Runs tokens on a forked cache; the logits (V,) after the last one."""
        device = self._base.device
        S = len(token_ids)
        arguments: dict[str, Any] = {
            "input_ids": torch.tensor([list(token_ids)], device=device),
            "past_key_values": cache,
            "use_cache": True,
        }
        if self._positions is not None:
            arguments["position_ids"] = torch.arange(position, position + S, device=device)[None]
        if pads:
            mask = torch.ones(1, pads + position + S, dtype=torch.long, device=device)
            mask[:, :pads] = 0
            arguments["attention_mask"] = mask
        return last_logits(self._base, **arguments)[0]
