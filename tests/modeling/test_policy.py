from __future__ import annotations

import pytest
import torch
from transformers import BloomConfig, GPT2Config, PreTrainedConfig, Qwen2Config, Qwen2ForCausalLM

from modeling_ospruner.configuration_ospruner import max_positions
from ospruner.train.untrained import fresh_layers


def test_fresh_policy_says_its_initial_bias(tiny_base: Qwen2ForCausalLM) -> None:
    policy = fresh_layers(tiny_base, 2, init_bias=-2.0, tuning="layers")
    logits = policy(torch.randn(1, 3, 32), torch.arange(3)[None])
    torch.testing.assert_close(logits, torch.full((1, 3), -2.0))


def test_head_alone_reads_the_last_hidden_state(tiny_base: Qwen2ForCausalLM) -> None:
    policy = fresh_layers(tiny_base, 0, tuning="layers")
    assert policy.tail is None
    assert policy.new_cache() is None
    hidden = torch.randn(2, 3, 32)
    torch.testing.assert_close(policy(hidden), policy.head(hidden)[..., 0])


def test_the_copied_layers_and_the_head_train(tiny_base: Qwen2ForCausalLM) -> None:
    policy = fresh_layers(tiny_base, 2, "layers")
    torch.nn.init.normal_(policy.head.weight)
    policy(torch.randn(1, 5, 32), torch.arange(5)[None]).sum().backward()
    with_gradient = {n for n, p in policy.named_parameters() if p.grad is not None}
    assert {"head.weight", "head.bias"} <= with_gradient
    modules = {name.split(".")[3] for name in with_gradient if name.startswith("tail.layers")}
    norms = {"input_layernorm", "post_attention_layernorm"}
    assert modules == {"self_attn", "mlp", *norms}
    assert "tail.norm.weight" not in with_gradient
    assert not any(parameter.grad is not None for parameter in tiny_base.parameters())


def test_training_leaves_the_base_unchanged(tiny_base: Qwen2ForCausalLM) -> None:
    before = {name: value.clone() for name, value in tiny_base.state_dict().items()}
    policy = fresh_layers(tiny_base, 2, tuning="layers")
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=1.0)
    torch.nn.init.normal_(policy.head.weight)
    policy(torch.randn(1, 5, 32), torch.arange(5)[None]).sum().backward()
    optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in tiny_base.state_dict().items())


def test_too_many_layers_are_refused(tiny_base: Qwen2ForCausalLM) -> None:
    with pytest.raises(ValueError, match=r"num_policy_layers is 5; it must lie in 0..4"):
        fresh_layers(tiny_base, 5, tuning="layers")


def _scaled(kind: str, factor: float, original: int) -> PreTrainedConfig:
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": factor}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    rope |= {} if kind == "linear" else {"original_max_position_embeddings": original}
    return Qwen2Config(max_position_embeddings=4096, rope_parameters=rope)


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (Qwen2Config(max_position_embeddings=300), 300),
        (GPT2Config(n_positions=77), 77),
        (BloomConfig(), None),
        (_scaled("yarn", 4.0, 4096), 16384),  # the configuration keeps the length before
        (_scaled("yarn", 4.0, 1024), 4096),  # or already says the one after
        (_scaled("linear", 2.0, 0), 8192),
        (_scaled("llama3", 8.0, 1024), 4096),
    ],
)
def test_a_base_says_how_long_a_text_may_be(config: PreTrainedConfig, limit: int | None) -> None:
    assert max_positions(config) == limit
