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
    texts = ["size=2", "--gpu-memory=0.8", "eager=true", 'limit={"image": 0}', "seed=null", "n=a=b"]
    found = {"size": 2, "gpu_memory": 0.8, "eager": True, "limit": {"image": 0}, "seed": None}
    assert parse_arguments(texts, "engine argument") == found | {"n": "a=b"}


@pytest.mark.parametrize("text", ["max_seqs", "=2", "a b=2", "", "max-len=3"])
def test_an_argument_without_name_or_value_or_given_twice_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be name=value"):
        parse_arguments(["max_len=2", text], "engine argument")


@pytest.mark.parametrize(
    ("cuda", "vllm", "device", "said"),
    [
        (True, True, None, "vllm: .*a CUDA GPU and vLLM"),
        (True, True, "cuda:1", r"transformers: .*a given device \(cuda:1\)"),
        (True, False, None, "transformers: .*vLLM, .* is not installed"),
        (False, True, None, "transformers: .*no CUDA GPU"),
    ],
)
def test_the_default_engine(
    cuda: bool, vllm: bool, device: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if vllm else None)
    assert re.match(said, ": ".join(default_engine(device)))


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


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("openai", "the openai engine takes"),
        ("sglang", "the sglang engine takes"),
        pytest.param("vllm", "vLLM's EngineArgs has none", marks=needs_vllm),
    ],
)
def test_what_an_engine_does_not_take_is_refused(
    name: str, said: str, tiny_base_dir: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(ValueError, match=rf"\['tensor_paralel_size'\]: {said}"):
        opened(name, tiny_base_dir, tiny_tokenizer, tensor_paralel_size=2)
