"""What `ospruner compare --set field=value` takes: how it generates, and what it prints."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from ospruner.eval.online.settings import OnlineSettings

__all__ = ["Comparing"]


def _help(text: str, default: Any = None) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Comparing(OnlineSettings):
    """Fields of `OnlineSettings`, of `OnlineRequest`, and of `ospruner.compare`."""

    preset: str = _help("The paper's sampling: deepseek-r1, drpo, gpt-oss.", "deepseek-r1")
    task: str | None = _help("math, choice, exact, code, generated or FILE.py.")
    prompt: str = _help("default, concise, chain-of-draft or check.", "default")
    wind_down: str | None = _help("A sentence forced before the closing.")
    files: tuple[str, ...] = _help("Read a benchmark's rows from these files.", ())
    dtype: str = _help("Such as bfloat16; auto: the base's own.", "auto")
    engine_args: tuple[str, ...] = _help("Such as tensor_parallel_size=2.", ())
    model: str | None = _help("What tables call the base.")
    benchmark: str | None = _help("What tables call the problems.")
    rewards_at: str = _help("Prices of a token for rewards and gaps: 5e-4,1e-4.", "")
    charge: str = _help("What AES and rewards count: thinking or compute.", "thinking")
    train: str | None = _help("Labels on which to fit LearnStop.")
    replicates: int = _help("Resamples of the frontiers' intervals.", 2000)


ONLINE = frozenset(one.name for one in fields(OnlineSettings))
"""Fields that say how traces are sampled."""
REQUEST = frozenset({"task", "prompt", "wind_down", "files"})
"""Fields of the request to generate."""
