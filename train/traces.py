"""Traces of a base: problems become prompts, prompts become sampled traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from modeling_ospruner.reasoning_format import TokenFormat
from modeling_ospruner.serving.engine import Engine, Sampled, SamplingSettings
from ospruner.eval.benchmarks import Problem
from ospruner.eval.schema import LabelSettings

__all__ = ["TraceKey", "sample_traces", "sampling_settings", "wanted_traces"]


@dataclass(frozen=True)
class TraceKey:
    """One trace to be sampled: which problem, and which of its samples.

    Attributes:
        problem: the problem.
        sample_index: 0 .. samples_per_problem - 1.
    """

    problem: Problem
    sample_index: int

    @property
    def name(self) -> str:
        """The row's key for the engine: with the seed, it decides all of the trace's draws."""
        return f"{self.problem.id}/{self.sample_index}"


def wanted_traces(problems: Sequence[Problem], samples_per_problem: int) -> list[TraceKey]:
    """Every trace of a label run, in order.

    Raises:
        ValueError: no problems, or an id that two problems share.
    """
    if not problems:
        raise ValueError("problems is empty; give at least one problem to label")
    seen: set[str] = set()
    for problem in problems:
        if problem.id in seen:
            raise ValueError(f"two problems share the id {problem.id!r}; ids must be unique")
        seen.add(problem.id)
    return [TraceKey(problem, k) for problem in problems for k in range(samples_per_problem)]


def sampling_settings(settings: LabelSettings) -> SamplingSettings:
    """The engine's sampling settings of a label run."""
    return SamplingSettings(
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        max_new_tokens=settings.max_new_tokens,
        seed=settings.seed,
    )


def sample_traces(
    keys: Sequence[TraceKey],
    prompts: Sequence[Sequence[int]],
    engine: Engine,
    fmt: TokenFormat,
    settings: LabelSettings,
    on_done: Callable[[int, Sampled], None] | None = None,
) -> list[Sampled]:
    """Samples one trace for each key; a trace does not depend on its neighbours in the call.

    Args:
        keys: what to sample.
        prompts: the prompt of each key.
        engine: runs the base.
        fmt: where the thinking ends.
        settings: how to sample.
        on_done: called with an index and its trace as soon as it is finished.
    """
    return engine.sample(
        prompts, sampling_settings(settings), fmt, [key.name for key in keys], on_done
    )
