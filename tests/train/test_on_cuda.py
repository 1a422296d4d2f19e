"""What training does on CUDA, shown on any machine: its attention, and its memory at full size.

The CPU then goes CUDA's ways. At full size the base is its configuration alone, and tensors have
shapes but no storage.
"""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from modeling_ospruner import OSPrunerConfig
from modeling_ospruner.policy_ospruner import StoppingPolicy
from ospruner.bases import empty_base, plain_text_config
from ospruner.doctor.plan import GIB, Workload, plan_for
from ospruner.train.config import StopConfig
from ospruner.train.flashthink import Verifier
from ospruner.train.labels.features import FEATURES
from ospruner.train.tail import FusedKernels, TrainedPolicy
from ospruner.train.traces import LabelledTraces, micro_batches
from ospruner.train.trainer import optimizer_of
from ospruner.train.untrained import set_trainable, untrained

from ..families import COMMON
from ..label_rows import label_row
from .conftest import Held, make_labels

BASES = Path(__file__).parents[1] / "bases"


class OnlyFused(TorchFunctionMode):
    """Counts attention calls, and fails at one that CUDA serves by its math kernel alone.

    It also fails where experts are computed in another dtype than autocast's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.experts = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.calls += 1
            refuse_math(*args, **kwargs)
        if func is torch._grouped_mm:
            self.experts += 1
            dtypes = {one.dtype for one in args}
            kind = args[0].device.type
            assert not torch.is_autocast_enabled(kind) or dtypes == {torch.bfloat16}
        return func(*args, **kwargs)


def refuse_math(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None:
    """Asks for what torch's kernels on CUDA ask for (sdp_utils.cpp), after autocast's casts."""
    autocast = torch.is_autocast_enabled(query.device.type)
    dtype = torch.get_autocast_dtype(query.device.type) if autocast else query.dtype
    half = dtype in (torch.float16, torch.bfloat16)
    grouped = query.shape[1] != key.shape[1]
    assert grouped <= enable_gqa
    if query.is_cuda:
        q, k, v = (one.to(dtype) for one in (query, key, value))
        asked = SDPAParams(q, k, v, attn_mask, dropout_p, is_causal, enable_gqa)
        assert can_use_flash_attention(asked) or can_use_efficient_attention(asked)
    head = query.shape[-1]
    same = head == key.shape[-1] == value.shape[-1]
    flash = half and attn_mask is None and same and head <= 256
    efficient = (
        not grouped
        and not enable_gqa
        and head % (8 if half else 4) == 0
        and not (is_causal and attn_mask is not None)
    )
    assert flash or efficient, (dtype, query.shape, key.shape, attn_mask is not None, enable_gqa)


TINY = {**COMMON, "initializer_range": 0.3, "pad_token_id": None}
BASE_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "llama": {},
    "qwen3": {},
    "gemma3_text": {
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gpt_oss": {
        "sliding_window": 8,
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
        "initializer_range": 0.1,  # with more, roundings grow from expert to expert
    },
}


@pytest.mark.parametrize(
    ("precision", "checkpointing"), [("float32", False), ("bfloat16", False), ("bfloat16", True)]
)
@pytest.mark.parametrize("kind", BASE_CONFIGS)
@pytest.mark.parametrize("device", ["cpu", *["cuda"] * torch.cuda.is_available()])
def test_no_attention_is_left_to_the_kernel_that_holds_all_scores(
    device: str,
    kind: str,
    precision: Literal["float32", "bfloat16"],
    checkpointing: bool,
    tiny_tokenizer: PreTrainedTokenizerFast,
    request: pytest.FixtureRequest,
) -> None:
    torch.manual_seed(0)
    fields = {**TINY, **BASE_CONFIGS[kind], "vocab_size": len(tiny_tokenizer)}
    config = AutoConfig.for_model(kind, **fields)
    base = AutoModelForCausalLM.from_config(config).to(device).eval()
    assert base.config._attn_implementation == ("eager" if kind == "gpt_oss" else "sdpa")
    model = untrained(base, tiny_tokenizer, tuning="layers")
    torch.nn.init.normal_(model.policy.head.weight)
    traces = LabelledTraces.from_dataset(make_labels(6))
    batch = traces.batch(np.arange(6))

    def gradients() -> list[Tensor]:
        model.policy.zero_grad(set_to_none=True)
        trained = TrainedPolicy(model.policy, precision == "bfloat16", checkpointing)
        hidden = traces.states(model, batch.rows)
        logits = trained(hidden, batch.positions.to(device))[..., 0]
        (logits.sigmoid().cpu() * batch.mask).sum().backward()
        trained_ones = (p.grad for p in model.policy.parameters() if p.grad is not None)
        return [logits.detach(), *(gradient.clone() for gradient in trained_ones)]

    found = gradients()  # as on this device
    if device == "cpu":
        if precision == "float32":
            with OnlyFused(), pytest.raises(AssertionError, match=r"torch\.float32"):
                gradients()
        request.getfixturevalue("as_on_cuda")
    attention = OnlyFused()
    with attention:
        again = gradients()
    # Two layers of trunk and two of tail, of which those that are checkpointed run twice.
    assert attention.calls >= 4
    assert bool(attention.experts) == (kind == "gpt_oss")
    tolerance = 2e-5 if precision == "float32" else 0.05
    for ours, theirs in zip(again, found, strict=True):
        close = tolerance * float(theirs.abs().max())
        torch.testing.assert_close(ours, theirs, atol=close, rtol=tolerance)


TOKENS, BATCH, STEPS = 15_000, 32, 300


def long_traces(count: int) -> LabelledTraces:
    """Traces of as many tokens and steps as R1's longest."""
    ends = np.linspace(TOKENS // STEPS, TOKENS - 100, STEPS).astype(int).tolist()
    right = [float(end > TOKENS / 2) for end in ends]
    columns: dict[str, Any] = {"prompt_ids": [0] * 100, "trace_ids": [0] * (TOKENS - 100)}
    columns |= {"step_ends": ends, "forced_correct": right}
    columns |= {"matches_final": [value == 1.0 for value in right]}
    rows = [label_row(f"p{n}", steps=STEPS, **columns) for n in range(count)]
    return LabelledTraces.from_dataset(Dataset.from_list(rows, features=FEATURES))


def base_and_policy(name: str, fake: FakeTensorMode, tuning: str) -> Verifier:
    """A base in bfloat16 with a policy whose tail is in float32, as `new_policy` gives it."""
    base = empty_base(AutoConfig.from_pretrained(BASES / name))
    policy = StoppingPolicy(base, 2, queries=tuning == "queries")
    policy.float()
    set_trainable(policy)
    config = OSPrunerConfig(text_config=plain_text_config(base.config), tuning=tuning)
    with fake:
        return Verifier(
            base.to_empty(device="cpu"), policy.to_empty(device="cpu"), config, ("", None)
        )


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """On any device, what is done on CUDA."""
    monkeypatch.setattr("ospruner.train.tail.fused_kernels", lambda device: FusedKernels())


def step_peak(name: str, tuning: str, attention: OnlyFused) -> int:
    """Bytes held at the peak of one optimiser step; base, weights and AdamW's state included."""
    traces, rows = long_traces(BATCH), np.arange(BATCH)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    model = base_and_policy(name, fake, tuning)
    with fake:
        trained = TrainedPolicy(model.policy, half=True)
        optimizer = optimizer_of(model.policy, StopConfig("run", learning_rate=1e-5))
        for parameter in model.policy.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # has its state from now on
        optimizer.zero_grad(set_to_none=True)
        parts = micro_batches(traces.token_lengths, rows, 16_384)
        state = [one for entry in optimizer.state.values() for one in entry.values()]
        held = Held([*model.base.parameters(), *model.policy.parameters(), *state])
        with held, attention:
            after = []
            for part in parts[:3]:  # the others repeat the third
                states, batch = traces.states(model, part), traces.batch(part)
                # The loss looks at its mask's values, which these tensors do not have.
                trained(states, batch.positions).mean().backward()
                del states, batch
                after.append(held.now)
            optimizer.step()
        assert after[1] == after[2]
        assert len(parts) == BATCH
    return held.peak


def trunk_peak(name: str, tuning: str) -> int:
    """Bytes held at the peak of a pass of the trunk over one trace, base and tail included."""
    traces = long_traces(1)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    model = base_and_policy(name, fake, tuning)
    with fake, Held([*model.base.parameters(), *model.policy.parameters()]) as held:
        traces.states(model, np.arange(1))
    return held.peak


@pytest.mark.parametrize(
    ("tuning", "name", "layers", "limit", "cached_limit"),
    [
        ("layers", "r1-distill-qwen-7b", 28, 30e9, 20e9),
        pytest.param("layers", "gpt-oss-20b", 24, 60e9, 60e9, marks=pytest.mark.slow),
        pytest.param("layers", "qwen3-30b-a3b", 48, 100e9, 70e9, marks=pytest.mark.slow),
        # Two layers at step ends, and all of the base's but the last, of which keys and values.
        ("queries", "r1-distill-qwen-7b", 29, 25e9, 20e9),
        pytest.param("queries", "gpt-oss-20b", 25, 50e9, 50e9, marks=pytest.mark.slow),
        ("queries", "qwen3-30b-a3b", 49, 90e9, 70e9),
    ],
)
def test_a_step_on_32_traces_of_15_000_tokens_takes_what_is_planned(
    tuning: Literal["layers", "queries"],
    name: str,
    layers: int,
    limit: float,
    cached_limit: float,
    as_on_cuda: None,
) -> None:
    attention = OnlyFused()
    step_bytes = step_peak(name, tuning, attention)
    if name == "gpt-oss-20b":  # its sliding layers attend in blocks of 128 tokens
        blocks, half = -(-TOKENS // 128), layers // 2
        assert 3 * half * blocks <= attention.calls <= 3 * (half * blocks + layers - half)
    else:
        assert attention.calls == 3 * layers
    # These bases are in bfloat16. Packed experts, for which there are no kernels here, are counted.
    config = AutoConfig.from_pretrained(BASES / name)
    plan = plan_for(config, Workload(tuning=tuning, step_tokens=TOKENS // STEPS))
    unpacked, stored = 2 * plan.parameters, plan.weights_gib * GIB
    packed = stored < 0.9 * unpacked
    step, trunk = (one - unpacked + stored for one in (step_bytes, trunk_peak(name, tuning)))
    cached = max(trunk, step if packed else step - stored)
    print(f"{name}, {tuning}: step {step / GIB:.1f} GiB, states on disk {cached / GIB:.1f} GiB")
    near = 0.03 if tuning == "layers" else 0.05
    assert plan.training_peak_gib == pytest.approx(step / GIB, rel=near)
    assert plan.training_cached_peak_gib == pytest.approx(cached / GIB, rel=near)
    assert step < limit
    assert cached < cached_limit
