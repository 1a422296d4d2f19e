"""The stopping policy: a tail of the base's last n layers, and a linear head (paper, section 3)."""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel

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
    ) -> StoppingPolicy:
        """A fresh policy: copies of the base's last layers, and a head that says sigmoid(bias).

        Args:
            base: a causal LM.
            num_layers: n.
            tuning: see `OSPrunerConfig`.
            init_bias: the head's bias; mild, for saturated logits have no gradient.

        Raises:
            ValueError: the base has fewer layers, or the tuning finds nothing to train.
        """
        decoder = base.get_decoder()
        policy = cls.empty(decoder.config, type(decoder), num_layers)
        policy.to_empty(device=base.device)
        if policy.tail is not None:
            nn.Module.to(policy.tail, dtype=decoder_dtype(base))
            own = policy.tail.state_dict()
            source = decoder.state_dict()
            offset = len(decoder_layers(base)) - num_layers
            with torch.no_grad():
                for name, tensor in own.items():
                    tensor.copy_(source[_name_in_base(name, offset)])
        nn.init.zeros_(policy.head.weight)
        nn.init.constant_(policy.head.bias, init_bias)
        policy.adopt_buffers(base)
        policy.set_trainable(tuning)
        return policy.eval()

    @classmethod
    def empty(
        cls, config: PreTrainedConfig, decoder_class: type[PreTrainedModel], num_layers: int
    ) -> StoppingPolicy:
        """A policy without weights (on the meta device) for a base of this configuration."""
        total = config.num_hidden_layers
        if not 0 <= num_layers <= total:
            raise ValueError(
                f"num_policy_layers is {num_layers}; it must lie in 0..{total}, the base's layers"
            )
        with torch.device("meta"):
            tail = _empty_tail(config, decoder_class, num_layers) if num_layers else None
            return cls(tail, config.hidden_size)

    def adopt_buffers(self, base: PreTrainedModel) -> None:
        """Copies from the base the buffers that no checkpoint holds, such as rotary frequencies."""
        if self.tail is None:
            return
        decoder = base.get_decoder()
        source = dict(decoder.named_buffers())
        offset = len(decoder_layers(base)) - len(self.layers)
        for name, buffer in list(self.tail.named_buffers()):
            module = self.tail.get_submodule(name.rpartition(".")[0])
            value = source[_name_in_base(name, offset)].detach().clone().to(self.head.weight.device)
            module.register_buffer(name.rpartition(".")[2], value, persistent=False)
            del buffer

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
            if tuning == "layers" or "attn" in name.split(".")[1] or "attention" in name
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
        return None if self.tail is None else DynamicCache(config=self.tail.config)

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
        if self.tail is not None:
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
        logits: torch.Tensor = self.head(hidden.to(self.head.weight.dtype))
        return logits[..., 0].float()

    def _put_back(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        entering = self._entering[threading.get_ident()]
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": entering}
        return (entering, *args[1:]), kwargs


def module_layers(decoder: nn.Module) -> nn.ModuleList:
    """The layers of a decoder.

    Raises:
        TypeError: it keeps them otherwise than transformers' decoders do.
    """
    layers = decoder.layers
    if not isinstance(layers, nn.ModuleList):
        raise TypeError(f"{type(decoder).__name__}.layers is no ModuleList; it cannot be a base")
    return layers


def decoder_layers(base: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of a causal LM."""
    return module_layers(base.get_decoder())


def decoder_dtype(base: PreTrainedModel) -> torch.dtype:
    """The floating dtype of the base's last layer."""
    for parameter in decoder_layers(base)[-1].parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    return torch.get_default_dtype()


def _empty_tail(
    config: PreTrainedConfig, decoder_class: type[PreTrainedModel], num_layers: int
) -> PreTrainedModel:
    """Keeps the last layers of a decoder built without weights, renumbered from 0.

    The configuration is cut after construction, for layers read their own entries of its lists
    while they are built, and caches and masks read the lists while they run.
    """
    config = copy.deepcopy(config)
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


def _name_in_base(name: str, offset: int) -> str:
    parts = name.split(".")
    if parts[0] == "layers":
        parts[1] = str(int(parts[1]) + offset)
    return ".".join(parts)
