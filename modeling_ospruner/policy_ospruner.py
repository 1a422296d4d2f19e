"""The stopping policy: a tail of the base's last n layers, and a linear head (paper, section 3)."""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from .adapters_ospruner import add_adapters, is_adapter, share_modules
from .bases_ospruner import (
    check_decoder,
    decoder_dtype,
    decoder_layers,
    execution_device,
    is_quantised,
    last_layers_of_checkpoint,
    module_layers,
    tail_device,
)

DEFAULT_INIT_BIAS = -2.0


class StoppingPolicy(nn.Module):
    """pi_i = sigmoid(w . h_i + b), with h_i the tail's output after its final norm.

    The tail's layers enter at layer L-n of the base with the hidden states that enter there. With
    n = 0 there is no tail: the head reads the base's last hidden state, after the final norm.

    Attributes:
        tail: a decoder of the base's own class that holds its last n layers and its final norm.
        head: H to 1, in float32.
    """

    def __init__(self, tail: PreTrainedModel | None, hidden_size: int) -> None:
        super().__init__()
        self.tail = tail
        self.head = nn.Linear(hidden_size, 1, dtype=torch.float32)
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
        init_bias: float = DEFAULT_INIT_BIAS,
        revision: str | None = None,
        lora_rank: int = 16,
    ) -> StoppingPolicy:
        """A fresh policy: copies of the base's last layers, and a head that says sigmoid(bias).

        Of a base that is quantised or offloaded, the copies are read unquantised from the
        checkpoint that it came from.

        Args:
            base: a causal LM in eval mode.
            num_layers: n.
            tuning: see `OSPrunerConfig`.
            init_bias: the head's bias; mild, for saturated logits have no gradient.
            revision: the commit of the base's checkpoint.
            lora_rank: of the adapters, with tuning "lora".

        Raises:
            ImportError: tuning "lora" without peft.
            ValueError: the base has fewer layers, its layers cannot be run on their own, or the
                tuning finds nothing to train.
        """
        policy = cls.empty(base, num_layers)
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
        nn.init.constant_(policy.head.bias, init_bias)
        policy.set_trainable(tuning)
        policy.eval()
        if policy.tail is not None and not is_quantised(base):
            check_tail(base, policy)
        return policy

    @classmethod
    def empty(cls, base: PreTrainedModel, num_layers: int) -> StoppingPolicy:
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
            return cls(tail, decoder.config.hidden_size)

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
    ) -> torch.Tensor:
        """Stop logits at every position.

        Args:
            hidden: what entered the base's layer L-n, (B, S, H); with n = 0 its last hidden state
                after the final norm.
            position_ids: (B, S).
            attention_mask: (B, cached + S), 1 for tokens and 0 for padding.
            past_key_values: a cache of `new_cache`, extended by this call.

        Returns:
            (B, S), float32.
        """
        device = self.head.weight.device
        hidden = hidden.to(device)
        if self.tail is not None:
            hidden = hidden.to(self.tail.dtype)
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
            logits: torch.Tensor = self.head(hidden.to(self.head.weight.dtype))
        logits = logits[..., 0].float()
        if not torch.is_grad_enabled() and not self._has_sound_weights():
            logits = torch.full_like(logits, torch.nan)
        return logits

    def _has_sound_weights(self) -> bool:
        """Whether every weight is a number, looked at again only after one has changed.

        Some attention kernels make zeros of queries that are NaN, and broken weights would pass.
        """
        weights = [*self.parameters()]
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

    Args:
        base: a causal LM in eval mode.
        policy: fresh copies of its last layers.

    Raises:
        ValueError: the two differ, or the copies cannot be run at once, in pieces and padded.
    """
    assert policy.tail is not None
    decoder, tail, n = base.get_decoder(), policy.tail, len(policy.layers)
    device = execution_device(base, decoder.get_input_embeddings())
    ids = torch.arange(2 * _PROBE, device=device).view(2, -1) % tail.config.vocab_size
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    entering: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entering.append(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

    handles = [
        decoder_layers(base)[-n].register_forward_pre_hook(keep, with_kwargs=True),
        tail.register_forward_hook(lambda _, __, out: outputs.append(out.last_hidden_state)),
    ]
    try:
        wanted = decoder(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
        ).last_hidden_state
        policy(entering[0], positions, mask)
        cache = policy.new_cache()
        for i, j in ((0, 5), (5, 6), (6, _PROBE)):
            policy(entering[0][:, i:j], positions[:, i:j], mask[:, :j], cache)
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
                f"{how}, give other hidden states than within it (they differ by {share:.0%} on "
                "average). Its layers need more than the hidden states that enter them"
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
