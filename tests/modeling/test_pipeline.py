"""transformers' own text-generation pipeline, and settings that travel in a generation config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, Qwen2ForCausalLM, pipeline

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.train.untrained import untrained

CHATS = [
    [{"role": "user", "content": text}]
    for text in ("Ann has 3 apples", "Ann has 3 apples and buys 4 more", "So 3 + 4 = 7")
]
ARGUMENTS: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False}


@pytest.fixture
def model(tiny_base: Qwen2ForCausalLM, tiny_tokenizer: Any) -> OSPrunerForCausalLM:
    """A policy that stops at the first paragraph's end."""
    model = untrained(tiny_base, tiny_tokenizer, init_bias=50.0, tuning="layers")
    breaks = [i for i, kind in enumerate(model.token_format.kinds) if kind & 1 and kind & 8]
    model.base.generation_config.sequence_bias = [[[i], 6.0] for i in breaks]
    return model


def alone(model: OSPrunerForCausalLM, chat: Any, stop_policy: Any = True) -> str:
    """What generate writes for one chat by itself."""
    assert model.tokenizer is not None
    inputs: Any = model.tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    output = model.generate(**inputs, stop_policy=stop_policy, **ARGUMENTS)
    new = output[0, inputs["input_ids"].shape[1] :]
    return str(model.tokenizer.decode(new, skip_special_tokens=True))


def test_chats_one_by_one_and_in_batches(model: OSPrunerForCausalLM) -> None:
    make: Any = pipeline
    pipe = make(
        "text-generation", model=model, tokenizer=model.tokenizer, stop_policy=True, **ARGUMENTS
    )
    wanted = [alone(model, chat) for chat in CHATS]
    assert all("</think>" in text for text in wanted)
    (one,) = pipe(CHATS[0])
    assert one["generated_text"][-1] == {"role": "assistant", "content": wanted[0]}
    batch = pipe(CHATS, batch_size=3, return_full_text=False)
    assert [found[0]["generated_text"] for found in batch] == wanted
    assert [record.reason for record in model.last_stop] == ["policy"] * 3
    (text,) = pipe("Ann has 3 apples", stop_policy={"mode": "threshold", "threshold": 1.0})
    assert text["generated_text"].startswith("Ann has 3 apples")
    assert model.last_stop[0].reason == "policy", "pi is 1 in float32"
    off = pipe(CHATS[0], stop_policy=False, return_full_text=False)
    assert off[0]["generated_text"] == alone(model, CHATS[0], stop_policy=False) != wanted[0]


def test_a_pipeline_loads_a_policy_by_name(model: OSPrunerForCausalLM, tmp_path: Path) -> None:
    model.base.save_pretrained(tmp_path / "base")
    model.config.base_model_name_or_path = str(tmp_path / "base")
    model.save_pretrained(tmp_path / "policy")
    make: Any = pipeline
    pipe: Any = make("text-generation", model=str(tmp_path / "policy"), trust_remote_code=True)
    assert type(pipe.model) is OSPrunerForCausalLM
    (found,) = pipe(CHATS[1], stop_policy=True, return_full_text=False, **ARGUMENTS)
    assert found["generated_text"] == alone(model, CHATS[1])


def test_a_generation_config_holds_the_stop_policy(model: OSPrunerForCausalLM) -> None:
    """It is how `transformers serve` passes it on, from a client or by the model's default."""
    ids = torch.tensor([[5, 6, 7, 8]])
    wanted = model.generate(ids, stop_policy=True, **ARGUMENTS)
    plain = model.generate(ids, **ARGUMENTS)
    assert not torch.equal(plain, wanted)
    given = GenerationConfig(
        **ARGUMENTS,
        stop_policy={"mode": "threshold"},
        sequence_bias=model.generation_config.sequence_bias,
        eos_token_id=model.generation_config.eos_token_id,
    )
    assert torch.equal(model.generate(ids, generation_config=given), wanted)
    assert model.last_stop[0].reason == "policy"
    off = model.generate(ids, generation_config=given, stop_policy=False)
    assert torch.equal(off, plain)
    settings: Any = model.generation_config
    settings.stop_policy = True
    assert torch.equal(model.generate(ids, **ARGUMENTS), wanted)
    settings.stop_policy = {"mod": "sample"}
    with pytest.raises(ValueError, match=r"stop_policy has no \['mod'\]"):
        model.generate(ids, **ARGUMENTS)
