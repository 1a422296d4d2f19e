"""The policy inside vLLM: bodies over HTTP, and the checks in processes of their own."""

from __future__ import annotations

import importlib.util
import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from modeling_ospruner import OSPrunerConfig
from ospruner.serving.launch import check_memory, engine_options, vllm_command
from ospruner.serving.requests import CALIBRATION_FIELDS, StopRequest

from ...own_process import needs_vllm, run_checks

# Of one process, for vLLM takes long to import; the last ones put others in the place of CUDA's.
ENGINE = ("plugin", "queries", "start", "processor", "marker", "../../engines/vllm")
AHEAD = pytest.param(("async", "graph"), id="ahead", marks=pytest.mark.slow)


@needs_vllm
@pytest.mark.parametrize("checks", [pytest.param(ENGINE, id="engine"), AHEAD])
def test_the_policy_and_labels_inside_vllm(checks: tuple[str, ...]) -> None:
    here = Path(__file__).parent
    run_checks(*((here / f"{one}_checks.py").resolve() for one in checks))


STAND_INS = Path(__file__).parents[2] / "stand_ins"
BASES = ("qwen2", "qwen3", "qwen3_moe", "llama", "mistral", "gemma3_text", "glm4", "gpt_oss")
MORE_BASES = (  # queries alone
    *("afmoe", "apertus", "ernie4_5", "gemma4_text", "granite", "granite_swa", "laguna"),
    *("ministral3", "phi3"),
)
CASES = [f"test_base[2-{base}]" for base in BASES]
CASES += ["test_base[0-qwen2]", "test_base[3-llama]", "test_base[3-gpt_oss]"]
CASES += [f"test_queries[{base}]" for base in BASES + MORE_BASES] + ["test_queries_compiled"]
CASES += [f"test_adapters[{one}]" for one in ("llama-layers", "qwen3_moe-layers", "qwen3-queries")]
CASES += ["test_compiled[qwen2]", "test_compiled[gemma3_text]", "test_two_tensor_parallel_ranks"]
CASES += ["test_refused[cohere2_moe]", "test_refused[mimo_v2_flash]"]
CASES += [f"test_a_hybrid[{one}]" for one in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")]
CASES += ["test_a_base_of_other_weights_is_refused"]


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_base_inside_vllm(case: str) -> None:
    """Compiled and on two ranks, too."""
    # In the place of torchvision, which vLLM's Qwen3.5 imports and its build for CPUs has not.
    path = f"{STAND_INS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {"PYTHONPATH": path} if "qwen3_5" in case else {}
    run_checks(Path(__file__).with_name("bases_checks.py"), case=case, environment=environment)


@needs_vllm
@pytest.mark.slow
def test_quantised_bases_inside_vllm() -> None:
    checks = Path(__file__).with_name("quantised_checks.py")
    for layout in ("mxfp4", "fp8", "awq", "gptq"):
        run_checks(checks, case=f"test_the_base_is_packed_and_the_tail_is_not[{layout}]")


DRAFTS = [f"test_drafts[{case}]" for case in ("ngram", "model", "block", "eagle3", "layers")]


@needs_vllm
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("case", [None, *DRAFTS])
def test_the_policy_in_runner_v2(case: str | None) -> None:
    """In Triton's interpreter; before Triton is imported by whatever: else parts are compiled."""
    environment = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    file = Path(__file__).with_name("drafts_checks.py" if case else "runner_v2_checks.py")
    run_checks(file, case=case, environment=environment)


def check_body(*args: Any) -> Any:
    return pytest.importorskip("ospruner.serving.vllm.monitoring").check_body(*args)


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
EVERY = OSPrunerConfig(head="price", price_range=[5e-5, 1e-2], price=1e-3)
FIXED = OSPrunerConfig(price=1e-3)


@pytest.mark.parametrize(
    ("body", "config", "parses", "message"),
    [
        ({"tools": TOOLS}, FIXED, True, "whose box no call fits in"),
        ({"tools": TOOLS}, FIXED, False, "calls are not parsed"),
        ({"tools": TOOLS, "tool_choice": None}, FIXED, True, "whose box no call fits in"),
        ({"tools": TOOLS, "tool_choice": {"type": "auto"}}, FIXED, True, "whose box no call fits"),
        (None, EVERY, True, None),
        ({"tools": []}, FIXED, True, None),
        ({"tools": TOOLS, "tool_choice": "none"}, FIXED, False, None),
        ({"tools": TOOLS, "vllm_xargs": {"stop_answer": "tools"}}, FIXED, True, None),
        ({"tools": TOOLS, "vllm_xargs": {"stop_policy": False}}, FIXED, True, None),
        # A grammar holds, under which no box is forced.
        ({"tools": TOOLS, "tool_choice": "required"}, FIXED, True, None),
        ({"vllm_xargs": {"stop_price": 5e-4}}, EVERY, True, None),
        ({"vllm_xargs": {"stop_price": 0.5}}, EVERY, True, "stop_price is 0.5.* 0.01"),
        ({"vllm_xargs": {"stop_price": 1e-3}}, FIXED, True, None),
        ({"vllm_xargs": {"stop_price": 5e-4}}, FIXED, True, "is 0.0005, but .* for 0.001 alone"),
    ],
)
def test_what_would_do_nothing_is_refused(
    body: Any, config: OSPrunerConfig, parses: bool, message: str | None
) -> None:
    on = StopRequest({"stop_policy": True}, server=True)
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        check_body(body, on, config, parses)
    if parses and config is FIXED and body.get("vllm_xargs") is None:  # tools, and a server's word
        for defaults in ({"stop_policy": False}, {"stop_answer": "tools"}):
            check_body(body, StopRequest(defaults, server=True), config, parses)


ON = StopRequest({}, server=True)
OFF = StopRequest({"stop_policy": False}, server=True)
CHAT, MESSAGES, TOKENS = "/v1/chat/completions", "/v1/messages", "/inference/v1/generate"
PLACES = ("extra_body", "chat_template_kwargs", "custom_params", "extra_args", "sampling_params")
OTHERS = (  # names of a budget elsewhere
    *("thinking_budget", "thinking_budget_tokens", "max_think_tokens", "reasoning_max_tokens"),
    *("budget_tokens", "reasoning_budget", "thinkingBudget", "max_reasoning_tokens"),
)
BUDGET = {"thinking": {"type": "enabled", "budget_tokens": 2000}}


@pytest.mark.parametrize("path", ["/invocations", CHAT, f"{CHAT}/batch", "/v1/responses", MESSAGES])
def test_a_setting_where_nobody_reads_it_is_refused_on_every_route(path: str) -> None:
    keys = ("max_thinking_tokens", "stop_price", "thinking_token_budget", *OTHERS)
    wrong = [*OTHERS, *(f"{place}.{key}" for place in PLACES for key in keys)]
    wrong += ["reasoning.max_tokens", "extra_body.vllm_xargs.stop_mode"]
    for name in (*wrong, "sampling_params.extra_args.stop_id"):
        body: Any = 512
        for part in reversed(name.split(".")):
            body = {part: body}
        with pytest.raises(ValueError, match=rf"\['{name}'\] would do nothing"):
            check_body(body, ON, FIXED, True, path)
    for name in OTHERS:
        with pytest.raises(ValueError, match=rf"vllm_xargs: no \['{name}'\]"):
            check_body({"vllm_xargs": {name: 512}}, ON, FIXED, True, path)


@pytest.mark.parametrize(
    ("path", "body", "refused"),
    [
        (CHAT, {"thinking_token_budget": 5, "reasoning_effort": "low"}, False),
        ("/v1/responses", {"thinking_token_budget": 5}, True),
        (MESSAGES, {"thinking_token_budget": 5}, True),
        (MESSAGES, BUDGET, False),
        (f"{MESSAGES}/count_tokens", BUDGET, False),
        (CHAT, BUDGET, True),
        (TOKENS, {"sampling_params": {"thinking_token_budget": 5}}, False),
        (TOKENS, {"sampling_params": {"extra_args": {"max_thinking_tokens": 5}}}, False),
        (TOKENS, {"sampling_params": {"extra_args": {"thinking_budget": 5}}}, True),
        (TOKENS, {"sampling_params": {"max_thinking_tokens": 5}}, True),
        (TOKENS, {"vllm_xargs": {"max_thinking_tokens": 5}}, True),
        # What its author names as he likes.
        (CHAT, {"response_format": {"json_schema": {"thinking_budget": {}}}}, False),
        (CHAT, {"metadata": {"thinking_budget": "5"}, "messages": [{"stop_id": 1}]}, False),
        (CHAT, {"thinking_budget": None}, False),
    ],
)
def test_what_each_route_reads(path: str, body: dict[str, Any], refused: bool) -> None:
    with pytest.raises(ValueError, match="thinking") if refused else nullcontext():
        check_body(body, ON, FIXED, True, path)


SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": SCHEMA},
        {"structured_outputs": {"regex": "a"}},
        {"text": {"format": SCHEMA}},  # of /v1/responses
        {"output_config": {"format": SCHEMA}},  # of /v1/messages
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "add"}},
    ],
)
def test_where_a_grammar_puts_the_policy_off(body: dict[str, Any]) -> None:
    """Said where it is on by default, refused where it is asked for."""
    why, asks = "a grammar beside that", {"vllm_xargs": {"stop_policy": True}}
    assert check_body(body, ON, FIXED, True, CHAT) is None
    assert check_body(body, ON, FIXED, True, CHAT, why) == why
    assert check_body(body, OFF, FIXED, True, CHAT, why) is None
    assert check_body(body | {"vllm_xargs": {"stop_policy": False}}, ON, FIXED, True, CHAT) is None
    hidden = check_body(body | {"include_reasoning": False}, ON, FIXED, True, CHAT)
    assert hidden == "a grammar, which holds in the thinking already"
    with pytest.raises(ValueError, match="the request has a grammar beside that: they exclude"):
        check_body(body | asks, ON, FIXED, True, CHAT, why)
    allowed = {"allowed_token_ids": [1]}
    assert check_body(allowed, ON, FIXED, True, CHAT) == "allowed_token_ids"
    with pytest.raises(ValueError, match="the request has allowed_token_ids: they exclude"):
        check_body(allowed | asks, ON, FIXED, True, CHAT)
    for plain in ({"response_format": {"type": "text"}}, {"tools": TOOLS, "tool_choice": "none"}):
        assert check_body(plain, ON, FIXED, True, CHAT, why) is None


