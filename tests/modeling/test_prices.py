"""The head "price": one policy for every price of a token."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from transformers import Qwen2ForCausalLM

from modeling_ospruner import OSPrunerForCausalLM, StopPolicyConfig
from modeling_ospruner.configuration_ospruner import PriceRange
from modeling_ospruner.policy_ospruner import price_logits, price_places
from ospruner.demo.shipped import Reasoner
from ospruner.eval.methods import price_grid
from ospruner.scoring import stop_logits, stop_probabilities
from ospruner.train.untrained import fresh_layers, untrained

from ..chats import asked_of, chat_batch, prompts_of
from ..families import random_policy

RANGE = (5e-5, 1e-2)
PRICES = (0.0, 2e-5, 5e-5, 3e-4, 1e-3, 1e-2)


def priced(base: Any, tokenizer: Any, num_policy_layers: int = 1) -> Any:
    """A policy of every price with random weights, on whose prices much depends."""
    return random_policy(base, tokenizer, num_policy_layers, price_range=RANGE, std=0.25)


@pytest.fixture(scope="module")
def model(reasoner: Reasoner) -> OSPrunerForCausalLM:
    made: OSPrunerForCausalLM = priced(reasoner.model, reasoner.tokenizer)
    return made


def test_prices_have_places_from_nothing_to_the_highest() -> None:
    known = PriceRange(*RANGE)
    assert known.place(0.0) == 0
    assert known.place(1e-2) == pytest.approx(5)
    # log(lambda + 1e-5), scaled so that 0 is at -1 and the highest price at 1.
    low, high = math.log(1e-5), math.log(1e-2 + 1e-5)
    for price in PRICES:
        z = 2 * (math.log(price + 1e-5) - low) / (high - low) - 1
        assert known.place(price) == pytest.approx(5 * (z + 1) / 2)
        assert known.price_at(known.place(price)) == pytest.approx(price)
    grid = price_grid(known)
    assert len(grid) == 31
    assert grid[:2] == (0.0, 5e-5)
    assert grid[-1] == 1e-2
    assert list(grid) == sorted(set(grid))
    assert known.price_at(math.inf) == math.inf
    assert math.isnan(known.price_at(math.nan))


@given(
    outputs=st.lists(st.floats(-40, 40, width=32), min_size=6, max_size=6),
    places=st.lists(st.floats(0, 5), min_size=2, max_size=6),
)
@settings(deadline=None)
def test_the_stop_probability_never_falls_with_the_price(
    outputs: list[float], places: list[float]
) -> None:
    said = torch.tensor(outputs, dtype=torch.float64)
    logits = price_logits(said, torch.tensor(sorted(places), dtype=torch.float64))
    assert bool((logits.diff() >= 0).all())


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
def test_generate_stops_as_one_pass_over_the_text_says(reasoner: Reasoner, layers: int) -> None:
    model = priced(reasoner.model, reasoner.tokenizer, layers)
    texts = prompts_of(reasoner, 3)
    padded = chat_batch(reasoner.tokenizer, asked_of(reasoner, 3))
    width = padded["input_ids"].shape[1]
    tokens = []
    for price in PRICES[::2]:
        how = {"price": price, "mode": "threshold", "threshold": 0.5}
        output = model.generate(**padded, stop_policy=how, max_new_tokens=150, do_sample=False)
        tokens.append(sum(record.thinking_tokens for record in model.last_stop))
        for text, row, record in zip(texts, output, model.last_stop, strict=True):
            written = [*text, *row[width:].tolist()]
            steps = len(record.step_ends)
            assert steps
            pi = stop_probabilities(model, written, prompt_length=len(text), price=price)
            said = torch.tensor(record.probabilities)
            torch.testing.assert_close(said, pi[:steps], atol=1e-5, rtol=1e-4)
            assert len(record.prices) == steps
            # It stops where the price of indifference is no higher than the price.
            for index, probability in zip(record.prices, record.probabilities, strict=True):
                assert (index <= price) == (probability >= 0.5)
    assert tokens == sorted(tokens, reverse=True)
    assert tokens[0] > tokens[-1]


def test_a_policy_of_one_lambda_has_no_prices(reasoner: Reasoner) -> None:
    model = untrained(reasoner.model, reasoner.tokenizer, num_policy_layers=1, tuning="layers")
    (ids,) = prompts_of(reasoner, 1)
    model.config.price = 1e-3
    own = {"price": 1e-3, "threshold": 1.0}
    model.generate(torch.tensor([ids]), stop_policy=own, max_new_tokens=40)
    assert model.last_stop[0].step_ends
    assert model.last_stop[0].prices == []
    for ask in (
        lambda: model.generate(torch.tensor([ids]), stop_policy={"price": 2e-3}),
        lambda: stop_logits(model, torch.tensor([ids]), price=2e-3),
    ):
        with pytest.raises(ValueError, match="price is 0.002, but the policy was trained"):
            ask()


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        ({"price": 0.02}, ValueError, "is 0.02, but .* prices .* 0 to 0.01"),
        ({"price": -1e-9}, ValueError, r"must lie in \[0, inf\)"),
        ({"price": math.nan}, ValueError, r"must lie in \[0, inf\)"),
        ({"price": [1e-4, 1e-3]}, TypeError, "must be a number"),
        ({"price": 1e-4, "max_loss": 0.1}, ValueError, "so is price given"),
    ],
)
def test_what_is_no_price_is_refused(
    model: OSPrunerForCausalLM,
    reasoner: Reasoner,
    asked: dict[str, Any],
    error: type[Exception],
    said: str,
) -> None:
    (ids,) = prompts_of(reasoner, 1)
    with pytest.raises(error, match=said):
        model.generate(torch.tensor([ids]), stop_policy=asked, max_new_tokens=20)


def test_the_default_price_is_the_configurations(
    model: OSPrunerForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.config, "price", 3e-4)
    assert StopPolicyConfig().with_defaults(model.config).price == 3e-4
    assert StopPolicyConfig(price=0.0).with_defaults(model.config).price == 0
    promises: list[dict[str, Any]] = [
        {"max_loss": 0.02, "mode": "threshold", "threshold": 0.5, "price": 2e-3},
        {"max_loss": 0.03, "mode": "sample", "threshold": None, "price": 3e-3},
    ]
    monkeypatch.setattr(model.config, "calibrations", [{"confidence": 0.95} | p for p in promises])
    for promise in promises:
        kept = StopPolicyConfig(max_loss=promise["max_loss"]).with_defaults(model.config)
        assert {name: vars(kept)[name] for name in promise if name != "max_loss"} == {
            name: value for name, value in promise.items() if name != "max_loss"
        }


def test_a_policy_without_a_price_says_nothing(tiny_base: Qwen2ForCausalLM) -> None:
    policy = fresh_layers(tiny_base, 1, prices=PriceRange(*RANGE), tuning="layers")
    hidden = torch.zeros(1, 3, 32)
    with pytest.raises(TypeError, match="price is None; it must be a number"):
        policy(hidden)
    assert policy.outputs(hidden).shape == (1, 3, 6)
