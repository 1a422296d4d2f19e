"""`ospruner doctor BASE --plan`: what labelling, training and serving will need.

Arithmetic on a base's configuration; no weights are read. tests/train/test_on_cuda.py compares the
peaks of training with steps on tensors without storage.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicSlidingWindowLayer

from modeling_ospruner.configuration_ospruner import check_choice
from modeling_ospruner.policy_ospruner import StoppingPolicy, decoder_layers
from ospruner.bases import empty_base
from ospruner.eval.compute import active_weights, heads_width
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
    """What is planned for."""

    gpu_gib: float = 80.0  # memory of each GPU
    gpus: int = 1  # each holds a whole base
    traces: int = 40_000
    mean_tokens: int = 5_000  # of a trace's thinking
    max_tokens: int = 15_000  # of the longest
    step_tokens: int = 40  # from one step's end to the next
    streams: int = 32  # traces that are sampled at once on a GPU
    label_tokens_per_second: float = 2_500.0  # an engine's on one GPU, over all streams
    tflops: float = 150.0  # one GPU's in bfloat16 while it trains, in 10^12 operations a second
    epochs: int = 8  # passes over the traces, all prices together
    num_policy_layers: int = 2
    tuning: str = "queries"
    micro_batch_tokens: int = 16_384  # as in `StopConfig`

    def __post_init__(self) -> None:
        check_choice("Workload", "tuning", self.tuning, ("layers", "queries"))
        for name, value in vars(self).items():
            if name != "tuning" and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}; it must be a finite number above 0")
        if self.max_tokens < self.mean_tokens:
            raise ValueError(
                f"max_tokens is {self.max_tokens}, below mean_tokens ({self.mean_tokens})"
            )


@dataclass(frozen=True)
class Plan:
    """What it takes. Hours are over all GPUs, peaks and tokens on one of them."""

    base: str  # its class, and how its attention is computed
    parameters: int  # of the base
    tail_parameters: int  # of the policy
    weights_gib: float  # the base's, as its checkpoint stores them
    kv_bytes_per_token: int  # of layers that see the whole text: a sliding window holds no more
    labelling_peak_gib: float  # weights, keys and values of `streams` longest traces, if they fit
    labelling_hours: float  # all traces with their forced answers
    labelling_disk_gib: float
    training_peak_gib: float  # one optimiser step on the longest traces
    training_cached_peak_gib: float  # with --states: the base leaves, unless its weights are packed
    training_hours: float  # all epochs, with the trunk run anew
    training_disk_gib: float  # the trunk's states, with --states
    serving_kv_tokens: int  # of all rows that vLLM can hold, for base and policy
    notes: tuple[str, ...]  # what may stand in the way
    workload: Workload

    @property
    def fine(self) -> bool:
        """Whether labelling, training and serving each fit on a GPU in some way."""
        training = min(self.training_peak_gib, self.training_cached_peak_gib)
        fits = max(self.labelling_peak_gib, training) <= self.workload.gpu_gib
        return fits and self.serving_kv_tokens >= self.workload.max_tokens

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-ready values."""
        return asdict(self)

    def show(self, console: Console) -> None:
        """Prints the plan, and what it was made for."""
        work, rows = self.workload, Table("", "memory of a GPU", "hours", "disk")
        policy = f"the policy {self.tail_parameters / 1e6:,.1f} M"
        rows.title = f"{self.base}: {self.parameters / 1e9:.1f} B parameters, {policy}"
        peaks = [self.labelling_peak_gib, self.training_peak_gib, self.training_cached_peak_gib]
        labelling, training, cached = (f"{peak:.1f} GiB" for peak in peaks)
        disk, states = f"{self.labelling_disk_gib:.1f} GiB", f"{self.training_disk_gib:.0f} GiB"
        rows.add_row("labelling", labelling, f"{self.labelling_hours:.0f}", disk)
        rows.add_row("training", training, f"{self.training_hours:.0f}")
        rows.add_row("training, --states", cached, "", states)
        rows.add_row("serving", f"{self.serving_kv_tokens:,} tokens of keys and values")
        console.print(rows)
        console.print(
            f"For {work.gpus} GPU(s) of {work.gpu_gib:g} GiB: {work.traces:,} traces of "
            f"{work.mean_tokens:,} tokens (the longest {work.max_tokens:,}), a step every "
            f"{work.step_tokens}; {work.streams} streams that write "
            f"{work.label_tokens_per_second:,.0f} tokens/s together; {work.epochs} epochs at "
            f"{work.tflops:g} TFLOP/s. The two speeds are assumptions: measure yours."
        )
        for note in self.notes:
            console.print(Text("•", "yellow"), Text(note))


