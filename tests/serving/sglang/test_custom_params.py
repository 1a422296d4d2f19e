"""What the policy inside SGLang refuses, and the command of its server; without SGLang."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from modeling_ospruner.configuration_ospruner import OSPrunerConfig
from ospruner.formats import DEEPSEEK_R1
from ospruner.formats import PLAIN as PLAIN_FORMAT
from ospruner.serving.launch import sglang_command
from ospruner.serving.sglang.stopper import (
    DEFAULTS_VARIABLE,
    check_body,
    check_params,
    read_chat,
    server_defaults,
)
from ospruner.serving.sglang.tapped import check_start

PLAIN = {
    **dict.fromkeys(("custom_params", "json_schema", "regex", "ebnf", "structural_tag")),
    **{"stop_strs": [], "stop_regex_strs": [], "ignore_eos": False},
    **{"n": 1, "min_new_tokens": 0, "beam_width": None},
}


def params(**said: Any) -> SimpleNamespace:
    """What of SGLang's `SamplingParams` is looked at."""
    return SimpleNamespace(**{**PLAIN, **said})


def test_keys_that_a_request_may_have() -> None:
    config = OSPrunerConfig(price=1e-3)
    assert check_params(params(), config).on is None
    own = {"__sglang_reasoning_in_grammar": True, "x": 3}  # SGLang's own keys
    assert check_params(params(custom_params=own), config).on is None
    theirs = {"thinking_budget": 3, "stop_policy": False}  # of SGLang's own processor of logits
    assert check_params(params(custom_params=theirs), config).on is False
    asked = {"stop_seed": 3, "stop_price": 1e-3}
    assert check_params(params(custom_params=asked), config).fields["seed"] == 3
    assert check_params(params(custom_params={"stop_policy": True}, n=4, beam_width=1), config).on
    assert check_params(params(custom_params={"stop_policy": False}, regex="a"), config).on is False


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"custom_params": {"stop_threshold": 2}}, "custom_params: stop_threshold is 2; it must"),
        (
            {"custom_params": {"max_thinking_tokens": 9}, "min_new_tokens": 10},
            "custom_params: max_thinking_tokens is 9, but the request is to have at least 10",
        ),
        ({"custom_params": {"thinking_budget": 9}}, r"no \['thinking_budget'\]; the policy's keys"),
        ({"custom_params": {"stop_id": "a"}}, "stop_id is 'a'; SGLang tells what happened"),
        ({"custom_params": {"stop_seed": 3}, "n": 2}, "stop_seed is 3 and n is 2, and nothing"),
        (
            {"custom_params": {"stop_price": 5e-4}},
            "custom_params: stop_price is 0.0005, but .* for ",
        ),
        *(
            ({"custom_params": {"stop_policy": True}, name: 2}, re.escape(str({name: 2})))
            for name in ("json_schema", "regex", "ebnf", "structural_tag", "beam_width")
        ),
    ],
)
def test_what_is_refused_is_named(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_params(params(**said), OSPrunerConfig(price=1e-3))


@pytest.mark.parametrize(
    ("sent", "named"),
    [
        ({"custom_params": {"max_thinking_tokens": 9, "stop_mode": "sample"}}, None),
        ({"sampling_params": {"custom_params": {"stop_threshold": 0.5}}}, None),
        ({"messages": [{"content": "max_thinking_tokens"}], "metadata": {"stop_id": "a"}}, None),
        ({"stop_threshold": 0.5}, "stop_threshold"),
        ({"vllm_xargs": {"stop_policy": True}}, "vllm_xargs.stop_policy"),
        ({"extra_body": {"custom_params": {"stop_policy": True}}}, "extra_body.custom_params"),
        ({"chat_template_kwargs": {"thinking_budget": 9}}, "chat_template_kwargs.thinking_budget"),
        ({"sampling_params": {"max_thinking_tokens": 9}}, "sampling_params.max_thinking_tokens"),
        ({"reasoning": {"max_tokens": 9}}, "reasoning.max_tokens"),
        ([{"stop_threshold": 0.5}], None),
    ],
)
def test_a_setting_where_nobody_reads_it_is_refused(sent: Any, named: str | None) -> None:
    body = json.dumps(sent).encode()
    check_body(SimpleNamespace(_body=body[:-1]))  # no JSON: SGLang's to refuse
    check_body(None)  # not over HTTP
    if named is None:
        check_body(SimpleNamespace(_body=body))
        return
    with pytest.raises(ValueError, match=rf"{re.escape(named)}.* would do nothing here: send it"):
        check_body(SimpleNamespace(_body=body))


CHAT = (
    *("custom_params", "tools", "tool_choice", "response_format", "regex", "ebnf"),
    "reasoning_effort",
)


@pytest.mark.parametrize(
    ("begun", "more", "parser", "refused"),
    [
        ("So 7.", {}, "qwen3", True),
        ("<think>I add.</think>So 7", {}, "deepseek-r1", True),
        ("<think>I add.", {}, "qwen3", False),
        ("So 7.", {"separate_reasoning": False}, "qwen3", False),
        ("So 7.", {"continue_final_message": False}, "qwen3", False),
        ("So 7.", {}, None, False),
    ],
)
def test_a_prefilled_answer_is_refused_where_it_would_come_as_thinking(
    begun: str, more: dict[str, bool], parser: str | None, refused: bool
) -> None:
    asked = {"continue_final_message": True, "separate_reasoning": True, **more}
    messages = [SimpleNamespace(content=begun)]
    request = SimpleNamespace(**asked, **dict.fromkeys(CHAT), messages=messages)
    said = pytest.raises(ValueError, match="continue_final_message is True.*separate_reasoning")
    with said if refused else nullcontext():
        read_chat(request, OSPrunerConfig(), parser)


def test_stop_strings_beside_the_policy_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEFAULTS_VARIABLE, json.dumps({"stop_policy": True}))
    config, asked = OSPrunerConfig(), params(stop_strs=["\n\n"])
    for one in (asked, params(stop_regex_strs=["a+"])):
        with pytest.raises(ValueError, match="looks in the thinking, too"):
            check_params(one, config)
    off = params(stop_strs=["\n\n"], custom_params={"stop_policy": False})
    assert check_params(off, config).on is False
    plain = OSPrunerConfig(reasoning_format=PLAIN_FORMAT.to_dict())  # whose reply is one
    assert check_params(asked, plain).on is None
    monkeypatch.setenv(DEFAULTS_VARIABLE, json.dumps({"stop_policy": False}))
    assert check_params(asked, config).on is None


