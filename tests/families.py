"""Every family that people reason with: tiny random bases from configurations, and policies."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto import CONFIG_MAPPING

from modeling_ospruner import OSPrunerForCausalLM, TokenFormat
from modeling_ospruner.formats_ospruner import BREAK, VISIBLE
from ospruner.scoring import stop_probabilities
from ospruner.train.untrained import untrained

NEVER: dict[str, Any] = {"mode": "threshold", "threshold": 1.0}
ALWAYS: dict[str, Any] = {"mode": "threshold", "threshold": 0.0}
COMMON: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
    "bos_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED_EXPERTS = {**EXPERTS, "shared_expert_intermediate_size": 24}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED_EXPERTS = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
}
LATENT = {
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "num_key_value_heads": 4},
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
}
LINEAR = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2},
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
}
MAMBA = {
    **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1},
    **{"mamba_chunk_size": 8, "mamba_d_ssm": 64},
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
        **{"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8},
        **{"n_groups": 1, "chunk_size": 8},
    },
}
PLAIN = """
apertus arcee bitnet cohere ernie4_5 gemma glm glm4 helium hunyuan_v1_dense hyperclovax
ministral3 nanochat nemotron olmo olmo2 phi phi3 seed_oss stablelm starcoder2
"""
FULL, RECURRENT = "full_attention", "linear_attention"
HYBRID: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": [RECURRENT, FULL, RECURRENT, RECURRENT, RECURRENT, FULL],
}
OTHERS: dict[str, dict[str, Any]] = {
    **{name: {} for name in PLAIN.split()},
    **dict.fromkeys(["cohere2", "exaone4", "gemma2", "granite_swa", "ministral"], WINDOW),
    **dict.fromkeys(["mistral", "olmo3", "vaultgemma"], WINDOW),
    **dict.fromkeys(["afmoe", "exaone_moe", "flex_olmo", "olmoe"], EXPERTS),
    "cohere2_moe": EXPERTS | WINDOW,
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
        **{**LOCAL_EXPERTS, **MAMBA, "shared_intermediate_size": 24},
        "layer_types": ["mamba", "attention", "attention", "mamba"],
    },
    "granitemoeshared": {**LOCAL_EXPERTS, "shared_intermediate_size": 24},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "mimo_v2_flash": {**ROUTED_EXPERTS, **WINDOW, "v_head_dim": 8},
    "minicpm3": {**LATENT, "dim_model_base": 64},  # else its logits are those of a far wider base
    "qwen2_moe": SHARED_EXPERTS,
    "kimi_linear": {**ROUTED_EXPERTS, **LATENT, **HYBRID, "num_experts": 4},
    "laguna": {**EXPERTS, "shared_expert_intermediate_size": 24},
    "lfm2": {"layer_types": [FULL, "conv", FULL, "conv"]},
    "gemma4_text": {**WINDOW, "hidden_size_per_layer_input": 0, "global_head_dim": 8},
    "olmo_hybrid": HYBRID,
    "qwen3_5_moe_text": {**SHARED_EXPERTS, **LINEAR, **HYBRID},
    "qwen3_5_text": {**LINEAR, **HYBRID},
    "qwen3_next": {**SHARED_EXPERTS, **LINEAR, **HYBRID},
}


# Families that a policy is refused on, each for a reason of its own.
MORE: dict[str, dict[str, Any]] = {
    "deepseek_v4": {"q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 8, "index_n_heads": 2}
    | {"index_head_dim": 16, "qk_rope_head_dim": 4, **LOCAL_EXPERTS, "moe_intermediate_size": 24},
    "gemma4_text, per-layer embeddings": {
        **{**WINDOW, "global_head_dim": 8},
        **{"vocab_size_per_layer_input": 640, "hidden_size_per_layer_input": 8},
    },
    "minimax": LOCAL_EXPERTS,
    "llama4_text": {**LOCAL_EXPERTS, "intermediate_size_mlp": 48},
    "gpt2": {},
}


def make_base(
    name: str, tokenizer: PreTrainedTokenizerBase, auto: Any = AutoModelForCausalLM, **extra: Any
) -> PreTrainedModel:
    """A random base in which no parameter has a neutral value: a tail without it would show."""
    fields = COMMON | {"vocab_size": len(tokenizer)}
    fields |= {one: getattr(tokenizer, one) for one in ("eos_token_id", "pad_token_id")}
    fields |= (ORDINARY | OTHERS | MORE).get(name, {}) | extra
    config = CONFIG_MAPPING[name.split(",")[0]](**fields)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        base: PreTrainedModel = auto.from_config(config).eval()
        for parameter in base.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
            else:
                parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return base


def random_policy(
    base: Any,
    tokenizer: PreTrainedTokenizerBase,
    num_layers: int = 2,
    tuning: str = "layers",
    std: float = 0.2,
    **fields: Any,
) -> OSPrunerForCausalLM:
    """An untrained policy of its own layers, whose probabilities spread over (0, 1)."""
    model = untrained(base, tokenizer, num_layers, tuning, **fields)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        torch.nn.init.normal_(model.policy.head.weight, std=std)
    return model


def let_write_paragraphs(
    base: Any, fmt: TokenFormat, likely: float = 6.0, ending: float = -30.0
) -> None:
    """Lets a base end paragraphs often; with `ending` low, its thinking and its text never."""
    breaks = [i for i, kind in enumerate(fmt.kinds) if kind & BREAK and kind & VISIBLE]
    ends = (fmt.think_end_id, *fmt.eos_ids)
    bias = dict.fromkeys(breaks, likely) | (dict.fromkeys(ends, ending) if ending else {})
    base.generation_config.sequence_bias = [[[token], more] for token, more in bias.items()]


def padded_prompts(width: int) -> dict[str, torch.Tensor]:
    """Two rows, the second of which begins with padding."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 250, (2, width), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, : width // 4] = 0
    return {"input_ids": ids, "attention_mask": mask}


def check_one_pass(
    model: OSPrunerForCausalLM,
    inputs: dict[str, Any],
    close: float = 1e-5,
    cache: Callable[[], Any] = lambda: None,
    price: float | None = None,
    **how: Any,
) -> list[float]:
    """Generates with a policy that never stops; what it says at the step ends of all rows.

    The tokens must be plain generate's, and what is said what one pass over the text says.
    """
    texts = []
    for stop_policy in (False, NEVER | {"price": price}):
        torch.manual_seed(0)
        given = {**how, "past_key_values": cache(), "stop_policy": stop_policy}
        texts.append(model.generate(**inputs, **given))
    assert torch.equal(*texts)
    width = inputs["input_ids"].shape[1]
    for row, real, record in zip(texts[0], inputs["attention_mask"], model.last_stop, strict=True):
        start, found = int(real.sum()), record.probabilities
        trace = row[width : width + record.thinking_tokens].tolist()
        assert model.token_format.step_ends(trace)[: len(found)] == record.step_ends
        wanted = stop_probabilities(model, row[width - start :], prompt_length=start, price=price)
        torch.testing.assert_close(torch.tensor(found), wanted[: len(found)], rtol=0, atol=close)
    return [one for record in model.last_stop for one in record.probabilities]
