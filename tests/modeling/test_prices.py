"""The head "price": one policy for every price of a token."""

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from modeling_ospruner import OSPrunerConfig, StopPolicyConfig
from modeling_ospruner.configuration_ospruner import PriceRange
from modeling_ospruner.policy_ospruner import price_logits, price_places
from ospruner.demo.shipped import Reasoner
from ospruner.eval.methods import price_grid
from ospruner.scoring import stop_logits
from ospruner.train.untrained import fresh_layers, untrained

from ..chats import prompts_of
from ..families import check_one_pass
from .test_policy import SAMPLED, policy_on, rows_of

RANGE = (5e-5, 1e-2)
PRICES = (0.0, 2e-5, 5e-5, 3e-4, 1e-3, 1e-2)


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
def test_generate_says_what_one_pass_over_the_text_says_at_each_price(
    tiny_tokenizer: PreTrainedTokenizerFast, layers: int
) -> None:
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
    {"max_loss": 0.02, "mode": "threshold", "threshold": 0.5, "price": 2e-3},
    {"max_loss": 0.03, "mode": "sample", "threshold": None, "price": 3e-3},
]
OF_EVERY_PRICE = OSPrunerConfig(
    head="price",
    price_range=list(RANGE),
    price=3e-4,
    calibrations=[{"confidence": 0.95} | one for one in PROMISES],
)
BOLD = OSPrunerConfig(default_mode="threshold", default_threshold=0.25, price=1e-3)


@pytest.mark.parametrize(
    ("asked", "config", "wanted"),  # mode, threshold, price
    [
        ({}, OF_EVERY_PRICE, ("sample", None, 3e-4)),
        ({"price": 0.0}, OF_EVERY_PRICE, ("sample", None, 0.0)),
        ({"threshold": 0.0}, OF_EVERY_PRICE, ("threshold", 0.0, 3e-4)),
        ({}, BOLD, ("threshold", 0.25, 1e-3)),
        ({"threshold": 0.0}, BOLD, ("threshold", 0.0, 1e-3)),
        *(
            ({"max_loss": most}, OF_EVERY_PRICE, tuple(one.values())[1:])
            for most, one in ((0.02, PROMISES[0]), (0.029, PROMISES[0]), (0.03, PROMISES[1]))
        ),
    ],
)
def test_what_is_not_said_is_the_configurations(
    asked: dict[str, Any], config: OSPrunerConfig, wanted: tuple[Any, ...]
) -> None:
    found = StopPolicyConfig(**asked).with_defaults(config)
    assert (found.mode, found.threshold, found.price) == wanted


def test_prices_that_the_policy_does_not_know_are_refused() -> None:
    with pytest.raises(ValueError, match=r"is 0.02, but .* prices .* 0 to 0.01"):
        StopPolicyConfig(price=0.02).with_defaults(OF_EVERY_PRICE)


def test_a_policy_without_a_price_says_nothing(tiny_base: Qwen2ForCausalLM) -> None:
    policy = fresh_layers(tiny_base, 1, prices=PriceRange(*RANGE), tuning="layers")
    hidden = torch.zeros(1, 3, 32)
    with pytest.raises(TypeError, match="price is None; it must be a number"):
        policy(hidden)
    assert policy.outputs(hidden).shape == (1, 3, 6)
