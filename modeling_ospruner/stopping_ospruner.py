"""Stopping: what generate is told, one row's way to its answer, and the record of it.

Between them, what is refused because stopping inside generate would do it wrong in silence.

A row takes in the tokens that are chosen for it, one by one. After the last token of a step it is
asked to decide; from a stop, or a natural end, on it says what the next token has to be. Generate
and every engine share this code.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, Literal, get_args

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode

from .configuration_ospruner import (
    MODES,
    OSPrunerConfig,
    check_choice,
    check_flag,
    check_integer,
    check_number,
    shown,
)
from .formats_ospruner import TokenFormat
from .rules_ospruner import DEFAULT_TRIAL_TOKENS, Budget, LearnedPolicy, StopRule, TrialAnswer
from .states_ospruner import BoxState, EndTextState

_OWNER = "stop_policy"

StopAnswer = Literal["forced", "free", "tools"]


def asked_price(owner: str, config: OSPrunerConfig, asked: float | None) -> float:
    """The price of a token (lambda) at which a policy stops: the asked one, else its default.

    Args:
        owner: whose setting `asked` is, for the message.
        config: the policy's.
        asked: None for the policy's own.

    Raises:
        TypeError: it is no number.
        ValueError: a policy of every price does not know it, or one of a fixed lambda has another.
    """
    if asked is None:
        return config.price
    if config.prices is not None:
        config.prices.check(owner, asked)
    elif asked != config.price:
        raise ValueError(
            f"{owner}: price is {shown(asked)}, but the policy was trained for "
            f"{config.price:g} alone (head 'fixed'): leave it out, take the policy of "
            "that lambda, or train one for every price with `ospruner train --head price`"
        )
    return asked


@dataclass(frozen=True)
class StopPolicyConfig:
    """How generate stops rows: `stop_policy=True`, a dict of these fields, a `StopRule`, or this.

    Attributes:
        mode: "sample" stops with probability pi (the paper), "threshold" where pi reaches the
            threshold. None: "threshold" where one is given, else the policy's default.
        threshold: in [0, 1], of mode "threshold". None: the policy's default.
        price: the price of a token, lambda, in reward per thinking token: a policy with
            the head "price" stops where going on is not worth it. One for all rows of the call.
            None: the policy's default; a policy with the head "fixed" knows its own alone.
        domain: stop at the price that the policy chose for this domain, one of those that it was
            trained on (`OSPrunerConfig.domains`); in place of `price`.
        max_loss: stop as boldly as a calibration of the policy (`ospruner calibrate`) promised to
            lose no more accuracy than this against the full trace, as a share; it gives mode,
            threshold and price. None: no promise.
        seed: of the draws in mode "sample"; without a meaning elsewhere.
        first_sample_index: the index of the call's first row, for runs over several calls, of
            which the draws of mode "sample" depend. Rows
            count up from it in the order of the output: with `num_return_sequences` k, the j-th
            text of prompt i is row i * k + j.
        min_thinking_tokens: no stop before so many.
        max_thinking_tokens: stop at the first step end with at least so many. None: no budget.
        answer: "forced" forces the closing and the box prefix, also after a natural end; "free"
            forces the closing only; "tools" forces as little as ends the thinking, for a prompt
            that offers tools: the reply may call one (in Harmony, the model chooses the channel).
        wind_down: a sentence forced before the closing, such as "I have what I need, so:", where
            something else than the model ends the thinking. None: the policy's own
            (`ReasoningFormat.wind_down`); "": none.
        max_answer_tokens: cap on the tokens after what is forced. None: generate's own limits.
        answer_do_sample: whether forced answers are sampled as the trace is; else greedy. Free
            answers are always sampled as the trace is.
        mask_reentry: whether an answer that something was forced into may not open the thinking
            again: its markers (`TokenFormat.reentry_ids`), or what would complete a marker of
            several tokens, get no probability.
        rule: what stops rows in place of the learned policy, which then does not run; such as
            `AnswerEntropy()`. It has settings of its own: mode, threshold and seed are not its.
    """

    mode: Literal["sample", "threshold"] | None = None
    threshold: float | None = None
    price: float | None = None
    domain: str | None = None
    max_loss: float | None = None
    seed: int = 0
    first_sample_index: int = 0
    min_thinking_tokens: int = 0
    max_thinking_tokens: int | None = None
    answer: StopAnswer = "forced"
    wind_down: str | None = None
    max_answer_tokens: int | None = None
    answer_do_sample: bool = False
    mask_reentry: bool = True
    rule: StopRule | None = None

    def __post_init__(self) -> None:
        if self.mode is not None:
            check_choice(_OWNER, "mode", self.mode, MODES)
        check_choice(_OWNER, "answer", self.answer, get_args(StopAnswer))
        if not isinstance(self.wind_down, str | None):
            raise TypeError(f"{_OWNER}: wind_down is {self.wind_down!r}; it must be a text or None")
        if self.threshold is not None:
            check_number(_OWNER, "threshold", self.threshold, 0, 1)
            if self.mode == "sample":
                raise ValueError(
                    f"{_OWNER}: threshold is {self.threshold}, but mode 'sample' draws and has "
                    "none: leave one of them out"
                )
            if self.rule is None:
                object.__setattr__(self, "mode", "threshold")  # what a threshold alone means
        if isinstance(self.price, list | tuple):
            raise TypeError(
                f"{_OWNER}: price is {shown(self.price)}; it must be one number, "
                "for all rows of the call: generate for rows of other prices in calls of their own"
            )
        if self.price is not None:
            check_number(_OWNER, "price", self.price, 0, math.inf)
        if not isinstance(self.domain, str | None):
            raise TypeError(f"{_OWNER}: domain is {shown(self.domain)}; it must be a text or None")
        if self.domain is not None and self.price is not None:
            raise ValueError(
                f"{_OWNER}: domain is {shown(self.domain)}, and so is price "
                f"{self.price} given: a domain has its own price; leave one of them out"
            )
        self._check_max_loss()
        check_integer(_OWNER, "seed", self.seed)
        check_integer(_OWNER, "first_sample_index", self.first_sample_index, 0)
        check_integer(_OWNER, "min_thinking_tokens", self.min_thinking_tokens, 0)
        for name in ("max_thinking_tokens", "max_answer_tokens"):
            if (value := vars(self)[name]) is not None:
                check_integer(_OWNER, name, value, 1)
        check_flag(_OWNER, "answer_do_sample", self.answer_do_sample)
        check_flag(_OWNER, "mask_reentry", self.mask_reentry)
        budget = self.max_thinking_tokens
        if budget is not None and budget < self.min_thinking_tokens:
            raise ValueError(
                f"{_OWNER}: max_thinking_tokens is {budget}, below min_thinking_tokens "
                f"{self.min_thinking_tokens}; leave one out, or exchange them"
            )
        self._check_rule()

    def _check_max_loss(self) -> None:
        if self.max_loss is None:
            return
        check_number(_OWNER, "max_loss", self.max_loss, 0, 1, open_low=True)
        unpromised = {
            "mode": self.mode is not None,
            "threshold": self.threshold is not None,
            "price": self.price is not None,
            "domain": self.domain is not None,
            "rule": self.rule is not None,
            "min_thinking_tokens": self.min_thinking_tokens > 0,
            "max_thinking_tokens": self.max_thinking_tokens is not None,
            "answer": self.answer != "forced",
            "wind_down": self.wind_down is not None,
            "answer_do_sample": self.answer_do_sample,
        }
        if given := [name for name, is_given in unpromised.items() if is_given]:
            raise ValueError(
                f"{_OWNER}: max_loss is {self.max_loss}, and so is {' and '.join(given)} given: "
                "what was promised holds for the calibration's setting and greedy forced "
                "answers alone; leave one of them out"
            )

    def _check_rule(self) -> None:
        if self.rule is None:
            return
        if isinstance(self.rule, type) or not isinstance(self.rule, StopRule):
            raise TypeError(
                f"{_OWNER}: rule is {self.rule!r}; it must be a StopRule, such as AnswerEntropy()"
            )
        learned = (self.mode, self.threshold, self.price, self.domain)
        if learned != (None, None, None, None):
            raise ValueError(
                f"{_OWNER}: mode, threshold, price and domain are the learned policy's, "
                "and rule "
                f"{type(self.rule).__name__} takes its place; leave them out, or the rule"
            )

    def with_defaults(self, config: OSPrunerConfig) -> StopPolicyConfig:
        """These settings, with a policy's own mode, threshold and price where none is given.

        With another rule they are as they are. `max_loss` takes the boldest calibration that fits.

        Args:
            config: the policy's.

        Raises:
            TypeError: the price is no number.
            ValueError: `max_loss` is given, and no calibration promises as little; or see
                `price_for`.
        """
        if self.rule is not None:
            return self
        if self.max_loss is not None:
            promises = config.calibrations or []
            kept = [one for one in promises if one["max_loss"] <= self.max_loss]
            if not kept:
                known = sorted(one["max_loss"] for one in promises)
                raise ValueError(
                    f"{_OWNER}: max_loss is {self.max_loss}, but the policy promises "
                    f"{f'{known} only' if known else 'nothing'}: make the promise with `ospruner "
                    f"calibrate POLICY --labels DIR --max-loss {self.max_loss:g}`"
                )
            boldest = max(kept, key=lambda one: (one["max_loss"], one["confidence"]))
            promised = {name: boldest[name] for name in ("mode", "threshold", "price")}
            return replace(self, max_loss=None, **promised)
        price = self.price_for(_OWNER, config)
        chosen, threshold = self.mode or config.default_mode, config.default_threshold
        if chosen == "threshold" and self.threshold is not None:
            threshold = self.threshold
        return replace(
            self,
            mode=chosen,  # type: ignore[arg-type]  # checked
            threshold=threshold if chosen == "threshold" else None,
            price=price,
            domain=None,
        )

    def price_for(self, owner: str, config: OSPrunerConfig) -> float:
        """The price of a token that is asked for: by number, by domain, or the policy's default.

        Args:
            owner: who asks, for the message.
            config: the policy's.

        Raises:
            TypeError: it is no number.
            ValueError: the policy has no such domain; or see `asked_price`.
        """
        if self.domain is not None:
            return config.domain_price(owner, self.domain)
        return asked_price(owner, config, self.price)

    def chosen_rule(
        self,
        step_stride: int = 1,
        trial_every: int = 0,
        trial_max_tokens: int = DEFAULT_TRIAL_TOKENS,
    ) -> StopRule:
        """The rule that stops rows: the given one, or the learned policy.

        Args:
            step_stride: the learned policy's, from its configuration.
            trial_every: likewise.
            trial_max_tokens: likewise.

        Raises:
            ValueError: for the learned policy, the mode or its threshold is missing.
        """
        if self.rule is not None:
            return self.rule
        if self.mode is None or (self.mode == "threshold" and self.threshold is None):
            raise ValueError(
                f"{_OWNER}: mode is {self.mode!r} and threshold {self.threshold}; without a rule "
                "the mode and its threshold must be given here (with_defaults fills them in from "
                "a policy)"
            )
        return LearnedPolicy(
            self.mode,
            self.threshold,
            self.seed,
            step_stride,
            trial_every=trial_every,
            trial_max_tokens=trial_max_tokens,
        )

    @classmethod
    def of(
        cls, stop_policy: bool | Mapping[str, Any] | StopRule | StopPolicyConfig
    ) -> StopPolicyConfig:
        """What the argument `stop_policy` of generate means.

        Raises:
            TypeError, ValueError: it has another type, or unknown keys.
        """
        if isinstance(stop_policy, StopPolicyConfig):
            return stop_policy
        if isinstance(stop_policy, Mapping):
            known = [one.name for one in fields(cls)]
            if "length_penalty" in stop_policy:
                raise ValueError(f"{_OWNER}: length_penalty is called price now")
            if unknown := sorted(map(str, set(stop_policy) - set(known))):
                raise ValueError(f"stop_policy has no {unknown}; its keys are {known}")
            return cls(**stop_policy)
        if stop_policy is True:
            return cls()
        if isinstance(stop_policy, StopRule) and not isinstance(stop_policy, type):
            return cls(rule=stop_policy)
        if type(stop_policy).__name__ == cls.__name__ and dataclasses.is_dataclass(stop_policy):
            # The installed package's, given to a model whose code came with its repository (or
            # the other way round): the same class by another name.
            return cls.of(vars(stop_policy))
        raise TypeError(
            f"stop_policy is {stop_policy!r}; it must be True, False, a dict, a StopRule or a "
            "StopPolicyConfig"
        )


def promise_of(settings: StopPolicyConfig, config: OSPrunerConfig) -> dict[str, Any] | None:
    """The calibration by which settings stop, None where they stop otherwise.

    Args:
        settings: with the policy's defaults.
        config: the policy's.
    """
    fields_of = ("mode", "threshold", "price")
    for one in config.calibrations or []:
        priced = fields_of if one["price"] is not None else fields_of[:2]
        same = all(vars(settings)[name] == one[name] for name in priced)
        if same and settings == StopPolicyConfig(
            **{name: vars(settings)[name] for name in fields_of},
            seed=settings.seed,
            first_sample_index=settings.first_sample_index,
        ):
            return one
    return None


HINT = "or pass stop_policy=False"

# Arguments of generate, and why they cannot be combined with a stop policy.
_ARGUMENTS = {
    "custom_generate": "it replaces the decoding that the policy works in",
    "inputs_embeds": "steps are found in token ids: pass input_ids alone",
    "position_ids": "the policy derives them from the attention mask: pass input_ids alone",
    "negative_prompt_ids": "a second pass of the base would reach the policy",
    "pixel_values": "the policy reads text alone",
    "input_features": "the policy reads text alone",
}


def refuse_unsupported(
    inputs: torch.Tensor | None, config: GenerationConfig, arguments: Mapping[str, Any]
) -> None:
    """Refuses decoding options and inputs that don't go together with a stop policy.

    Args:
        inputs: generate's first argument.
        config: the generation config with generate's keyword arguments applied.
        arguments: all keyword arguments of generate.

    Raises:
        TypeError: the prompt is no tensor of integers, or the mask no tensor.
        ValueError: naming the option and what to do.
    """
    _refuse_decoding(config, arguments)
    for name, why in _ARGUMENTS.items():
        if arguments.get(name) is not None:
            raise ValueError(f"{name} and stop_policy exclude each other; {why}")
    _refuse_inputs(inputs, arguments)
    cache = arguments.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError(
            "past_key_values holds tokens that the stopping policy has not seen; pass the whole "
            "text as input_ids without them"
        )
    if config.eos_token_id is None:
        raise ValueError(
            "the generation config has no eos_token_id, so rows cannot end by themselves; set it "
            "in base.generation_config"
        )


def _refuse_decoding(config: GenerationConfig, arguments: Mapping[str, Any]) -> None:
    mode = config.get_generation_mode(arguments.get("assistant_model"))
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(
            f"stop_policy works with greedy decoding and sampling, not with {mode.value}: leave "
            "out num_beams, assistant_model, prompt_lookup_num_tokens, penalty_alpha, dola_layers "
            f"and the like, {HINT}"
        )
    if config.use_cache is False:
        raise ValueError("use_cache is False; stop_policy needs the cache: leave use_cache out")
    if "paged" in (config.cache_implementation, arguments.get("cache_implementation")):
        raise ValueError(
            "cache_implementation is 'paged', that is, continuous batching, in which stop_policy "
            f"cannot work: leave it out, use the vLLM or SGLang engine, {HINT}"
        )
    if config.guidance_scale not in (None, 1, 1.0):
        raise ValueError(
            f"guidance_scale is {config.guidance_scale}; its second pass of the base would reach "
            f"the policy: leave it out, {HINT}"
        )
    if config.token_healing:
        raise ValueError(
            f"token_healing rewrites the prompt by a generate of its own: leave it out, {HINT}"
        )


def _refuse_inputs(inputs: torch.Tensor | None, arguments: Mapping[str, Any]) -> None:
    input_ids = arguments.get("input_ids") if inputs is None else inputs
    if input_ids is not None and not isinstance(input_ids, torch.Tensor):
        raise TypeError(
            f"the prompt is a {type(input_ids).__name__}; it must be a tensor of token ids (B, S): "
            "tokenize with return_tensors='pt', and pass what a tokenizer gives as **inputs"
        )
    if input_ids is not None and input_ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            f"the prompt's dtype is {input_ids.dtype}; token ids are torch.int64 or torch.int32: "
            "pass what a tokenizer gives"
        )
    if input_ids is None or input_ids.numel() == 0:
        raise ValueError("the prompt is empty: stop_policy needs input_ids with a prompt")
    if input_ids.dim() != 2:
        raise ValueError(
            f"input_ids has the shape {tuple(input_ids.shape)}; it must be (B, S): one row a prompt"
        )
    mask = arguments.get("attention_mask")
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor):
        raise TypeError(
            f"attention_mask is a {type(mask).__name__}; it must be a tensor (B, S): pass what a "
            "tokenizer gives with return_tensors='pt'"
        )
    if mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has the shape {tuple(mask.shape)}, input_ids "
            f"{tuple(input_ids.shape)}; they must be the same"
        )
    if not ((mask == 0) | (mask == 1)).all():
        raise ValueError("attention_mask must hold 1 for tokens and 0 for padding, nothing else")
    if empty := (mask.sum(-1) == 0).nonzero().flatten().tolist():
        raise ValueError(f"the prompts of rows {empty} are empty: their attention_mask is all 0")
    if holes := (mask[:, 1:] < mask[:, :-1]).any(-1).nonzero().flatten().tolist():
        raise ValueError(
            f"the attention_mask of rows {holes} has zeros after tokens; padding must stand on the "
            "left: set tokenizer.padding_side = 'left'"
        )


@dataclass
class StopRecord:
    """What happened to one row.

    Attributes:
        step_ends: L_i of each step end that generate passed, in thinking tokens generated (those
            that a prompt holds already are not counted).
        probabilities: the learned policy's pi_i at each; NaN where it gave none, or was not asked
            (`OSPrunerConfig.step_stride`). Empty under another rule.
        thinking_tokens: tokens generated before the end marker, or before what was forced.
        reason: "policy" (the learned one, or another rule), "budget" (`max_thinking_tokens`, or
            the rule `Budget`), "natural", or "length" (a limit of generate's own came first: its
            length, time, stop strings or stopping criteria).
        prices: with a policy of every price, the price of indifference at each step end: the
            lambda at which pi_i is one half, so that going on pays up to so much a token; 0 where
            the policy stops even for nothing, inf where it goes on at every price that it knows,
            NaN where it was not asked. Else empty.
        nan_steps: steps at which the policy or rule gave NaN, which means "continue".
        signals: what another rule measured at each step end; NaN where it did not measure.
        probe_tokens: tokens spent on trial answers: the forced ones and the answers' own.
    """

    step_ends: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    prices: list[float] = field(default_factory=list)
    thinking_tokens: int = 0
    reason: Literal["policy", "budget", "natural", "length"] = "length"
    nan_steps: int = 0
    signals: list[float] = field(default_factory=list)
    probe_tokens: int = 0


class Phase(Enum):
    """Where a row is."""

    THINKING = 1
    FORCING = 2
    ANSWER = 3
    DONE = 4


@dataclass
class _RowEnd:
    """The `StepEnd` of a row in generate or an engine."""

    sample_index: int
    step: int
    thinking_tokens: int
    may_stop: bool
    stop_probability: Callable[..., float]
    trial_answer: Callable[[int], TrialAnswer]
    next_text: Callable[[], str]
    step_text: Callable[[], str]
    thinking_entropy: Callable[[], float]


def _unasked() -> Any:
    raise AssertionError("the rule does not ask for it")


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
    """

    def __init__(self, plan: RowPlan, prompt_ids: Sequence[int], sample_index: int) -> None:
        token_format = plan.token_format
        span = token_format.thinking_span(prompt_ids)
        self.phase = Phase.DONE if span.closed else Phase.THINKING
        self.record = StopRecord(reason="natural" if span.closed else "length")
        self.at_boundary = False
        self.forced: deque[int] = deque()
        self._masked = False
        marker = token_format.start_marker
        self._reopening = None if marker is None else marker.state()
        self._plan = plan
        self._sample_index = sample_index
        self._rule = plan.rule.for_row()
        self._boundary = token_format.boundary_state(prompt_ids[span.start :])
        self._prefilled_tokens = self._boundary.thinking_tokens
        self._length = 0  # tokens generated so far
        self._end_ids: frozenset[int] = frozenset()  # of its answer
        self._box: BoxState | EndTextState | None = None
        self._answer_tokens = 0
        self._last: int | None = None

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

    @property
    def masked_ids(self) -> tuple[int, ...]:
        """What its next token may not be, so that the thinking is not opened again."""
        if not self._masked or self.phase is not Phase.ANSWER:
            return ()
        if self._reopening is not None:
            return self._reopening.completing()
        token_format = self._plan.token_format
        channels = token_format.channels
        if channels is None or self._plan.settings.answer != "tools":
            return token_format.reentry_ids
        # Any channel but the one of the thinking.
        return channels.thinking[1:2] if self._last == channels.thinking[0] else ()

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
            self._answer_tokens += 1
            if self._reopening is not None:
                self._reopening.push(token)
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
        stop_probability: Callable[..., float],
        trial_answer: Callable[[int], TrialAnswer],
        next_text: Callable[[], str],
        indifference: Callable[[], float] | None = None,
        step_text: Callable[[], str] = _unasked,
        thinking_entropy: Callable[[], float] = _unasked,
    ) -> None:
        """Decides on the step that has ended with the last token.

        Args:
            stop_probability: gives the learned policy's; of the `TRIAL_NUMBERS`, where it has any.
            trial_answer: gives an answer forced here, of at most so many tokens.
            next_text: gives the text of the most likely next token.
            indifference: gives the price of indifference; None for a policy of a fixed lambda.
            step_text: gives the text of the step.
            thinking_entropy: gives the mean entropy of the thinking's tokens so far.
        """
        plan, record = self._plan, self.record
        self.at_boundary = False
        end = _RowEnd(
            sample_index=self._sample_index,
            step=len(record.step_ends),
            thinking_tokens=self._length,
            may_stop=self._length >= plan.settings.min_thinking_tokens,
            stop_probability=stop_probability,
            trial_answer=trial_answer,
            next_text=next_text,
            step_text=step_text,
            thinking_entropy=thinking_entropy,
        )
        record.step_ends.append(self._length)
        stop, signal = self._rule.at_step_end(end)
        learned = "stop_probability" in plan.rule.asks
        (record.probabilities if learned else record.signals).append(
            math.nan if signal is None else signal
        )
        if learned and indifference is not None:
            record.prices.append(math.nan if signal is None else indifference())
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
        plan, settings, token_format = self._plan, self._plan.settings, self._plan.token_format
        forced = settings.answer == "forced" and not self._boundary.calls
        suffix: list[int] = []
        if forced or not natural:
            ended = self._boundary if natural else None
            suffix = token_format.forced_suffix("forced" if forced else "free", ended)
        channels = token_format.channels
        chosen = channels is not None and settings.answer == "tools"  # the channel, by the model
        if channels is not None and chosen and suffix:
            del suffix[-len(channels.answer) :]
        self.forced.extend(suffix)
        self.phase = Phase.FORCING if suffix else Phase.ANSWER
        closed = forced or not natural  # by us, so that the answer's message is known to be open
        self._masked = settings.mask_reentry and closed
        ends = () if chosen or not closed else token_format.answer_end_ids
        self._end_ids = plan.eos_ids.union(ends)
        if forced:
            self._box = token_format.box_state()


def shape_scores(
    scores: torch.Tensor,
    rows: Iterable[tuple[int, StopRow]],
    ended: Mapping[int, int] | None = None,
) -> None:
    """Masks markers in answers, then leaves one token where it is forced, or greedy; in place.

    Args:
        scores: of the next tokens, (B, V).
        rows: with their places in the batch; those that think are left alone.
        ended: the token that ends a row which is complete already, by its place.
    """
    forced = dict(ended or {})
    masked: tuple[list[int], list[int]] = ([], [])
    greedy = []
    for i, row in rows:
        if row.phase is Phase.FORCING:
            forced[i] = row.forced[0]
        elif row.phase is Phase.ANSWER:
            for token in row.masked_ids:
                masked[0].append(i)
                masked[1].append(token)
            greedy += [i] * row.greedy
    device = scores.device
    if masked[0]:
        scores[torch.tensor(masked, device=device).unbind()] = -torch.inf
    if forced or greedy:
        places = torch.tensor([*forced, *greedy], device=device)
        ids = torch.tensor(list(forced.values()), dtype=torch.long, device=device)
        chosen = torch.cat([ids, scores[places[len(forced) :]].argmax(-1)])
        scores[places] = -torch.inf
        scores[places, chosen] = 0.0
