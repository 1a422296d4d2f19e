"""`ospruner doctor plan`: what labelling, training and serving will need.

Arithmetic on a base's configuration; no weights are read. tests/train/test_on_cuda.py compares the
peaks of training with steps on tensors without storage.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from modeling_ospruner.configuration_ospruner import check_choice
from modeling_ospruner.policy_ospruner import StoppingPolicy, decoder_layers
from ospruner.bases import empty_base
from ospruner.eval.arithmetic import active_weights, heads_width, share_met
from ospruner.train.sinks import takes_sinks_as_keys

GIB = 2**30
_HALF, _FLOAT32 = 2, 4  # bytes
_MXFP4 = 4.25 / 8  # bytes a weight: four bits, and a scale of eight for 32 of them
_FORCED_TOKENS = 32  # of an answer, and its closing
_LABEL_BYTES = 8  # on disk, for each token
_VLLM_SHARE = 0.9  # of the GPU's memory, which vLLM takes
_VLLM_GRAPHS = 2 * GIB
# Per token and layer, in bfloat16 with residuals and norms in float32: bytes kept for the backward
# pass, and those that it needs on top in one layer. "Routed" is the width, in and within, of all
# experts that a token is sent to: their inputs and outputs are copied in another order.
_KEPT_BY_WEIGHT, _KEPT_BY_WIDTH, _KEPT_BY_ROUTED = 8 / 3, 14, 7
_PASSING_BY_WEIGHT, _PASSING_BY_ROUTED = 2.0, 4
_TRUNK_TOKENS = 16_384  # of one pass, without gradient


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is planned for.

    Attributes:
        gpu_gib: memory of each GPU.
        gpus: how many; each holds a whole base.
        traces: labelled traces.
        mean_tokens: thinking tokens of a trace.
        max_tokens: of the longest.
        step_tokens: tokens from one step's end to the next.
        streams: traces that are sampled at once on a GPU.
        label_tokens_per_second: what an engine writes on one GPU, over all streams.
        tflops: what one GPU computes in bfloat16 while it trains, in 10^12 operations a second.
        epochs: passes over the traces, all lambdas together.
        num_policy_layers: n.
        tuning: what of them trains: "layers", or "queries".
        micro_batch_tokens: see `TrainSettings`.
    """

    gpu_gib: float = 80.0
    gpus: int = 1
    traces: int = 40_000
    mean_tokens: int = 5_000
    max_tokens: int = 15_000
    step_tokens: int = 40
    streams: int = 32
    label_tokens_per_second: float = 2_500.0
    tflops: float = 150.0
    epochs: int = 8
    num_policy_layers: int = 2
    tuning: str = "queries"
    micro_batch_tokens: int = 16_384

    def __post_init__(self) -> None:
        check_choice("Workload", "tuning", self.tuning, ("layers", "queries"))
        for name, value in vars(self).items():
            if name == "tuning":
                continue
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}; it must be a finite number above 0")
        if self.max_tokens < self.mean_tokens:
            raise ValueError(
                f"max_tokens is {self.max_tokens}, below mean_tokens ({self.mean_tokens})"
            )


@dataclass(frozen=True)
class Plan:
    """What it takes.

    Attributes:
        base: its class, and how its attention is computed.
        parameters: of the base.
        tail_parameters: of a policy.
        weights_gib: the base's, as its checkpoint stores them.
        kv_bytes_per_token: of one row; layers of a sliding window hold no more with length.
        labelling_peak_gib: weights, and keys and values of `streams` of the longest traces, or of
            as many as fit.
        labelling_hours: all traces with their forced answers, over all GPUs.
        labelling_disk_gib: the labels.
        training_peak_gib: one optimiser step on the longest traces, on one GPU.
        training_cached_peak_gib: the same with the trunk's states kept on disk: the base leaves the
            GPU once they are there, unless its weights are packed.
        training_hours: all epochs with the trunk run anew, over all GPUs.
        training_disk_gib: the trunk's states, with --states.
        serving_kv_tokens: tokens of all rows that vLLM can hold on one GPU, base and policy.
        serving_weights_share: of the bytes of weights that a decode step of `streams` rows reads,
            how many more the policy reads while it stops none, on average. Where steps take as long
            as reading the weights does, as on most GPUs, this is what it costs.
        notes: what may stand in the way.
    """

    base: str
    parameters: int
    tail_parameters: int
    weights_gib: float
    kv_bytes_per_token: int
    labelling_peak_gib: float
    labelling_hours: float
    labelling_disk_gib: float
    training_peak_gib: float
    training_cached_peak_gib: float
    training_hours: float
    training_disk_gib: float
    serving_kv_tokens: int
    serving_weights_share: float
    notes: tuple[str, ...]


