"""Every family people reason with: tiny random bases, one of each, from their configurations."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
    PreTrainedModel,
)
from transformers.cache_utils import CacheLayerMixin

from modeling_ospruner.policy_ospruner import Reader
from ospruner.train.untrained import fresh_layers, untrained

from ..families import (
    COMMON,
    MAMBA,
    ORDINARY,
    OTHERS,
    check_one_pass,
    let_write_paragraphs,
    make_base,
    padded_prompts,
    random_policy,
)

HYBRID_AND_LATENT = ("qwen3_5_text", "deepseek_v3")
FAMILIES = [
    *ORDINARY,
    *HYBRID_AND_LATENT,
    *(pytest.param(one, marks=pytest.mark.slow) for one in OTHERS if one not in HYBRID_AND_LATENT),
]
PROMPT_WIDTH, NEW_TOKENS = 9, 20
PIECES = ((0, 7), (7, 12), (12, 13), (13, 20))


@pytest.fixture(params=FAMILIES)
def base(request: pytest.FixtureRequest, tiny_tokenizer: Any) -> PreTrainedModel:
    return make_base(request.param, tiny_tokenizer)


# Bases whose layers keep something else beside keys and values, and what.
NO_KEYS = {
    "deepseek_v32": "DynamicIndexedLayer",
    "glm_moe_dsa": "DynamicIndexedLayer",
    "falcon_h1": "LinearAttentionAndFullAttentionLayer",
}
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}  # kernels for other shapes round otherwise
# Parameters that no gradient reaches in the base's own layers either.
WITHOUT_GRADIENT = ("expert_bias", "e_score_correction_bias")


def layers_with_keys(base: PreTrainedModel) -> int:
    """How many of its layers may be queries only; asserts that more are refused."""
    kind, total = base.config.model_type, base.config.num_hidden_layers
    if kind in NO_KEYS:
        with pytest.raises(ValueError, match=f"some keep {NO_KEYS[kind]}"):
            fresh_layers(base, 2, "queries")
        return 0
    cached = DynamicCache(config=base.config).layers
    holding = sum(isinstance(one, CacheLayerMixin) for one in cached)
    if holding < total:
        with pytest.raises(ValueError, match=f"of this base's .* {holding} hold any"):
            fresh_layers(base, holding + 1, "queries")
    return holding


@torch.no_grad()
@pytest.mark.parametrize("tuning", ["layers", "queries"])
def test_copies_equal_the_base(base: PreTrainedModel, tuning: str) -> None:
    """Fed with what enters layer L-n, the copies give the base's last hidden states, to the bit.

    All positions at once, and in pieces on a cache; copies that are queries only do so on the
    base's keys and values, also for a few positions.
    """
    queries = tuning == "queries"
    holding = layers_with_keys(base) if queries else 2
    close: dict[str, Any] = CLOSE if queries else {"rtol": 0, "atol": 0}
    inputs, decoder = padded_prompts(20), base.get_decoder()
    mask = inputs["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    real = mask.bool()
    for n in {1, 2, holding}.intersection(range(1, holding + 1)):
        policy = fresh_layers(base, n, tuning)
        torch.nn.init.normal_(policy.head.weight)
        with Reader(base, policy) as reader:
            last = decoder(**inputs, position_ids=positions).last_hidden_state
            hidden, keys = reader.hidden, reader.keys
        expected = policy.head(last.float())[..., 0]
        with torch.set_grad_enabled(queries):
            whole = policy(hidden, positions, mask, None, keys)
            total = whole[real].sum()
        assert whole.dtype == torch.float32
        torch.testing.assert_close(whole[real], expected[real], **close)
        if queries:
            total.backward()
            named = dict(policy.layers.named_parameters())
            assert not [name for name in named if {"k_proj", "v_proj"} & set(name.split("."))]
            unreached = [name for name, one in named.items() if one.grad is None]
            assert [name for name in unreached if not name.endswith(WITHOUT_GRADIENT)] == []
            columns = torch.tensor([[7, 19, 12], [6, 5, 18]])
            index = columns[..., None].expand(-1, -1, hidden.shape[-1])
            few = hidden.gather(1, index), positions.gather(1, columns)
            some = policy(*few, mask, None, keys, columns)
            torch.testing.assert_close(some, expected.gather(1, columns), **close)
        cache, own = DynamicCache(config=decoder.config), policy.new_cache()
        for i, j in PIECES:
            # In pieces the base itself rounds otherwise; where it has linear attention, by much.
            with Reader(base, policy) as reader:
                last = decoder(
                    input_ids=inputs["input_ids"][:, i:j],
                    attention_mask=mask[:, :j],
                    position_ids=positions[:, i:j],
                    past_key_values=cache,
                ).last_hidden_state
                columns = torch.arange(i, j)[None]
                at = positions[:, i:j], mask[:, :j]
                part = policy(reader.hidden, *at, own, reader.keys, columns)
            wanted, seen = policy.head(last.float())[..., 0], real[:, i:j]
            torch.testing.assert_close(part[seen], wanted[seen], **close)


@pytest.mark.parametrize("tuning", ["layers", "queries"])
def test_saved_loaded_and_generating(
    base: PreTrainedModel, tiny_tokenizer: Any, tmp_path: Path, tuning: str
) -> None:
    """A policy with weights of its own, in a fresh model: same probabilities, on and offline."""
    if tuning == "queries" and layers_with_keys(base) < 2:
        return
    base.save_pretrained(where := str(tmp_path / "base"))
    model = random_policy(base, tiny_tokenizer, tuning=tuning, base_model_name_or_path=where)
    with torch.no_grad():
        for parameter in model.policy.layers.parameters():
            parameter.mul_(1.1)
    model.save_pretrained(tmp_path / "policy")
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    for name, tensor in loaded.policy.state_dict().items():
        assert torch.equal(tensor, model.policy.state_dict()[name]), name
    let_write_paragraphs(loaded.base, loaded.token_format, 12.0, -100.0)
    length: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    said = check_one_pass(loaded, padded_prompts(PROMPT_WIDTH), 1e-4, **length)
    assert len(said) >= 6


SEES: dict[str, Any] = {
    "auto": AutoModelForImageTextToText,
    "text_config": {**COMMON, "vocab_size": 640},
    "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    | {"num_attention_heads": 4, "image_size": 28, "patch_size": 14},
}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gpt2", {}, r"GPT2LMHeadModel cannot be a base: its decoder \(GPT2Model\) keeps its la"),
    ("gemma4_text, per-layer embeddings", {}, "beside .* looks up embed_tokens_per_layer"),
    ("bamba", {**MAMBA, "attn_layer_indices": [1]}, "BambaForCausalLM cannot be a base: its la"),
    ("mamba", {}, r"MambaForCausalLM cannot be a base: its .* on their own \(RuntimeError"),
    ("gemma3", SEES, "Gemma3ForConditionalGeneration cannot be a base: it wraps a .*Load that mo"),
]


@pytest.mark.parametrize(("name", "fields", "said"), REFUSED)
def test_bases_that_cannot_work_are_refused_by_name(
    tiny_tokenizer: Any, name: str, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        untrained(make_base(name, tiny_tokenizer, **fields), tiny_tokenizer, tuning="layers")
