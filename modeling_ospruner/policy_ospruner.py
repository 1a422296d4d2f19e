"""The stopping policy: a tail of the base's last n layers, and a linear head (paper, section 3).

First, what may be a base and how its last layers are reached, also where it is quantised or
offloaded. Nothing here knows an architecture by name: a base qualifies if its decoder keeps L
layers in a `ModuleList`, needs token ids for its embeddings only, and if copies of its last layers,
fed with what enters them, give what it gives.

Second, LoRA in place of copies: the tail then has layers of its own, but what they are made of
(projections, norms, experts) are the base's modules themselves. An adapter takes the place of a
projection in the tail only, so the base computes what it always did, also in other threads.
"""

from __future__ import annotations

import copy
import math
import tempfile
import threading
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

from .configuration_ospruner import (
    PRICE_RAMPS,
    PriceRange,
    position_switch,
    price_logits,
    rotary_settings,
)

_INSTEAD = (
    "A base is a decoder-only language model of transformers whose layers can be run on their own, "
    "such as Qwen2, Llama, Qwen3, GPT-OSS, Phi-3, Gemma 3, OLMo, GLM-4, Mistral"
)


def module_layers(decoder: nn.Module) -> nn.ModuleList:
    """The layers of a decoder that `check_decoder` has let pass."""
    layers = decoder.layers
    assert isinstance(layers, nn.ModuleList)
    return layers


