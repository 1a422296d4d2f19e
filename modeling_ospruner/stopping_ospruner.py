"""Stopping: what generate is told, one row's way from its thinking to its answer, its record.

A row takes in the tokens that are chosen for it. After the last one of a step it is asked to
decide; from a stop, or a natural end, on it says what the next token has to be. Draws are
counter-based: the same numbers in any batch and engine.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch

from .configuration_ospruner import (
    MODES,
    OSPrunerConfig,
    check_choice,
    check_integer,
    check_number,
    shown,
)
from .formats_ospruner import BoxState, MarkerState, TokenFormat

_OWNER = "stop_policy"
_MASK64 = (1 << 64) - 1


def mix64(value: int) -> int:
    """The finaliser of splitmix64 (Steele et al., 2014): a 64-bit integer from any integer."""
    z = (value + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def uniform(seed: int, sample_index: int, step: int) -> float:
    """The draw in [0, 1) that decides one step of one sample: a row stops if it is below pi."""
    mixed = mix64(mix64(mix64(seed) ^ (sample_index & _MASK64)) ^ (step & _MASK64))
    return (mixed >> 11) * 2.0**-53


class Said(NamedTuple):
    """What is said at one step end of a row."""

    signal: float | None = None  # the stop probability, or a rule's measure; None if not asked
    price: float | None = None  # of indifference, with a policy of every price
    stops: bool | None = None  # a rule's own decision; else settings decide on the probability
    tokens: int = 0  # that the asking has cost


@runtime_checkable
class RuleLike(Protocol):
    """What stops rows in place of the learned policy; the package's `ospruner.rules` are such."""

    @property
    def reason(self) -> Literal["policy", "budget"]:
        """What `StopRecord.reason` says of the rows that it stopped."""

    def asker(self, base: Any, plan: RowPlan, tokenizer: Any) -> Any:
        """What generate asks in place of `Asked`; refuses what the rule cannot work with."""


_CHOICES = {"mode": MODES, "answer": ("forced", "free", "tools")}
_HIGHEST = {"threshold": 1.0, "price": math.inf, "max_loss": 1.0}
_LOWEST = {
    **{"seed": -math.inf, "first_sample_index": 0, "min_thinking_tokens": 0},
    **{"max_thinking_tokens": 1, "max_answer_tokens": 1},
}
_TYPES = {"wind_down": str, "answer_do_sample": bool, "mask_reentry": bool, "rule": RuleLike}
# What may be asked beside a promise.
_OF_A_PROMISE = {"max_loss", "seed", "first_sample_index", "max_answer_tokens", "mask_reentry"}


