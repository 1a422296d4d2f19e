"""What generate refuses with a stop policy, and in which words."""

import copy
import math
from typing import Any

import pytest
import torch
from transformers import (
    Cache,
    DynamicCache,
    GenerationConfig,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer

from modeling_ospruner import OSPrunerForCausalLM, StopPolicyConfig, StopRecord
from ospruner.demo.shipped import Reasoner
from ospruner.rules import Agreement, Budget
from ospruner.rules.live import fork_row, generate_with_rule
from ospruner.scoring import stop_probabilities
from ospruner.train.untrained import untrained


@pytest.fixture(scope="module")
def model(reasoner: Reasoner) -> OSPrunerForCausalLM:
    return untrained(reasoner.model, reasoner.tokenizer, num_policy_layers=1, tuning="layers")


PROMPT = torch.arange(20, 30)[None]
PADDED = torch.tensor([[1] * 10, [0] * 2 + [1] * 8, [1] * 8 + [0] * 2])
T5 = T5Config(vocab_size=640, d_model=32, d_ff=48, d_kv=8, num_layers=2, num_heads=4)


def refused(model: Any, error: Any, message: str, *inputs: Any, **kwargs: Any) -> None:
    """Refused before the base runs at all."""
    ran: list[int] = []
    handle = model.base.register_forward_pre_hook(lambda module, args: ran.append(1))
    try:
        with pytest.raises(error, match=message):
            model.generate(*inputs, **{"stop_policy": True, "max_new_tokens": 5, **kwargs})
    finally:
        handle.remove()
    assert not ran


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"treshold": 0.5}, ValueError, r"stop_policy has no \['treshold'\]; its keys are .*rule"),
        ({"threshold": 1.5}, ValueError, r"threshold is 1.5; it must lie in \[0, 1\]"),
        ({"threshold": True}, TypeError, "threshold is True; it must be a number"),
        ({"answer": "loud"}, ValueError, "answer is 'loud'; it must be 'forced' or 'free'"),
        ({"seed": True}, TypeError, "seed is True; it must be an integer"),
        ({"first_sample_index": -1}, ValueError, "first_sample_index is -1; it must be 0 or more"),
        ({"max_thinking_tokens": 0}, ValueError, "max_thinking_tokens is 0; it must be 1 or more"),
        ({"max_answer_tokens": 2.5}, TypeError, "max_answer_tokens is 2.5; it must be an integer"),
        ({"mask_reentry": 1}, TypeError, "mask_reentry is 1; it must be a bool"),
        ({"wind_down": 3}, TypeError, "wind_down is 3; it must be a str"),
        ({"rule": Agreement}, TypeError, "rule is .*; it must be a RuleLike"),
        *(({"price": one}, ValueError, r"must lie in \[0, inf\)") for one in (-1e-9, math.nan)),
        ({"price": 1e-4, "max_loss": 0.1}, ValueError, "so is price given"),
        ({"wind_down": "So: </think>"}, ValueError, "with the markers '</think>'"),
        (1, TypeError, "stop_policy is 1; it must be True, False"),
        (Agreement, TypeError, "it must be True, False, a dict or a rule"),
    ],
)
def test_settings(model: OSPrunerForCausalLM, settings: Any, error: Any, message: str) -> None:
    refused(model, error, message, PROMPT, stop_policy=settings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 2, "do_sample": False}, "greedy decoding and sampling, not with beam_se"),
        ({"prompt_lookup_num_tokens": 3}, "not with assisted_generation"),
        ({"use_cache": False}, "use_cache is False; stop_policy needs the cache"),
        ({"cache_implementation": "paged"}, "continuous batching"),
        ({"guidance_scale": 2.0}, "guidance_scale and token_healing run the base a second"),
        ({"custom_generate": "x/y"}, "custom_generate and stop_policy exclude each other; it repl"),
        ({"inputs_embeds": torch.zeros(1, 3, 8)}, "inputs_embeds and stop_policy exclude"),
        ({"position_ids": torch.arange(3)[None]}, "position_ids and stop_policy exclude"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size and stop_policy exclude each other"),
        ({"encoder_no_repeat_ngram_size": 2}, "encoder_no_repeat_ngram_size and stop_policy excl"),
        ({"forced_eos_token_id": 0}, "forced_eos_token_id and stop_policy exclude each other"),
        ({"length_penalty": 0.5}, r"price of a token is stop_policy=\{'price': \.\.\.\}"),
        ({"length_penalty": 1.0}, "length_penalty is for beams"),
        ({"price": 1e-4}, r"\['price'\] are settings of stop_policy"),
        ({"stop_strings": ["7"], "tokenizer": None}, "stop_strings and wind_down need the"),
    ],
)
def test_decoding(model: OSPrunerForCausalLM, arguments: dict[str, Any], message: str) -> None:
    model.last_stop = [StopRecord()]  # of another call
    refused(model, ValueError, message, PROMPT, **arguments)
    assert model.last_stop == []


