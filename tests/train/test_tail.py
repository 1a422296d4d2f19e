"""How a tail is computed while it is trained: other ways, same numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM
from transformers.models.llama.modeling_llama import rotate_half

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.eval.replay import replay
from ospruner.eval.table import IntArray, TraceTable
from ospruner.scoring import stop_logits
from ospruner.train.states import States
from ospruner.train.tail import TrainedPolicy, no_denormals, step_outputs
from ospruner.train.traces import LabelledTraces, predict_outputs
from ospruner.train.untrained import untrained

from ..families import make_base, random_policy
from .conftest import RANGE, SETTINGS, Fit, MakeLabels

ROWS: IntArray = np.arange(12)
# granite scales what enters its first layer, which the policy puts back.
KINDS = ("qwen2", "llama", "qwen3", "granite", "gpt_oss")
MakeModel = Callable[..., Any]


@pytest.fixture
def traces(make_labels: MakeLabels) -> LabelledTraces:
    return LabelledTraces.from_dataset(make_labels(12))


@pytest.fixture
def make_model(tiny_tokenizer: PreTrainedTokenizerFast) -> MakeModel:
    """A random base of a family with a policy whose weights are not the base's."""

    def make(kind: str = "qwen2", tuning: str = "layers", n: int = 2) -> Any:
        model = random_policy(make_base(kind, tiny_tokenizer), tiny_tokenizer, n, tuning, std=1.0)
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(0)  # whatever tests ran before
            for parameter in model.policy.layers.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        return model

    return make


def gradients(
    model: Any, states: States, traces: LabelledTraces, **settings: Any
) -> tuple[list[Tensor], int]:
    """Logits and the gradient of each parameter; and the bytes kept for the backward pass."""
    model.policy.zero_grad(set_to_none=True)
    batch = traces.batch(ROWS)
    given = {p.untyped_storage().data_ptr() for p in model.parameters()}
    given |= {k.untyped_storage().data_ptr() for one in states.keys for k in (one.keys, one.values)}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = TrainedPolicy(model.policy, **settings)(states, batch.positions)[..., 0]
    (logits.sigmoid() * batch.correct * batch.mask).sum().backward()
    trained = [p for p in model.policy.parameters() if p.requires_grad]
    found = [p.grad.clone() for p in trained if p.grad is not None]
    assert len(found) == len(trained)
    return [logits.detach()[batch.mask], *found], sum(kept.values())


def same(ours: list[Tensor], theirs: list[Tensor], share: float = 1e-5) -> None:
    """Equal to a share of each one's largest number."""
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        close = share * float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=10 * share, atol=close)