def plan_for(config: PreTrainedConfig, work: Workload) -> Plan:
    """What a workload takes with the base of a configuration.

    Raises:
        ValueError: no policy can be made for this base.
    """
    sizes = _Sizes(config, work)
    base, weights, kv = sizes.base, sizes.weights, sizes.kv_bytes
    tail_kv = 0 if sizes.queries else kv * work.num_policy_layers // len(sizes.layers)
    tokens = work.traces * work.mean_tokens
    answered = tokens * (1 + _FORCED_TOKENS / work.step_tokens)
    room = _VLLM_SHARE * work.gpu_gib * GIB - weights
    streams = min(work.streams, max(1, int(room / (kv * work.max_tokens))))
    kept = float(_HALF * sizes.width)
    if sizes.queries:  # of each step; keys and values of each token
        kept = kept / work.step_tokens + sizes.tail_kv_bytes
    operations = tokens * work.epochs * sizes.training_operations()
    peak, cached = sizes.training_peak(weights), sizes.cached_peak(weights, sizes.quantised)
    notes = _notes(sizes, peak, cached)
    if streams < work.streams:
        notes.append(f"labelling holds {streams} of the longest traces at once, not {work.streams}")
    return Plan(
        base=f"{type(base).__name__}, attention {base.config._attn_implementation}",
        parameters=sizes.parameters,
        tail_parameters=sizes.tail,
        weights_gib=weights / GIB,
        kv_bytes_per_token=kv,
        labelling_peak_gib=(weights + streams * work.max_tokens * kv) / GIB,
        labelling_hours=answered / work.label_tokens_per_second / work.gpus / 3600,
        labelling_disk_gib=_LABEL_BYTES * answered / GIB,
        training_peak_gib=peak / GIB,
        training_cached_peak_gib=cached / GIB,
        training_hours=operations / (work.tflops * 1e12) / work.gpus / 3600,
        training_disk_gib=tokens * kept / GIB,
        serving_kv_tokens=max(0, int((room - _HALF * sizes.tail - _VLLM_GRAPHS) / (kv + tail_kv))),
        notes=tuple(notes),
        workload=work,
    )


