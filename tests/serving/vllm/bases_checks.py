"""The policy inside vLLM on each base, compiled, and without layers; run one by one, for each
leaves its own process groups behind. Run by test_plugin.py.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from vllm import SamplingParams
from vllm.compilation.counter import compilation_counter

from modeling_ospruner import OSPrunerForCausalLM as Policy
from modeling_ospruner.formats_ospruner import BREAK, VISIBLE
from ospruner.demo.shipped import Reasoner
from ospruner.train.untrained import untrained

from .plugin_checks import UNCHANGED, record, run, start, start_policy
from .plugin_replay import TOLERANCE, perturb, replay

SIZES: dict[str, Any] = {
    **{"vocab_size": 640, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 5},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
    **{"eos_token_id": 2, "pad_token_id": 0},
    "head_dim": 32,  # vLLM's attention on CPUs takes no smaller one
}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
_LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 128}
_YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "truncate": False}
_YARN |= {"original_max_position_embeddings": 128, "beta_fast": 32.0, "beta_slow": 1.0}
_ROTATED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_EXPERTS = {"num_experts": 4, "moe_intermediate_size": 64, "num_experts_per_tok": 2}
_MIXED = [f"{one}_attention" for one in ("sliding", "full", "sliding", "full", "sliding")]
_KINDS = ("linear", "full", "linear", "linear", "full", "linear")
_HYBRID: dict[str, Any] = {"layer_types": [f"{k}_attention" for k in _KINDS]}
_HYBRID |= {"num_hidden_layers": 6, "linear_num_value_heads": 2, "linear_num_key_heads": 1}
_HYBRID_OF_EXPERTS = _EXPERTS | _HYBRID | {"shared_expert_intermediate_size": 64}
BASES: dict[str, dict[str, Any]] = {  # by model_type, what differs
    "qwen2": {"hidden_size": 128},  # its heads always have hidden_size / num_attention_heads
    "qwen3": {},
    "llama": {"rope_parameters": _LLAMA3},
    "gpt_oss": {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
    | {"sliding_window": 32, "rope_parameters": _YARN},
    # Every other layer is dense, and an odd number of layers: a tail's places show.
    "qwen3_moe": _EXPERTS | {"decoder_sparse_step": 2, "norm_topk_prob": True},
    "mistral": {"sliding_window": None},
    "gemma3_text": {"query_pre_attn_scalar": 32, "sliding_window": 32, "layer_types": _MIXED},
    "glm4": {"attention_bias": True, "rope_parameters": _ROTATED},
    "afmoe": _EXPERTS
    | {"num_dense_layers": 1, "sliding_window": 32, "num_shared_experts": 1}
    # As in the checkpoints: no defaults.
    | {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "ernie4_5": {},
    "gemma4_text": {"hidden_size_per_layer_input": 0, "global_head_dim": 32, "sliding_window": 32},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5}
    | {"attention_multiplier": 0.2},
    "ministral3": {},
    "phi3": {},
    "apertus": {},
    "granite_swa": {"sliding_window": 32, "layer_types": _MIXED},
    "laguna": {"sliding_window": 32, "layer_types": _MIXED}
    | {"mlp_layer_types": ["dense"] * 5},  # on CPUs vLLM has no router for its experts
    "qwen3_next": _HYBRID_OF_EXPERTS,
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe_text": _HYBRID_OF_EXPERTS,
    "cohere2_moe": _EXPERTS | {"sliding_window": 32},
    "mimo_v2_flash": {"n_routed_experts": 4, "moe_intermediate_size": 64, "num_experts_per_tok": 2},
}
REFUSED = {  # what has the tap, and cannot be right
    "cohere2_moe": "vLLM's Cohere2MoeForCausalLM looks back over 33 tokens, transformers' over 32",
    "mimo_v2_flash": "vLLM's MiMoV2FlashForCausalLM is not made of transformers' configuration",
}
RIGHT = [name for name in BASES if name not in REFUSED]
HYBRID = [name for name, one in BASES.items() if "linear_num_key_heads" in one]


@pytest.fixture
def make(environment: None, reasoner: Reasoner, tmp_path: Path) -> Iterator[Callable[..., Policy]]:
    """Makes a tiny random base and a policy on it, saved in `tmp_path`."""

    def made(
        base_type: str,
        num_layers: int,
        tuning: str = "layers",
        adapter_rank: int = 0,
        fresh: bool = False,
        **sizes: Any,
    ) -> Policy:
        torch.manual_seed(0)
        config = AutoConfig.for_model(base_type, **{**SIZES, **BASES[base_type], **sizes})
        base = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for name, parameter in base.named_parameters():
                if "norm" not in name:
                    parameter.mul_(3)  # lest all tokens be about as likely
        where = str(tmp_path / "base")
        base.save_pretrained(where)
        reasoner.tokenizer.save_pretrained(where)
        torch.manual_seed(1)  # for the head
        named: dict[str, Any] = {"base_model_name_or_path": where, "adapter_rank": adapter_rank}
        model = untrained(base, reasoner.tokenizer, num_layers, tuning, **named)
        if fresh:
            torch.nn.init.normal_(model.policy.head.weight, std=0.25)
            torch.nn.init.constant_(model.policy.head.bias, -3)
        else:
            perturb(model)
        model.save_pretrained(tmp_path / "policy")
        for name, parameter in model.named_parameters():
            if ".act_fn." in name:  # Apertus's: vLLM holds them in bfloat16 in any case
                parameter.data = parameter.data.bfloat16()
        return model

    yield made
    gc.collect()


def check(
    model: Policy, folder: Path, count: int = 12, tolerance: float = TOLERANCE, **further: Any
) -> list[float]:
    """Tokens as plain vLLM's, probabilities as transformers', of so many prompts."""
    fmt = model.token_format
    breaks = [i for i, kind in enumerate(fmt.kinds) if kind & BREAK]
    visible = [i for i, kind in enumerate(fmt.kinds) if kind == VISIBLE]
    generator = torch.Generator().manual_seed(1)
    lengths = range(20, 20 + 3 * count, 3)
    prompts = [torch.randint(5, 600, (n,), generator=generator).tolist() for n in lengths]
    common: dict[str, Any] = {"temperature": 0.0, "max_tokens": 120, "ignore_eos": True}
    # Few tokens, none of them for long, so that paragraphs end.
    likely = dict.fromkeys([*breaks[:2], *visible[:12]], 50.0)
    common |= {"logit_bias": likely, "frequency_penalty": 2.0}
    arguments: dict[str, Any] = {"max_model_len": 512, "max_num_batched_tokens": 64, **further}
    arguments |= {"max_num_seqs": 8}
    plain: Any = start(folder / "base", **arguments)
    wanted = run(plain, prompts, SamplingParams(**common))
    room = plain.llm_engine.vllm_config.cache_config.kv_cache_size_tokens
    del plain
    gc.collect()
    served: Any = start_policy(folder / "policy", **arguments)
    extras = [UNCHANGED | {"stop_id": str(i)} for i in range(len(prompts))]
    outputs = run(served, prompts, [SamplingParams(**common, extra_args=extra) for extra in extras])
    assert outputs == wanted
    left = served.llm_engine.vllm_config.cache_config.kv_cache_size_tokens
    print(f"room for {left} tokens of {room}")
    share = model.config.num_policy_layers / model.config.get_text_config().num_hidden_layers
    # In tokens, for a block's bytes depend on how vLLM groups layers of two kinds. A tail of
    # queries has no pages of its own.
    assert left >= int((1 - share * (not model.policy.queries)) * room)
    seen: list[float] = []
    for i, [ids] in enumerate(outputs):
        told = record(served, str(i))["probabilities"]
        replay(model, prompts[i], ids, extras[i], told, tolerance)
        seen += told
    print(f"{len(seen)} probabilities from {min(seen):.4f} to {max(seen):.4f}")
    assert len(seen) > 4 * count
    assert max(seen) - min(seen) > 0.05
    return seen


@pytest.mark.parametrize("base_type", RIGHT)
@pytest.mark.parametrize("num_layers", [2, 0, 3])
def test_base(make: Callable[..., Policy], tmp_path: Path, base_type: str, num_layers: int) -> None:
    check(make(base_type, num_layers), tmp_path)


@pytest.mark.parametrize(
    ("base_type", "tuning"), [("llama", "layers"), ("qwen3_moe", "layers"), ("qwen3", "queries")]
)
def test_adapters(make: Callable[..., Policy], tmp_path: Path, base_type: str, tuning: str) -> None:
    """Merged where they are loaded, into copies of the base's layers."""
    check(make(base_type, 2, tuning, adapter_rank=4), tmp_path)


