"""Tuning "queries": trained on states at step ends and the base's keys, from one pass of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2ForCausalLM,
)
from transformers.models.llama.modeling_llama import rotate_half

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.eval.replay import replay
from ospruner.eval.table import TraceTable
from ospruner.scoring import stop_logits
from ospruner.train.policies import SavedPolicy
from ospruner.train.predicting import predict
from ospruner.train.states import States
from ospruner.train.tail import TrainedPolicy, step_outputs
from ospruner.train.traces import LabelledTraces
from ospruner.train.untrained import untrained

from .conftest import SETTINGS, SHORT, MakeLabels
from .test_trained import FAMILIES, SIZES

QUERIES = SETTINGS | {"tuning": "queries"}


@pytest.fixture(params=FAMILIES)
def base(request: pytest.FixtureRequest, tiny_tokenizer: PreTrainedTokenizerFast) -> Any:
    torch.manual_seed(0)
    fields = {**SIZES, **FAMILIES[request.param], "vocab_size": len(tiny_tokenizer)}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(request.param, **fields)).eval()


@pytest.fixture
def traces(make_labels: MakeLabels) -> LabelledTraces:
    return LabelledTraces.from_dataset(make_labels(12))


def queries_only(base: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, n: int = 2) -> Any:
    """A policy whose weights are not the base's."""
    model = untrained(base, tokenizer, n, tuning="queries")
    torch.manual_seed(1)
    torch.nn.init.normal_(model.policy.head.weight)
    with torch.no_grad():
        for parameter in model.policy.layers.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@pytest.mark.parametrize("head", ["fixed", "price"])
