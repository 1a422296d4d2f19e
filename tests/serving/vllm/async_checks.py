"""The policy inside vLLM where steps are scheduled ahead, as on GPUs; run by test_plugin.py in a
process of its own, for streams and events of CUDA are replaced in all of it.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from vllm.platforms import current_platform

from modeling_ospruner import OSPrunerForCausalLM as Policy
from ospruner.serving.vllm.runner_v1 import V1Processor

from .plugin_checks import TIGHT, Prompts, Texts, check_as_ever, start_policy


@pytest.fixture(autouse=True)
def scheduled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    platform: Any = type(current_platform)
    checked = platform.check_and_update_config

    def check(vllm_config: Any) -> None:
        checked(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(platform, "check_and_update_config", staticmethod(check))
    for name in ("Stream", "Event", "current_stream"):  # where everything has happened already
        monkeypatch.setattr(torch.cuda, name, MagicMock)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)


def test_preempted_requests_go_on_as_they_were(
    plain: Texts, model: Policy, mixed: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    reasons = check_as_ever(served, model, mixed, plain, ahead=True)
    print(f"{len(came_back)} came back after {came_back} tokens")
    assert len(came_back) > 5
    assert min(reasons["policy"], reasons["natural"]) > 0