@pytest.mark.parametrize("base_type", [one for one in RIGHT if one not in HYBRID])
def test_queries(make: Callable[..., Policy], tmp_path: Path, base_type: str) -> None:
    """Sinks, windows, norms of keys and experts: on the base's pages, where steps end."""
    check(make(base_type, 2, "queries"), tmp_path)


@pytest.mark.parametrize("base_type", HYBRID)
def test_a_hybrid(make: Callable[..., Policy], tmp_path: Path, base_type: str) -> None:
    """Fresh copies of its layers with keys say what the head says of the base's last states.

    In bfloat16, in which alone vLLM computes linear attention on CPUs: transformers is far off, and
    a router may choose another expert.
    """
    alone, copies = (
        check(make(base_type, n, "queries", fresh=True), tmp_path, dtype="bfloat16", tolerance=1)
        for n in (0, 2)
    )
    apart = [abs(a - b) for a, b in zip(alone, copies, strict=True)]
    print(f"{max(apart):.4f} apart at most, {sum(apart) / len(apart):.4f} in the middle")
    assert max(apart) < 0.05
    assert sum(apart) / len(apart) < 0.002


@pytest.mark.parametrize("base_type", REFUSED)
def test_refused(make: Callable[..., Policy], tmp_path: Path, base_type: str) -> None:
    make(base_type, 2, "queries")
    with pytest.raises(ValueError, match=REFUSED[base_type]):
        start_policy(tmp_path / "policy", max_model_len=512)


