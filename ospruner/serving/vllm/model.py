"""A base of vLLM's own with a policy's tail beside it.

The base is vLLM's own model, compiled as vLLM compiles it. Its EAGLE-3 tap gives what enters layer
L-n; the tail runs on that after it, compiled by itself as EAGLE heads are, on layers of the base's
own class whose keys and values lie in vLLM's pages, so that chunked prefill, prefix caching and
preemption hold for both. Drafts may be made from the same tap (EAGLE-3): it gives what both read.

A policy of queries only reads the base's pages where steps end (`Pages`).
"""

import copy
import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from vllm.compilation.backends import set_model_tag
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.model_executor.model_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models.interfaces import SupportsEagle3, is_hybrid
from vllm.model_executor.models.utils import maybe_prefix
from vllm.v1.attention.backend import CommonAttentionMetadata, subclass_attention_backend

from modeling_ospruner.configuration_ospruner import PRICE_RAMPS, OSPrunerConfig
from modeling_ospruner.modeling_ospruner import check_norm, empty_policy
from ospruner.bases import empty_base

from ..checks import Weights, base_weights, check_base_weights, quantisation, stored_tail
from .plugin import architecture
from .servable import TAPPED, check_start, check_windows, class_of_base

STOP_HEAD = "stop_head"  # by this name the processor finds it, where vLLM's own layers are found
_NORMS_OF_KEYS = {"k_norm", "k_layernorm"}


