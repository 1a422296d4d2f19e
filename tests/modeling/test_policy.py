"""The policy's own layers, asked in generate: caches, positions that change, every price."""

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    BloomConfig,
    DynamicCache,
    GPT2Config,
    Qwen2Config,
    Qwen2ForCausalLM,
    StaticCache,
)
from transformers.cache_utils import Cache, QuantizedLayer

from modeling_ospruner import OSPrunerConfig, OSPrunerForCausalLM, StopPolicyConfig
from modeling_ospruner.configuration_ospruner import PriceRange, max_positions
from modeling_ospruner.generation_ospruner import Asked
from modeling_ospruner.policy_ospruner import LayerKeys, price_logits, price_places
from ospruner.demo.shipped import Reasoner
from ospruner.eval.methods import price_grid
from ospruner.rules import Budget
from ospruner.rules.live import generate_with_rule
from ospruner.scoring import stop_logits
from ospruner.train.untrained import fresh_layers, untrained

from ..chats import prompts_of
from ..families import (
    NEVER,
    check_one_pass,
    let_write_paragraphs,
    make_base,
    padded_prompts,
    random_policy,
)


def test_a_base_says_how_long_a_text_may_be() -> None:
    before = "original_max_position_embeddings"
    llama = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, before: 1024}
    ropes: list[tuple[dict[str, Any], int]] = [
        ({"rope_type": "yarn", "factor": 4.0, before: 4096}, 16384),
        ({"rope_type": "yarn", "factor": 4.0, before: 1024}, 4096),  # what it says is stretched
        ({"rope_type": "linear", "factor": 2.0}, 8192),
        ({"rope_type": "llama3", "factor": 8.0, **llama}, 4096),
    ]
    for rope, limit in ropes:
        rope["rope_theta"] = 1e4
        config = Qwen2Config(max_position_embeddings=4096, rope_parameters=rope)
        assert max_positions(config) == limit
    assert max_positions(GPT2Config(n_positions=77)) == 77
    assert max_positions(BloomConfig()) is None


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
    tokenizer: Any,
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
    name: str, kind: str, n: int, how: dict[str, Any], tiny_tokenizer: Any
) -> None:
    model = policy_on(name, tiny_tokenizer, n, **how)
    rounded = kind == "quantised" or "dtype" in how
    given: dict[str, Any] = {"cache": lambda: CACHES[kind](model.base.config), **SAMPLED}
    said = check_one_pass(model, rows_of(6), 5e-2 if rounded else 1e-5, **given)
    assert len(said) > 20
    assert max(said) - min(said) > 0.2


def test_rows_at_a_steps_end_are_asked_together_and_no_other_token_runs_the_policy(
    tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = policy_on("qwen2", tiny_tokenizer)
    asked, held = list[tuple[int, ...]](), list[int]()
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


SWITCH = 64
ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": SWITCH},
    "longrope": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    | {"original_max_position_embeddings": SWITCH},
}


def base_of(kind: str, tokenizer: Any, positions: int, name: str = "llama") -> Any:
    """A tiny base with a `rope_type`, and so many positions."""
    more: dict[str, Any] = {"rope_parameters": {"rope_theta": 10_000.0, **ROPES[kind]}}
    more |= {"original_max_position_embeddings": SWITCH} if name == "phi3" else {}
    return make_base(name, tokenizer, max_position_embeddings=positions, **more)


def model_on(kind: str, tokenizer: Any, positions: int) -> OSPrunerForCausalLM:
    """A policy on it; every few tokens end a step."""
    model = random_policy(base_of(kind, tokenizer, positions), tokenizer)
    let_write_paragraphs(model.base, model.token_format, 15.0, -1e9)
    return model


