"""What `ospruner compare --set field=value` takes beside its options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Comparing"]


def _help(text: str, default: Any = None) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Comparing:
    """Further arguments of `ospruner.compare`."""

    batch_problems: int = _help("Problems in one batch of --online.", 1)
    model: str | None = _help("What tables call the base.")
    benchmark: str | None = _help("What tables call the problems.")
    rewards_at: str = _help("Prices of a token for rewards and gaps: 5e-4,1e-4.", "")
    charge: str = _help("What AES and rewards count: thinking or compute.", "thinking")
    train: str | None = _help("Labels on which to fit LearnStop.")
    replicates: int = _help("Resamples of the frontiers' intervals.", 2000)
