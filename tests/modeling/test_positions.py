"""Bases whose rotary frequencies depend on the text's length: equal, or refused by name."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.rules import Budget
from ospruner.rules.live import generate_with_rule
from ospruner.scoring import stop_logits
from ospruner.train.untrained import fresh_layers

from ..families import check_one_pass, let_write_paragraphs, make_base, random_policy

SWITCH = 64
ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": SWITCH},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": SWITCH,
    },
}


def base_of(
    kind: str, tokenizer: PreTrainedTokenizerFast, positions: int, name: str = "llama"
) -> PreTrainedModel:
    """A tiny base with a `rope_type`, and so many positions."""
    more = {"original_max_position_embeddings": SWITCH} if name == "phi3" else {}
    rope = {"rope_theta": 10_000.0, **ROPES[kind]}
    fields = {"max_position_embeddings": positions, "rope_parameters": rope}
    return make_base(name, tokenizer, **fields, **more)


def model_on(kind: str, tokenizer: PreTrainedTokenizerFast, positions: int) -> OSPrunerForCausalLM:
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
    tiny_tokenizer: PreTrainedTokenizerFast, kind: str, positions: int, new_tokens: int
) -> None:
    model = model_on(kind, tiny_tokenizer, positions)
    ids = tiny_tokenizer("<think>\n", return_tensors="pt").input_ids
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    met = check_one_pass(model, inputs, 1e-4, max_new_tokens=new_tokens)
    assert len(met) >= new_tokens // 8
    assert max(met) - min(met) > 0.1


def test_texts_that_pass_a_dynamic_switch_are_refused(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    model = model_on("dynamic", tiny_tokenizer, SWITCH)
    prompt = torch.arange(20, 30)[None]
    for read in (
        lambda: model.generate(prompt, stop_policy=True, max_new_tokens=60),
        lambda: stop_logits(model, torch.arange(20, 90)[None]),
    ):
        said = r"may reach 70 tokens, but .* \(rope_type 'dynamic'\) change from 64 tokens on"
        with pytest.raises(ValueError, match=said):
            read()
    # Without the policy nothing is read.
    assert model.generate(prompt, stop_policy=False, max_new_tokens=60).shape[1] > 10
    base: Any = model.base
    generate_with_rule(base, tiny_tokenizer, Budget(5), prompt, max_new_tokens=60)


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_longrope_within_the_positions_is_refused_at_construction(
    tiny_tokenizer: PreTrainedTokenizerFast, name: str
) -> None:
    base = base_of("longrope", tiny_tokenizer, 4 * SWITCH, name)
    with pytest.raises(ValueError, match="a base: with rope_type 'longrope' .* passes 64 tokens"):
        fresh_layers(base, 2, tuning="layers")


def test_an_unknown_switch_is_found_by_trying(
    tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
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
