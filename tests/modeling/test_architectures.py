"""Every family people reason with: tiny random bases, one of each, from their configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto import CONFIG_MAPPING

from modeling_ospruner.policy_ospruner import Reader, decoder_layers
from ospruner.scoring import stop_probabilities
from ospruner.train.untrained import fresh_layers, untrained

COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": None,
    "max_position_embeddings": 256,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED_EXPERTS = {**EXPERTS, "shared_expert_intermediate_size": 24}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "mamba_d_ssm": 64,
}
WINDOW = {"sliding_window": 8}

# In every test run: what is said to be served most, and one of each kind of layer.
ORDINARY: dict[str, dict[str, Any]] = {
    "qwen2": {},  # DeepSeek-R1-Distill-Qwen, DRPO-7B
    "llama": {},  # DeepSeek-R1-Distill-Llama
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "gpt_oss": {**LOCAL_EXPERTS, **WINDOW},
    "gemma3_text": WINDOW,
    "glm4_moe": ROUTED_EXPERTS,
    "smollm3": {},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 8,
    },
}
PLAIN = """
apertus arcee bitnet cohere ernie4_5 gemma glm glm4 helium hunyuan_v1_dense hyperclovax lfm2
ministral3 nanochat nemotron olmo olmo2 olmo_hybrid phi phi3 seed_oss stablelm starcoder2
"""
OTHERS: dict[str, dict[str, Any]] = {
    **{name: {} for name in PLAIN.split()},
    **dict.fromkeys(
        ["cohere2", "exaone4", "gemma2", "ministral", "mistral", "olmo3", "vaultgemma"], WINDOW
    ),
    **dict.fromkeys(["afmoe", "exaone_moe", "flex_olmo", "olmoe"], EXPERTS),
    **dict.fromkeys(["minimax_m2", "mixtral", "phimoe"], LOCAL_EXPERTS),
    **dict.fromkeys(["dots1", "solar_open"], ROUTED_EXPERTS),
    **dict.fromkeys(
        ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "glm_moe_dsa"], ROUTED_EXPERTS | LATENT
    ),
    "cwm": {"bos_token_id": 1},
    "deepseek_v32": {**ROUTED_EXPERTS, **LATENT, "index_n_heads": 2, "index_head_dim": 16},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24},
    "falcon_h1": MAMBA,
    "granitemoe": {**LOCAL_EXPERTS, "embedding_multiplier": 3.0},
    "granitemoehybrid": {
        **LOCAL_EXPERTS,
        **MAMBA,
        "shared_intermediate_size": 24,
        "layer_types": ["mamba", "attention", "mamba", "attention"],
    },
    "granitemoeshared": {**LOCAL_EXPERTS, "shared_intermediate_size": 24},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "qwen2_moe": SHARED_EXPERTS,
    "qwen3_5_moe_text": {**SHARED_EXPERTS, **LINEAR},
    "qwen3_5_text": LINEAR,
    "qwen3_next": {**SHARED_EXPERTS, **LINEAR},
}
FAMILIES = [
    *ORDINARY,
    *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS),
]
PROMPT_WIDTH, NEW_TOKENS = 9, 20
PIECES = ((0, 7), (7, 12), (12, 13), (13, 20))


def make_base(
    name: str, tokenizer: PreTrainedTokenizerFast, auto: Any = AutoModelForCausalLM, **extra: Any
) -> PreTrainedModel:
    """A random base in which no parameter has a neutral value: a tail without it would show."""
    fields = {
        **COMMON,
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **ORDINARY.get(name, {}),
        **OTHERS.get(name, {}),
        **extra,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        base: PreTrainedModel = auto.from_config(CONFIG_MAPPING[name](**fields)).eval()
        for parameter in base.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
            else:
                parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return base


@pytest.fixture(params=FAMILIES)
def base(
    request: pytest.FixtureRequest, tiny_tokenizer: PreTrainedTokenizerFast
) -> PreTrainedModel:
    return make_base(request.param, tiny_tokenizer)


def padded_prompts(width: int) -> dict[str, torch.Tensor]:
    """Two rows, the second of which begins with padding."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 250, (2, width), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, : width // 4] = 0
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def test_tail_equals_the_base(base: PreTrainedModel) -> None:
    """Fed with what enters layer L-n, the tail gives the base's last hidden states."""
    inputs = padded_prompts(20)
    mask = inputs["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    entering: dict[int, list[torch.Tensor]] = {1: [], 2: []}  # the whole, then its pieces
    handles = [
        decoder_layers(base)[-n].register_forward_pre_hook(
            lambda module, args, kwargs, n=n: entering[n].append(
                kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            ),
            with_kwargs=True,
        )
        for n in entering
    ]
    last = base.get_decoder()(**inputs, position_ids=positions).last_hidden_state
    real = mask.bool()
    own_cache = DynamicCache(config=base.get_decoder().config)
    # In pieces the base itself rounds otherwise; where it has linear attention, by much.
    last_in_parts = [
        base.get_decoder()(
            input_ids=inputs["input_ids"][:, i:j],
            attention_mask=mask[:, :j],
            position_ids=positions[:, i:j],
            past_key_values=own_cache,
        ).last_hidden_state
        for i, j in PIECES
    ]
    for handle in handles:
        handle.remove()
    for n, (hidden, *pieces) in entering.items():
        policy = fresh_layers(base, n, tuning="layers")
        torch.nn.init.normal_(policy.head.weight)
        expected = policy.head(last.float())[..., 0]
        whole = policy(hidden, positions, mask)
        assert whole.dtype == torch.float32
        torch.testing.assert_close(whole[real], expected[real], rtol=0, atol=0)
        cache = policy.new_cache()
        parts = [
            policy(piece, positions[:, i:j], mask[:, :j], cache)
            for piece, (i, j) in zip(pieces, PIECES, strict=True)
        ]
        expected = torch.cat([policy.head(one.float())[..., 0] for one in last_in_parts], 1)
        torch.testing.assert_close(torch.cat(parts, 1)[real], expected[real], rtol=0, atol=0)


# Bases whose last two layers keep something else than keys and values, and what.
NO_KEYS = {
    "nemotron_h": "LinearAttentionLayer",
    "deepseek_v2": "latent keys",
    "deepseek_v3": "latent keys",
    "deepseek_v32": "DynamicIndexedLayer, latent keys",
    "glm4_moe_lite": "latent keys",
    "glm_moe_dsa": "DynamicIndexedLayer, latent keys",
    "falcon_h1": "LinearAttentionAndFullAttentionLayer",
    "granitemoehybrid": "LinearAttentionLayer",
    "olmo_hybrid": "LinearAttentionLayer",
    "qwen3_5_text": "LinearAttentionLayer",
    "qwen3_5_moe_text": "LinearAttentionLayer",
    "qwen3_next": "LinearAttentionLayer",
}
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}  # kernels for other shapes round otherwise
# Parameters that no gradient reaches in the base's own layers either.
WITHOUT_GRADIENT = ("expert_bias", "e_score_correction_bias")


