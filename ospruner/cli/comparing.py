"""What `ospruner compare --set field=value` takes: how it generates, and what it prints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["ONLINE", "Comparing"]


def _help(text: str, default: Any = None) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Comparing:
    """Fields of `ospruner.compare`."""

    samples: int = _help("With --online: traces of each problem.", 16)
    seed: int = _help("With --online: of sampling and of the policies' draws.", 0)
    batch_problems: int = _help("With --online: problems in one batch of generate.", 1)
    model: str | None = _help("What tables call the base.")
    benchmark: str | None = _help("What tables call the problems.")
    rewards_at: str = _help("Prices of a token for rewards and gaps: 5e-4,1e-4.", "")
    charge: str = _help("What AES and rewards count: thinking or compute.", "thinking")
    train: str | None = _help("Labels on which to fit LearnStop.")
    replicates: int = _help("Resamples of the frontiers' intervals.", 2000)


ONLINE = ("samples", "seed", "batch_problems")
"""Fields that say how traces are generated."""