def run_plan(
    where: str, revision: str | None, work: Workload, console: Console, json_file: Path | None
) -> bool:
    """Plans and prints; whether labelling, training and serving each fit on a GPU in some way.

    Args:
        where: a base, as a folder or Hub id; only its config.json is read.
        revision: of the base.
        work: what is planned for.
        console: to print on.
        json_file: where to write the plan and the workload, too.

    Raises:
        ValueError: no policy can be made for this base.
        OSError: there is no such base.
    """
    plan = plan_for(AutoConfig.from_pretrained(where, revision=revision), work)
    print_plan(plan, work, console)
    if json_file is not None:
        content = {**asdict(plan), "workload": asdict(work)}
        json_file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    training = min(plan.training_peak_gib, plan.training_cached_peak_gib)
    peak = max(plan.labelling_peak_gib, training)
    return peak <= work.gpu_gib and plan.serving_kv_tokens >= work.max_tokens


def plan_for(config: PreTrainedConfig, work: Workload) -> Plan:
    """What a workload takes with a base.

    Args:
        config: the base's.
        work: the workload.

    Raises:
        ValueError: no policy can be made for this base.
    """
    base = empty_base(config)
    policy = StoppingPolicy.empty(base, work.num_policy_layers, queries=work.tuning == "queries")
    size = sum(p.numel() for p in base.parameters())
    tail = sum(p.numel() for p in policy.parameters())
    weights = _weight_bytes(base, config)
    kv = _kv_bytes(base)
    tail_kv = 0 if policy.queries else kv * work.num_policy_layers // len(decoder_layers(base))
    tokens = work.traces * work.mean_tokens
    answered = tokens * (1 + _FORCED_TOKENS / work.step_tokens)
    free = _VLLM_SHARE * work.gpu_gib * GIB - weights - _HALF * tail - _VLLM_GRAPHS
    peak = training_peak_bytes(base, policy, work, weights)
    quantised = bool(vars(config).get("quantization_config"))
    cached = cached_peak_bytes(base, policy, work, weights, quantised)
    fitting = max(1, int((_VLLM_SHARE * work.gpu_gib * GIB - weights) / (kv * work.max_tokens)))
    streams = min(work.streams, fitting)
    notes = _notes(base, config, peak, cached, work)
    if _is_packed(config):
        unpacked = _HALF * size
        there = cached_peak_bytes(base, policy, work, unpacked) / GIB
        notes.append(
            "transformers keeps experts of MXFP4 packed where the packages kernels and triton are "
            f"installed; elsewhere it unpacks the base, and training takes "
            f"{(peak - weights + unpacked) / GIB:.1f} GiB, or {there:.1f} with --states"
        )
    if streams < work.streams:
        notes.append(f"labelling holds {streams} of the longest traces at once, not {work.streams}")
    kept = _HALF * config.get_text_config().hidden_size
    if policy.queries:  # of each step; keys and values of each token
        kept = kept / work.step_tokens + _key_bytes(base, work)
    return Plan(
        base=f"{type(base).__name__}, attention {base.config._attn_implementation}",
        parameters=size,
        tail_parameters=tail,
        weights_gib=weights / GIB,
        kv_bytes_per_token=kv,
        labelling_peak_gib=(weights + streams * work.max_tokens * kv) / GIB,
        labelling_hours=answered / work.label_tokens_per_second / work.gpus / 3600,
        labelling_disk_gib=_LABEL_BYTES * answered / GIB,
        training_peak_gib=peak / GIB,
        training_cached_peak_gib=cached / GIB,
        training_hours=tokens
        * work.epochs
        * _training_operations(base, policy, work)
        / (work.tflops * 1e12)
        / work.gpus
        / 3600,
        training_disk_gib=tokens * kept / GIB,
        serving_kv_tokens=max(0, int(free / (kv + tail_kv))),
        serving_weights_share=_weights_share(base, policy, config, work),
        notes=tuple(notes),
    )