def keeps_keys(base: PreTrainedModel) -> bool:
    """Whether its last two layers may be queries only; asserts that it is refused if not."""
    if base.config.model_type not in NO_KEYS:
        return True
    with pytest.raises(ValueError, match=f"some keep {NO_KEYS[base.config.model_type]}"):
        fresh_layers(base, 2, "queries")
    return False


@torch.no_grad()
def test_queries_equal_the_base(base: PreTrainedModel) -> None:
    """On the base's keys and values, copies without their own give its last hidden states.

    All positions at once, a few of them, and in pieces on a cache of transformers.
    """
    if not keeps_keys(base):
        return
    inputs = padded_prompts(20)
    mask = inputs["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    real = mask.bool()
    for n in (1, 2, base.config.num_hidden_layers):
        policy = fresh_layers(base, n, "queries")
        names = [name for name, _ in policy.layers.named_parameters()]
        assert not [name for name in names if {"k_proj", "v_proj"} & set(name.split("."))]
        torch.nn.init.normal_(policy.head.weight)
        with Reader(base, n, queries=True) as reader:
            last = base.get_decoder()(**inputs, position_ids=positions).last_hidden_state
            hidden, keys = reader.hidden, reader.keys
        expected = policy.head(last.float())[..., 0]
        with torch.enable_grad():
            whole = policy(hidden, positions, mask, None, keys)
            whole[real].sum().backward()
        torch.testing.assert_close(whole[real], expected[real], **CLOSE)
        reached = {name for name, p in policy.layers.named_parameters() if p.grad is not None}
        assert [name for name in set(names) - reached if not name.endswith(WITHOUT_GRADIENT)] == []
        columns = torch.tensor([[7, 19, 12], [6, 5, 18]])
        index = columns[..., None].expand(-1, -1, hidden.shape[-1])
        few = hidden.gather(1, index), positions.gather(1, columns)
        some = policy(*few, mask, None, keys, columns)
        torch.testing.assert_close(some, expected.gather(1, columns), **CLOSE)
        cache = DynamicCache(config=base.get_decoder().config)
        for i, j in PIECES:
            with Reader(base, n, queries=True) as reader:
                last = base.get_decoder()(
                    input_ids=inputs["input_ids"][:, i:j],
                    attention_mask=mask[:, :j],
                    position_ids=positions[:, i:j],
                    past_key_values=cache,
                ).last_hidden_state
                columns = torch.arange(i, j)[None]
                part = policy(
                    reader.hidden, positions[:, i:j], mask[:, :j], None, reader.keys, columns
                )
            wanted = policy.head(last.float())[..., 0]
            seen = real[:, i:j]
            torch.testing.assert_close(part[seen], wanted[seen], **CLOSE)


@pytest.mark.parametrize("tuning", ["layers", "queries"])
def test_saved_loaded_and_generating(
    base: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, tuning: str
) -> None:
    """A policy with weights of its own, in a fresh model: same probabilities, on and offline."""
    if tuning == "queries" and not keeps_keys(base):
        return
    base.save_pretrained(tmp_path / "base")
    model = untrained(
        base, tiny_tokenizer, tuning=tuning, base_model_name_or_path=str(tmp_path / "base")
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        torch.nn.init.normal_(model.policy.head.weight, std=0.2)
        for parameter in model.policy.layers.parameters():
            parameter.mul_(1.1)
    model.save_pretrained(tmp_path / "policy")
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    for name, tensor in loaded.policy.state_dict().items():
        assert torch.equal(tensor, model.policy.state_dict()[name]), name

    texts = [str(tiny_tokenizer.decode([i])) for i in range(len(tiny_tokenizer))]
    breaks = [i for i, text in enumerate(texts) if text.strip() and "\n\n" in text]
    ends = [loaded.token_format.think_end_id, tiny_tokenizer.eos_token_id]
    bias = {**{(i,): 12.0 for i in breaks}, **{(i,): -100.0 for i in ends}}
    loaded.base.generation_config.sequence_bias = bias
    inputs = padded_prompts(PROMPT_WIDTH)
    length = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    never = {"mode": "threshold", "threshold": 1.0}
    plain = loaded.generate(**inputs, **length)
    watched = loaded.generate(**inputs, **length, stop_policy=never)
    assert torch.equal(plain, watched)
    online = [record.probabilities for record in loaded.last_stop]
    assert sum(map(len, online)) >= 6
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, NEW_TOKENS, dtype=torch.long)], 1)
    starts = inputs["attention_mask"].sum(1).tolist()
    offline = stop_probabilities(loaded, watched, attention_mask=mask, prompt_length=starts)
    for found, expected in zip(online, offline, strict=True):
        torch.testing.assert_close(torch.tensor(found), expected[: len(found)], rtol=0, atol=1e-4)
    always = {"mode": "threshold", "threshold": 0.0}
    stopped = loaded.generate(**inputs, **length, stop_policy=always)
    for row, record in enumerate(loaded.last_stop):
        assert record.reason == "policy"
        cut = PROMPT_WIDTH + record.step_ends[0]
        forced = loaded.token_format.forced_suffix()
        assert stopped[row, :cut].tolist() == plain[row, :cut].tolist()
        assert stopped[row, cut : cut + len(forced)].tolist() == forced


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("gpt2", {}, r"GPT2LMHeadModel cannot be a base: its decoder \(GPT2Model\) keeps its la"),
        (
            "gemma4_text",
            {"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8},
            "Gemma4ForCausalLM cannot be a base: beside .* looks up embed_tokens_per_layer",
        ),
        ("minimax", LOCAL_EXPERTS, r"MiniMaxForCausalLM cannot be a base: its .* on their own \("),
        (
            "bamba",
            {**MAMBA, "attn_layer_indices": [1]},
            "BambaForCausalLM cannot be a base: its la",
        ),
        ("mamba", {}, r"MambaForCausalLM cannot be a base: its .* on their own \(RuntimeError"),
    ],
)
def test_bases_that_cannot_work_are_refused_by_name(
    tiny_tokenizer: PreTrainedTokenizerFast, name: str, fields: dict[str, Any], message: str
) -> None:
    base = make_base(name, tiny_tokenizer, **fields)
    with pytest.raises(ValueError, match=message):
        untrained(base, tiny_tokenizer, tuning="layers")


@pytest.mark.parametrize("name", ["gemma3", "mistral3"])
def test_wrapped_language_models_are_refused(
    tiny_tokenizer: PreTrainedTokenizerFast, name: str
) -> None:
    kind: Any = CONFIG_MAPPING[name]
    text_kind: Any = CONFIG_MAPPING[kind().text_config.model_type]
    text = text_kind(**COMMON, vocab_size=len(tiny_tokenizer), pad_token_id=0)
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    vision |= {"num_attention_heads": 4, "image_size": 28, "patch_size": 14}
    config = kind(text_config=text.to_dict(), vision_config=vision)
    config.vision_config.update({key: vision[key] for key in vision})
    base = AutoModelForImageTextToText.from_config(config).eval()
    message = (
        rf"{type(base).__name__} cannot be a base: it wraps a language model.*Load that model alone"
    )
    with pytest.raises(ValueError, match=message):
        untrained(base, tiny_tokenizer, tuning="layers")