def test_the_command_of_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, config = str(tmp_path), OSPrunerConfig(base_model_name_or_path="org/base")
    config.save_pretrained(folder)
    defaults = {"stop_policy": True, "stop_control": 0.1}
    command, environment = vllm_command(folder, defaults, ["--port", "81"])
    assert command[:4] == ["-m", "vllm.entrypoints.openai.api_server", "--model", folder]
    told = json.dumps({"ospruner": defaults})
    assert command[4:] == ["--additional-config", told, "--port", "81"]
    assert set(environment) == {"VLLM_PLUGINS"}  # which model runner, vLLM chooses
    assert {"ospruner", "ospruner_stops"} <= set(environment["VLLM_PLUGINS"].split(","))
    said = f"Serving {folder} on org/base: stops by draws, at price 0 of a token by default; "
    assert capsys.readouterr().out == f"{said}promises: none\n"
    promise = {"mode": "threshold", "threshold": 0.25, "price": None, "max_loss": 0.02}
    config.calibrations = [dict.fromkeys(CALIBRATION_FIELDS, 0) | promise | {"confidence": 0.95}]
    config.save_pretrained(folder)
    vllm_command(folder, {"stop_policy": False, "stop_max_loss": 0.03}, [])
    said = capsys.readouterr().out
    assert "stops those who ask, from probability 0.25 on, at price 0" in said
    assert said.endswith("promises: at most 0.02 of accuracy lost, with confidence 0.95\n")
    for wrong, arguments, message in (
        ({}, ["--additional-config={}"], "--additional-config={}: `ospruner serve` sets it"),
        ({"stop_control": 2}, [], "the server's defaults: stop_control is 2"),
    ):
        with pytest.raises(ValueError, match=message):
            vllm_command(folder, wrong, arguments)


@needs_vllm
def test_too_little_memory_on_a_cpu_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.utils import cpu_resource_utils as resources

    memory = resources.MemoryNodeInfo(total_memory=1000, available_memory=500)
    monkeypatch.setattr(resources, "get_memory_node_info", lambda _: memory)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    with pytest.raises(ValueError, match=r"the share 0.92 .*0.50 of it is free.* 0.40,"):
        check_memory(engine_options(["--port", "81"]))
    for enough in (["--gpu-memory-utilization", "0.5"], ["--kv-cache-memory-bytes", "9"]):
        check_memory(engine_options(enough))
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    check_memory(engine_options([]))