def training_peak_bytes(
    base: PreTrainedModel, policy: StoppingPolicy, work: Workload, weights: int
) -> int:
    """What one optimiser step holds at its peak, on one GPU, in bfloat16 under autocast.

    Of the tail weights, gradients and AdamW's two moments in float32, and the weights' copies in
    bfloat16; activations of one micro-batch. The last layer's queries and MLP run at step ends only
    where the tail is a Llama's or Qwen2's. The weights that a token meets, over the width H, stand
    for the widths of all projections of a layer. What torch's allocator leaves unused comes on top.
    A tail that is queries only is computed at step ends; the pass of the base before it, if the
    base is there, mostly takes more.

    Args:
        base: without weights.
        policy: without weights.
        work: the workload.
        weights: bytes of the base's.
    """
    tail = sum(p.numel() for p in policy.parameters())
    if policy.queries:
        stays = weights + 4 * _FLOAT32 * tail
        trunk = _trunk_bytes(base, work) if weights else 0
        return int(stays + max(trunk, _HALF * tail + _step_end_bytes(base, work)))
    fixed = weights + (4 * _FLOAT32 + _HALF) * tail
    width = base.config.get_text_config().hidden_size
    layer = decoder_layers(base)[-1]
    projections = active_weights(layer, base.config) / width
    routed = _routed_width(layer, base)
    whole = work.num_policy_layers
    if base.config.model_type in ("llama", "qwen2"):
        whole -= 1
    tokens = max(work.max_tokens, work.micro_batch_tokens // work.max_tokens * work.max_tokens)
    kept = _KEPT_BY_WEIGHT * projections + _KEPT_BY_WIDTH * width + _KEPT_BY_ROUTED * routed
    passing = _PASSING_BY_WEIGHT * projections + _PASSING_BY_ROUTED * routed
    return int(fixed + tokens * (whole * kept + passing) + _scores_bytes(base, work))


def cached_peak_bytes(
    base: PreTrainedModel,
    policy: StoppingPolicy,
    work: Workload,
    weights: int,
    stays: bool = False,
) -> int:
    """`training_peak_bytes` where the trunk's states are kept on disk: the larger of two peaks.

    First the trunk runs over all traces, beside the tail in float32. Then the base leaves the GPU,
    and the tail is trained.

    Args:
        base: as there.
        policy: as there.
        work: as there.
        weights: as there.
        stays: the base does not leave, as one whose weights are packed.
    """
    tail = sum(p.numel() for p in policy.parameters())
    first = weights + _FLOAT32 * tail + _trunk_bytes(base, work)
    return max(first, training_peak_bytes(base, policy, work, weights if stays else 0))


def _trunk_bytes(base: PreTrainedModel, work: Workload) -> int:
    """What a pass of the trunk holds at its peak beside the weights."""
    width = base.config.get_text_config().hidden_size
    layer = decoder_layers(base)[-1]
    passing = _HALF * (active_weights(layer, base.config) / width + 2 * _routed_width(layer, base))
    tokens = max(_TRUNK_TOKENS, work.max_tokens)
    return int(tokens * passing) + _scores_bytes(base, work)


def _key_bytes(base: PreTrainedModel, work: Workload) -> int:
    """Keys and values of one token in the policy's layers, in half precision."""
    text = base.config.get_text_config()
    head_dim = vars(text).get("head_dim") or text.hidden_size // text.num_attention_heads
    return int(2 * _HALF * text.num_key_value_heads * head_dim * work.num_policy_layers)


def _step_end_bytes(base: PreTrainedModel, work: Workload) -> int:
    """Activations of a tail that is queries only, on the longest trace.

    Keys and values of all tokens; for each layer a mask, in half precision and as truth values, of
    each head that shares keys at each step's end; and what a layer keeps of so few tokens.
    """
    text, layer = base.config.get_text_config(), decoder_layers(base)[-1]
    steps = work.max_tokens / work.step_tokens
    groups = text.num_attention_heads // text.num_key_value_heads
    masks = (_HALF + 1) * groups * steps * work.max_tokens * work.num_policy_layers
    projections = active_weights(layer, base.config) / text.hidden_size
    kept = _KEPT_BY_WEIGHT * projections + _KEPT_BY_WIDTH * text.hidden_size
    kept += _KEPT_BY_ROUTED * _routed_width(layer, base)
    kept *= work.num_policy_layers
    return int(work.max_tokens * _key_bytes(base, work) + masks + steps * kept)


def _scores_bytes(base: PreTrainedModel, work: Workload) -> int:
    """Attention scores of one trace where no kernel avoids them: two copies in half precision."""
    config = base.config.get_text_config()
    if config._attn_implementation != "eager" or takes_sinks_as_keys(config):
        return 0
    return 2 * _HALF * int(config.num_attention_heads) * work.max_tokens**2


def _routed_width(layer: torch.nn.Module, base: PreTrainedModel) -> int:
    """Width in and within a layer's experts, times those that a token is sent to; 0 without."""
    # Their down projections are the smaller of two stacks: (experts, within, out) or transposed.
    widths = [sum(p.shape[1:]) for p in layer.parameters() if p.ndim == 3]
    text = vars(base.config.get_text_config())
    return int(text["num_experts_per_tok"] * min(widths)) if widths else 0


def _training_operations(base: PreTrainedModel, policy: StoppingPolicy, work: Workload) -> float:
    """Operations a token: two a weight in the frozen trunk, six in the tail, and attention.

    Causal attention over S tokens takes 2 S a head's width for each token and layer. A tail that is
    queries only is computed once a step, without the mask's half left out, and all of the base's
    layers before it (of the last one only keys and values, which is counted as a layer).
    """
    layers = decoder_layers(base)
    n = work.num_policy_layers
    trunk = sum(active_weights(layer, base.config) for layer in layers[: len(layers) - n])
    tail = sum(active_weights(layer, base.config) for layer in policy.layers)
    attention = 2 * work.mean_tokens * heads_width(base.config)
    if policy.queries:
        whole = sum(active_weights(layer, base.config) for layer in layers)
        at_ends = (6.0 * tail + 2 * 3 * n * attention) / work.step_tokens
        return 2.0 * whole + attention * len(layers) + at_ends
    return 2.0 * trunk + 6.0 * tail + attention * (len(layers) - n + 3 * n)


def _weight_bytes(base: PreTrainedModel, config: PreTrainedConfig) -> int:
    """The checkpoint's weights: in bfloat16, experts of MXFP4 in four bits."""
    sizes = _bytes_by_weight(config)
    return int(sum(p.numel() * sizes(p) for p in base.parameters()))


def _bytes_by_weight(config: PreTrainedConfig) -> Callable[[torch.Tensor], float]:
    packed = _is_packed(config)
    return lambda parameter: _MXFP4 if packed and parameter.ndim == 3 else _HALF


def _weights_share(
    base: PreTrainedModel, policy: StoppingPolicy, config: PreTrainedConfig, work: Workload
) -> float:
    """Bytes of the policy's weights over the base's that a decode step reads, on average.

    The policy's are in bfloat16. Those of queries only are read in steps in which a row ends a
    paragraph, others in each. Rows are sent to experts independently of each other.
    """

    def read(module: torch.nn.Module, rows: float, sizes: Callable[[torch.Tensor], float]) -> float:
        return sum(
            share_met(p, base.config, rows) * sizes(p) * p.numel() for p in module.parameters()
        )

    rows, often = float(work.streams), 1.0
    if policy.queries:
        often = 1 - (1 - 1 / work.step_tokens) ** work.streams
        rows = work.streams / work.step_tokens / often
    tail = often * read(policy, rows, lambda _: _HALF)
    whole = read(base, work.streams, _bytes_by_weight(config))
    embedding: Any = base.get_input_embeddings()
    if embedding.weight is not base.get_output_embeddings().weight:  # a step reads a few rows of it
        whole -= _HALF * embedding.weight.numel()
    return tail / whole


def _is_packed(config: PreTrainedConfig) -> bool:
    quantised = vars(config).get("quantization_config") or {}
    return dict(quantised).get("quant_method") == "mxfp4"


def _kv_bytes(base: PreTrainedModel) -> int:
    """Keys and values of one token in half precision, of the layers whose cache grows."""
    text = base.config.get_text_config()
    layers = DynamicCache(config=text).layers
    growing = sum(not isinstance(layer, DynamicSlidingWindowLayer) for layer in layers)
    head_dim = vars(text).get("head_dim") or text.hidden_size // text.num_attention_heads
    return int(2 * _HALF * text.num_key_value_heads * head_dim * growing)


def _notes(
    base: PreTrainedModel, config: PreTrainedConfig, peak: int, cached: int, work: Workload
) -> list[str]:
    notes = []
    if vars(config).get("quantization_config") and not _is_packed(config):
        notes.append("training is planned with unpacked (bfloat16) weights of the base")
    if scores := _scores_bytes(base, work):
        notes.append(
            f"{type(base).__name__} has no sdpa attention: eager holds {scores / GIB:.0f} GiB of "
            f"scores at least for a trace of {work.max_tokens:,} tokens; lower --max-tokens"
        )
    limit = work.gpu_gib * GIB
    if cached <= limit < peak:
        notes.append(
            f"training fits with --states ({cached / GIB:.1f} GiB): the base leaves the GPU "
            "once the trunk's states are on disk"
        )
    elif peak > limit:
        tunings = "attention" if vars(config).get("quantization_config") else "lora or attention"
        notes.append(
            f"training does not fit: --shard over several GPUs, --tuning {tunings}, or lower "
            "--max-tokens"
        )
    return notes


def print_plan(plan: Plan, work: Workload, console: Console) -> None:
    """Prints a plan, and what it was made for."""
    table = Table(title=f"{plan.base}: {plan.parameters / 1e9:.1f} B parameters")
    for heading in ("", "memory of a GPU", "hours", "disk"):
        table.add_column(heading)
    table.add_row(
        "labelling",
        f"{plan.labelling_peak_gib:.1f} GiB",
        f"{plan.labelling_hours:.0f}",
        f"{plan.labelling_disk_gib:.1f} GiB",
    )
    table.add_row(
        "training",
        f"{plan.training_peak_gib:.1f} GiB",
        f"{plan.training_hours:.0f}",
        "",
    )
    table.add_row(
        "training, --states",
        f"{plan.training_cached_peak_gib:.1f} GiB",
        "",
        f"{plan.training_disk_gib:.0f} GiB",
    )
    table.add_row("serving", f"{plan.serving_kv_tokens:,} tokens of keys and values", "", "")
    console.print(table)
    console.print(
        f"Serving {work.streams} streams, the policy adds {plan.serving_weights_share:.1%} to the "
        "weights that a step reads while it stops none."
    )
    console.print(
        f"For {work.gpus} GPU(s) of {work.gpu_gib:g} GiB: {work.traces:,} traces of "
        f"{work.mean_tokens:,} tokens (the longest {work.max_tokens:,}), a step every "
        f"{work.step_tokens}; {work.streams} streams that write "
        f"{work.label_tokens_per_second:,.0f} tokens/s together; {work.epochs} epochs at "
        f"{work.tflops:g} TFLOP/s. The two speeds are assumptions: measure yours."
    )
    for note in plan.notes:
        console.print(f"[yellow]•[/yellow] {note}")