@dataclass(frozen=True)
class StopPolicyConfig:
    """How generate stops rows: `stop_policy=True`, a dict of these fields, a `RuleLike`, or this.

    Attributes:
        mode: "sample" stops with probability pi (the paper), "threshold" where pi reaches the
            threshold. None: "threshold" where one is given, else the policy's default.
        threshold: in [0, 1], of mode "threshold". None: the policy's default.
        price: of a thinking token, in reward, for all rows of the call. None: the policy's default;
            a policy of one price knows its own alone.
        max_loss: stop as boldly as a calibration of the policy (`ospruner calibrate`) promised to
            lose no more accuracy than this against the full trace, by greedy forced answers.
        seed: of the draws in mode "sample", also of greedy text. None: another in each call, as
            torch's generator says (`torch.manual_seed`).
        first_sample_index: the index of the call's first row, for runs over several calls.
        min_thinking_tokens: no stop before so many.
        max_thinking_tokens: stop at the first step end with at least so many. None: no budget.
        answer: "forced" forces the closing and the box prefix, also after a natural end; "free" the
            closing only; "tools" as little as ends the thinking, so that the reply may call one (in
            Harmony, the model chooses the channel).
        wind_down: a sentence forced before the closing where something else than the model ends the
            thinking. None: the format's own; "": none.
        max_answer_tokens: cap on the tokens after what is forced. None: generate's own limits.
        answer_do_sample: whether forced answers are sampled as the trace is; else greedy.
        mask_reentry: whether an answer that something was forced into may not open the thinking
            again.
        rule: what stops rows in place of the learned policy, which then does not run.
    """

    mode: Literal["sample", "threshold"] | None = None
    threshold: float | None = None
    price: float | None = None
    max_loss: float | None = None
    seed: int | None = None
    first_sample_index: int = 0
    min_thinking_tokens: int = 0
    max_thinking_tokens: int | None = None
    answer: Literal["forced", "free", "tools"] = "forced"
    wind_down: str | None = None
    max_answer_tokens: int | None = None
    answer_do_sample: bool = False
    mask_reentry: bool = True
    rule: RuleLike | None = None

    def __post_init__(self) -> None:
        for one in fields(self):
            name, value = one.name, vars(self)[one.name]
            if value is None and one.default is None:
                continue
            if name in _CHOICES:
                check_choice(_OWNER, name, value, _CHOICES[name])
            elif name in _HIGHEST:
                check_number(_OWNER, name, value, 0, _HIGHEST[name])
            elif name in _LOWEST:
                check_integer(_OWNER, name, value, _LOWEST[name])
            elif not isinstance(value, _TYPES[name]):
                kind = _TYPES[name].__name__
                raise TypeError(f"{_OWNER}: {name} is {value!r}; it must be a {kind}")
        least, most = self.min_thinking_tokens, self.max_thinking_tokens
        given = {one.name for one in fields(self) if vars(self)[one.name] != one.default}
        beside = sorted(given - _OF_A_PROMISE)
        wrong = {
            f"threshold is {self.threshold}, but mode 'sample' draws and has none: leave one of "
            "them out": self.threshold is not None and self.mode == "sample",
            f"max_thinking_tokens is {most}, below min_thinking_tokens {least}; leave one out, or "
            "exchange them": most is not None and most < least,
            f"max_loss is {self.max_loss}, and so is {' and '.join(beside)} given: what was "
            "promised holds for the calibration's setting alone; leave it "
            "out": self.max_loss is not None and beside,
            "mode, threshold and price are the learned policy's, and rule "
            f"{self.rule!r} takes its place; leave them out, or the "
            "rule": self.rule is not None and {"mode", "threshold", "price"} & given,
        }
        for message, is_wrong in wrong.items():
            if is_wrong:
                raise ValueError(f"{_OWNER}: {message}")
        if self.threshold is not None:
            object.__setattr__(self, "mode", "threshold")  # what a threshold alone means

    def with_defaults(self, config: OSPrunerConfig) -> StopPolicyConfig:
        """These settings, with a policy's own mode, threshold and price where none is given.

        Refuses a `max_loss` that no calibration promises, and a price that it does not know.
        """
        if self.rule is not None:
            return self
        if self.max_loss is not None:
            promises = config.calibrations or []
            kept = [one for one in promises if one["max_loss"] <= self.max_loss]
            if not kept:
                raise ValueError(
                    f"{_OWNER}: max_loss is {self.max_loss}, but the policy promises "
                    f"{[one['max_loss'] for one in promises]}: make the promise with "
                    "`ospruner calibrate`"
                )
            boldest = max(kept, key=lambda one: (one["confidence"], one["max_loss"]))
            promised = {name: boldest[name] for name in ("mode", "threshold", "price")}
            return replace(self, max_loss=None, **promised)
        price = config.price if self.price is None else self.price
        if config.prices is not None:
            config.prices.check(_OWNER, price)
        elif price != config.price:
            raise ValueError(
                f"{_OWNER}: price is {shown(price)}, but the policy was trained for "
                f"{config.price:g} alone (head 'fixed'): leave it out, take the policy of that "
                "price, or train one for every price with `ospruner train --head price`"
            )
        mode, threshold = self.mode or config.default_mode, self.threshold
        if mode == "threshold" and threshold is None:
            threshold = config.default_threshold
        return replace(self, mode=mode, threshold=threshold, price=price)  # type: ignore[arg-type]

    @classmethod
    def of(
        cls, stop_policy: bool | Mapping[str, Any] | RuleLike | StopPolicyConfig
    ) -> StopPolicyConfig:
        """What the argument `stop_policy` of generate means; refuses unknown keys by name."""
        if stop_policy is True:
            return cls()
        if dataclasses.is_dataclass(stop_policy) and type(stop_policy).__name__ == cls.__name__:
            stop_policy = vars(stop_policy)  # the installed package's class, or the repository's
        if isinstance(stop_policy, Mapping):
            known = [one.name for one in fields(cls)]
            if unknown := sorted(map(str, set(stop_policy) - set(known))):
                raise ValueError(f"{_OWNER} has no {unknown}; its keys are {known}")
            return cls(**stop_policy)
        if isinstance(stop_policy, RuleLike) and not isinstance(stop_policy, type):
            return cls(rule=stop_policy)
        raise TypeError(f"{_OWNER} is {stop_policy!r}; it must be True, False, a dict or a rule")


