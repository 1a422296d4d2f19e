"""How a tail and its attention with sinks are computed in training: other ways, same numbers."""

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
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2ForCausalLM
from transformers.models.llama.modeling_llama import rotate_half

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.eval.replay import replay
from ospruner.eval.table import IntArray, TraceTable
from ospruner.scoring import stop_logits
from ospruner.train.sinks import sinks_as_keys, takes_sinks_as_keys
from ospruner.train.states import States
from ospruner.train.tail import TrainedPolicy, no_denormals, step_outputs
from ospruner.train.traces import LabelledTraces, predict_outputs
from ospruner.train.untrained import untrained

from ..families import COMMON, make_base, random_policy
from .conftest import SETTINGS, Fit, Held, make_labels

ROWS: IntArray = np.arange(12)
# granite scales what enters its first layer, which the policy puts back.
KINDS = ("qwen2", "llama", "qwen3", "granite", "gpt_oss")
MakeModel = Callable[..., Any]


@pytest.fixture
def traces() -> LabelledTraces:
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
def test_queries_follow_the_formula(n: int, make_model: MakeModel, traces: LabelledTraces) -> None:
    model, batch = make_model(tuning="queries", n=n), traces.batch(ROWS)
    found = step_outputs(model.policy, traces.states(model, ROWS), batch.positions)[..., 0]
    for row, ids in enumerate(traces.tokens):
        ends = batch.positions[row][batch.mask[row]].tolist()
        wanted = by_hand(model, torch.from_numpy(ids), ends)
        torch.testing.assert_close(found[row, : len(ends)], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tuning", ["layers", "queries"])
def test_what_stays_in_float32(tuning: str, make_model: MakeModel, traces: LabelledTraces) -> None:
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


@pytest.mark.parametrize(
    "changed",
    [{"tuning": "queries"}, {"adapter_rank": 4, "learning_rate": 5e-3, "average": 0.5}],
    ids=["queries", "adapters"],
)
def test_it_trains_saves_loads_and_generates(
    changed: dict[str, Any], fit: Fit, tiny_base: Any, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    before, held_out = copy.deepcopy(tiny_base.state_dict()), make_labels(40, seed=1, prefix="v")
    saved = fit(SETTINGS | changed, validation=held_out)[-1]
    after = tiny_base.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    prompt = torch.tensor([tiny_tokenizer.encode("Ann has 3 apples")])
    for loaded in (
        OSPrunerForCausalLM.from_base(tiny_base, saved.path),
        OSPrunerForCausalLM.from_pretrained(saved.path),
    ):
        assert loaded.config.tuning == changed.get("tuning", "layers")
        assert loaded.config.adapter_rank == 0
        assert not any(".lora_" in name for name in loaded.policy.state_dict()), "they are merged"
        said = predict_outputs(loaded, LabelledTraces.from_dataset(held_out)).probabilities()
        outcome = replay(TraceTable.from_dataset(held_out), said)
        assert outcome.accuracy == pytest.approx(saved.accuracy, abs=1e-5)
        loaded.generate(prompt, stop_policy=True, max_new_tokens=30, do_sample=False)
    tensors = load_file(saved.path / "model.safetensors")
    if "adapter_rank" in changed:
        adapters = {name for name in tensors if ".lora_" in name}
        assert set(tensors) - adapters == {"policy.head.weight", "policy.head.bias"}
        assert len(adapters) == 2 * 2 * 7  # A and B for each projection of two layers
        assert all(tensors[name].any() for name in adapters)  # also the B, which began at zero
    else:
        assert saved.accuracy > 0.9
        for name in (one for one in tensors if ".layers." in one):
            theirs = before["model." + loaded.policy.name_in_base(name.removeprefix("policy."))]
            assert not torch.equal(tensors[name], theirs), name


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


# Attention with sinks, computed as one more key, against transformers' own eager attention.

SIZES: dict[str, Any] = COMMON | {"num_hidden_layers": 2, "vocab_size": 64, "sliding_window": 8}
SIZES |= {"max_position_embeddings": 512, "layer_types": ["sliding_attention", "full_attention"]}
SIZES |= {"initializer_range": 0.3, "pad_token_id": None, "eos_token_id": None}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}


def decoder_of(kind: str, dtype: torch.dtype) -> Any:
    """A random decoder whose sinks take a good share."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES, **({} if kind == "granite_swa" else EXPERTS))
    config._experts_implementation = "eager"  # takes float64
    decoder = AutoModelForCausalLM.from_config(config).eval().to(dtype).get_decoder()
    sinks = [p for name, p in decoder.named_parameters() if name.endswith("sinks")]
    assert len(sinks) == 2
    for one in sinks:
        torch.nn.init.normal_(one, 1.0)
    return decoder


def states_and_gradients(
    decoder: Any, ids: Tensor, mask: Tensor | None, ours: bool
) -> list[Tensor]:
    decoder.zero_grad(set_to_none=True)
    with sinks_as_keys(decoder.config) if ours else nullcontext():
        states = decoder(ids, attention_mask=mask, use_cache=False).last_hidden_state
        if mask is not None:
            states = states[mask.bool()]
        states.tanh().pow(3).sum().backward()
    gradients = {n: p.grad for n, p in decoder.named_parameters() if p.grad is not None}
    assert sum(float(one.abs().max()) > 0 for n, one in gradients.items() if "sinks" in n) == 2
    return [states.detach(), *gradients.values()]


@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [
        ("gpt_oss", torch.float64, 1e-11),
        # Their eager attention computes its softmax in float32 always.
        ("granite_swa", torch.float32, 1e-5),
        ("granitemoe_swa", torch.float32, 1e-5),
    ],
    ids=str,
)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("tokens", [1, 8, 9, 48])  # the window is 8
def test_states_and_gradients_are_those_of_eager_attention(
    tokens: int, padded: bool, kind: str, dtype: torch.dtype, tolerance: float
) -> None:
    decoder = decoder_of(kind, dtype)
    ids = torch.randint(0, 64, (3, tokens), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids) if padded else None
    if mask is not None:
        mask[1, : tokens // 3] = 0
    found, wanted = (states_and_gradients(decoder, ids, mask, ours) for ours in (True, False))
    for ours, theirs in zip(found, wanted, strict=True):
        close = tolerance * float(theirs.abs().max().clamp(min=1))
        torch.testing.assert_close(ours, theirs, atol=close, rtol=tolerance)
    assert decoder.config._attn_implementation == "eager"


def test_no_tensor_grows_with_the_square_of_the_text() -> None:
    decoder = decoder_of("gpt_oss", torch.float32)
    peaks = {}
    for ours in (True, False):
        for tokens in (256, 512):
            ids = torch.zeros(1, tokens, dtype=torch.int64)
            with Held(decoder.parameters()) as held:
                states_and_gradients(decoder, ids, None, ours)
            peaks[ours, tokens] = held.peak
    assert peaks[True, 512] <= 2 * peaks[True, 256]
    assert peaks[False, 512] > 2 * peaks[True, 512]


def test_bases_without_sinks_and_chosen_kernels_are_left_alone() -> None:
    for config in (
        AutoConfig.for_model("qwen2", attn_implementation="eager"),
        AutoConfig.for_model("gpt_oss", attn_implementation="flash_attention_3"),
    ):
        before = config._attn_implementation
        assert not takes_sinks_as_keys(config)
        with sinks_as_keys(config):
            assert config._attn_implementation == before
        assert config._attn_implementation == before
