"""The policy's own layers, also as queries on the base's keys: made, trained, asked in generate."""

from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    DynamicCache,
    GPT2Config,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    StaticCache,
)
from transformers.cache_utils import Cache, QuantizedLayer

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.configuration_ospruner import max_positions
from modeling_ospruner.generation_ospruner import Asked
from modeling_ospruner.policy_ospruner import LayerKeys
from ospruner.train.untrained import fresh_layers

from ..families import (
    NEVER,
    check_one_pass,
    let_write_paragraphs,
    make_base,
    padded_prompts,
    random_policy,
)


def _scaled(kind: str, factor: float, original: int) -> PreTrainedConfig:
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": factor}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    rope |= {} if kind == "linear" else {"original_max_position_embeddings": original}
    return Qwen2Config(max_position_embeddings=4096, rope_parameters=rope)


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (Qwen2Config(max_position_embeddings=300), 300),
        (GPT2Config(n_positions=77), 77),
        (BloomConfig(), None),
        (_scaled("yarn", 4.0, 4096), 16384),  # the configuration keeps the length before
        (_scaled("yarn", 4.0, 1024), 4096),  # or already says the one after
        (_scaled("linear", 2.0, 0), 8192),
        (_scaled("llama3", 8.0, 1024), 4096),
    ],
)
def test_a_base_says_how_long_a_text_may_be(config: PreTrainedConfig, limit: int | None) -> None:
    assert max_positions(config) == limit


COLUMNS, PROMPT = 30, 7


@torch.no_grad()
def test_what_nobody_waits_for_is_forgotten(tiny_base: Qwen2ForCausalLM) -> None:
    policy = fresh_layers(tiny_base, 2, "layers")
    ids = torch.randint(3, 300, (3, COLUMNS), generator=torch.Generator().manual_seed(0))
    cache: Any = DynamicCache(config=tiny_base.config)
    modules = (*tiny_base.modules(), *policy.modules())
    before = sum(len(module._forward_pre_hooks) for module in modules)
    with Asked(tiny_base, policy, None) as asked:
        for end in range(PROMPT, COLUMNS + 1):
            begin = 0 if end == PROMPT else end - 1
            tiny_base(input_ids=ids[:, begin:end], past_key_values=cache, use_cache=True)
            asked.keep([0, 1] if end < 20 else [1], torch.empty(0))
            held = sum(chunk.shape[1] for chunk in asked.chunks)
            assert held == end if end < 11 else held <= end - 10
            if end in (10, 20):
                asked.ask([0, 1] if end == 10 else [1], [], ids)
        asked.keep([], torch.empty(0))
        assert asked.chunks == []
    assert sum(len(module._forward_pre_hooks) for module in modules) == before


WIDTH, LENGTH = 12, 30
SAMPLED: dict[str, Any] = {"max_new_tokens": LENGTH, "do_sample": True}
SAMPLED |= {"temperature": 2.0, "top_k": 0}


class Rounded(QuantizedLayer):
    """Keeps all but the last few keys in half precision."""

    def _quantize(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        return tensor.bfloat16()

    def _dequantize(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float()


CACHES: dict[str, Any] = {
    "dynamic": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config=config, max_cache_len=WIDTH + LENGTH + 9),
    "quantised": lambda config: Cache(
        layers=[Rounded(residual_length=5) for _ in range(config.num_hidden_layers)]
    ),
}


def policy_on(
    name: str,
    tokenizer: PreTrainedTokenizerFast,
    n: int = 3,
    tuning: str = "queries",
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> OSPrunerForCausalLM:
    """A policy whose weights are not the base's; the base ends a step every few tokens."""
    base: Any = make_base(name, tokenizer)
    model = random_policy(base.to(dtype), tokenizer, n, tuning, **fields)
    with torch.no_grad():
        for parameter in model.policy.layers.parameters():
            parameter.mul_(1.1)
    let_write_paragraphs(model.base, model.token_format, 10.0, -100.0)
    return model


def rows_of(count: int) -> dict[str, Any]:
    return {name: value.repeat(count // 2, 1) for name, value in padded_prompts(WIDTH).items()}


WHOLE: list[tuple[int, Any]] = [(0, {}), (1, {}), (2, {}), (2, {"dtype": torch.bfloat16})]


@pytest.mark.parametrize(
    ("name", "kind", "n", "how"),  # full attention; windows of 8; those and sinks
    [
        *(("qwen2", kind, 3, {}) for kind in CACHES),
        ("gemma3_text", "dynamic", 3, {}),
        ("gpt_oss", "static", 3, {}),
        *(("qwen2", "dynamic", n, how | {"tuning": "layers"}) for n, how in WHOLE),
    ],
)
def test_on_every_cache_it_says_what_one_pass_over_the_text_says(
    name: str, kind: str, n: int, how: dict[str, Any], tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    model = policy_on(name, tiny_tokenizer, n, **how)
    rounded = kind == "quantised" or "dtype" in how
    given: dict[str, Any] = {"cache": lambda: CACHES[kind](model.base.config), **SAMPLED}
    said = check_one_pass(model, rows_of(6), 5e-2 if rounded else 1e-5, **given)
    assert len(said) > 20
    assert max(said) - min(said) > 0.2
    if kind == "quantised":  # the rounded keys were those that it saw
        with pytest.raises(AssertionError):
            check_one_pass(model, rows_of(6), 1e-6, **given)


def test_rows_at_a_steps_end_are_asked_together_and_no_other_token_runs_the_policy(
    tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = policy_on("qwen2", tiny_tokenizer)
    asked: list[tuple[int, ...]] = []
    held: list[int] = []
    outputs, update = model.policy.outputs, DynamicCache.update

    def counted(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        asked.append(tuple(hidden.shape[:2]))
        return outputs(hidden, *args, **kwargs)

    def watched(self: Any, keys: Any, *args: Any) -> Any:
        held.append(keys.shape[-2])
        return update(self, keys, *args)

    monkeypatch.setattr(model.policy, "outputs", counted)
    monkeypatch.setattr(DynamicCache, "update", watched)
    told: dict[str, Any] = {"stop_policy": NEVER, "return_dict_in_generate": True}
    ids: Any = model.generate(**rows_of(4), **SAMPLED, **told)
    ends = [record.step_ends for record in model.last_stop]
    columns = {end for row in ends for end in row if end < LENGTH}
    assert [tokens for _, tokens in asked] == [1] * len(columns)
    assert sum(rows for rows, _ in asked) == sum(end < LENGTH for row in ends for end in row)
    assert max(rows for rows, _ in asked) > 1
    assert len(held) == LENGTH * 4  # the base's own layers, once a token: the policy adds nothing
    assert ids.past_key_values.get_seq_length() == WIDTH + LENGTH - 1


def test_keys_that_are_not_those_of_its_layers_are_refused(tiny_base: Qwen2ForCausalLM) -> None:
    policy = fresh_layers(tiny_base, 2, "queries")
    one = LayerKeys(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8))
    with pytest.raises(ValueError, match=r"the policy's 2 layers .* and those of 1 layers were g"):
        policy(torch.zeros(1, 3, 32), keys=[one])