@dataclass
class StopRecord:
    """What happened to one row."""

    step_ends: list[int] = field(default_factory=list)  # L_i that generate passed, in tokens
    # The policy's pi_i at each; NaN where it gave none, or was not asked. None under another rule.
    probabilities: list[float] = field(default_factory=list)
    # With a policy of every price, the price of indifference at each, at which pi_i is one half: 0
    # where it stops even for nothing, inf where it goes on at every price, NaN if not asked.
    prices: list[float] = field(default_factory=list)
    thinking_tokens: int = 0  # before the (last) end marker, or before what was forced
    # Why it ended: "policy" (or another rule), "budget" (`max_thinking_tokens`, or such a rule),
    # "natural", "request" (`answer_now`), or "length" (a limit of generate's own came first).
    reason: Literal["policy", "budget", "natural", "request", "length"] = "length"
    nan_steps: int = 0  # at which the policy or rule gave NaN, which means "continue"
    signals: list[float] = field(default_factory=list)  # what another rule measured; or NaN
    probe_tokens: int = 0  # that a rule spent on trial answers: forced ones and their own
    answer_tokens: int = 0  # after the thinking's end and what was forced there, with the last one
    rethinks: int = 0  # tokens of it that think on (`TokenFormat.rethinking_ids`)


class Phase(Enum):
    """Where a row is."""

    THINKING, FORCING, ANSWER, DONE = range(4)