def test_queries_compiled(make: Callable[..., Policy], tmp_path: Path) -> None:
    """The base in vLLM's compiled graph, the tail as it is."""
    check(make("gemma3_text", 2, "queries"), tmp_path, enforce_eager=False)
    counter = compilation_counter  # the cache may hold what an earlier test compiled
    assert counter.num_aot_compiles + counter.num_aot_artifacts_loaded == 2  # plain; base


@pytest.mark.parametrize("base_type", ["qwen2", "gemma3_text"])
def test_compiled(make: Callable[..., Policy], tmp_path: Path, base_type: str) -> None:
    """The base in vLLM's compiled graph, the tail in one of its own."""
    check(make(base_type, 2), tmp_path, count=64, enforce_eager=False)
    assert compilation_counter.num_models_seen == 3  # plain; base and tail


def test_two_tensor_parallel_ranks(
    make: Callable[..., Policy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    check(make("qwen2", 2), tmp_path, tensor_parallel_size=2)


def test_a_base_of_other_weights_is_refused(make: Callable[..., Policy], tmp_path: Path) -> None:
    """Its sizes are those that the policy needs; its final norm tells."""
    base = make("qwen2", 2).base
    base.model.norm.weight.data.mul_(1.1)
    base.save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match=r"the base '.*base' has the sizes.*but other weights"):
        start_policy(tmp_path / "policy", max_model_len=512)
