"""The stopping policy: a tail of the base's last n layers, and a linear head (paper, section 3).

Nothing here knows an architecture by name: copies of the base's last layers, fed with what enters
them, give what it gives, and a base with which they do not is refused.

First, LoRA in place of copies: the tail then has layers of its own, but what they are made of
(projections, norms, experts) are the base's modules themselves. An adapter takes the place of a
projection in the tail only, so the base computes what it always did, also in other threads.

Second, copies that are queries only: they keep nothing that makes keys and values, and attend to
those that the base's layer of the same number has computed. So they are computed at step ends
alone, and keep nothing from one to the next.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    AttentionInterface,
    Cache,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from .configuration_ospruner import (
    PRICE_RAMPS,
    PriceRange,
    check_decoder,
    decoder_dtype,
    decoder_layers,
    execution_device,
    hidden_entering,
    is_quantised,
    last_layers_of_checkpoint,
    module_layers,
    price_logits,
    rotary_settings,
    tail_device,
)
from .rules_ospruner import DEFAULT_TRIAL_TOKENS, TRIAL_NUMBERS

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


class TrunkDone(Exception):  # noqa: N818  (it ends a forward early; nothing went wrong)
    """Raised inside a forward of the base once all that the policy reads is known."""


@dataclass(frozen=True)
class LayerKeys:
    """Keys and values that the base computed in one layer.

    Attributes:
        keys: (B, KV, S, D), as transformers caches them: with their positions.
        values: (B, KV, S, D).
        first: the column of the first one; a window may have dropped those before.
    """

    keys: torch.Tensor
    values: torch.Tensor
    first: int = 0


class Reader:
    """A context in which forwards of the base by this thread leave what a policy reads.

    Attributes:
        hidden: (B, S, H) of the last forward: what entered layer L-n, or with n = 0 the last hidden
            states after the final norm.
        keys: of the base's last n layers, as the last forward attended to them; empty where the
            policy has its own.
        last_positions: (B or 1, 1) position of each row's last token; only with `queries`.
        listening: whether forwards leave anything.

    Args:
        base: the causal LM.
        num_layers: n.
        queries: whether the policy reads the base's keys and values.
        stop_there: end each forward when all is known, by raising `TrunkDone`.
    """

    def __init__(
        self, base: PreTrainedModel, num_layers: int, queries: bool, stop_there: bool = False
    ) -> None:
        self.hidden = torch.empty(0)
        self.keys: list[LayerKeys] = []
        self.last_positions = torch.empty(0, 1)
        self.listening = True
        self._base = base
        self._num_layers = num_layers
        self._queries = queries
        self._stop_there = stop_there
        self._thread = threading.get_ident()
        self._handles: list[Any] = []

    def __enter__(self) -> Reader:
        layers = list(decoder_layers(self._base))[-self._num_layers :] if self._num_layers else []
        decoder = self._base.get_decoder()
        if not layers:
            self._handles.append(decoder.register_forward_hook(self._after_decoder))
        if self._queries:
            handle = decoder.register_forward_pre_hook(self._before_decoder, with_kwargs=True)
            self._handles.append(handle)
        for layer in layers if self._queries else layers[:1]:
            handle = layer.register_forward_pre_hook(self._before_layer, with_kwargs=True)
            self._handles.append(handle)
        self._first = layers[0] if layers else None
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Listens no more, and forgets everything."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.forget()

    def forget(self) -> None:
        """Lets go of what the last forward left."""
        self.hidden, self.keys = torch.empty(0), []

    def heard(self, layer_keys: LayerKeys) -> None:
        """Takes in what the next one of the last n layers attends to."""
        self.keys.append(layer_keys)
        if self._stop_there and len(self.keys) == self._num_layers:
            raise TrunkDone

    def _after_decoder(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.listening and threading.get_ident() == self._thread:
            self.hidden = output.last_hidden_state.detach()

    def _before_decoder(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self.listening and threading.get_ident() == self._thread:
            positions = kwargs.get("position_ids")
            if positions is not None:
                self.last_positions = positions[:, -1:]

    def _before_layer(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self.listening or threading.get_ident() != self._thread:
            return None
        if module is self._first:
            self.hidden, self.keys = hidden_entering(args, kwargs).detach(), []
            if self._stop_there and not self._queries:
                raise TrunkDone
        if not self._queries:
            return None
        return args, {**kwargs, "past_key_values": _Tapped(self, kwargs.get("past_key_values"))}


class _Tapped:
    """The base's cache for one layer, or none: what the layer attends to goes to a reader, too."""

    def __init__(self, reader: Reader, cache: Cache | None) -> None:
        self._reader = reader
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As the cache's; without one, the new keys and values are all that there are."""
        first = 0
        if self._cache is not None:
            first = self._cache.get_mask_sizes(keys.shape[-2], layer_idx)[1]
            keys, values = self._cache.update(keys, values, layer_idx, *args, **kwargs)
        self._reader.heard(LayerKeys(keys.detach(), values.detach(), first))
        return keys, values