@pytest.mark.parametrize(
    ("kind", "positions", "new_tokens"),
    [
        ("dynamic", SWITCH, 40),  # below its switch
        ("dynamic", 4 * SWITCH, 200),
        ("yarn", 4 * SWITCH, 200),  # across the length that it names
        ("longrope", SWITCH, 40),  # never reaches its switch
    ],
)
def test_what_is_read_step_by_step_is_what_one_pass_gives(
    tiny_tokenizer: Any, kind: str, positions: int, new_tokens: int
) -> None:
    model = model_on(kind, tiny_tokenizer, positions)
    ids = tiny_tokenizer("<think>\n", return_tensors="pt").input_ids
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    met = check_one_pass(model, inputs, 1e-4, max_new_tokens=new_tokens)
    assert len(met) >= new_tokens // 8
    assert max(met) - min(met) > 0.1


def test_dynamic_switches_are_not_passed(tiny_tokenizer: Any) -> None:
    model = model_on("dynamic", tiny_tokenizer, SWITCH)
    prompt = torch.arange(20, 30)[None]
    said = r"may reach 70 tokens, but .* \(rope_type 'dynamic'\) change from 64 tokens on"
    with pytest.raises(ValueError, match=said):
        model.generate(prompt, stop_policy=True, max_new_tokens=60)
    with pytest.raises(ValueError, match=said):
        stop_logits(model, torch.arange(20, 90)[None])
    # Without the policy nothing is read.
    assert model.generate(prompt, stop_policy=False, max_new_tokens=60).shape[1] > 10
    base: Any = model.base
    generate_with_rule(base, tiny_tokenizer, Budget(5), prompt, max_new_tokens=60)


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_longrope_within_the_positions_is_refused(tiny_tokenizer: Any, name: str) -> None:
    base = base_of("longrope", tiny_tokenizer, 4 * SWITCH, name)
    with pytest.raises(ValueError, match="a base: with rope_type 'longrope' .* passes 64 tokens"):
        fresh_layers(base, 2, tuning="layers")


