from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2ForCausalLM
from transformers.models.auto import CONFIG_MAPPING

from modeling_ospruner.bases_ospruner import decoder_layers
from modeling_ospruner.capture_ospruner import Capture
from modeling_ospruner.policy_ospruner import StoppingPolicy

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 256,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
WINDOW = {"sliding_window": 8}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "llama": {},
    "mistral": WINDOW,
    "phi3": {},
    "gemma2": WINDOW,
    "gemma3_text": WINDOW,
    "gpt_oss": {**LOCAL_EXPERTS, **WINDOW},
    "olmo2": {},
    "glm4": {},
    "granite": {"embedding_multiplier": 3.0},
    "seed_oss": {},
    "smollm3": {},
}


def make_base(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name](**COMMON, **ARCHITECTURES[name])
    base: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    for parameter in base.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
        else:
            # Norms that differ from their neutral value: a tail without them would show.
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return base


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("layers", [1, 2])
def test_tail_equals_the_base(name: str, layers: int) -> None:
    """Fed with what enters layer L-n, the tail gives the base's last hidden states."""
    base = make_base(name)
    policy = StoppingPolicy.from_base(base, layers)
    torch.nn.init.normal_(policy.head.weight)
    ids = torch.randint(3, 97, (2, 20))
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, :5] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    entering: list[torch.Tensor] = []
    handle = decoder_layers(base)[-layers].register_forward_pre_hook(
        lambda module, args, kwargs: entering.append(
            kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        ),
        with_kwargs=True,
    )
    with torch.no_grad():
        last = base.get_decoder()(
            input_ids=ids, attention_mask=mask, position_ids=positions
        ).last_hidden_state
        handle.remove()
        expected = policy.head(last.float())[..., 0]
        whole = policy(entering[0], positions, mask)
        cache = policy.new_cache()
        parts = [
            policy(entering[0][:, i:j], positions[:, i:j], mask[:, :j], cache)
            for i, j in ((0, 7), (7, 12), (12, 13), (13, 20))
        ]
    real = mask.bool()
    torch.testing.assert_close(whole[real], expected[real], rtol=0, atol=0)
    torch.testing.assert_close(torch.cat(parts, 1)[real], expected[real], rtol=0, atol=2e-5)
    assert whole.dtype == torch.float32


def test_fresh_policy_says_its_initial_bias(tiny_base: Qwen2ForCausalLM) -> None:
    policy = StoppingPolicy.from_base(tiny_base, 2, init_bias=-2.0)
    logits = policy(torch.randn(1, 3, 32), torch.arange(3)[None])
    torch.testing.assert_close(logits, torch.full((1, 3), -2.0))


def test_head_alone_reads_the_last_hidden_state(tiny_base: Qwen2ForCausalLM) -> None:
    policy = StoppingPolicy.from_base(tiny_base, 0)
    assert policy.tail is None
    assert policy.new_cache() is None
    hidden = torch.randn(2, 3, 32)
    torch.testing.assert_close(policy(hidden), policy.head(hidden)[..., 0])


@pytest.mark.parametrize(
    ("tuning", "trained"), [("layers", {"self_attn", "mlp"}), ("attention", {"self_attn"})]
)
def test_tuning_chooses_what_trains(
    tiny_base: Qwen2ForCausalLM, tuning: str, trained: set[str]
) -> None:
    policy = StoppingPolicy.from_base(tiny_base, 2, tuning)
    torch.nn.init.normal_(policy.head.weight)
    policy(torch.randn(1, 5, 32), torch.arange(5)[None]).sum().backward()
    with_gradient = {n for n, p in policy.named_parameters() if p.grad is not None}
    assert {"head.weight", "head.bias"} <= with_gradient
    modules = {name.split(".")[3] for name in with_gradient if name.startswith("tail.layers")}
    assert modules - {"input_layernorm", "post_attention_layernorm"} == trained
    assert ("input_layernorm" in modules) == (tuning == "layers")
    assert not any(parameter.grad is not None for parameter in tiny_base.parameters())


def test_training_leaves_the_base_unchanged(tiny_base: Qwen2ForCausalLM) -> None:
    before = {name: value.clone() for name, value in tiny_base.state_dict().items()}
    policy = StoppingPolicy.from_base(tiny_base, 2)
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=1.0)
    torch.nn.init.normal_(policy.head.weight)
    policy(torch.randn(1, 5, 32), torch.arange(5)[None]).sum().backward()
    optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in tiny_base.state_dict().items())


def test_too_many_layers_are_refused(tiny_base: Qwen2ForCausalLM) -> None:
    with pytest.raises(ValueError, match=r"num_policy_layers is 5; it must lie in 0..4"):
        StoppingPolicy.from_base(tiny_base, 5)


@pytest.mark.parametrize("layers", [0, 2])
def test_capture_in_pieces_equals_one_pass(tiny_base: Qwen2ForCausalLM, layers: int) -> None:
    policy = StoppingPolicy.from_base(tiny_base, layers)
    torch.nn.init.normal_(policy.head.weight)
    ids = torch.randint(3, 300, (2, 12))
    with torch.no_grad():
        with Capture(tiny_base, policy) as capture:
            tiny_base(input_ids=ids)
            whole = capture.probabilities()
        with Capture(tiny_base, policy) as capture:
            cache = tiny_base(input_ids=ids[:, :5], use_cache=True).past_key_values
            for i in range(5, 12):
                positions = torch.full((2, 1), i)
                tiny_base(
                    input_ids=ids[:, i : i + 1], position_ids=positions, past_key_values=cache
                )
                if i == 8:
                    capture.probabilities()
            pieces = capture.probabilities()
    torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-5)
