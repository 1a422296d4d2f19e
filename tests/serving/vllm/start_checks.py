"""What vLLM is refused, or told, before an engine is made; run by test_plugin.py."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer
from vllm import SamplingParams
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from modeling_ospruner import OSPrunerConfig
from modeling_ospruner import OSPrunerForCausalLM as Policy
from ospruner.demo.shipped import Reasoner
from ospruner.serving.checks import base_weights, check_base_weights
from ospruner.serving.requests import StopRequest
from ospruner.serving.vllm.plugin import Defaults, ServedPolicy
from ospruner.serving.vllm.processor import PolicyProcessor, StopRecords
from ospruner.serving.vllm.servable import check_start, why_not

from ...broken_tensors import BROKEN, break_tensors
from ...chats import chat_ids


def started(policy: Policy, config: Any = None, **differing: Any) -> Any:
    """As much of vLLM's configuration as `check_start` reads; other settings by name."""
    sizes = ("pipeline", "data", "decode_context", "prefill_context")
    parallel: dict[str, Any] = {f"{name}_parallel_size": 1 for name in sizes}
    parallel |= {"use_ubatching": False, "worker_extension_cls": ""}
    parts = {
        "structured_outputs_config": SimpleNamespace(reasoning_parser=""),
        "parallel_config": SimpleNamespace(**parallel),
        "cache_config": SimpleNamespace(cache_dtype="auto"),
        "model_config": SimpleNamespace(
            logits_processors=None,
            enable_trace_replay=False,
            hf_config=policy.config if config is None else config,
            model=policy.config._name_or_path,
            revision=None,
        ),
        "load_config": SimpleNamespace(load_format="auto", download_dir=None),
    }
    whole = SimpleNamespace(use_v2_model_runner=False, speculative_config=None, **parts)
    whole.additional_config = {}
    for name, value in differing.items():
        [owner] = [one for one in (whole, *parts.values()) if name in vars(one)]
        setattr(owner, name, value)
    return whole


def changed(model: Policy, **fields: Any) -> Any:
    """Its configuration with other fields, of the base where the policy has none of them."""
    config = copy.deepcopy(model.config)
    for name, value in fields.items():
        setattr(config if name in vars(config) else config.text_config, name, value)
    return config


def drafting(method: str = "eagle3", **further: Any) -> dict[str, Any]:
    further = {"rejection_sample_method": "standard", **further}
    speculative = SimpleNamespace(method=method, **further)
    return {"use_v2_model_runner": True, "speculative_config": speculative}


QUERIES = {"tuning": "queries"}


