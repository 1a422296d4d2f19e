"""What generate is told about stopping, and what it records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from .reasoning_format import AnswerMode


@dataclass(frozen=True)
class StopPolicyConfig:
    """How generate uses the policy: `stop_policy=True`, a dict of these fields, or this.

    Attributes:
        mode: "sample" stops with probability pi (the paper), "threshold" where pi reaches the
            threshold. None: the policy's default.
        threshold: in [0, 1]. None: the policy's default.
        seed: of the draws in mode "sample".
        first_sample_index: the index of the call's first row, for runs over several calls.
        min_thinking_tokens: no stop before so many.
        max_thinking_tokens: stop at the first step end with at least so many. None: no budget.
        answer: "forced" forces the closing and the box prefix, also after a natural end; "free"
            forces the closing only.
        max_answer_tokens: cap on the tokens after what is forced. None: generate's own limits.
        answer_do_sample: whether forced answers are sampled as the trace is; else greedy.
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

    def __post_init__(self) -> None:
        if self.mode not in (None, "sample", "threshold"):
            raise ValueError(
                f"stop_policy: mode is {self.mode!r}; it must be 'sample' or 'threshold'"
            )
        if self.answer not in ("forced", "free"):
            raise ValueError(
                f"stop_policy: answer is {self.answer!r}; it must be 'forced' or 'free'"
            )
        threshold = self.threshold
        if threshold is not None and not (math.isfinite(threshold) and 0 <= threshold <= 1):
            raise ValueError(f"stop_policy: threshold is {threshold}; it must lie in [0, 1]")
        least = {"min_thinking_tokens": 0, "max_thinking_tokens": 1, "max_answer_tokens": 1}
        for name, low in least.items():
            value = vars(self)[name]
            if value is not None and value < low:
                raise ValueError(f"stop_policy: {name} is {value}; it must be {low} or more")

    def with_defaults(self, mode: str, threshold: float) -> StopPolicyConfig:
        """These settings, with a policy's own mode and threshold where none is given."""
        return replace(
            self,
            mode=mode if self.mode is None else self.mode,
            threshold=threshold if self.threshold is None else self.threshold,
        )

    def with_defaults(self, mode: str, threshold: float) -> StopPolicyConfig:
        """These settings, with a policy's own mode and threshold where none is given."""
        return replace(
            self,
            mode=mode if self.mode is None else self.mode,
            threshold=threshold if self.threshold is None else self.threshold,
        )

    @classmethod
    def of(cls, stop_policy: bool | Mapping[str, Any] | StopPolicyConfig) -> StopPolicyConfig:
        """What the argument `stop_policy` of generate means.

        Raises:
            TypeError, ValueError: it has another type, or unknown keys.
        """
        if isinstance(stop_policy, StopPolicyConfig):
            return stop_policy
        if isinstance(stop_policy, Mapping):
            known = [one.name for one in fields(cls)]
            if unknown := sorted(set(stop_policy) - set(known)):
                raise ValueError(f"stop_policy has no {unknown}; its keys are {known}")
            return cls(**stop_policy)
        if stop_policy is True:
            return cls()
        raise TypeError(
            f"stop_policy is {stop_policy!r}; it must be True, False, a dict or a StopPolicyConfig"
        )


@dataclass
class StopRecord:
    """What happened to one row.

    Attributes:
        step_ends: L_i of each step end that generate passed, in thinking tokens.
        probabilities: pi_i at each; NaN where the policy gave none.
        thinking_tokens: tokens before the end marker, or before what was forced.
        reason: "policy", "budget" (`max_thinking_tokens`), "natural", or "length" (generate's
            own limit came first).
        nan_steps: steps at which the policy gave NaN, which means "continue".
    """

    step_ends: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    thinking_tokens: int = 0
    reason: Literal["policy", "budget", "natural", "length"] = "length"
    nan_steps: int = 0