def test_unknown_switches_are_found(tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base that changes at the length that it names, by a way of its own."""
    base: Any = base_of("yarn", tiny_tokenizer, 4 * SWITCH)
    fresh_layers(base, 2, tuning="layers")
    rotary: Any = type(base.model.rotary_emb)
    forward = rotary.forward

    def switching(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        cos, sin = forward(self, x, position_ids)
        long = int(position_ids.max()) >= SWITCH
        return (cos * 0.5, sin * 0.5) if long else (cos, sin)

    monkeypatch.setattr(rotary, "forward", switching)
    with pytest.raises(ValueError, match=r"in pieces, give other .*from position 58 on"):
        fresh_layers(base, 2, tuning="layers")


RANGE = (5e-5, 1e-2)
PRICES = (0.0, 2e-5, 5e-5, 3e-4, 1e-3, 1e-2)


def test_prices_have_places_from_nothing_to_the_highest() -> None:
    known = PriceRange(*RANGE)
    # log(lambda + 1e-5), scaled so that 0 is at -1 and the highest price at 1.
    low, high = math.log(1e-5), math.log(1e-2 + 1e-5)
    for price in PRICES:
        z = 2 * (math.log(price + 1e-5) - low) / (high - low) - 1
        assert known.place(price) == pytest.approx(5 * (z + 1) / 2)
        assert known.price_at(known.place(price)) == pytest.approx(price)
    grid = price_grid(known)
    assert (len(grid), *grid[:2], grid[-1]) == (31, 0.0, 5e-5, 1e-2)
    assert list(grid) == sorted(set(grid))
    assert known.price_at(math.inf) == math.inf
    assert math.isnan(known.price_at(math.nan))


def test_the_logit_is_the_formula() -> None:
    torch.manual_seed(0)
    outputs = 3 * torch.randn(4, 7, 6)
    for place in (0.0, 0.4, 1.0, 3.7, 5.0):
        wanted = outputs[..., 0].clone()
        for j in range(5):
            wanted += F.softplus(outputs[..., 1 + j]) * min(max(place - j, 0.0), 1.0)
        torch.testing.assert_close(price_logits(outputs, torch.tensor(place)), wanted)


def test_the_price_of_indifference_is_where_a_stop_is_as_likely_as_not() -> None:
    torch.manual_seed(1)
    outputs = torch.randn(2000, 6, dtype=torch.float64) * torch.tensor([3.0, 1, 1, 1, 1, 1])
    places = price_places(outputs)
    inside = places.isfinite() & (places > 0)
    assert 0.2 < float(inside.double().mean()) < 0.8
    found = price_logits(outputs[inside], places[inside])
    torch.testing.assert_close(found, torch.zeros_like(found), atol=1e-9, rtol=0)
    everywhere = torch.full((len(outputs),), 5.0, dtype=torch.float64)
    at_most = price_logits(outputs, everywhere)
    assert torch.equal(places == torch.inf, at_most < 0)
    assert torch.equal(places == 0, outputs[:, 0] >= 0)
    assert bool(price_places(torch.full((1, 6), torch.nan)).isnan().all())


@pytest.mark.parametrize("layers", [0, 2])
def test_at_each_price_it_says_what_one_pass_says(tiny_tokenizer: Any, layers: int) -> None:
    model = policy_on("qwen2", tiny_tokenizer, layers, price_range=RANGE, std=0.25)
    for price in PRICES[::2]:
        assert len(check_one_pass(model, rows_of(4), 1e-5, price=price, **SAMPLED)) > 10
        for record in model.last_stop:
            # It stops where the price of indifference is no higher than the price.
            for index, probability in zip(record.prices, record.probabilities, strict=True):
                assert (index <= price) == (probability >= 0.5)


def test_a_policy_of_one_price_tells_none_and_knows_no_other(reasoner: Reasoner) -> None:
    model = untrained(reasoner.model, reasoner.tokenizer, num_policy_layers=1, tuning="layers")
    ids = torch.tensor(prompts_of(reasoner, 1))
    model.config.price = 1e-3
    model.generate(ids, stop_policy={"price": 1e-3, "threshold": 1.0}, max_new_tokens=40)
    assert model.last_stop[0].step_ends
    assert model.last_stop[0].prices == []
    with pytest.raises(ValueError, match="price is 0.002, but the policy was trained"):
        stop_logits(model, ids, price=2e-3)


PROMISES: list[dict[str, Any]] = [
    {"confidence": 0.95, "max_loss": 0.02, "mode": "threshold", "threshold": 0.5, "price": 2e-3},
    {"confidence": 0.95, "max_loss": 0.03, "mode": "sample", "threshold": None, "price": 3e-3},
]
EVERY_PRICE = OSPrunerConfig(head="price", price_range=[*RANGE], price=3e-4, calibrations=PROMISES)
BOLD = OSPrunerConfig(default_mode="threshold", default_threshold=0.25, price=1e-3)


@pytest.mark.parametrize(
    ("asked", "config", "wanted"),  # mode, threshold, price
    [
        ({}, EVERY_PRICE, ("sample", None, 3e-4)),
        ({"price": 0.0}, EVERY_PRICE, ("sample", None, 0.0)),
        ({"threshold": 0.0}, EVERY_PRICE, ("threshold", 0.0, 3e-4)),
        ({}, BOLD, ("threshold", 0.25, 1e-3)),
        ({"threshold": 0.0}, BOLD, ("threshold", 0.0, 1e-3)),
        ({"max_loss": 0.02}, EVERY_PRICE, ("threshold", 0.5, 2e-3)),
        ({"max_loss": 0.029}, EVERY_PRICE, ("threshold", 0.5, 2e-3)),
        ({"max_loss": 0.03}, EVERY_PRICE, ("sample", None, 3e-3)),
    ],
)
def test_what_is_not_said_is_the_configurations(
    asked: dict[str, Any], config: OSPrunerConfig, wanted: tuple[Any, ...]
) -> None:
    found = StopPolicyConfig(**asked).with_defaults(config)
    assert (found.mode, found.threshold, found.price) == wanted


def test_a_policy_without_a_price_says_nothing(tiny_base: Qwen2ForCausalLM) -> None:
    policy = fresh_layers(tiny_base, 1, prices=PriceRange(*RANGE), tuning="layers")
    hidden = torch.zeros(1, 3, 32)
    with pytest.raises(TypeError, match="price is None; it must be a number"):
        policy(hidden)
    assert policy.outputs(hidden).shape == (1, 3, 6)