def decoder_layers(base: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of a causal LM."""
    return module_layers(base.get_decoder())


def hidden_entering(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The hidden states (B, S, H) among a decoder layer's arguments."""
    hidden: torch.Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    return hidden


def decoder_dtype(base: PreTrainedModel) -> torch.dtype:
    """The dtype in which the base's last layer computes."""
    if is_quantised(base):
        return base.dtype
    for parameter in decoder_layers(base)[-1].parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    return torch.get_default_dtype()


def execution_device(base: PreTrainedModel, module: nn.Module) -> torch.device:
    """Where a module of the base computes.

    accelerate computes what is offloaded to the CPU or to disk on the first device of its map.
    """
    placed: dict[str, Any] = vars(base).get("hf_device_map", {})
    if not placed:
        return next(module.parameters()).device
    name = next(name for name, one in base.named_modules() if one is module)
    keys = [key for key in placed if not key or name == key or name.startswith(f"{key}.")]
    device = placed[max(keys, key=len)]
    if device in ("cpu", "disk"):
        device = next((one for one in placed.values() if one not in ("cpu", "disk")), "cpu")
    return torch.device(device)


def input_device(base: PreTrainedModel) -> torch.device:
    """Where the base takes its token ids and masks, and gives its logits."""
    return execution_device(base, base.get_input_embeddings())


def tail_device(base: PreTrainedModel) -> torch.device:
    """Where the base computes its last layer, and the policy all of its own."""
    return execution_device(base, decoder_layers(base)[-1])


def check_decoder(base: PreTrainedModel) -> None:
    """Refuses a base whose last layers cannot be run on their own, by what is seen of it.

    Raises:
        ValueError: naming the base's class, what it lacks, and what to use.
    """
    name, config = type(base).__name__, base.config
    if config.is_encoder_decoder:
        raise ValueError(f"{name} cannot be a base: it is an encoder-decoder. {_INSTEAD}")
    decoder = base.get_decoder()
    layers = dict(decoder.named_children()).get("layers")
    if not isinstance(decoder, PreTrainedModel) or not isinstance(layers, nn.ModuleList):
        raise ValueError(
            f"{name} cannot be a base: its decoder ({type(decoder).__name__}) keeps its layers in "
            f"no ModuleList named `layers`. {_INSTEAD}"
        )
    total = decoder.config.num_hidden_layers
    if len(layers) != total:
        raise ValueError(
            f"{name} cannot be a base: it has {len(layers)} layers where its configuration says "
            f"num_hidden_layers={total}. {_INSTEAD}"
        )
    own = decoder.get_input_embeddings()
    tables = [
        child_name
        for child_name, child in decoder.named_modules()
        if isinstance(child, nn.Embedding) and child is not own
    ]
    if tables:
        raise ValueError(
            f"{name} cannot be a base: beside the token embeddings its decoder looks up "
            f"{', '.join(tables)}, which the hidden states of its last layers do not carry. "
            f"{_INSTEAD}"
        )
    if config.get_text_config() is not config:
        raise ValueError(
            f"{name} cannot be a base: it wraps a language model, beside parts for other "
            f"inputs than text. Load that model alone, from a checkpoint of its own. {_INSTEAD}"
        )
    kind, length = position_switch(config) or ("", 0)
    if kind == "longrope" and length < config.max_position_embeddings:
        raise ValueError(
            f"{name} cannot be a base: with rope_type {kind!r} the frequencies of all positions "
            f"change when a text passes {length} tokens (original_max_position_embeddings), and it "
            "writes on from other hidden states than one pass over the whole text gives, from "
            f"which a policy learns. {_INSTEAD}"
        )


def is_quantised(base: PreTrainedModel) -> bool:
    """Whether the base's layers hold packed weights."""
    return vars(base).get("hf_quantizer") is not None


def last_layers_of_checkpoint(
    base: PreTrainedModel, num_layers: int, revision: str | None
) -> dict[str, torch.Tensor]:
    """The tensors of the decoder's last layers and final norm, unquantised, from where base came.

    The checkpoint is opened once more with everything else left on disk.

    Args:
        base: a base that holds packed parameters, or none.
        num_layers: n.
        revision: the commit of the checkpoint; None for a folder.

    Raises:
        ValueError: the checkpoint itself is quantised in a way that cannot be undone.
    """
    where = str(base.name_or_path)
    config = AutoConfig.from_pretrained(where, revision=revision)
    arguments: dict[str, Any] = {}
    stored = vars(config).get("quantization_config")
    if stored is not None:
        arguments["quantization_config"] = _undoing(stored, type(base).__name__)
    with tempfile.TemporaryDirectory() as folder:
        opened = type(base).from_pretrained(
            where,
            revision=revision or "main",
            dtype=decoder_dtype(base),
            device_map=_only_last_layers(base, num_layers),
            offload_folder=folder,
            use_safetensors=True,
            **arguments,
        )
        tensors: dict[str, torch.Tensor] = {
            name: tensor
            for name, tensor in opened.get_decoder().state_dict().items()
            if not tensor.is_meta
        }
    return tensors


def _only_last_layers(base: PreTrainedModel, num_layers: int) -> dict[str, str]:
    """A device map with the last layers and the final norm in memory, and all else on disk."""
    decoder, layers = base.get_decoder(), decoder_layers(base)
    last, beside = set(layers[-num_layers:]), set(decoder.children()) - {layers}
    device_map: dict[str, str] = {}
    for name, module in base.named_modules():
        covered = any(name.startswith(f"{key}.") for key in device_map)
        if covered or module is layers or decoder in module.modules():
            continue
        small = module in beside and not isinstance(module, nn.Embedding)
        device_map[name] = "cpu" if small or module in last else "disk"
    return device_map


def _undoing(stored: Any, name: str) -> Any:
    """The quantisation config that dequantises a checkpoint while it is read."""
    method = stored["quant_method"] if isinstance(stored, dict) else stored.quant_method
    ways = {"mxfp4": Mxfp4Config, "fp8": FineGrainedFP8Config}
    if method not in ways:
        raise ValueError(
            f"the checkpoint of {name} is quantised ({method}) and its layers cannot be read "
            f"unquantised (only {', '.join(ways)} can): make the policy on the unquantised model; "
            "it may then be used on this one"
        )
    return ways[method](dequantize=True)


_PEFT_NEEDED = (
    "tuning 'lora' needs the package peft, which is not installed: pip install peft (or use a "
    "policy of another tuning)"
)


def share_modules(tail: PreTrainedModel, base: PreTrainedModel) -> None:
    """Puts the base's own modules and parameters in the place of the tail's.

    Args:
        tail: an empty tail of the base's last layers.
        base: the causal LM.
    """
    decoder, layers = base.get_decoder(), module_layers(tail)
    for own, theirs in zip(layers, decoder_layers(base)[-len(layers) :], strict=True):
        _share(own, theirs)
    for name in [name for name, _ in tail.named_children()]:
        if name != "layers":
            setattr(tail, name, decoder.get_submodule(name))


def _share(own: nn.Module, theirs: nn.Module) -> None:
    for name, parameter in theirs.named_parameters(recurse=False):
        own.register_parameter(name, parameter)
    for name, buffer in theirs.named_buffers(recurse=False):
        own.register_buffer(name, buffer, name not in theirs._non_persistent_buffers_set)
    for name, child in theirs.named_children():
        # A part with a projection or a layer's number becomes the tail's own. All others, such as
        # experts, are shared as they are: a quantised base may have given them another forward.
        inside = list(child.modules())
        apart = any(isinstance(one, nn.Linear) or "layer_idx" in vars(one) for one in inside)
        if len(inside) == 1 or not apart:
            setattr(own, name, child)
        else:
            _share(own.get_submodule(name), child)


LORA_SCALE = 2
"""By which B A is multiplied: LoRA's alpha over the rank."""


def add_adapters(tail: PreTrainedModel, rank: int) -> None:
    """Puts an adapter beside every linear projection of the tail's layers; at first it adds 0.

    W x becomes W x + 2 B A x with A (rank, in) drawn and B (out, rank) zero (LoRA's alpha is twice
    the rank). Adapters are in float32 whatever the base's dtype.

    Args:
        tail: the tail; also one without weights (on the meta device).
        rank: of the adapters.

    Raises:
        ImportError: peft is not installed.
        ValueError: the tail's layers have no linear projection.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ImportError(_PEFT_NEEDED) from error
    layers = module_layers(tail)
    linear = [name for name, part in layers.named_modules() if isinstance(part, nn.Linear)]
    if not linear:
        raise ValueError(
            f"tuning is 'lora', but {type(tail).__name__}'s layers have no linear projections; use "
            "tuning='layers'"
        )
    config = LoraConfig(r=rank, lora_alpha=LORA_SCALE * rank, target_modules=linear)
    inject_adapter_in_model(config, layers)
    for name, parameter in layers.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.float()


def is_adapter(name: str) -> bool:
    """Whether a tensor of a policy belongs to an adapter."""
    return ".lora_" in name


INIT_BIAS = {"fixed": -2.0, "price": -2.5}
"""The heads' first bias; that of "price" is the logit at the price 0."""
_INIT_RISE = 0.6  # of a price head's logit from one place to the next


class StoppingPolicy(nn.Module):
    """pi_i = sigmoid(w . h_i + b), with h_i the tail's output after its final norm.

    With the head "price" six numbers of h_i and the price of a token give pi_i (`price_logits`);
    the tail never sees the price.

    The tail's layers enter at layer L-n of the base with the hidden states that enter there. With
    n = 0 there is no tail: the head reads the base's last hidden state, after the final norm.

    Attributes:
        tail: a decoder of the base's own class that holds its last n layers and its final norm.
        head: H to 1, or to 6 with the head "price", in float32.
        prices: that it knows; None for the head "fixed".
    """

    def __init__(
        self, tail: PreTrainedModel | None, hidden_size: int, prices: PriceRange | None = None
    ) -> None:
        super().__init__()
        self.tail = tail
        self.step_stride = 1  # it decides at every k-th step end
        self.prices = prices
        outputs = 1 if prices is None else 1 + PRICE_RAMPS
        self.head = nn.Linear(hidden_size, outputs, dtype=torch.float32)
        # Some decoders scale the embeddings they are given: what enters the first layer is put
        # back to what entered the base's. By thread, so that concurrent calls don't mix.
        self._entering: dict[int, torch.Tensor] = {}
        self._seen_weights: tuple[list[tuple[int, int]], bool] | None = None
        if tail is not None:
            self.layers[0].register_forward_pre_hook(self._put_back, with_kwargs=True)

    @property
    def layers(self) -> nn.ModuleList:
        """The tail's layers; none for n = 0."""
        return nn.ModuleList() if self.tail is None else module_layers(self.tail)

    @classmethod
    def from_base(
        cls,
        base: PreTrainedModel,
        num_layers: int,
        tuning: str = "layers",
        init_bias: float | None = None,
        revision: str | None = None,
        lora_rank: int = 16,
        prices: PriceRange | None = None,
    ) -> StoppingPolicy:
        """A fresh policy: copies of the base's last layers, and a head that says sigmoid(bias).

        Of a base that is quantised or offloaded, the copies are read unquantised from the
        checkpoint that it came from.

        Args:
            base: a causal LM in eval mode.
            num_layers: n.
            tuning: see `OSPrunerConfig`.
            init_bias: the head's bias; mild, for saturated logits have no gradient. None: that of
                `INIT_BIAS`.
            revision: the commit of the base's checkpoint.
            lora_rank: of the adapters, with tuning "lora".
            prices: to be known, for the head "price"; None for the other.

        Raises:
            ImportError: tuning "lora" without peft.
            ValueError: the base has fewer layers, its layers cannot be run on their own, or the
                tuning finds nothing to train.
        """
        policy = cls.empty(base, num_layers, prices)
        if tuning == "lora":
            policy.adapt(base, lora_rank)
        elif policy.tail is not None:
            source = base.get_decoder().state_dict()
            names = {name: policy.name_in_base(base, name) for name in policy.tail.state_dict()}
            if is_quantised(base) or any(source[name].is_meta for name in names.values()):
                source = last_layers_of_checkpoint(base, num_layers, revision)
            policy.load_tail(base, {name: source[names[name]] for name in names})
        policy.head.to_empty(device=tail_device(base))
        nn.init.zeros_(policy.head.weight)
        nn.init.constant_(policy.head.bias, math.log(math.expm1(_INIT_RISE)))
        first = INIT_BIAS["fixed" if prices is None else "price"]
        nn.init.constant_(policy.head.bias[:1], first if init_bias is None else init_bias)
        policy.set_trainable(tuning)
        policy.eval()
        if policy.tail is not None and not is_quantised(base):
            check_tail(base, policy)
        return policy

    @classmethod
    def empty(
        cls, base: PreTrainedModel, num_layers: int, prices: PriceRange | None = None
    ) -> StoppingPolicy:
        """A policy without weights (on the meta device) for a base.

        Raises:
            ValueError: the base has fewer layers, or its layers cannot be run on their own.
        """
        check_decoder(base)
        decoder = base.get_decoder()
        total = decoder.config.num_hidden_layers
        if not 0 <= num_layers <= total:
            raise ValueError(
                f"num_policy_layers is {num_layers}; it must lie in 0..{total}, the base's layers"
            )
        with torch.device("meta"):
            tail = _empty_tail(decoder.config, type(decoder), num_layers) if num_layers else None
            return cls(tail, decoder.config.hidden_size, prices)

    def adapt(self, base: PreTrainedModel, lora_rank: int) -> None:
        """Makes the tail one of adapters beside the base's own modules; see `adapters_ospruner`."""
        if self.tail is not None:
            share_modules(self.tail, base)
            add_adapters(self.tail, lora_rank)
            self.layers.to(tail_device(base))

    def own_names(self) -> set[str]:
        """Names of the tensors that are the policy's own and not the base's: what is saved."""
        names = set(self.state_dict())
        adapters = {name for name in names if is_adapter(name)}
        return adapters | {"head.weight", "head.bias"} if adapters else names

    def name_in_base(self, base: PreTrainedModel, name: str) -> str:
        """What a tensor of the tail is called in the base's decoder."""
        parts = name.split(".")
        if parts[0] == "layers":
            offset = len(decoder_layers(base)) - len(self.layers)
            parts[1] = str(int(parts[1]) + offset)
        return ".".join(parts)

    def load_tail(self, base: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> None:
        """Fills the tail with copies of tensors, each in the dtype that it has in the base.

        What no checkpoint holds, such as rotary frequencies, is copied from the base.

        Args:
            base: the causal LM that the tail follows.
            tensors: by name in the tail.
        """
        if self.tail is None:
            return
        device, usual = tail_device(base), decoder_dtype(base)
        decoder = base.get_decoder()
        own, buffers = decoder.state_dict(), dict(decoder.named_buffers())
        placed = {}
        for name, tensor in tensors.items():
            same = own.get(self.name_in_base(base, name))
            dtype = tensor.dtype
            if tensor.is_floating_point():
                dtype = usual
                if same is not None and same.is_floating_point() and same.shape == tensor.shape:
                    dtype = same.dtype if same.itemsize > 1 else usual
            placed[name] = tensor.detach().to(device, dtype, copy=True)
        self.tail.load_state_dict(placed, assign=True)
        for name, _ in list(self.tail.named_buffers()):
            if name not in placed:
                value = buffers[self.name_in_base(base, name)].detach().to(device, copy=True)
                module = self.tail.get_submodule(name.rpartition(".")[0])
                module.register_buffer(name.rpartition(".")[2], value, persistent=False)

    def set_trainable(self, tuning: str) -> None:
        """Lets gradients reach the head and what `tuning` names of the copied layers.

        Raises:
            ValueError: no parameter of the layers belongs to an attention.
        """
        self.requires_grad_(False)
        self.head.requires_grad_(True)
        if self.tail is None or tuning == "head":
            return
        chosen = [
            parameter
            for name, parameter in self.layers.named_parameters()
            if (is_adapter(name) if tuning == "lora" else tuning == "layers" or _attends(name))
        ]
        if not chosen:
            raise ValueError(
                f"tuning is {tuning!r}, but {type(self.tail).__name__}'s layers have no attention "
                "parameters; use tuning='layers'"
            )
        for parameter in chosen:
            parameter.requires_grad_(True)

    def new_cache(self) -> DynamicCache | None:
        """An empty cache for `forward` in pieces; None without a tail."""
        if self.tail is None:
            return None
        cache = DynamicCache(config=self.tail.config)
        if cache.layers and not any(isinstance(one, CacheLayerMixin) for one in cache.layers):
            cache = _CountingCache(config=self.tail.config)
        return cache

    def forward(
        self,
        hidden: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        length_penalty: float | None = None,
    ) -> torch.Tensor:
        """Stop logits at every position.

        Args:
            hidden: what entered the base's layer L-n, (B, S, H); with n = 0 its last hidden state
                after the final norm.
            position_ids: (B, S).
            attention_mask: (B, cached + S), 1 for tokens and 0 for padding.
            past_key_values: a cache of `new_cache`, extended by this call.
            length_penalty: the price of a token, with the head "price"; the other ignores it.

        Returns:
            (B, S), float32.
        """
        outputs = self.outputs(hidden, position_ids, attention_mask, past_key_values)
        return self.logits(outputs, length_penalty)

    def logits(self, outputs: torch.Tensor, length_penalty: float | None) -> torch.Tensor:
        """Stop logits (...) of the head's outputs (..., 1 or 6).

        Raises:
            ValueError: the head "price" without a price, or one that it does not know.
            TypeError: a price that is no number.
        """
        if self.prices is None:
            return outputs[..., 0]
        self.prices.check("StoppingPolicy", length_penalty)
        assert length_penalty is not None
        place = torch.tensor(self.prices.place(length_penalty), device=outputs.device)
        return price_logits(outputs, place)

    def outputs(
        self,
        hidden: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> torch.Tensor:
        """What the head says at every position, (B, S, 1 or 6) float32; arguments as `forward`."""
        device = self.head.weight.device
        hidden = hidden.to(device)
        if self.tail is not None:
            hidden = hidden.to(self.tail_dtype)
            position_ids = None if position_ids is None else position_ids.to(device)
            attention_mask = None if attention_mask is None else attention_mask.to(device)
            me = threading.get_ident()
            self._entering[me] = hidden
            try:
                hidden = self.tail(
                    inputs_embeds=hidden,
                    position_ids=position_ids,
                    attention_mask=attention_mask,
                    past_key_values=past_key_values,
                    use_cache=past_key_values is not None,
                ).last_hidden_state  # (B, S, H)
            finally:
                del self._entering[me]
            if isinstance(past_key_values, _CountingCache):
                past_key_values.tokens += hidden.shape[1]
        kind = "cpu" if hidden.is_meta else hidden.device.type  # there is no autocast on meta
        with torch.autocast(kind, enabled=False):  # the head stays in its own dtype
            said: torch.Tensor = self.head(hidden.to(self.head.weight.dtype)).float()
        if not torch.is_grad_enabled() and not self._has_sound_weights():
            said = torch.full_like(said, torch.nan)
        return said

    @property
    def tail_dtype(self) -> torch.dtype:
        """In which the tail computes: its final norm's where the base's layers are packed."""
        assert self.tail is not None
        if all(one.itemsize > 1 for one in self.layers.parameters()):
            return self.tail.dtype
        outside = (one for name, one in self.tail.named_parameters() if "layers." not in name)
        return next(outside).dtype

    def _has_sound_weights(self) -> bool:
        """Whether every weight is a number, looked at again only after one has changed.

        Some attention kernels make zeros of queries that are NaN, and broken weights would pass.
        What a quantised base has packed is left out: its adapters alone are the policy's.
        """
        weights = [one for one in self.parameters() if one.itemsize > 1]
        now = [(one.data_ptr(), 0 if one.is_inference() else one._version) for one in weights]
        if self._seen_weights is None or self._seen_weights[0] != now:
            sound = all(one.is_meta or bool(one.isfinite().all()) for one in weights)
            self._seen_weights = (now, sound)
        return self._seen_weights[1]

    def _put_back(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        entering = self._entering[threading.get_ident()]
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": entering}
        return (entering, *args[1:]), kwargs


def _attends(name: str) -> bool:
    return "attn" in name.split(".")[1] or "attention" in name


class _CountingCache(DynamicCache):
    """The cache of a tail without attention, which transformers' own does not count tokens in."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self.tokens = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.tokens + query_length, 0


@torch.no_grad()
def check_tail(base: PreTrainedModel, policy: StoppingPolicy) -> None:
    """Runs a few tokens through the base, and from layer L-n on through the fresh copies.

    At the beginning of a text, across each length that the base's rotary settings name, and at the
    end of its positions.

    Args:
        base: a causal LM in eval mode.
        policy: fresh copies of its last layers.

    Raises:
        ValueError: the two differ, or the copies cannot be run at once, in pieces and padded.
    """
    most = vars(base.config.get_text_config()).get("max_position_embeddings") or _PROBE
    named = [one.get("original_max_position_embeddings") for one in rotary_settings(base.config)]
    starts = {0, most - _PROBE, *(length - _PROBE // 2 for length in named if length)}
    for start in sorted(starts):
        if 0 <= start <= most - _PROBE:
            _check_tail_from(start, base, policy)


def _check_tail_from(start: int, base: PreTrainedModel, policy: StoppingPolicy) -> None:
    """What `check_tail` does, with positions that begin at `start`."""
    assert policy.tail is not None
    decoder, tail, n = base.get_decoder(), policy.tail, len(policy.layers)
    device = execution_device(base, decoder.get_input_embeddings())
    ids = torch.arange(2 * _PROBE, device=device).view(2, -1) % tail.config.vocab_size
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    positions = start + (mask.cumsum(-1) - 1).clamp(min=0)
    entering: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entering.append(hidden_entering(args, kwargs))

    handles = [
        decoder_layers(base)[-n].register_forward_pre_hook(keep, with_kwargs=True),
        tail.register_forward_hook(lambda _, __, out: outputs.append(out.last_hidden_state)),
    ]
    try:
        wanted = decoder(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
        ).last_hidden_state
        policy.outputs(entering[0], positions, mask)
        cache = policy.new_cache()
        for i, j in ((0, 5), (5, 6), (6, _PROBE)):
            policy.outputs(entering[0][:, i:j], positions[:, i:j], mask[:, :j], cache)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{type(base).__name__} cannot be a base: its last {n} layers do not run on their own "
            f"({type(error).__name__}: {error})"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    real = mask.bool()
    wanted = wanted.to(outputs[0].device)[real]
    if not wanted.isfinite().all():
        return  # broken weights tell nothing of the architecture
    for how, found in (("at once", outputs[0]), ("in pieces", torch.cat(outputs[1:], dim=1))):
        share = float((found[real] - wanted).abs().mean() / wanted.abs().mean())
        if not share < _TOLERATED_SHARE.get(wanted.dtype, 0.05):
            raise ValueError(
                f"{type(base).__name__} cannot be a base: its last {n} layers, run on their own "
                f"{how}, give other hidden states than within it (from position {start} on they "
                f"differ by {share:.0%} on average). Its layers need more than the hidden states "
                "that enter them"
            )


_PROBE = 12  # tokens a row
# Rounding in another order stays below (0.05 is for half precision), a missing input lies above.
_TOLERATED_SHARE = {torch.float32: 0.01}


def _empty_tail(
    config: PreTrainedConfig, decoder_class: type[PreTrainedModel], num_layers: int
) -> PreTrainedModel:
    """Keeps the last layers of a decoder built without weights, renumbered from 0.

    The configuration is cut after construction, for layers read their own entries of its lists
    while they are built, and caches and masks read the lists while they run.
    """
    config = copy.deepcopy(config)
    if isinstance(config.dtype, str):  # what save_pretrained leaves there; layers may read it
        config.dtype = getattr(torch, config.dtype)
    total = config.num_hidden_layers
    offset = total - num_layers
    tail = decoder_class(config)
    layers = module_layers(tail)[offset:]
    tail.layers = layers
    for module in layers.modules():
        if "layer_idx" in vars(module) and module.layer_idx is not None:
            module.layer_idx -= offset
    for name, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == total:
            setattr(config, name, value[offset:])
    config.num_hidden_layers = num_layers
    for name, child in list(tail.named_children()):
        if child is tail.get_input_embeddings():
            delattr(tail, name)
            break
    return tail
