"""What generate is told about stopping, and what it records."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from .checks_ospruner import check_flag, check_integer, check_number
from .reasoning_format import AnswerMode
from .stop_rules import LearnedPolicy, StopRule

_OWNER = "stop_policy"


@dataclass(frozen=True)
class StopPolicyConfig:
    """How generate stops rows: `stop_policy=True`, a dict of these fields, a `StopRule`, or this.

    Attributes:
        mode: "sample" stops with probability pi (the paper), "threshold" where pi reaches the
            threshold. None: the policy's default.
        threshold: in [0, 1]. None: the policy's default.
        seed: of the draws in mode "sample".
        first_sample_index: the index of the call's first row, for runs over several calls. Rows
            count up from it in the order of the output: with `num_return_sequences` k, the j-th
            text of prompt i is row i * k + j.
        min_thinking_tokens: no stop before so many.
        max_thinking_tokens: stop at the first step end with at least so many. None: no budget.
        answer: "forced" forces the closing and the box prefix, also after a natural end; "free"
            forces the closing only.
        max_answer_tokens: cap on the tokens after what is forced. None: generate's own limits.
        answer_do_sample: whether forced answers are sampled as the trace is; else greedy. Free
            answers are always sampled as the trace is.
        mask_reentry: whether an answer that something was forced into may not open the thinking
            again: its markers (`TokenFormat.reentry_ids`) get no probability.
        rule: what stops rows in place of the learned policy, which then does not run; such as
            `AnswerEntropy()`. It has settings of its own: mode, threshold and seed are not its.
    """

    mode: Literal["sample", "threshold"] | None = None
    threshold: float | None = None
    seed: int = 0
    first_sample_index: int = 0
    min_thinking_tokens: int = 0
    max_thinking_tokens: int | None = None
    answer: AnswerMode = "forced"
    max_answer_tokens: int | None = None
    answer_do_sample: bool = False
    mask_reentry: bool = True
    rule: StopRule | None = None

    def __post_init__(self) -> None:
        choices = {"mode": (None, "sample", "threshold"), "answer": ("forced", "free")}
        for name, allowed in choices.items():
            if (value := vars(self)[name]) not in allowed:
                words = " or ".join(repr(one) for one in allowed if one is not None)
                raise ValueError(f"{_OWNER}: {name} is {value!r}; it must be {words}")
        if self.threshold is not None:
            check_number(_OWNER, "threshold", self.threshold, 0, 1)
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

    def _check_rule(self) -> None:
        if self.rule is None:
            return
        if isinstance(self.rule, type) or not isinstance(self.rule, StopRule):
            raise TypeError(
                f"{_OWNER}: rule is {self.rule!r}; it must be a StopRule, such as AnswerEntropy()"
            )
        if self.mode is not None or self.threshold is not None:
            raise ValueError(
                f"{_OWNER}: mode and threshold are the learned policy's, and rule "
                f"{type(self.rule).__name__} takes its place; leave them out, or the rule"
            )

    def with_defaults(self, mode: str, threshold: float) -> StopPolicyConfig:
        """These settings, with a policy's own mode and threshold where none is given.

        With another rule they are as they are.
        """
        if self.rule is not None:
            return self
        return replace(
            self,
            mode=mode if self.mode is None else self.mode,  # type: ignore[arg-type]  # checked
            threshold=threshold if self.threshold is None else self.threshold,
        )

    def chosen_rule(self) -> StopRule:
        """The rule that stops rows: the given one, or the learned policy.

        Raises:
            ValueError: for the learned policy, mode or threshold is missing.
        """
        if self.rule is not None:
            return self.rule
        if self.mode is None or self.threshold is None:
            raise ValueError(
                f"{_OWNER}: mode is {self.mode!r} and threshold {self.threshold}; without a rule "
                "both must be given here (with_defaults fills them in from a policy)"
            )
        return LearnedPolicy(self.mode, self.threshold, self.seed)

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


@dataclass
class StopRecord:
    """What happened to one row.

    Attributes:
        step_ends: L_i of each step end that generate passed, in thinking tokens generated (those
            that a prompt holds already are not counted).
        probabilities: the learned policy's pi_i at each; NaN where it gave none. Empty under
            another rule.
        thinking_tokens: tokens generated before the end marker, or before what was forced.
        reason: "policy" (the learned one, or another rule), "budget" (`max_thinking_tokens`, or
            the rule `Budget`), "natural", or "length" (a limit of generate's own came first: its
            length, time, stop strings or stopping criteria).
        nan_steps: steps at which the policy or rule gave NaN, which means "continue".
        signals: what another rule measured at each step end; NaN where it did not measure.
        probe_tokens: tokens spent on trial answers: the forced ones and the answers' own.
    """

    step_ends: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    thinking_tokens: int = 0
    reason: Literal["policy", "budget", "natural", "length"] = "length"
    nan_steps: int = 0
    signals: list[float] = field(default_factory=list)
    probe_tokens: int = 0