@pytest.mark.parametrize(
    ("fields", "differing", "message"),
    [
        ({}, drafting("mtp"), "method is 'mtp'"),
        ({}, drafting(rejection_sample_method="synthetic"), "method is 'synthetic'"),
        ({}, {"enable_trace_replay": True}, "trace_replay is True"),
        ({}, {"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({}, {"prefill_context_parallel_size": 4}, "prefill_context_parallel_size is 4"),
        ({}, {"use_ubatching": True}, "use_ubatching is True"),
        ({}, {"reasoning_parser": "openai_gptoss"}, "parser is 'openai_gptoss'"),
        ({"method": "flashthink"}, {}, "is a verifier"),
        ({"hidden_size": 64}, {}, "hidden_size 128 where the policy needs 64"),
        ({"model_type": "olmo2"}, {}, "is a olmo2"),
        (QUERIES, {"cache_dtype": "fp8"}, "cache_dtype is 'fp8'"),
        (QUERIES, {"data_parallel_size": 2}, "data_parallel_size is 2"),
        (QUERIES, {"decode_context_parallel_size": 2}, "context_parallel_size is 2"),
    ],
)
def test_what_would_be_wrong_is_refused_at_start(
    model: Policy, fields: dict[str, Any], differing: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_start(started(model, changed(model, **fields), **differing))


def test_what_stops_is_named_as_vllm_chooses_its_runner(
    model: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Defaults, "here", Defaults.here)
    monkeypatch.setattr(Defaults, "config", None)
    for v2, own in ((False, None), (True, ["a:B"])):
        config = started(model, use_v2_model_runner=v2, logits_processors=own)
        config.additional_config = {"ospruner": {"stop_policy": not v2}}
        ServedPolicy.verify_and_update_config(config)
        *others, name = config.model_config.logits_processors
        assert others == (own or [])
        assert name == f"ospruner.serving.vllm.runner_v{1 + v2}:V{1 + v2}Processor"
        assert issubclass(resolve_name(name), PolicyProcessor)
        assert resolve_name(config.parallel_config.worker_extension_cls) is StopRecords
        assert config.structured_outputs_config.reasoning_parser == "ospruner"
        assert Defaults.here.on is not v2
    theirs = started(model, reasoning_parser="qwen3", worker_extension_cls="c.D")
    ServedPolicy.verify_and_update_config(theirs)
    assert theirs.structured_outputs_config.reasoning_parser == "qwen3"
    assert theirs.parallel_config.worker_extension_cls == "c.D"
    for wrong, message in (
        (drafting() | {"use_v2_model_runner": False}, "speculative decoding is on"),
        ({"additional_config": {"ospruner": {"stop_threshold": 4}}}, "stop_threshold is 4"),
    ):
        with pytest.raises(ValueError, match=message):
            ServedPolicy.verify_and_update_config(started(model, **wrong))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("nemotron_h", "NemotronHForCausalLM keeps recurrent states"),
        ("deepseek_v3", "DeepseekV3ForCausalLM has compressed"),
        ("olmo2", "Olmo2ForCausalLM is run by transformers' own code"),
        ("gemma2", "Gemma2ForCausalLM has no tap"),
        ("nanochat", "there is no NanoChatForCausalLM"),
        ("glm4", None),  # by its decoder
        ("qwen3_next", None),
        ("granite", None),
        ("gemma3_text", None),
    ],
)
def test_a_base_is_taken_by_what_vllms_model_can_do(kind: str, message: str | None) -> None:
    config = AutoConfig.for_model(kind)
    why = why_not(config)
    assert why is message is None or (message or "-") in str(why)
    recurrent = kind in ("qwen3_next", "nemotron_h")
    assert "keeps recurrent states" in str(why_not(config, queries=False)) or not recurrent


def test_adapters_are_merged_into_copies_of_the_bases_layers() -> None:
    torch.manual_seed(0)
    down, up, weight = torch.randn(2, 6), torch.randn(4, 2), torch.randn(4, 6)
    at = "policy.tail.layers.0.self_attn.q_proj"
    adapters = {f"{at}.lora_A.default.weight": down, f"{at}.lora_B.default.weight": up}
    norm = torch.randn(6)
    base = {
        "base.model.layers.0.self_attn.q_proj.weight": torch.zeros(4, 6),
        "base.model.layers.1.self_attn.q_proj.weight": weight,
        "base.model.layers.1.input_layernorm.weight": norm,
        "base.model.norm.weight": norm + 1,
    }
    text = {"model_type": "qwen2", "num_hidden_layers": 2}
    config = OSPrunerConfig(text_config=text, num_policy_layers=1, adapter_rank=2)
    own = dict[str, torch.Tensor]()
    found = dict(base_weights([*adapters.items(), *base.items()], config, own))
    assert found == {name.removeprefix("base."): tensor for name, tensor in base.items()}
    weights = ("layers.0.self_attn.q_proj", "layers.0.input_layernorm", "norm")
    assert set(own) == {f"tail.{name}.weight" for name in weights}
    torch.testing.assert_close(own[f"tail.{weights[0]}.weight"], weight + 2 * up @ down)
    assert torch.equal(own["tail.norm.weight"], norm + 1)
    base["base.model.layers.1.self_attn.q_proj.weight"] = weight.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"layers.0.self_attn.q_proj cannot be merged.*_rank"):
        list(base_weights([*base.items(), *adapters.items()], config, {}))
    plain = dict(base_weights(base.items(), OSPrunerConfig(), own := {}))
    assert (list(plain), own) == (list(found), {})


