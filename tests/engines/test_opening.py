"""Engines by name: their arguments as the command line gives them."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from ospruner.engines.opening import EngineOptions, default_engine, open_engine, parse_arguments
from ospruner.engines.transformers.engine import TransformersEngine

from ..own_process import needs_vllm


def test_values_have_the_types_that_they_say() -> None:
    texts = ["tensor_parallel_size=2", "--gpu-memory-utilization=0.8", "enforce_eager=true"]
    texts += ["attn_implementation=eager", 'limit={"image": 0}', "seed=null", "name=a=b"]
    assert parse_arguments(texts, "engine argument") == {
        "tensor_parallel_size": 2,
        "gpu_memory_utilization": 0.8,
        "enforce_eager": True,
        "attn_implementation": "eager",
        "limit": {"image": 0},
        "seed": None,
        "name": "a=b",
    }


@pytest.mark.parametrize("text", ["tensor_parallel_size", "=2", "a b=2", "", "max-len=3"])
def test_an_argument_without_name_or_value_or_given_twice_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be name=value"):
        parse_arguments(["max_len=2", text], "engine argument")


@pytest.mark.parametrize(
    ("cuda", "vllm", "device", "engine", "why"),
    [
        (True, True, None, "vllm", "a CUDA GPU and vLLM"),
        (True, True, "cuda:1", "transformers", r"a given device \(cuda:1\)"),
        (True, False, None, "transformers", "vLLM, .* is not installed"),
        (False, True, None, "transformers", "no CUDA GPU"),
    ],
)
def test_the_default_engine(
    cuda: bool,
    vllm: bool,
    device: str | None,
    engine: str,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if vllm else None)
    found, reason = default_engine(device)
    assert found == engine
    assert re.search(why, reason)


def opened(name: str, base: Path, tokenizer: PreTrainedTokenizerFast, **arguments: Any) -> Any:
    urls = ("http://127.0.0.1:9",) if name in ("openai", "sglang") else ()
    dtype = "auto" if urls else "float32"
    options = EngineOptions(str(base), dtype=dtype, urls=urls, arguments=arguments)
    return open_engine(name, tokenizer, options)


def test_transformers_takes_its_own_and_those_of_loading(
    tiny_base_dir: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    arguments = {"attn_implementation": "eager", "fork_tokens": 99}
    engine = opened("transformers", tiny_base_dir, tiny_tokenizer, **arguments)
    assert isinstance(engine, TransformersEngine)
    assert engine.fork_tokens == 99
    assert engine.model.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="cannot be loaded with {'attn_implementation': 'none"):
        opened("transformers", tiny_base_dir, tiny_tokenizer, attn_implementation="none such")


@pytest.mark.parametrize("name", ["openai", "sglang"])
def test_a_server_is_not_given_arguments_of_its_start(
    name: str, tiny_base_dir: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(ValueError, match=rf"\['tensor_parallel_size'\]: the {name} engine takes"):
        opened(name, tiny_base_dir, tiny_tokenizer, tensor_parallel_size=2)


@needs_vllm
def test_vllm_refuses_what_its_engine_lacks(
    tiny_base_dir: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(ValueError, match=r"\['tensor_paralel_size'\]: vLLM's EngineArgs has none"):
        opened("vllm", tiny_base_dir, tiny_tokenizer, tensor_paralel_size=2)
