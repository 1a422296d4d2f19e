"""The policy inside vLLM where steps are scheduled ahead, as on GPUs; run by test_plugin.py.

vLLM's own asynchronous scheduler and runner, with streams and events of CUDA that do nothing: a
process of its own, for they are replaced in all of it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform

from modeling_ospruner import OSPrunerForCausalLM as Policy
from ospruner.demo.shipped import Reasoner
from ospruner.serving.vllm.runner_v1 import V1Processor

from .plugin_checks import (
    NEVER,
    TIGHT,
    Prompts,
    Texts,
    check_stops,
    environment,
    greedy,
    mixed,
    model,
    run,
    start,
    start_policy,
)

__all__ = ["environment", "mixed", "model"]


class _Nothing:
    """A stream or an event where everything has happened already."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, _: Any) -> None: ...


@pytest.fixture(autouse=True)
def scheduled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    platform: Any = type(current_platform)
    checked = platform.check_and_update_config

    def check(vllm_config: Any) -> None:
        checked(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(platform, "check_and_update_config", staticmethod(check))
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, _Nothing)
    monkeypatch.setattr(torch.cuda, "current_stream", _Nothing)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)


@pytest.fixture
def plain(reasoner: Reasoner, mixed: Prompts) -> Iterator[Texts]:
    """What vLLM gives without us."""
    llm = start(reasoner.folder, **TIGHT)
    yield run(llm, mixed, greedy())
    del llm


def test_preempted_requests_go_on_as_they_were(
    plain: Texts, model: Policy, mixed: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    came_back = []
    enter = V1Processor._enter

    def entered(self: V1Processor, params: Any, prompt: Any, output: list[int]) -> Any:
        request = enter(self, params, prompt, output)
        if request is not None and (taken := request.served.taken - request.prompt_tokens):
            came_back.append(taken)
        return request

    monkeypatch.setattr(V1Processor, "_enter", entered)
    served = start_policy(model.config._name_or_path, **TIGHT)
    assert served.llm_engine.vllm_config.scheduler_config.async_scheduling
    assert run(served, mixed, greedy(NEVER | {"stop_answer": "free"})) == plain
    seeds = [{"stop_policy": True, "stop_seed": 7, "stop_sample_index": i} for i in range(36)]
    reasons = check_stops(served, model, mixed, seeds, ahead=True)
    print(f"{len(came_back)} came back after {came_back} tokens")
    assert len(came_back) > 5
    assert min(reasons[reason] for reason in ("policy", "natural")) > 0
