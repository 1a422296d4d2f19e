"""A policy beside drafts, in vLLM's model runner V2; run by test_plugin.py, case by case."""

from __future__ import annotations

from . import on_runner_v2  # isort: skip

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm import LLM
from vllm.v1.worker.gpu.spec_decode import rejection_sampler

from ospruner.demo.shipped import Reasoner

from .plugin_checks import TIGHT, UNCHANGED, Prompts, check_stops, greedy, run, start, start_policy
from .plugin_replay import make_policy

__all__ = ["on_runner_v2"]

EAGLE = {"method": "eagle3", "num_speculative_tokens": 2}
MODEL = {"method": "draft_model", "num_speculative_tokens": 3}
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # the policy's tuning, and the drafts
    "ngram": ("queries", {"method": "ngram", "prompt_lookup_max": 2, "num_speculative_tokens": 3}),
    "model": ("queries", MODEL),
    "block": ("queries", MODEL | {"rejection_sample_method": "block"}),
    "eagle3": ("queries", EAGLE),
    "layers": ("layers", EAGLE),
}


def make_drafter(reasoner: Reasoner, folder: Path) -> None:
    """A random head of EAGLE-3's, which reads three layers and drafts from a few tokens."""
    size, own = 128, "midlayer"
    ids = sorted(set(reasoner.tokenizer.encode("0 1 2 3 + = x.\n\n", add_special_tokens=False)))
    shapes = {f"{own}.mlp.{name}_proj": (size, size) for name in ("gate", "up", "down")}
    shapes |= {f"{own}.self_attn.{name}_proj": (64, 2 * size) for name in "kv"}
    shapes |= {f"{own}.self_attn.q_proj": (size, 2 * size)}
    shapes |= {f"{own}.self_attn.o_proj": (size, size), "fc": (size, 3 * size)}
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    torch.manual_seed(0)
    tensors = {f"{name}.weight": 0.1 * torch.randn(shape) for name, shape in shapes.items()}
    tensors |= {f"{own}.{name}.weight": torch.ones(size) for name in norms}
    tensors |= {"norm.weight": torch.ones(size), "lm_head.weight": torch.randn(len(ids), size)}
    tensors |= {"d2t": torch.tensor(ids) - torch.arange(len(ids))}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    literals: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]}
    literals |= {"hidden_size": size, "intermediate_size": size, "num_hidden_layers": 1}
    literals |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 640}
    literals |= {"max_position_embeddings": 1024, "rms_norm_eps": 1e-6}
    literals |= {"draft_vocab_size": len(ids), "num_aux_hidden_states": 3}
    literals |= {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}  # the policy's is 4
    (folder / "config.json").write_text(json.dumps(literals), "utf-8")


def accepted(llm: LLM) -> int:
    [found] = [m for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens"]
    return int(found.value)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("environment")
def test_drafts(
    case: str, reasoner: Reasoner, mixed: Prompts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that never stops changes nothing; decisions read what was accepted alone."""
    tuning, drafts = CASES[case]
    if drafts["method"] == "draft_model":
        drafts = drafts | {"model": str(reasoner.folder)}
    if drafts["method"] == "eagle3":
        (tmp_path / "drafter").mkdir()
        make_drafter(reasoner, tmp_path / "drafter")
        drafts = drafts | {"model": str(tmp_path / "drafter")}
    if tuning == "layers":  # drafts are verified in parts
        monkeypatch.setattr(rejection_sampler, "MAX_CHUNK_BYTES", 4 * 640 * 7)
    prompts = mixed[:10]
    sampled: list[dict[str, Any]] = [{"temperature": float(i % 2), "seed": i} for i in range(10)]
    plain = start(reasoner.folder, **TIGHT, speculative_config=drafts)
    wanted = run(plain, prompts, [greedy(**one) for one in sampled])
    plainly = accepted(plain)
    del plain
    gc.collect()
    model = make_policy(reasoner, tmp_path / "policy", tuning=tuning)
    served = start_policy(tmp_path / "policy", **TIGHT, speculative_config=drafts)
    before = accepted(served)
    assert run(served, prompts, [greedy(UNCHANGED, **one) for one in sampled]) == wanted
    count = accepted(served) - before
    print(f"{count} drafts were accepted, {plainly} without a policy")
    assert count > 15
    if drafts["method"] == "eagle3":
        assert abs(count - plainly) < 5  # that drafter reads what it reads without a policy
    extras = [
        {"stop_policy": True, "stop_seed": 7, "stop_sample_index": i}
        | ({"max_thinking_tokens": 30} if i % 5 == 1 else {})
        | ({"stop_answer": "free"} if i % 5 == 2 else {})
        for i in range(len(prompts))
    ]
    reasons = check_stops(served, model, prompts, extras, sampled=True)
    assert min(reasons["policy"], reasons["budget"]) > 0