def test_it_trains_saves_loads_and_generates(
    head: str,
    fit: Callable[..., list[SavedPolicy]],
    tiny_base: Qwen2ForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    make_labels: MakeLabels,
) -> None:
    settings = QUERIES
    if head == "price":
        settings = QUERIES | {"head": "price", "prices": [1e-3, 3e-2], "entropy_bonus": 0.0}
    labels, held_out = make_labels(64), make_labels(40, seed=1, prefix="v")
    stages = fit(settings, labels, validation=held_out)
    saved = load_file(stages[-1].path / "model.safetensors")
    per_layer = {
        "input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.q_proj.weight",
        "self_attn.q_proj.bias", "self_attn.o_proj.weight", "mlp.gate_proj.weight",
        "mlp.up_proj.weight", "mlp.down_proj.weight",
    }  # fmt: skip
    wanted = {f"policy.tail.layers.{i}.{name}" for i in (0, 1) for name in per_layer}
    assert set(saved) == wanted | {
        "policy.tail.norm.weight", "policy.head.weight", "policy.head.bias"
    }  # fmt: skip
    own = tiny_base.state_dict()
    for name in wanted:
        layer, rest = name.removeprefix("policy.tail.layers.").split(".", 1)
        assert not torch.equal(saved[name], own[f"model.layers.{int(layer) + 2}.{rest}"]), name
    assert stages[-1].accuracy > 0.9
    prompt = torch.tensor([tiny_tokenizer.encode("Ann has 3 apples")])
    for loaded in (
        OSPrunerForCausalLM.from_base(tiny_base, stages[-1].path),
        OSPrunerForCausalLM.from_pretrained(stages[-1].path),
    ):
        assert (loaded.config.tuning, loaded.config.head) == ("queries", head)
        assert loaded.policy.queries
        found = predict(loaded, held_out)
        outcome = replay(TraceTable.from_dataset(held_out), found)
        assert outcome.accuracy == pytest.approx(stages[-1].accuracy, abs=1e-5)
        loaded.generate(prompt, stop_policy=True, max_new_tokens=30, do_sample=False)


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
        groups = attention.num_key_value_groups
        seen = torch.zeros(T, q.shape[1], D)
        for t, end in enumerate(ends):
            for head in range(q.shape[1]):
                keys, values = (
                    one[0, head // groups, : end + 1] for one in (kept.keys, kept.values)
                )
                seen[t, head] = (q[t, head] @ keys.T / D**0.5).softmax(-1) @ values
        x = x + attention.o_proj(seen.flatten(1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return policy.head(policy.tail.norm(x))[:, 0]


@torch.no_grad()
@pytest.mark.parametrize("n", [1, 2, 4])
def test_it_is_the_formula_of_the_page(
    n: int, tiny_base: Qwen2ForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast,
    traces: LabelledTraces,
) -> None:  # fmt: skip
    model = queries_only(tiny_base, tiny_tokenizer, n)
    rows = np.arange(12)
    batch = traces.batch(rows)
    found = step_outputs(model.policy, traces.states(model, rows), batch.positions)[..., 0]
    for row in rows:
        ends = batch.positions[row][batch.mask[row]].tolist()
        wanted = by_hand(model, traces.input_ids(rows[row : row + 1])[0], ends)
        torch.testing.assert_close(found[row, : len(ends)], wanted, rtol=1e-5, atol=1e-5)


def gradients(model: Any, states: States, traces: LabelledTraces, **settings: Any) -> list[Tensor]:
    """Logits, and the gradient of each parameter."""
    model.policy.zero_grad(set_to_none=True)
    batch = traces.batch(np.arange(12))
    logits = TrainedPolicy(model.policy, **settings)(states, batch.positions)[..., 0]
    (logits.sigmoid() * batch.mask).sum().backward()
    trained = [p.grad for p in model.policy.parameters() if p.grad is not None]
    assert len(trained) == sum(p.requires_grad for p in model.policy.parameters())
    return [logits.detach() * batch.mask, *(one.clone() for one in trained)]


def test_kept_states_and_other_ways_give_the_same(
    base: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerFast,
    traces: LabelledTraces,
    make_labels: MakeLabels,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In memory, on disk, computed anew, packed or a trace a row, with checkpointing."""
    model = queries_only(base, tiny_tokenizer)
    rows = np.arange(12)
    computed = gradients(model, traces.states(model, rows), traces)
    offline = [
        stop_logits(model, traces.input_ids(rows[i : i + 1]))[0, traces.positions[i]] for i in rows
    ]
    steps = computed[0].shape[1]
    mask = traces.batch(rows).mask
    torch.testing.assert_close(
        computed[0][mask], torch.stack(offline)[:, :steps].detach()[mask], rtol=1e-4, atol=1e-5
    )
    states = traces.states(model, rows)
    checkpointed = gradients(model, states, traces, checkpointing=True)
    in_memory, on_disk, alone = (LabelledTraces.from_dataset(make_labels(12)) for _ in range(3))
    size = in_memory.cache_states(model, 2**30)
    config = base.config
    heads, width = config.num_key_value_heads, config.hidden_size
    head = vars(config).get("head_dim") or width // config.num_attention_heads
    numbers = traces.token_lengths.sum() * 2 * 2 * heads * head + traces.table.mask.sum() * width
    assert size == numbers * 4
    on_disk.keep_states(tmp_path / "states")
    assert on_disk.cache_states(model, 0) == 0
    assert len(list((tmp_path / "states").glob("*/*.safetensors"))) == 12
    monkeypatch.setattr("ospruner.train.states.takes_packing", lambda base: False)
    ways = {
        "memory": gradients(model, in_memory.states(model, rows), traces),
        "disk": gradients(model, on_disk.states(model, rows), traces),
        "a trace a row": gradients(model, alone.states(model, rows), traces),
        "checkpointed": checkpointed,
    }
    for name, found in ways.items():
        for ours, theirs in zip(found, computed, strict=True):
            close = 1e-5 * float(theirs.abs().max())
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=close, msg=name)


def test_states_of_layers_are_not_given_to_queries(
    tiny_base: Qwen2ForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, traces: LabelledTraces
) -> None:
    """Both read the same base with the same n."""
    layers = untrained(tiny_base, tiny_tokenizer, tuning="layers")
    queries = queries_only(tiny_base, tiny_tokenizer)
    assert traces.cache_states(layers, 2**30) > 0
    assert traces.holds_states_of(layers)
    assert not traces.holds_states_of(queries)
    assert len(traces.states(queries, np.arange(3)).keys) == 2
    assert len(traces.states(layers, np.arange(3)).keys) == 0


def test_half_precision_keys_train_a_policy_in_float32(
    tiny_base: Qwen2ForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, traces: LabelledTraces
) -> None:
    model = queries_only(tiny_base, tiny_tokenizer)
    exact = gradients(model, traces.states(model, np.arange(12)), traces)
    tiny_base.bfloat16()
    states = traces.states(model, np.arange(12))
    assert {one.keys.dtype for one in states.keys} == {torch.bfloat16}
    for half in (False, True):
        rough = gradients(model, states, traces, half=half)
        difference = (rough[0] - exact[0]).abs().max()
        assert 0 < difference < 0.2 * exact[0].abs().max()
        assert {one.dtype for one in rough} == {torch.float32}


def test_fewer_numbers_are_kept_for_the_backward_pass(
    tiny_base: Qwen2ForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, traces: LabelledTraces
) -> None:
    kept = {}
    for tuning in ("layers", "queries"):
        model = untrained(tiny_base, tiny_tokenizer, tuning=tuning)
        states = traces.states(model, np.arange(12))
        found: dict[int, int] = {}
        given = {p.untyped_storage().data_ptr() for p in model.parameters()}
        given |= {
            k.untyped_storage().data_ptr() for one in states.keys for k in (one.keys, one.values)
        }

        def keep(tensor: Tensor, found: dict[int, int] = found, given: set[int] = given) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given:
                found[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            step_outputs(model.policy, states, traces.batch(np.arange(12)).positions)
        kept[tuning] = sum(found.values())
    assert kept["queries"] < 0.75 * kept["layers"]


def test_a_run_in_parts_and_from_disk_ends_alike(
    fit: Callable[..., list[SavedPolicy]], tmp_path: Path
) -> None:
    settings = SHORT | {"tuning": "queries"}
    (whole,) = fit(settings, out=tmp_path / "whole")
    parts = settings | {"micro_batch_tokens": 100, "states": str(tmp_path / "states")}
    (other,) = fit(parts, out=tmp_path / "parts")
    ours, theirs = (load_file(one.path / "model.safetensors") for one in (whole, other))
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=2e-3, rtol=0)
    assert whole.accuracy == pytest.approx(other.accuracy, abs=1e-3)