@dataclass(frozen=True)
class RowPlan:
    """What rows have in common."""

    settings: StopPolicyConfig  # with a rule, or with the policy's defaults
    token_format: TokenFormat
    eos_ids: frozenset[int]
    step_stride: int = 1  # the policy is asked at every k-th step end; rules are at each
    priced: bool = False  # whether the policy is one of every price
    least_tokens: int = 0  # of a reply: before, no row stops, and none ends by its answer

    @property
    def unasked(self) -> Said:
        """What is said of a step end at which the policy is not asked."""
        return Said(price=math.nan if self.priced else None)


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
    """

    def __init__(self, plan: RowPlan, prompt_ids: Sequence[int], sample_index: int) -> None:
        self._plan, self._sample_index = plan, sample_index
        self._boundary = plan.token_format.prompt_state(prompt_ids)
        self._prefilled, closed = self._boundary.thinking_tokens, self._boundary.ended
        self.phase = Phase.DONE if closed else Phase.THINKING
        self.record = StopRecord(reason="natural" if closed else "length")
        self.at_boundary, self.forced = False, deque[int]()
        self._length, self._last = 0, -1  # tokens generated so far, and the last one
        self._whole = closed or not plan.token_format.format.think_end  # all of it is the reply
        self._masked = self._answered = False
        self._box: BoxState | MarkerState | None = None
        self._end_ids: frozenset[int] = frozenset()  # of its answer

    @property
    def step_tokens(self) -> int:
        """The thinking tokens since the last step end."""
        return self._boundary.step_tokens

    @property
    def asks(self) -> bool:
        """Whether the policy is to be asked at the step end where it is."""
        stride = 1 if self._plan.settings.rule is not None else self._plan.step_stride
        return (len(self.record.step_ends) + 1) % stride == 0

    @property
    def greedy(self) -> bool:
        """Whether the next token is the model's most likely one, whatever the sampling."""
        boxed = self.phase is Phase.ANSWER and self._box is not None
        return boxed and not self._plan.settings.answer_do_sample

    @property
    def masked_ids(self) -> tuple[int, ...]:
        """What its next token may not be, so that the thinking is not opened again."""
        if not self._masked or self.phase is not Phase.ANSWER:
            return ()
        channels = self._plan.token_format.channels
        if channels is None or self._plan.settings.answer != "tools":
            return self._plan.token_format.reentry_ids
        # Any channel but the one of the thinking.
        return channels.thinking[1:2] if self._last == channels.thinking[0] else ()

    @property
    def may_reopen(self) -> bool:
        """Whether its answer may open the thinking again, which then counts and may be stopped."""
        free = self.phase is Phase.ANSWER and self._box is None and not self._masked
        return free and self._boundary.ended

    @property
    def stoppable_tokens(self) -> int:
        """How many of its last tokens are its answer, in which a stop string ends it."""
        answered = self._boundary.answer_tokens if self.may_reopen else self.record.answer_tokens
        return self._length if self._whole else answered

    def push(self, token: int) -> bool:
        """Takes in the token chosen next; whether it completes the answer."""
        self._length += 1
        self._last = token
        if self.phase is Phase.THINKING:
            self._think(token)
        elif self.phase is Phase.FORCING:
            self.forced.popleft()
            if not self.forced:
                self.phase = Phase.ANSWER
        elif self.phase is Phase.ANSWER:
            if self.may_reopen and not (self._boundary.push(token) or self._boundary.ended):
                self.phase, self.record.reason = Phase.THINKING, "length"
                self.record.answer_tokens = self.record.rethinks = 0
                return False
            self.record.answer_tokens += 1
            self.record.rethinks += token in self._plan.token_format.rethinking_ids
            closed = self._box is not None and self._box.push(token)
            full = self.record.answer_tokens == self._plan.settings.max_answer_tokens
            self._answered |= closed or full or token in self._end_ids
            if self._answered and self._length >= self._plan.least_tokens:
                self.phase = Phase.DONE
                return True
        return False

    def end(self) -> None:
        """Something else has ended the row."""
        self.phase = Phase.DONE
        self.at_boundary = False

    def answer_now(self) -> None:
        """Closes the thinking before the next token, wherever it is, for somebody has asked."""
        if self.phase is Phase.THINKING:
            self.at_boundary, self.record.reason = False, "request"
            self._close(natural=False)

    def wants_stop(self, said: Said) -> bool:
        """Whether the policy or rule stops at this step end, however short the thinking."""
        settings, signal = self._plan.settings, math.nan if said.signal is None else said.signal
        if said.stops is not None:
            return said.stops
        if settings.threshold is not None:
            return signal >= settings.threshold
        return uniform(settings.seed or 0, self._sample_index, len(self.record.step_ends)) < signal

    def decide(self, said: Said) -> None:
        """Decides on the step that has ended with the last token.

        Args:
            said: of this step end. What the policy was not asked for (`asks`), and NaN, go on.
        """
        settings, record, stops = self._plan.settings, self.record, self.wants_stop(said)
        signal = math.nan if said.signal is None else said.signal
        self.at_boundary = False
        record.step_ends.append(self._length)
        (record.probabilities if settings.rule is None else record.signals).append(signal)
        if said.price is not None:
            record.prices.append(said.price)
        record.nan_steps += said.signal is not None and math.isnan(signal)
        record.probe_tokens += said.tokens
        least = max(settings.min_thinking_tokens, self._plan.least_tokens)
        if stops and self._length >= least:
            record.reason = "policy" if settings.rule is None else settings.rule.reason
        elif self._length >= (settings.max_thinking_tokens or math.inf):
            record.reason = "budget"
        else:
            return
        self._close(natural=False)

    def _think(self, token: int) -> None:
        if token in self._plan.eos_ids and token != self._plan.token_format.think_end_id:
            self.phase, self.record.reason = Phase.DONE, "natural"
            return
        self.at_boundary = self._boundary.push(token)
        self.record.thinking_tokens = max(0, self._boundary.thinking_tokens - self._prefilled)
        if self._boundary.ended:
            self.record.reason = "natural"
            self._close(natural=True)

    def _close(self, natural: bool) -> None:
        """Turns to the answer; after a natural end, the model has written some closing."""
        settings, token_format = self._plan.settings, self._plan.token_format
        answer = "free" if self._boundary.calls and settings.answer == "forced" else settings.answer
        closed = answer == "forced" or not natural  # by us, so that the answer's message is open
        if closed:
            ended = self._boundary if natural else None
            self.forced.extend(token_format.forced_suffix(answer, ended))
        self.phase = Phase.FORCING if self.forced else Phase.ANSWER
        self._masked = settings.mask_reentry and closed
        chosen = answer == "tools" and token_format.channels is not None  # by the model
        ends = () if chosen or not closed else token_format.answer_end_ids
        self._end_ids = self._plan.eos_ids.union(ends)
        if answer == "forced":
            self._box = token_format.box_state()


def shape_scores(
    scores: torch.Tensor,
    rows: Iterable[tuple[int, StopRow]],
    ended: Mapping[int, int] | None = None,
) -> None:
    """Masks markers in answers, then leaves one token where it is forced, or greedy.

    In place, in the next tokens' scores (B, V), of rows by their places, those that think left
    alone; `ended` has the token that ends a row which is complete already, by its place.
    """
    forced = dict(ended or {})
    masked: list[tuple[int, int]] = []
    greedy: list[int] = []
    for i, row in rows:
        if row.phase is Phase.FORCING:
            forced[i] = row.forced[0]
        elif row.phase is Phase.ANSWER:
            masked += [(i, token) for token in row.masked_ids]
            greedy += [i] * row.greedy
    device = scores.device
    if masked:
        scores[torch.tensor(masked, device=device).unbind(1)] = -torch.inf
    if forced or greedy:
        places = torch.tensor([*forced, *greedy], device=device)
        ids = torch.tensor(list(forced.values()), dtype=torch.long, device=device)
        chosen = torch.cat([ids, scores[places[len(forced) :]].argmax(-1)])
        scores[places] = -torch.inf
        scores[places, chosen] = 0.0