class _Given:
    """What the tail's layers take for a cache: it shows them the base's keys and values."""

    def __init__(self, keys: Sequence[LayerKeys]) -> None:
        self._keys = keys

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The base's, whatever the layer has made."""
        known = self._keys[layer_idx]
        if torch.is_autocast_enabled(keys.device.type):  # which brings all to one dtype itself
            return known.keys, known.values
        return known.keys.to(keys.dtype), known.values.to(keys.dtype)


class _Unasked(nn.Module):
    """In the place of a projection whose output is not looked at."""

    def __init__(self, out_features: int) -> None:
        super().__init__()
        self.out_features = out_features

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Zeros (..., out_features) that take no memory."""
        return hidden.new_zeros(()).expand(*hidden.shape[:-1], self.out_features)


# What makes keys and values, by the names that all of transformers' families give it. (Where one
# projection makes queries, too, as in Phi-3, it is kept whole.)
_KEY_PROJECTIONS = ("k_proj", "v_proj")
_KEY_NORMS = ("k_norm", "k_layernorm", "key_layernorm", "v_norm")
_LATENT = "kv_b_proj"  # makes keys and values of what is cached: compressed ones


def _drop_keys(layers: nn.ModuleList) -> None:
    """Leaves in decoder layers nothing that makes keys and values."""
    for module in list(layers.modules()):
        for name, child in list(module.named_children()):
            if name in _KEY_PROJECTIONS and isinstance(child, nn.Linear):
                setattr(module, name, _Unasked(child.out_features))
            elif name in _KEY_NORMS:
                setattr(module, name, nn.Identity())


def _windows(tail: PreTrainedModel) -> list[int | None]:
    """How many tokens a token sees in each layer of a tail, itself included; None for all.

    Raises:
        ValueError: a layer keeps something else than keys and values.
    """
    cached = DynamicCache(config=tail.config).layers
    known = (DynamicLayer, DynamicSlidingWindowLayer)
    total = len(module_layers(tail))
    parts = {name.rpartition(".")[2] for name, _ in module_layers(tail).named_modules()}
    kinds = {type(one).__name__ for one in cached if type(one) not in known}
    if _LATENT in parts:
        kinds.add("latent keys and values, compressed")
    if len(cached) != total:
        kinds.add(f"what {len(cached)} layers share")
    if kinds:
        raise ValueError(
            f"tuning is 'queries', whose layers attend to the base's cached keys and values, but "
            f"of the last {total} layers of this base ({type(tail).__name__}) some keep "
            f"{', '.join(sorted(kinds))}: use tuning='layers', or fewer policy layers if the last "
            "ones are plain attention"
        )
    return [one.sliding_window if type(one) is known[1] else None for one in cached]


_GROUPED = "ospruner_queries"


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' sdpa attention, but that keys are not repeated for the heads that share them.

    The queries of these heads stand in a row instead: there are few, and keys are many.

    Args:
        module: the layer's attention.
        query: (B, heads, T, D).
        key: (B, KV, S, D).
        value: (B, KV, S, D).
        attention_mask: (B, 1, T, S), true where a key is seen.
        scaling: of the scores.

    Returns:
        (B, T, heads, D), and no scores.
    """
    (B, heads, T, _D), groups = query.shape, query.shape[1] // key.shape[1]
    out = F.scaled_dot_product_attention(
        query.reshape(B, key.shape[1], groups * T, -1),
        key,
        value,
        attn_mask=attention_mask.repeat(1, 1, groups, 1),
        scale=scaling,
    )
    return out.reshape(B, heads, T, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(_GROUPED, _attend)


INIT_BIAS = {"fixed": -2.0, "price": -2.5}
"""The heads' first bias; that of "price" is the logit at the price 0."""
_INIT_RISE = 0.6  # of a price head's logit from one place to the next


class StoppingPolicy(nn.Module):
    """pi_i = sigmoid(w . h_i + b), with h_i the tail's output after its final norm.

    With the head "price" six numbers of h_i and the price of a token give pi_i (`price_logits`);
    the tail never sees the price.

    With trial answers a linear layer of the numbers of their history, at first 0, is added to what
    the head says; so that pi_i still rises with the price.

    The tail's layers enter at layer L-n of the base with the hidden states that enter there. With
    n = 0 there is no tail: the head reads the base's last hidden state, after the final norm.
    With tuning "queries" they attend to the base's keys and values.

    Attributes:
        tail: a decoder of the base's own class that holds its last n layers and its final norm.
        head: H to 1, or to 6 with the head "price", in float32.
        trial: from `TRIAL_NUMBERS` to as many as the head, in float32; None without trial answers.
        prices: that it knows; None for the head "fixed".
        queries: whether it attends to the base's keys and values, and so needs no others.
    """

    def __init__(
        self,
        tail: PreTrainedModel | None,
        hidden_size: int,
        prices: PriceRange | None = None,
        queries: bool = False,
        trial: bool = False,
    ) -> None:
        super().__init__()
        self.tail = tail
        self.queries = queries and tail is not None
        self.step_stride = 1  # it decides at every k-th step end
        self.trial_every = 0  # of these, at every k-th an answer is tried
        self.trial_max_tokens = DEFAULT_TRIAL_TOKENS
        self.prices = prices
        outputs = 1 if prices is None else 1 + PRICE_RAMPS
        self.head = nn.Linear(hidden_size, outputs, dtype=torch.float32)
        self.trial: nn.Linear | None = None
        if trial:
            self.trial = nn.Linear(len(TRIAL_NUMBERS), outputs, bias=False, dtype=torch.float32)
        # Some decoders scale the embeddings they are given: what enters the first layer is put
        # back to what entered the base's. By thread, so that concurrent calls don't mix.
        self._entering: dict[int, torch.Tensor] = {}
        self._seen_weights: tuple[list[tuple[int, int]], bool] | None = None
        self._shown: dict[int, list[dict[str, Any]]] = {}  # to each layer, by thread, likewise
        if tail is not None:
            self.layers[0].register_forward_pre_hook(self._put_back, with_kwargs=True)
        if self.queries and tail is not None:
            self._windows = _windows(tail)
            _drop_keys(self.layers)
            tail.config._attn_implementation = _own_attention(tail)
            for layer in self.layers:
                layer.register_forward_pre_hook(self._show, with_kwargs=True)

    @property
    def layers(self) -> nn.ModuleList:
        """The tail's layers; none for n = 0."""
        return nn.ModuleList() if self.tail is None else module_layers(self.tail)

    @classmethod
    def from_base(
        cls,
        base: PreTrainedModel,
        num_layers: int,
        tuning: str = "queries",
        init_bias: float | None = None,
        revision: str | None = None,
        lora_rank: int = 16,
        prices: PriceRange | None = None,
        trial: bool = False,
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
            trial: whether it reads the history of trial answers.

        Raises:
            ImportError: tuning "lora" without peft.
            ValueError: the base has fewer layers, its layers cannot be run on their own, or the
                tuning finds nothing to train.
        """
        policy = cls.empty(base, num_layers, prices, tuning == "queries", trial)
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
        if policy.trial is not None:
            policy.trial.to_empty(device=tail_device(base))
            nn.init.zeros_(policy.trial.weight)
        policy.set_trainable(tuning)
        policy.eval()
        if policy.tail is not None and not is_quantised(base):
            check_tail(base, policy)
        return policy

    @classmethod
    def empty(
        cls,
        base: PreTrainedModel,
        num_layers: int,
        prices: PriceRange | None = None,
        queries: bool = False,
        trial: bool = False,
    ) -> StoppingPolicy:
        """A policy without weights (on the meta device) for a base.

        Raises:
            ValueError: the base has fewer layers, its layers cannot be run on their own, or with
                `queries` the last ones keep something else than keys and values.
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
            return cls(tail, decoder.config.hidden_size, prices, queries, trial)

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
        beside = {name for name in names if name.partition(".")[0] in ("head", "trial")}
        return adapters | beside if adapters else names

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
        """Lets gradients reach the heads and what `tuning` names of the copied layers.

        Raises:
            ValueError: no parameter of the layers belongs to an attention.
        """
        self.requires_grad_(False)
        self.head.requires_grad_(True)
        if self.trial is not None:
            self.trial.requires_grad_(True)
        if self.tail is None or tuning == "head":
            return
        chosen = [
            parameter
            for name, parameter in self.layers.named_parameters()
            if (is_adapter(name) if tuning == "lora" else tuning in _WHOLE or _attends(name))
        ]
        if not chosen:
            raise ValueError(
                f"tuning is {tuning!r}, but {type(self.tail).__name__}'s layers have no attention "
                "parameters; use tuning='layers'"
            )
        for parameter in chosen:
            parameter.requires_grad_(True)

    def new_cache(self) -> DynamicCache | None:
        """An empty cache for `forward` in pieces; None where nothing is kept."""
        if self.tail is None or self.queries:
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
        price: float | None = None,
        keys: Sequence[LayerKeys] = (),
        columns: torch.Tensor | None = None,
        numbers: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Stop logits at every position that it is given.

        Args:
            hidden: what entered the base's layer L-n, (B, S, H); with n = 0 its last hidden state
                after the final norm.
            position_ids: (B, S).
            attention_mask: (B, cached + S), 1 for tokens and 0 for padding.
            past_key_values: a cache of `new_cache`, extended by this call.
            price: the price of a token, with the head "price"; the other ignores it.
            keys: with tuning "queries" those of the base's last n layers, of the whole text; then
                `hidden` and `position_ids` may be of any positions of it.
            columns: (B, S) where these stand among the text's columns; None for all of them.
            numbers: see `with_history`.

        Returns:
            (B, S), float32.

        Raises:
            ValueError: see `with_history` and `logits`.
        """
        outputs = self.outputs(hidden, position_ids, attention_mask, past_key_values, keys, columns)
        return self.logits(self.with_history(outputs, numbers), price)

    def with_history(self, outputs: torch.Tensor, numbers: torch.Tensor | None) -> torch.Tensor:
        """What the head says, (..., 1 or 6), with what the history of trial answers adds to it.

        Args:
            outputs: of the head.
            numbers: `TRIAL_NUMBERS` (..., 11) in float32; None for a policy without trial answers.

        Raises:
            ValueError: the policy tries answers, and there are no numbers.
        """
        if self.trial is None:
            return outputs
        if numbers is None:
            raise ValueError(
                f"the policy tries an answer at every {self.trial_every}. step (trial_every) and "
                "reads how they went, which is not known here: generate with transformers "
                "(stop_policy=True), or replay it on labels (ospruner eval replay)"
            )
        with torch.autocast(outputs.device.type, enabled=False):
            added: torch.Tensor = self.trial(numbers.to(outputs.device))
        return outputs + added

    def logits(self, outputs: torch.Tensor, price: float | None) -> torch.Tensor:
        """Stop logits (...) of the head's outputs (..., 1 or 6).

        Raises:
            ValueError: the head "price" without a price, or one that it does not know.
            TypeError: a price that is no number.
        """
        if self.prices is None:
            return outputs[..., 0]
        self.prices.check("StoppingPolicy", price)
        assert price is not None
        place = torch.tensor(self.prices.place(price), device=outputs.device)
        return price_logits(outputs, place)

    def outputs(
        self,
        hidden: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        keys: Sequence[LayerKeys] = (),
        columns: torch.Tensor | None = None,
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
            if self.queries:
                if columns is None:
                    columns = torch.arange(hidden.shape[1], device=device)[None]
                self._shown[me] = self._to_show(keys, columns.to(device), attention_mask)
                if position_ids is None:
                    position_ids = columns.to(device)
                attention_mask = None  # `_show` gives each layer its own
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
                self._shown.pop(me, None)
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

    def _show(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        number = next(i for i, layer in enumerate(self.layers) if layer is module)
        return args, {**kwargs, **self._shown[threading.get_ident()][number]}

    def _to_show(
        self, keys: Sequence[LayerKeys], columns: torch.Tensor, mask: torch.Tensor | None
    ) -> list[dict[str, Any]]:
        """Each layer's arguments: the base's keys as a cache, and which of them are seen.

        Args:
            keys: of each layer.
            columns: (B or 1, T) of the queries.
            mask: (B, columns of the text), 1 for tokens.
        """
        device = columns.device
        known = [LayerKeys(one.keys.to(device), one.values.to(device), one.first) for one in keys]
        if len(known) != len(self.layers):
            raise ValueError(
                f"the policy's {len(self.layers)} layers attend to the base's keys and values, and "
                f"those of {len(known)} layers were given: read them with `Reader`"
            )
        cache, masks, shown = _Given(known), {}, []
        for one, window in zip(known, self._windows, strict=True):
            kind = one.first, one.keys.shape[-2], window
            if kind not in masks:
                masks[kind] = self._mask(kind, columns, mask)
            shown.append({"past_key_values": cache, "attention_mask": masks[kind]})
        return shown

    def _mask(
        self,
        kind: tuple[int, int, int | None],
        columns: torch.Tensor,
        tokens: torch.Tensor | None,
    ) -> torch.Tensor:
        """Which keys queries see, (B, 1, T, S): true, or for eager attention 0 in scores."""
        first, length, window = kind
        seen, at = torch.arange(first, first + length, device=columns.device), columns[..., None]
        visible = seen <= at  # (B, T, S)
        if window is not None:
            visible &= seen > at - window
        if tokens is not None:
            there = tokens[:, first : first + length].bool()
            there = F.pad(there, (0, length - there.shape[1]))  # room for what is not written yet
            # Padding sees itself, so that no softmax is over nothing.
            visible = visible & there[:, None] | (seen == at)
        visible = visible[:, None]
        assert self.tail is not None
        if self.tail.config._attn_implementation == _GROUPED:
            return visible
        scores = torch.zeros((), dtype=self.tail_dtype, device=columns.device)
        return torch.where(visible, scores, torch.finfo(scores.dtype).min)


_WHOLE = ("layers", "queries")


def _own_attention(tail: PreTrainedModel) -> str:
    """How the layers of a tail that is queries only attend: with a mask, so as no flash kernel can.

    Eager attention stays what it is: each family's own, with sinks or softcaps where it has them.
    """
    said = tail.config._attn_implementation
    capped = vars(tail.config).get("attn_logit_softcapping") is not None
    if said == "eager" or not tail._supports_sdpa or (capped and said != "sdpa"):
        return "eager"
    return _GROUPED


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
    outputs: list[torch.Tensor] = []
    handle = tail.register_forward_hook(lambda _, __, out: outputs.append(out.last_hidden_state))
    try:
        with Reader(base, n, policy.queries) as reader:
            wanted = decoder(
                input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
            ).last_hidden_state
            hidden, keys = reader.hidden, reader.keys
        policy.outputs(hidden, positions, mask, None, keys)
        cache = policy.new_cache()
        columns = torch.arange(_PROBE, device=device)[None]
        for i, j in ((0, 5), (5, 6), (6, _PROBE)):
            known = [LayerKeys(one.keys[:, :, :j], one.values[:, :, :j]) for one in keys]
            policy.outputs(
                hidden[:, i:j], positions[:, i:j], mask[:, :j], cache, known, columns[:, i:j]
            )
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{type(base).__name__} cannot be a base: its last {n} layers do not run on their own "
            f"({type(error).__name__}: {error})"
        ) from error
    finally:
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