class _Sizes:
    """Bytes and operations of a base and its policy, from the shapes of their weights."""

    def __init__(self, config: PreTrainedConfig, work: Workload) -> None:
        self.work, self.queries = work, work.tuning == "queries"
        self.base = base = empty_base(config)
        self.policy = StoppingPolicy(base, work.num_policy_layers, queries=self.queries)
        self.layers = decoder_layers(base)
        self.parameters = sum(p.numel() for p in base.parameters())
        self.tail = sum(p.numel() for p in self.policy.parameters())
        quantised = vars(config).get("quantization_config") or {}
        self.quantised = bool(quantised)
        self.packed = dict(quantised).get("quant_method") == "mxfp4"
        # Bytes of the checkpoint: bfloat16, but experts of MXFP4 in four bits.
        experts = _MXFP4 if self.packed else _HALF
        stored = (p.numel() * (experts if p.ndim == 3 else _HALF) for p in base.parameters())
        self.weights = int(sum(stored))
        text = base.config.get_text_config()
        self.width = int(text.hidden_size)
        head_dim = vars(text).get("head_dim") or self.width // text.num_attention_heads
        key_bytes = 2 * _HALF * text.num_key_value_heads * head_dim
        caches = DynamicCache(config=text).layers
        growing = sum(not isinstance(layer, DynamicSlidingWindowLayer) for layer in caches)
        # Keys and values of one token: of layers whose cache grows, and in the policy's layers.
        self.kv_bytes, self.tail_kv_bytes = key_bytes * growing, key_bytes * work.num_policy_layers
        self.groups = text.num_attention_heads // text.num_key_value_heads
        # The weights of a layer that a token meets, over H, for the widths of all projections.
        self.projections = active_weights(self.layers[-1], base.config) / self.width
        # Their down projections are the smaller of two stacks: (experts, within, out) or transposed
        widths = [sum(p.shape[1:]) for p in self.layers[-1].parameters() if p.ndim == 3]
        # Width in and within a layer's experts, times those that a token is sent to.
        self.routed = int(vars(text)["num_experts_per_tok"] * min(widths)) if widths else 0
        self.scores = 0  # bytes of a trace's where no kernel avoids them: two copies
        if text._attn_implementation == "eager" and not takes_sinks_as_keys(text):
            self.scores = 2 * _HALF * int(text.num_attention_heads) * work.max_tokens**2

    def training_peak(self, weights: int) -> int:
        """What one optimiser step holds at its peak, on one GPU, in bfloat16 under autocast.

        Of the tail weights, gradients and AdamW's two moments in float32, and the weights' copies
        in bfloat16; activations of one micro-batch. The last layer's queries and MLP run at step
        ends only where the tail is a Llama's or Qwen2's. What torch's allocator leaves unused comes
        on top. A tail that is queries only is computed at step ends; the pass of the base before
        it, if the base is there (`weights` bytes of it), mostly takes more.
        """
        work = self.work
        kept = _KEPT_BY_WEIGHT * self.projections + _KEPT_BY_WIDTH * self.width
        kept += _KEPT_BY_ROUTED * self.routed
        if self.queries:
            # Keys and values of all tokens; for each layer a mask, in half precision and as truth
            # values, of each head that shares keys at each step's end; what a layer keeps of these.
            steps, layers = work.max_tokens / work.step_tokens, work.num_policy_layers
            masks = (_HALF + 1) * self.groups * steps * work.max_tokens * layers
            ends = int(work.max_tokens * self.tail_kv_bytes + masks + steps * kept * layers)
            trunk = self.trunk_peak() if weights else 0
            return int(weights + 4 * _FLOAT32 * self.tail + max(trunk, _HALF * self.tail + ends))
        fixed = weights + (4 * _FLOAT32 + _HALF) * self.tail
        whole = work.num_policy_layers - (self.base.config.model_type in ("llama", "qwen2"))
        tokens = max(work.max_tokens, work.micro_batch_tokens // work.max_tokens * work.max_tokens)
        passing = _PASSING_BY_WEIGHT * self.projections + _PASSING_BY_ROUTED * self.routed
        return int(fixed + tokens * (whole * kept + passing) + self.scores)

    def cached_peak(self, weights: int, stays: bool) -> int:
        """`training_peak` where the trunk's states are kept on disk: the larger of two peaks.

        First the trunk runs over all traces, beside the tail in float32. Then the base leaves the
        GPU, unless it stays, as one whose weights are packed does, and the tail is trained.
        """
        first = weights + _FLOAT32 * self.tail + self.trunk_peak()
        return max(first, self.training_peak(weights if stays else 0))

    def trunk_peak(self) -> int:
        """What a pass of the trunk holds at its peak beside the weights."""
        tokens = max(_TRUNK_TOKENS, self.work.max_tokens)
        return int(tokens * _HALF * (self.projections + 2 * self.routed)) + self.scores

    def training_operations(self) -> float:
        """Operations a token: two a weight in the frozen trunk, six in the tail, and attention.

        Causal attention over S tokens takes 2 S a head's width for each token and layer. A tail
        that is queries only is computed once a step, without the mask's half left out, and all of
        the base's layers before it (of the last one only keys and values, which is counted as a
        layer).
        """
        work, n, config = self.work, self.work.num_policy_layers, self.base.config
        active = [active_weights(layer, config) for layer in self.layers]
        tail = sum(active_weights(layer, config) for layer in self.policy.layers)
        attention = 2 * work.mean_tokens * heads_width(config)
        if self.queries:
            at_ends = (6.0 * tail + 2 * 3 * n * attention) / work.step_tokens
            return 2.0 * sum(active) + attention * len(active) + at_ends
        trunk = 2.0 * sum(active[: len(active) - n])
        return trunk + 6.0 * tail + attention * (len(active) - n + 3 * n)


def _notes(sizes: _Sizes, peak: int, cached: int) -> list[str]:
    """What may stand in the way of training, by its two peaks."""
    notes, work = list[str](), sizes.work
    if sizes.quantised and not sizes.packed:
        notes.append("training is planned with unpacked (bfloat16) weights of the base")
    if sizes.scores:
        notes.append(
            f"{type(sizes.base).__name__} has no sdpa attention: eager holds "
            f"{sizes.scores / GIB:.0f} GiB of scores at least for a trace of {work.max_tokens:,} "
            "tokens; label shorter ones (--max-thinking-tokens)"
        )
    if cached <= work.gpu_gib * GIB < peak:
        notes.append(
            f"training fits with --states ({cached / GIB:.1f} GiB): the base leaves the GPU "
            "once the trunk's states are on disk"
        )
    elif peak > work.gpu_gib * GIB:
        notes.append(
            "training does not fit: --tuning queries, fewer --layers, --set adapter_rank=16, or "
            "shorter traces (--max-thinking-tokens) take less"
        )
    if sizes.packed:
        unpacked = _HALF * sizes.parameters
        notes.append(
            "transformers keeps experts of MXFP4 packed where the packages kernels and triton are "
            f"installed; elsewhere it unpacks the base, and training takes "
            f"{(peak - sizes.weights + unpacked) / GIB:.1f} GiB, or "
            f"{sizes.cached_peak(unpacked, False) / GIB:.1f} with --states"
        )
    return notes
