"""Settings of an online evaluation, and the paper's as presets."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["PRESETS", "OnlineSettings", "preset"]


@dataclass(frozen=True, kw_only=True)
class OnlineSettings:
    """How traces are sampled and answers forced.

    Attributes:
        samples: k, traces for each problem; Pass@1 is their mean.
        answer: "forced" (closing and box prefix, also after a natural end) or "free".
        temperature: of the thinking; 0 decodes greedily. Forced answers are greedy.
        top_p: nucleus, in (0, 1].
        top_k: 0 for none.
        max_thinking_tokens: the token cap of a trace; one cut there is counted as truncated.
        max_answer_tokens: cap of an answer.
        seed: of sampling and of the policy's draws.
        batch_problems: problems, with all their samples, generated in one batch. With 1 the
            wall-clock intervals are exact; more share a batch's time evenly between its rows.
    """

    samples: int = 16
    answer: Literal["forced", "free"] = "forced"
    temperature: float = 0.6
    top_p: float = 0.95
    top_k: int = 0
    max_thinking_tokens: int = 15_000
    max_answer_tokens: int = 32
    seed: int = 0
    batch_problems: int = 1

    def __post_init__(self) -> None:
        if self.answer not in ("forced", "free"):
            raise ValueError(f"answer is {self.answer!r}; it must be 'forced' or 'free'")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature is {self.temperature!r}; it must be finite and >= 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p!r}; it must lie in (0, 1]")
        least = {
            "samples": 1,
            "top_k": 0,
            "max_thinking_tokens": 1,
            "max_answer_tokens": 1,
            "seed": 0,
            "batch_problems": 1,
        }
        for name, low in least.items():
            if vars(self)[name] < low:
                raise ValueError(f"{name} is {vars(self)[name]}; it must be at least {low}")
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(
                f"samples is {self.samples} at temperature 0: greedy samples are all alike; "
                "take one, or a temperature above 0"
            )

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready values."""
        return dataclasses.asdict(self)

    def generate_arguments(self) -> dict[str, Any]:
        """What transformers' generate is told about sampling."""
        if self.temperature == 0:
            return {"do_sample": False}
        return {
            "do_sample": True,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }


PRESETS: dict[str, OnlineSettings] = {
    "deepseek-r1": OnlineSettings(),
    "drpo": OnlineSettings(),
    "gpt-oss": OnlineSettings(temperature=1.0, top_p=1.0),
}
"""The paper's settings (section 5): 16 samples, cap 15,000, by family of models."""


def preset(name: str, **changes: Any) -> OnlineSettings:
    """A preset with the given fields changed; those that are None stay.

    Raises:
        ValueError: no such preset, or a value out of range.
    """
    if name not in PRESETS:
        raise ValueError(f"preset is {name!r}; it must be one of {', '.join(PRESETS)}")
    given = {key: value for key, value in changes.items() if value is not None}
    return dataclasses.replace(PRESETS[name], **given)