def test_defaults_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEFAULTS_VARIABLE, raising=False)
    config = OSPrunerConfig(price=1e-3)
    assert server_defaults(config).on  # a server that says nothing stops
    monkeypatch.setenv(DEFAULTS_VARIABLE, json.dumps({"stop_policy": True, "stop_answer": "free"}))
    assert server_defaults(config).on
    monkeypatch.setenv(DEFAULTS_VARIABLE, '{"stop_mode": "now"}')
    with pytest.raises(ValueError, match=f"{DEFAULTS_VARIABLE}: stop_mode is 'now'; it must be"):
        server_defaults(config)


LOW: dict[str, Any] = {"reasoning_effort": "low"}


def test_the_effort_of_a_chat_is_its_price(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"stop_policy": True, "stop_answer": "tools", "stop_efforts": {"low": 5e-4}}
    monkeypatch.setenv(DEFAULTS_VARIABLE, json.dumps(said))
    config = OSPrunerConfig(head="price", price_range=[5e-5, 1e-2], price=1e-4)
    own = {**dict.fromkeys(CHAT), "tool_choice": "none"}
    others: list[dict[str, Any]] = [{"reasoning_effort": effort} for effort in ("high", 0.5, None)]
    # A policy that is on by default goes off here, and nothing is refused.
    others += [LOW | {"regex": "[0-9]"}, LOW | {"tool_choice": "required"}]
    for more in (LOW, *others):
        asked = SimpleNamespace(**own | more)
        read_chat(asked, config, None)
        assert asked.custom_params == ({"stop_price": 5e-4} if more is LOW else None)


