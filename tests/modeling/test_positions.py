"""Bases whose rotary frequencies depend on the text's length: equal, or refused by name."""

from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.formats_ospruner import BREAK
from ospruner.rules import Budget
from ospruner.rules.live import generate_with_rule
from ospruner.scoring import stop_logits, stop_probabilities
from ospruner.train.untrained import fresh_layers, untrained

SWITCH = 64
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "pad_token_id": None,
}
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


LOW = -1e9  # not -inf, which forbids what a stop policy has to force, and is refused


def make_base(kind: str, tokenizer: PreTrainedTokenizerFast, positions: int) -> PreTrainedModel:
    """A tiny Llama with a `rope_type`, and so many positions."""
    config = LlamaConfig(
        **SIZES,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        max_position_embeddings=positions,
        rope_parameters={"rope_theta": 10_000.0, **ROPES[kind]},
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


def make_model(
    kind: str, tokenizer: PreTrainedTokenizerFast, positions: int
) -> OSPrunerForCausalLM:
    model = untrained(make_base(kind, tokenizer, positions), tokenizer, tuning="layers")
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        weight = model.policy.head.weight
        weight.copy_(torch.randn(weight.shape, generator=generator))
        model.policy.head.bias.zero_()
    return model


class Breaks(LogitsProcessor):
    """Lets every seventh token end a step, and none end the thinking or the text."""

    def __init__(self, model: OSPrunerForCausalLM) -> None:
        fmt = model.token_format
        self.breaks = [i for i, kind in enumerate(fmt.kinds) if kind & BREAK]
        self.ends = [fmt.think_end_id, 0]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.index_fill(-1, torch.tensor(self.ends), LOW)
        if input_ids.shape[1] % 7 == 0:
            scores = torch.full_like(scores, LOW).index_fill(-1, torch.tensor(self.breaks), 0.0)
        return scores


def online(model: OSPrunerForCausalLM, prompt: torch.Tensor, new_tokens: int) -> tuple[Any, Any]:
    """A text that never stops, and the stop probabilities that generate met at its steps."""
    never = {"mode": "threshold", "threshold": 1.0}
    breaks = LogitsProcessorList([Breaks(model)])
    texts = model.generate(
        prompt, stop_policy=never, max_new_tokens=new_tokens, logits_processor=breaks
    )
    return texts[0], model.last_stop[0].probabilities


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
    model = make_model(kind, tiny_tokenizer, positions)
    prompt = tiny_tokenizer("<think>\n", return_tensors="pt").input_ids
    torch.manual_seed(0)
    text, met = online(model, prompt, new_tokens)
    assert len(met) >= new_tokens // 8
    assert max(met) - min(met) > 0.1
    one_pass = stop_probabilities(model, text, prompt_length=prompt.shape[1])
    torch.testing.assert_close(one_pass[: len(met)], torch.tensor(met), rtol=0, atol=1e-4)


def test_texts_that_pass_a_dynamic_switch_are_refused(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    model = make_model("dynamic", tiny_tokenizer, SWITCH)
    prompt = torch.arange(20, 30)[None]
    message = r"may reach 70 tokens, but .* \(rope_type 'dynamic'\) change from 64 tokens on"
    with pytest.raises(ValueError, match=message):
        model.generate(prompt, stop_policy=True, max_new_tokens=60)
    long = torch.arange(20, 90)[None]
    with pytest.raises(ValueError, match=message):
        stop_logits(model, long)
    # Without the policy nothing is read.
    assert model.generate(prompt, stop_policy=False, max_new_tokens=60).shape[1] > 10
    base: Any = model.base
    generate_with_rule(base, tiny_tokenizer, Budget(5), prompt, max_new_tokens=60)


def test_longrope_within_the_positions_is_refused_at_construction(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    phi = Phi3Config(
        **SIZES,
        vocab_size=300,
        max_position_embeddings=4 * SWITCH,
        original_max_position_embeddings=SWITCH,
        rope_parameters={"rope_theta": 10_000.0, **ROPES["longrope"]},
    )
    for base in (make_base("longrope", tiny_tokenizer, 4 * SWITCH), Phi3ForCausalLM(phi)):
        name = type(base).__name__
        message = f"{name} cannot be a base: with rope_type 'longrope' .* passes 64 tokens"
        with pytest.raises(ValueError, match=message):
            fresh_layers(base.eval(), 2, tuning="layers")


def test_an_unknown_switch_is_found_by_trying(
    tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base that changes at the length that it names, by a way of its own."""
    base = make_base("yarn", tiny_tokenizer, 4 * SWITCH)
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