def test_a_filled_cache_an_assistant_and_options_in_a_config(model: OSPrunerForCausalLM) -> None:
    refused(model, ValueError, "not with assisted_generation", PROMPT, assistant_model=model.base)
    filled = StaticCache(config=model.base.config, max_cache_len=200)
    model.base(input_ids=PROMPT, past_key_values=filled, use_cache=True)
    refused(model, ValueError, "past_key_values holds tokens", PROMPT, past_key_values=filled)
    config = GenerationConfig(num_beams=3, do_sample=False)
    refused(model, ValueError, "not with beam_search", PROMPT, generation_config=config)
    assert config.num_beams == 3


@pytest.mark.parametrize(
    ("inputs", "mask", "message"),
    [
        ([[5, 6]], None, "the prompt is list; it must be a tensor"),
        (PROMPT.float(), None, "the prompt is torch.float32; it must be"),
        (torch.zeros(1, 0, dtype=torch.long), None, r"the prompt is|input_ids has the shape"),
        (torch.arange(5), None, r"input_ids has the shape \(5,\); it must be \(B, S\)"),
        (torch.tensor([[3, -1, 640]]), None, r"holds \[-1, 640\]; .*has the ids 0 to 639"),
        (PROMPT, torch.ones(1, 9), "attention_mask must be a tensor of the shape"),
        (PROMPT, [[1] * 10], "attention_mask must be a tensor"),
        (PROMPT, torch.full(PROMPT.shape, 2.0), "1 for tokens and 0 for padding"),
        (PROMPT, torch.full(PROMPT.shape, torch.nan), "1 for tokens and 0 for padding"),
        (PROMPT.expand(2, 10), torch.eye(2)[:, :1].expand(2, 10), r"of rows \[1\] are empty"),
        (PROMPT.expand(3, 10), PADDED, r"rows \[2\] has zeros after tokens; .* on the left"),
    ],
)
def test_prompts(model: OSPrunerForCausalLM, inputs: Any, mask: Any, message: str) -> None:
    refused(model, (TypeError, ValueError), message, inputs, attention_mask=mask)
    if mask is None and isinstance(inputs, torch.Tensor) and inputs.dim() == 2:
        with pytest.raises((TypeError, ValueError)):
            stop_probabilities(model, inputs, prompt_length=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # Nothing is compiled: torch compiles at the first forward, which is not reached.
        (torch.compile, "compiled by torch.compile"),
        (lambda base: base.compile(), "compiled by torch.compile"),
        (lambda base: base.model.layers[1].compile(), "compiled by torch.compile"),
        (lambda base: setattr(base, "forward", torch.compile(base.forward)), "compiled by torch."),
        (lambda base: setattr(base.generation_config, "eos_token_id", None), "no eos_token_id"),
        (lambda base: base.gradient_checkpointing_enable() or base.train(), "checkpointing"),
        (lambda base: T5ForConditionalGeneration(T5), "T5ForConditionalGeneration"),
    ],
)
def test_bases_of_a_rule(reasoner: Reasoner, change: Any, message: str) -> None:
    given, fmt = copy.deepcopy(reasoner.model), reasoner.token_format
    changed = change(given)
    base = given if changed is None else changed
    with pytest.raises(ValueError, match=message):
        generate_with_rule(base, reasoner.tokenizer, Budget(5), PROMPT, token_format=fmt)


def test_what_cannot_stop(reasoner: Reasoner, model: OSPrunerForCausalLM) -> None:
    end = model.token_format.think_end_id
    message = rf"the tokens \[{end}\] close the thinking .* and are eos_token_id, too"
    refused(model, ValueError, message, PROMPT, eos_token_id=[0, end])
    with pytest.raises(ValueError, match="stop_policy holds no rule, and there is no policy"):
        generate_with_rule(reasoner.model, reasoner.tokenizer, StopPolicyConfig(), PROMPT)
    with pytest.raises(ValueError, match="generate_batch cannot stop"):
        model.generate_batch([[5, 6]], stop_policy=True)


def test_caches_that_cannot_be_copied_by_rows(reasoner: Reasoner) -> None:
    with pytest.raises(ValueError, match="cannot copy a row of a Cache: leave cache_implementatio"):
        fork_row(Cache(layers=[DynamicLayer()] * 4), 0)
    indexed = DynamicCache(config=reasoner.model.config)
    indexed.layers[1] = DynamicIndexedLayer()
    with pytest.raises(ValueError, match=r"cache layer DynamicIndexedLayer \(layer 1\)"):
        fork_row(indexed, 0)


def test_a_prompt_longer_than_the_bases_positions(model: OSPrunerForCausalLM) -> None:
    limit = model.base.config.max_position_embeddings
    ids = torch.full((2, limit + 1), int(PROMPT[0, 0]))
    message = rf"prompt of row 1 has {limit + 1} tokens; the base has {limit} positions"
    padded = torch.ones_like(ids)
    padded[0, 0] = 0
    refused(model, ValueError, message, ids, attention_mask=padded)