@pytest.mark.parametrize("tuning", ["layers", "queries"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_gives_the_same_logits_and_gradients(
    kind: str,
    tuning: str,
    make_model: MakeModel,
    traces: LabelledTraces,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In memory, on disk, checkpointed, the whole last layer, eager sinks."""
    model = make_model(kind, tuning)
    states = traces.states(model, ROWS)
    computed, size = gradients(model, states, traces)
    offline = [
        stop_logits(model, torch.from_numpy(ids)[None])[0, traces.positions[n]]
        for n, ids in enumerate(traces.tokens)
    ]
    mask = traces.batch(ROWS).mask
    wanted = torch.stack(offline)[:, : mask.shape[1]].detach()[mask]
    torch.testing.assert_close(computed[0], wanted, rtol=1e-4, atol=1e-5)

    less, smaller = gradients(copy.deepcopy(model), states, traces, checkpointing=True)
    same(less, computed)
    assert smaller < size
    on_disk = LabelledTraces(traces.table, traces.tokens, traces.positions, tmp_path)
    on_disk.cache_states(model, 0)
    same(gradients(model, on_disk.states(model, ROWS), traces)[0], computed)
    monkeypatch.setattr("ospruner.train.tail._takes_fast_tail", lambda tail: False)
    monkeypatch.setattr("ospruner.train.tail.sinks_as_keys", lambda config: nullcontext())
    plain, held = gradients(model, traces.states(model, ROWS), traces)
    same(plain, computed)
    special = kind == "gpt_oss" or (kind in ("qwen2", "llama") and tuning == "layers")
    assert (held != size) == special, "another way was taken"


def by_hand(model: Any, ids: Tensor, ends: list[int]) -> Tensor:
    """Stop logits (T,) of a Qwen2 by the formula of docs/method.md, with weights of any values."""
    policy, decoder = model.policy, model.base.get_decoder()
    n = len(policy.layers)
    out = decoder(input_ids=ids[None], use_cache=True, output_hidden_states=True)
    x = out.hidden_states[-1 - n][0, ends]  # (T, H)
    cos, sin = (
        one[0, ends][:, None] for one in decoder.rotary_emb(out[0], torch.arange(999)[None])
    )
    for layer, kept in zip(policy.layers, out.past_key_values.layers[-n:], strict=True):
        attention = layer.self_attn
        T, D = len(ends), attention.head_dim
        q = attention.q_proj(layer.input_layernorm(x)).view(T, -1, D)
        q = q * cos + rotate_half(q) * sin
        seen = torch.zeros(T, q.shape[1], D)
        for t, end in enumerate(ends):
            for head in range(q.shape[1]):
                keys, values = (
                    one[0, head // attention.num_key_value_groups, : end + 1]
                    for one in (kept.keys, kept.values)
                )
                seen[t, head] = (q[t, head] @ keys.T / D**0.5).softmax(-1) @ values
        x = x + attention.o_proj(seen.flatten(1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return policy.head(policy.tail.norm(x))[:, 0]


@torch.no_grad()
@pytest.mark.parametrize("n", [1, 4])
def test_queries_are_the_formula_of_the_page(
    n: int, make_model: MakeModel, traces: LabelledTraces
) -> None:
    model, batch = make_model(tuning="queries", n=n), traces.batch(ROWS)
    found = step_outputs(model.policy, traces.states(model, ROWS), batch.positions)[..., 0]
    for row, ids in enumerate(traces.tokens):
        ends = batch.positions[row][batch.mask[row]].tolist()
        wanted = by_hand(model, torch.from_numpy(ids), ends)
        torch.testing.assert_close(found[row, : len(ends)], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tuning", ["layers", "queries"])
def test_bfloat16_keeps_weights_head_and_loss_in_float32(
    tuning: str, make_model: MakeModel, traces: LabelledTraces
) -> None:
    model = make_model(tuning=tuning)
    (exact, *_), size = gradients(model, traces.states(model, ROWS), traces)
    rough = {"tail": gradients(model, traces.states(model, ROWS), traces, half=True)}
    assert rough["tail"][1] < size
    model.base.bfloat16()
    states = traces.states(model, ROWS)
    assert {one.keys.dtype for one in states.keys} <= {torch.bfloat16}
    rough["base"] = gradients(model, states, traces)
    for (logits, *found), _ in rough.values():
        assert {one.dtype for one in (logits, *found)} == {torch.float32}
        assert not torch.equal(logits, logits.bfloat16().float())  # the head was not in bfloat16
        assert 0 < (logits - exact).abs().max() < 0.2 * exact.abs().max()


PER_LAYER = {
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.q_proj.bias",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
}
HEAD = {"policy.head.weight", "policy.head.bias"}


@pytest.mark.parametrize(
    ("changed", "tuning"),
    [
        ({"tuning": "queries"}, "queries"),
        ({"tuning": "queries", "head": "price", "prices": RANGE}, "queries"),
        ({"adapter_rank": 4, "learning_rate": 5e-3, "average": 0.5}, "layers"),
    ],
    ids=["queries", "price", "adapters"],
)
def test_it_trains_saves_loads_and_generates(
    changed: dict[str, Any],
    tuning: str,
    fit: Fit,
    tiny_base: Qwen2ForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    make_labels: MakeLabels,
) -> None:
    base: Any = tiny_base
    before, held_out = copy.deepcopy(base.state_dict()), make_labels(40, seed=1, prefix="v")
    saved = fit(SETTINGS | changed, validation=held_out)[-1]
    after = base.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    tensors = load_file(saved.path / "model.safetensors")
    if tuning == "queries":
        own = {f"policy.tail.layers.{i}.{name}" for i in (0, 1) for name in PER_LAYER}
        assert set(tensors) == own | HEAD | {"policy.tail.norm.weight"}
        for name in own:
            layer, rest = name.removeprefix("policy.tail.layers.").split(".", 1)
            theirs = before[f"model.layers.{int(layer) + 2}.{rest}"]
            assert not torch.equal(tensors[name], theirs), name
        assert saved.accuracy > 0.9
    else:
        adapters = {name for name in tensors if ".lora_" in name}
        assert set(tensors) - adapters == HEAD
        assert len(adapters) == 2 * 2 * 7  # A and B for each projection of two layers
        assert all(tensors[name].any() for name in adapters)  # also the B, which began at zero
    prompt = torch.tensor([tiny_tokenizer.encode("Ann has 3 apples")])
    for loaded in (
        OSPrunerForCausalLM.from_base(base, saved.path),
        OSPrunerForCausalLM.from_pretrained(saved.path),
    ):
        assert (loaded.config.tuning, loaded.config.adapter_rank) == (tuning, 0)
        assert loaded.config.head == changed.get("head", "fixed")
        assert not any(".lora_" in name for name in loaded.policy.state_dict()), "they are merged"
        said = predict_outputs(loaded, LabelledTraces.from_dataset(held_out)).probabilities()
        outcome = replay(TraceTable.from_dataset(held_out), said)
        assert outcome.accuracy == pytest.approx(saved.accuracy, abs=1e-5)
        loaded.generate(prompt, stop_policy=True, max_new_tokens=30, do_sample=False)


def test_adapters_of_a_half_precision_base_are_in_float32(
    tiny_base: Qwen2ForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, traces: LabelledTraces
) -> None:
    model = untrained(tiny_base.bfloat16(), tiny_tokenizer, tuning="layers", adapter_rank=16)
    trained = [p for p in model.policy.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {torch.float32}
    assert model.policy.tail is not None
    assert model.policy.tail.dtype == torch.bfloat16
    assert sum(p.numel() for p in trained) < sum(p.numel() for p in model.policy.parameters()) / 2
    assert np.isfinite(predict_outputs(model, traces).outputs).all()


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this CPU cannot")
def test_denormal_numbers_count_as_zero_while_training() -> None:
    smallest = torch.tensor([1e-39])
    with no_denormals():
        assert (smallest * 0.5).item() == 0
    assert (smallest * 0.5).item() > 0
