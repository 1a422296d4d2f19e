"""The options of commands whose functions take plain arguments; what is not said is their default.

A default given here is only shown in the help.
"""

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Calibrating", "Comparing", "Serving"]


def _opt(text: str, default: Any = None) -> Any:
    return field(default=default, metadata={"help": text})


_BASE = "The base, if it is no longer where labels say."
_DEVICE = "Torch device; default: the best."
_STATES = "Folder that keeps the trunk's states, for the next command on these labels."


@dataclass(frozen=True, kw_only=True)
class Comparing:
    """Of `ospruner.compare`, and of its tables."""

    choose_on: str | None = _opt("Labels of other problems, on which choices are made.")
    prices: str = _opt("Prices of a token at which a policy stops: 5e-5,1e-4, or all.", "")
    online: bool = _opt("Generate on the labels' problems; a run continues.", False)
    samples: int = _opt("With --online: traces of each problem.", 16)
    seed: int = _opt("With --online: seed of the sampling.", 0)
    across_tasks: bool = _opt("Take policies of another task, too.", False)
    base: str | None = _opt(_BASE)
    device: str | None = _opt(_DEVICE)
    states: str | None = _opt(_STATES)
    limit: int | None = _opt("Only the first N traces; problems with --online.")
    batch_problems: int = _opt("Problems in one batch of --online.", 1)
    answer: str | None = _opt("With --online: forced or free; default: the labels'.")
    model: str | None = _opt("What tables call the base.")
    benchmark: str | None = _opt("What tables call the problems.")
    rewards_at: str = _opt("Prices of a token for rewards and gaps: 5e-4,1e-4.", "")
    charge: str = _opt("What AES and rewards count: thinking, or generated.", "thinking")
    train: str | None = _opt("Labels on which to fit LearnStop.")
    beside: tuple[str, ...] = _opt("Labels of the same problems by other prompts: more rows.", ())


@dataclass(frozen=True, kw_only=True)
class Calibrating:
    """Of `ospruner.calibrate`."""

    confidence: float = _opt("Chance that no more is lost, at least.", 0.95)
    mode: str = _opt("threshold, or sample: the policy draws its stops.", "threshold")
    values: str | None = _opt(
        "Thresholds, prices (0@.9: and a threshold), a rule's; from careful to bold: .9,.8,.7"
    )
    base: str | None = _opt(_BASE)
    device: str | None = _opt(_DEVICE)
    states: str | None = _opt(_STATES)
    efforts: str | None = _opt("Shares of the full traces' tokens: low=.5,medium=.7")


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What a server takes for a request that says nothing, in a request's names."""

    mode: str | None = _opt("sample or threshold.")
    threshold: float | None = _opt("For mode threshold, in [0, 1].")
    max_loss: float | None = _opt("What `ospruner calibrate` promised, such as 0.02.")
    price: float | None = _opt("Price of a token; default: the policy's own.")
    answer: str | None = _opt("forced, free, or tools.")
    wind_down: str | None = _opt("A sentence forced before the closing.")
    min_thinking_tokens: int | None = _opt("No stop before so many tokens.")
    max_thinking_tokens: int | None = _opt("Stop at the first step end from here on.")
    efforts: str | None = _opt("Prices of reasoning_effort, or thresholds: low=5e-4; '' for none.")
    control: float = _opt("Share of requests that never stop, to measure savings against.", 0.0)