def test_files_that_are_others_are_refused_at_start(
    model: Policy, reasoner: Reasoner, tmp_path: Path
) -> None:
    """`tests/modeling` has all kinds of positions and of broken tensors."""
    check_start(started(model, **drafting()))
    absent = changed(model, base_model_name_or_path="/nowhere/at/all")
    with pytest.raises(OSError, match="the base '/nowhere/at/all'"):
        check_start(started(model, absent))
    folder = Path(shutil.copytree(reasoner.folder, tmp_path / "base"))
    moved = changed(model, base_model_name_or_path=str(folder))
    check_start(started(model, moved))  # the same weights, lying elsewhere
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] *= 1.01  # not the norm, which is compared too
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    message = rf"'{folder}' has other weights \(fingerprint .*{model.config.base_fingerprint}"
    with pytest.raises(ValueError, match=message):
        check_start(started(model, moved))
    with pytest.raises(ValueError, match=message):
        check_base_weights(moved, None)  # after the download of a base that was not there
    literals = json.loads((folder / "config.json").read_text("utf-8"))
    literals["rope_parameters"] = {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 4.0}
    (folder / "config.json").write_text(json.dumps(literals), "utf-8")
    with pytest.raises(ValueError, match="has rope_type 'dynamic'"):
        check_start(started(model, moved))
    broken = shutil.copytree(model.config._name_or_path, tmp_path / "policy")
    said = break_tensors(broken, next(iter(BROKEN)))
    with pytest.raises(ValueError, match=said):
        check_start(started(model, model=str(broken)))


@pytest.mark.parametrize("on", [True, False])
def test_anthropics_budget_is_the_policys(monkeypatch: pytest.MonkeyPatch, on: bool) -> None:
    """By vLLM's own way from a body for /v1/messages to its parameters; also used again."""
    monkeypatch.setattr(Defaults, "here", StopRequest({"stop_policy": on}, server=True))
    body = {"model": "toy", "max_tokens": 4000, "messages": [{"role": "user", "content": "?"}]}
    body |= {"thinking": {"type": "enabled", "budget_tokens": 2000}}
    request = AnthropicMessagesRequest.model_validate(body)
    asked = AnthropicServingMessages.to_chat_completion_request(request)
    params = asked.to_sampling_params(4000, {})
    for _ in range(2):
        PolicyProcessor.validate_params(params)
        assert params.extra_args == ({"max_thinking_tokens": 2000} if on else None)
        assert params.thinking_token_budget == (None if on else 2000)


@pytest.mark.parametrize("width", [1, 3, 100])
def test_stop_strings_cut_no_thinking(model: Policy, width: int) -> None:
    """vLLM's own detokenizer looks for them, in chunks of any width."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model.config._name_or_path)

    def told(on: bool, prompt_ids: list[int], text: str) -> tuple[str, str | None]:
        params = SamplingParams(stop=["\n\n", "7"], extra_args={"stop_policy": on})
        asked = {"sampling_params": params, "prompt_token_ids": prompt_ids}
        request: Any = SimpleNamespace(request_id="a", **asked)
        made = IncrementalDetokenizer.from_new_request(tokenizer, request)
        ids = tokenizer.encode(text, add_special_tokens=False)
        for at in range(0, len(ids), width):
            if stop := made.update(ids[at : at + width], False):
                return made.get_next_output_text(True, False), stop
        return made.get_next_output_text(True, False), None

    thought = "3+4=7.\n\nSo 7.</think>\n\n"
    prompt, closed = (chat_ids(tokenizer, "Solve 2x=6.", more) for more in ("", "</think>"))
    assert told(False, prompt, thought) == ("3+4=", "7")
    assert told(True, prompt, thought) == (thought, None)
    assert told(True, prompt, f"{thought}x=3 7\n\n8") == (f"{thought}x=3 ", "7")
    assert told(True, prompt, f"{thought}x=3\n\n8") == (f"{thought}x=3", "\n\n")
    assert told(True, closed, "x=3\n\n8") == ("x=3", "\n\n")