GOOD: dict[str, Any] = {
    **dict.fromkeys(("speculative_algorithm", "quantization", "enable_lora", "lora_paths")),
    **dict.fromkeys(("dllm_algorithm", "revision", "download_dir")),
    **dict.fromkeys(("pp_size", "attn_dp_size", "attn_cp_size", "dcp_size"), 1),
    **dict.fromkeys(("enable_dp_attention", "enable_pdmux", "enable_two_batch_overlap"), False),
    **{"enable_hisparse": False, "kv_cache_dtype": "auto", "disaggregation_mode": "null"},
    **{"device": "cuda", "disable_prefill_cuda_graph": True, "model_path": "policy"},
}


class Tapped:
    """What is looked at of SGLang's model of a base."""

    def set_eagle3_layers_to_capture(self, layer_ids: list[int]) -> None:
        """EAGLE-3's tap."""


KNOWN: dict[str, Any] = {"text_config": {"model_type": "qwen2"}, "tuning": "queries"}
KNOWN["base_model_name_or_path"] = "base"


def check(fields: dict[str, Any] | None = None, found: Any = Tapped, **server: Any) -> None:
    """Of a policy on a base that is not there, and a server."""
    config = OSPrunerConfig(**KNOWN | (fields or {}))
    check_start(config, SimpleNamespace(**GOOD | server), found)


def test_servers_in_which_the_policy_works() -> None:
    servers: list[dict[str, Any]] = [{}, {"kv_cache_dtype": "bfloat16", "enable_lora": False}]
    for server in [*servers, {"device": "cpu", "disable_prefill_cuda_graph": False}]:
        with pytest.raises(OSError, match="the base 'base' at revision None"):
            check(**server)


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("speculative_algorithm", "EAGLE3", "leave --speculative-algorithm out"),
        ("pp_size", 2, "use --tp-size"),
        ("enable_dp_attention", True, "leave --enable-dp-attention out"),
        ("kv_cache_dtype", "fp8_e4m3", "leave --kv-cache-dtype out"),
        ("quantization", "fp8", "leave --quantization out"),
        ("enable_lora", True, "leave --enable-lora out"),
        ("lora_paths", ["a"], "leave --lora-paths out"),
        ("disaggregation_mode", "prefill", "leave --disaggregation-mode out"),
        ("disable_prefill_cuda_graph", False, "start with --disable-prefill-cuda-graph"),
    ],
)
def test_servers_that_are_refused(name: str, value: Any, advice: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} is {re.escape(repr(value))}.*{advice}"):
        check(**{name: value})


@pytest.mark.parametrize(
    ("fields", "found", "message"),
    [
        ({"tuning": "layers"}, Tapped, "tuning 'layers' and 2 layers; inside SGLang policies of"),
        ({"num_policy_layers": 0}, Tapped, "'queries' and 0 layers; inside SGLang"),
        ({"method": "flashthink"}, Tapped, "is a verifier, which reads another"),
        ({}, None, "is a qwen2; inside SGLang there is no Qwen2ForCausalLM"),
        ({}, object, "Qwen2ForCausalLM has no tap"),
        ({"text_config": {"model_type": "deepseek_v3"}}, Tapped, "compressed .latent. keys"),
        ({"text_config": {"model_type": "qwen3_next"}}, Tapped, "keeps states in place of keys"),
    ],
)
def test_policies_that_are_refused(fields: dict[str, Any], found: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(fields, found)


def test_the_command_of_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """What is refused: tests/project/bad_inputs.txt."""
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    literals = replace(DEEPSEEK_R1, name="one's own").to_dict()
    OSPrunerConfig(**KNOWN, reasoning_format=literals).save_pretrained(policy := str(tmp_path))
    tiny_tokenizer.save_pretrained(policy)
    defaults = {"stop_policy": True, "stop_threshold": 0.5, "stop_control": 0.0}
    command, environment = sglang_command(policy, defaults, ["--port", "1"])
    start = ["-m", "sglang.launch_server", "--model-path", policy, "--disable-prefill-cuda-graph"]
    assert command == [*start, "--reasoning-parser", "deepseek-r1", "--port", "1"]
    assert environment == {DEFAULTS_VARIABLE: json.dumps(defaults)}
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    given = ["--reasoning-parser=qwen3", "--disable-prefill-cuda-graph"]
    command, environment = sglang_command(policy, defaults, given)
    assert command == [*start[:-1], *given]
    assert environment["SGLANG_PLUGINS"] == "ospruner,other"