class StopHead(nn.Linear):
    """H to 1, or to 6 for every price, in float32; it keeps what it says of a step."""

    def __init__(self, hidden_size: int, outputs: int, tokens: int = 0) -> None:
        super().__init__(hidden_size, outputs, dtype=torch.float32)
        # Of a step's tokens, (T, 1 or 6); in model runner V1 of the sampled rows.
        self.outputs = torch.zeros(tokens, outputs)
        # In V1: each row's last position that has been computed, (B,).
        self.positions = torch.empty(0, dtype=torch.int32)
        # Gives what it reads where it is asked, with a policy of queries only; else it has said it
        # of all.
        self.pages: Pages | None = None
        self.arrivals: Any = None  # who comes and leaves, in V2 (`runner_v2.Arrivals`)

    def ask(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What it says of rows (K,) of the batch, (K, 1 or 6), and their last positions, (K,)."""
        if self.pages is None:
            return self.outputs[rows], self.positions[rows]
        lengths, places = self.pages.ends(rows)
        return self(self.pages.hidden(rows, lengths, places).float()), lengths - 1


@support_torch_compile(dynamic_arg_dims={"positions": 0, "hidden": 0})
class _Tail(nn.Module):
    """The policy's copies of the base's last n layers and of its final norm.

    Layers are made of what their class asks for; beside an unquantised base they must turn out as
    its own.
    """

    def __init__(
        self,
        *,
        vllm_config: VllmConfig,
        base: Any,
        copied: Sequence[int],
        added_to: Sequence[int],
        unquantised: bool,
    ) -> None:
        super().__init__()
        self.config: Any = vllm_config.model_config.hf_config
        self.parallel_config = vllm_config.parallel_config
        self.layers = nn.ModuleList()
        self._added_to = added_to
        total = len(base.model.layers)
        for number in copied:
            theirs = base.model.layers[number]
            place = 2 * total + number
            given = {**vars(vllm_config), "vllm_config": vllm_config, "config": self.config}
            given |= {"prefix": f"tail.layers.{place}", "layer_idx": place}
            given["layer_type"] = (vars(self.config).get("layer_types") or {place: None})[place]
            asked = inspect.signature(type(theirs)).parameters
            try:
                own = type(theirs)(**{name: given[name] for name in asked if name in given})
            except TypeError as error:
                raise ValueError(
                    f"vLLM's {type(theirs).__name__} cannot be copied for a policy ({error}): "
                    "generate with transformers"
                ) from error
            shapes = [{(k, v.shape) for k, v in one.named_parameters()} for one in (own, theirs)]
            unlike = shapes[0] ^ shapes[1]
            if unlike and unquantised:
                raise ValueError(
                    f"vLLM's {type(theirs).__name__} is another behind the base's last layer "
                    f"({', '.join(sorted(name for name, _ in unlike))}): generate with transformers"
                )
            self.layers.append(own)
        self.norm = copy.deepcopy(base.model.norm)
        self._pairs = "residual" in inspect.signature(type(self.layers[0]).forward).parameters

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, added: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor:
        """From what enters the first of the layers, (T, H), to what follows the final norm, (T, H).

        What other layers of the base between and behind them added is `added`, each (T, H).
        """
        residual = None
        for number, layer in enumerate(self.layers):
            if self._pairs:
                hidden, residual = layer(
                    positions=positions, hidden_states=hidden, residual=residual
                )
            else:
                hidden = layer(positions=positions, hidden_states=hidden)
            if number in self._added_to:
                hidden = hidden + added[self._added_to.index(number)]
        return self.norm(hidden) if residual is None else self.norm(hidden, residual)[0]


class Pages:
    """Asks a tail of queries only, copies of the base's last layers, about rows of the batch.

    The tail's attention has no pages: it shares those of the base's layer of the same number
    (`kv_sharing_target_layer_name`), which vLLM has filled by the time that a token is sampled.
    vLLM prepares its attention at each step, and that only notes where each row's pages are; once
    rows have ended a step, the layers run on these rows, one token each, after the base's forward
    and outside of its graphs. Nothing is computed for all other rows, and nothing stays from one
    step to the next: chunked prefill, prefix caching and preemption are the base's.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        tail: Any,
        base_layers: Sequence[nn.Module],
        shape: tuple[int, int],  # of what the tail reads, (T, R)
    ) -> None:
        self._config, self._tail = vllm_config, tail
        self._layers = dict(map(_share_pages, tail.layers, base_layers))
        # Filled by copying, which a graph records: what a replay computes lands here, too.
        self._entering = torch.zeros(shape, dtype=vllm_config.model_config.dtype)
        for module in tail.modules():
            if isinstance(module, QKVParallelLinear):  # of which queries alone are loaded
                for parameter in module.parameters():
                    parameter.data.zero_()

    def keep(self, entering: torch.Tensor) -> None:
        """Keeps what a tail reads (`StoppingPolicy.outputs`), (T, R), until rows are asked."""
        self._entering[: entering.shape[0]].copy_(entering)

    def ends(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where rows end, whose places in vLLM's batch are (K,) int64.

        It gives their lengths, (K,) int32, and the places of their last tokens in the step, (K,).
        """
        batch = next(iter(self._layers.values())).batch
        return batch.seq_lens[rows], batch.query_start_loc[1:][rows] - 1

    def hidden(
        self,
        rows: torch.Tensor,  # the places of their rows in the batch, (K,) int64
        lengths: torch.Tensor,  # of the texts that end with them, (K,) int32
        places: torch.Tensor,  # theirs in the step, (K,)
    ) -> torch.Tensor:
        """What the head reads of tokens of vLLM's batch, (K, H), after the final norm."""
        attention, count = {}, len(rows)
        starts, device = torch.arange(count + 1, dtype=torch.int32), lengths.device
        for name, noted in self._layers.items():
            asked = CommonAttentionMetadata(
                query_start_loc=starts.to(device),
                query_start_loc_cpu=starts,
                seq_lens=lengths,
                num_reqs=count,
                num_actual_tokens=count,
                max_query_len=1,
                max_seq_len=noted.batch.max_seq_len,
                block_table_tensor=noted.batch.block_table_tensor[rows],
                slot_mapping=torch.full((count,), -1, device=device),  # nothing is written
            )
            attention[name] = noted.made.build_for_rows(asked)
        entering = self._entering[places.long()].split(self._tail.config.hidden_size, dim=1)
        with set_forward_context(
            attention, self._config, num_tokens=count, slot_mapping={}, skip_compiled=True
        ):
            # Experts find themselves by counting; those of the base come first.
            context = get_forward_context()
            named = context.all_moe_layers or []
            own = [i for i, one in enumerate(named) if one.startswith("tail.")]
            context.moe_layer_index = own[0] if own else 0
            return self._tail.forward(lengths.long() - 1, entering[0], entering[1:])


def _share_pages(layer: nn.Module, base_layer: nn.Module) -> tuple[str, Any]:
    """Lets a layer of the tail attend to the pages of the base's of the same number.

    It gives the name of its attention and what vLLM prepares this with, which notes the batch.
    """
    [own], [theirs] = (
        [one for one in each.modules() if isinstance(one, Attention)]
        for each in (layer, base_layer)
    )
    usual: Any = own.attn_backend.get_builder_cls()

    class Builder(usual):
        """Notes the batch in place of preparing attention for all of its rows."""

        supports_update_block_table = False  # of what it did not prepare
        made: Any = None  # the one of these that vLLM has made
        batch: Any = None  # of this step, with its block table (`CommonAttentionMetadata`)

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            Builder.made = self

        def build(
            self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
        ) -> Any:
            Builder.batch = common_attn_metadata
            return common_attn_metadata

        def build_for_rows(self, rows: CommonAttentionMetadata) -> Any:
            return super().build(0, rows)

    # By its own name, so that each layer is an attention group of its own.
    name = f"OSPruner{own.layer_name.replace('.', '_')}"
    own.attn_backend = subclass_attention_backend(name, own.attn_backend, Builder)
    for one in (own, own.impl):
        one.kv_sharing_target_layer_name = theirs.layer_name
    return own.layer_name, Builder


class OSPrunerVLLM(nn.Module, SupportsEagle3):
    """What vLLM runs for a policy repository: the base that it pins, its tail and its head."""

    allow_patterns_overrides = ("model.safetensors",)  # of the policy's own repository
    fall_back_to_pt_during_load = False

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: OSPrunerConfig = vllm_config.model_config.hf_config
        check_start(vllm_config)
        self._config, self._download_dir = config, vllm_config.load_config.download_dir
        text = config.get_text_config()
        self.secondary_weights = [
            DefaultModelLoader.Source(
                model_or_path=config.base_model_name_or_path,
                revision=config.base_revision,
                prefix="base.",
                fall_back_to_pt=False,
            )
        ]
        name = architecture(text)
        own = _for_base(vllm_config, [name])
        prefix = maybe_prefix(prefix, "base")
        try:
            base = initialize_model(own, prefix=prefix, model_class=TAPPED.get(name))
        except AttributeError as error:  # as of MiMo V2 Flash's
            raise ValueError(
                f"vLLM's {name} is not made of transformers' configuration ({error}): generate "
                "with transformers"
            ) from error
        self.base: Any = base
        check_windows(base, name, vars(text).get("sliding_window"))
        self.tail: _Tail | None = None
        policy = empty_policy(config, empty_base(text))
        self._points: list[int] = policy.points if policy.copied else []  # what the tail reads
        added_to = [k for k, i in enumerate(policy.copied) if i + 1 in self._points]
        if policy.copied:
            tail_config = _for_tail(own, as_base=config.adapter_rank > 0)
            with set_model_tag("ospruner_tail"):
                self.tail = _Tail(
                    vllm_config=tail_config,
                    base=base,
                    copied=policy.copied,
                    added_to=added_to,
                    unquantised=own.quant_config is None,
                )
        self.set_aux_hidden_state_layers(())
        # Of a step, or of a graph, up to whose size a batch is padded.
        graphs = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        tokens = max(vllm_config.scheduler_config.max_num_batched_tokens, graphs)
        self._v2 = vllm_config.use_v2_model_runner
        outputs = 1 if config.prices is None else 1 + PRICE_RAMPS
        self.head = StopHead(text.hidden_size, outputs, tokens if self._v2 else 0)
        vllm_config.compilation_config.static_forward_context[STOP_HEAD] = self.head
        if self.tail is not None and config.tuning == "queries":
            theirs = [base.model.layers[i] for i in policy.copied]
            shape = (tokens, (1 + len(added_to)) * text.hidden_size)
            self.head.pages = Pages(vllm_config, self.tail, theirs, shape)

    def get_model_state_cls(self) -> type:
        """What model runner V2 keeps beside the model."""
        name = "HybridArrivals" if is_hybrid(self.base) else "Arrivals"
        return vars(importlib.import_module(f"{__package__}.runner_v2"))[name]

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> Any:
        """Of what a hybrid base keeps in place of keys."""
        return class_of_base(vllm_config).get_mamba_state_shape_from_config(vllm_config)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> Any:
        """Likewise."""
        return class_of_base(vllm_config).get_mamba_state_dtype_from_config(vllm_config)

    def get_mamba_state_copy_funcs(self, mamba_types: Any) -> Any:
        """How it is copied."""
        return self.base.get_mamba_state_copy_funcs(mamba_types)

    def get_language_model(self) -> nn.Module:
        """The base, whose embeddings and head a drafter shares."""
        return self.base

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """Sets the layers whose entering states a drafter reads; the policy's stays tapped."""
        self._drafted = tuple(sorted(set(layers)))
        self._tapped = tuple(sorted({*layers, *self._points}))
        if self._tapped:
            self.base.model._set_aux_hidden_state_layers(self._tapped)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The base's token embeddings."""
        return self.base.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        """The base's last hidden states, (T, H), and what a drafter reads, if there is one.

        What the head says of the tokens is kept in it, where a replayed graph puts it, too; what a
        policy of queries only reads is kept until it is asked, where steps have ended.
        """
        output = self.base(input_ids, positions, intermediate_tensors, inputs_embeds)
        hidden, tapped = output if self._tapped else (output, [])
        at = dict(zip(self._tapped, tapped, strict=True))
        read = [at[i] for i in self._points]
        if self.head.pages is not None:
            added = (end - begin for begin, end in zip(read[1::2], read[2::2], strict=True))
            self.head.pages.keep(torch.cat([read[0], *added], dim=1))
        else:
            last = hidden if self.tail is None else self.tail(positions, read[0])
            said = self.head(last.float())  # (T, 1 or 6)
            if self._v2:
                self.head.outputs[: len(said)].copy_(said)
            else:
                # V1 picks the rows that it samples, and tells nobody which these are: behind hidden
                # states, in columns of their dtype, stand the bits of what the head says, float32,
                # and of positions, int32.
                told = [said.view(torch.int32), positions[:, None].to(torch.int32)]
                hidden = torch.cat([hidden, torch.cat(told, dim=1).view(hidden.dtype)], dim=1)
        return (hidden, [at[i] for i in self._drafted]) if self._drafted else hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """The base's logits of rows of `forward`; in V1, the head keeps what it said of them."""
        size = self.head.in_features
        if hidden.shape[1] > size:
            told = hidden[:, size:].contiguous().view(torch.int32)  # (B, 2 or 7)
            self.head.outputs = told[:, :-1].view(torch.float32)
            self.head.positions = told[:, -1]
            # Contiguous, so that the base computes with the very same kernel as without a policy.
            hidden = hidden[:, :size].contiguous()
        return self.base.compute_logits(hidden)

    def load_weights(self, weights: Weights) -> set[str]:
        """Takes the policy's tensors, and the base's with the prefix `base.`."""
        own: dict[str, torch.Tensor] = {}
        given = base_weights(weights, self._config, own)
        loaded = {f"base.{name}" for name in self.base.load_weights(given)}
        for name, parameter in self.head.named_parameters():
            parameter.data.copy_(own[f"head.{name}"])
            loaded.add(f"head.{name}")
        if self.tail is not None:
            loaded |= self._fill(self.tail, own)
        # A base that was not on this machine at the start is now.
        check_base_weights(self._config, self._download_dir)
        return loaded

    def _fill(self, tail: _Tail, own: Mapping[str, torch.Tensor]) -> set[str]:
        """Fills the tail as vLLM fills the base, in whose decoder it stands meanwhile."""
        stored, model = stored_tail(self._config, own)[1], self.base.model
        # Set in place: a module that goes and comes back is last, and shared layers change names.
        usual = {part: getattr(model, part) for part in ("config", "layers", "norm")}
        for part in usual:
            setattr(model, part, getattr(tail, part))
        found = self.base.load_weights((f"model.{name}", one) for name, one in stored.items())
        for part, one in usual.items():
            setattr(model, part, one)
        loaded = {name.replace("model.", "tail.", 1) for name in found}
        if self.head.pages is not None:  # keys are the base's, and their norms are not read
            parts = ((name, name.split(".")) for name, _ in tail.named_parameters())
            loaded |= {f"tail.{name}" for name, of in parts if not _NORMS_OF_KEYS.isdisjoint(of)}
        if not self._config.adapter_rank:
            # Never trained: it shows which base the policy was made for.
            where = self._config.base_model_name_or_path
            check_norm(tail.norm.weight, model.norm.weight, "norm.weight", self._config, where)
        return loaded


def _for_base(config: VllmConfig, architectures: list[str]) -> VllmConfig:
    """The base's configuration, with the quantisation of its own checkpoint.

    The policy's repository knows nothing of that: which of the base's tensors are packed, and how,
    stands in the base's repository alone.
    """
    policy: OSPrunerConfig = config.model_config.hf_config
    where, revision = policy.base_model_name_or_path, policy.base_revision
    text = copy.deepcopy(policy.get_text_config())
    stored = quantisation(policy)
    if stored is not None:
        text.quantization_config = stored
    config = copy.copy(config.with_hf_config(text, architectures))
    model = config.model_config
    model.hf_text_config = model.hf_config
    if stored is not None:
        model.model, model.revision = where, revision
        model.quantization = None
        model._verify_quantization()
        config.quant_config = VllmConfig.get_quantization_config(model, config.load_config)
    return config


def _for_tail(config: VllmConfig, as_base: bool) -> VllmConfig:
    """The base's configuration for layers with indices beyond its own.

    They are counted from 2L on, so that each layer of the tail stands at the same place of a
    pattern over layers as the one that it copies. Copies are saved unquantised; adapters are of
    layers that are quantised `as_base`.
    """
    text = copy.deepcopy(config.model_config.hf_config)
    total = text.num_hidden_layers
    for name, value in vars(text).items():
        if isinstance(value, list | tuple) and len(value) == total:
            setattr(text, name, list(value) * 3)
    text.num_hidden_layers = 3 * total
    if "decoder_sparse_step" in vars(text):
        dense, step = text.mlp_only_layers or (), text.decoder_sparse_step
        plain = [i for i in range(total) if i in dense or (i + 1) % step]
        text.mlp_only_layers, text.decoder_sparse_step = [2 * total + i for i in plain], 1
    if not as_base:
        vars(text).pop("quantization_config", None)  # vLLM asks whether there is one
    config = copy.copy(config.with_hf_config(text))
    config.model_config.hf_text_config = config.model_config.hf_config
    if not as_base:
        config.quant_config = None
    return config
