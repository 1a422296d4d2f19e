"""The stopping policy: a tail of the base's last n layers, and a linear head (paper, section 3).

Nothing here knows an architecture by name: the tail is a decoder of the base's own class that holds
its last n layers and its final norm, fed with the hidden states that enter layer L-n. With tuning
"queries" these are the last n layers that hold keys; they attend to the keys and values that the
base's layers have computed, so that they run at step ends alone and keep nothing between them. What
the base's other layers between and behind them added is added, too.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from .configuration_ospruner import PRICE_RAMPS, PriceRange


def price_logits(outputs: Tensor, places: Tensor) -> Tensor:
    """A price head's stop logits: b + sum_j softplus(d_j) clamp(p - j, 0, 1); they rise with p.

    Args:
        outputs: (..., 6), b and d_0 to d_4 of the head.
        places: p of prices (`PriceRange.place`), of a shape that broadcasts with (...).
    """
    starts = torch.arange(PRICE_RAMPS, device=outputs.device)
    ramps = (places[..., None] - starts).clamp(0, 1)
    return outputs[..., 0] + (F.softplus(outputs[..., 1:]) * ramps).sum(-1)


def price_places(outputs: Tensor) -> Tensor:
    """Where a price head's logit is 0, the place p of the price of indifference, (...) in [0, 5].

    0 where the policy stops even for nothing, inf where it stops at no price.
    """
    wanted, rises = -outputs[..., :1], F.softplus(outputs[..., 1:])
    below = rises.cumsum(-1) - rises  # of the ramps before
    parts = ((wanted - below) / rises.clamp(min=1e-30)).clamp(0, 1)
    return parts.sum(-1).masked_fill(wanted[..., 0] > rises.sum(-1), torch.inf)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The layers of a causal LM, or of a tail; refuses a model that keeps them otherwise."""
    decoder = model.get_decoder()
    layers = dict(decoder.named_children()).get("layers")
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(
            f"{type(model).__name__} cannot be a base: its decoder ({type(decoder).__name__}) "
            "keeps no layers in a ModuleList `layers`. Use one such as Qwen3, Llama or GPT-OSS"
        )
    return layers


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


def is_quantised(base: PreTrainedModel) -> bool:
    """Whether the base's layers hold packed weights."""
    return vars(base).get("hf_quantizer") is not None


@dataclass(frozen=True)
class LayerKeys:
    """Keys and values (B, KV, S, D) that the base computed in one layer, and the first's column."""

    keys: Tensor
    values: Tensor
    first: int = 0


class Reader:
    """A context in which forwards of the base by this thread leave what a policy reads.

    Attributes:
        hidden: (B, S, R) of the last forward, see `StoppingPolicy.outputs`.
        chunks: `hidden` of each forward, without queries; whoever reads them drops them.
        keys: with queries, of the copied layers, as the last forward attended.
        columns: of the text so far, padding included.
        positions: (B or 1, 1) of each row's last token.
    """

    def __init__(self, base: PreTrainedModel, policy: StoppingPolicy) -> None:
        self.hidden, self.keys, self.chunks = torch.empty(0), list[LayerKeys](), list[Tensor]()
        self.columns, self.positions = 0, torch.empty(0, 1)
        self._base, self._policy, self._seen = base, policy, dict[int, Tensor]()
        self._thread, self._handles = threading.get_ident(), list[Any]()

    def __enter__(self) -> Self:
        decoder, layers, policy = self._base.get_decoder(), decoder_layers(self._base), self._policy
        keyed = set(policy.copied if policy.queries else ())
        self._hook(decoder.register_forward_pre_hook, self._begin)
        for number in keyed.union(policy.points):
            if number < len(layers):
                enter = partial(self._enter_layer, number, number in keyed)
                self._hook(layers[number].register_forward_pre_hook, enter)
            else:
                last = layers[-1] if policy.copied else decoder
                self._hook(last.register_forward_hook, partial(self._leave, number))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self.hidden, self.keys, self.chunks, self._seen = torch.empty(0), [], [], {}

    def told(self) -> None:
        """Called whenever more is known of a forward."""

    def _hook(self, register: Any, hook: Any) -> None:
        def here(*args: Any) -> Any:
            return hook(*args) if threading.get_ident() == self._thread else None

        self._handles.append(register(here, with_kwargs=True))

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args]
        self.columns += next(one for one in given if one is not None).shape[1]
        at = kwargs.get("position_ids")
        self.positions = torch.tensor([[self.columns - 1]]) if at is None else at[:, -1:]
        self.keys, self._seen = [], {}

    def _enter_layer(self, number: int, keyed: bool, module: Any, args: Any, kwargs: Any) -> Any:
        if number in self._policy.points:
            self._saw(number, kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])
        if not keyed:
            return None
        return args, {**kwargs, "past_key_values": _Tapped(self, kwargs.get("past_key_values"))}

    def _leave(self, number: int, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        self._saw(number, output if isinstance(output, Tensor) else output[0])

    def _saw(self, number: int, hidden: Tensor) -> None:
        self._seen[number] = hidden.detach()
        if len(self._seen) == len(self._policy.points):
            first, *others = self._seen.values()
            gaps = zip(others[::2], others[1::2], strict=True)
            added = [(b - a.to(b.device)).to(first.device) for a, b in gaps]
            self.hidden = torch.cat([first, *added], dim=-1) if added else first
            self.chunks += [] if self._policy.queries else [self.hidden]
        self.told()


class _Tapped:
    """The base's cache for one layer, or none: what the layer attends to goes to a reader, too."""

    def __init__(self, reader: Reader, cache: Cache | None) -> None:
        self._reader, self._cache = reader, cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """As the cache's; without one, the new keys and values are all that there are."""
        first = 0
        if self._cache is not None:
            first = self._cache.get_mask_sizes(keys.shape[-2], layer_idx)[1]
            keys, values = self._cache.update(keys, values, layer_idx, *args, **kwargs)
        self._reader.keys.append(LayerKeys(keys.detach(), values.detach(), first))
        self._reader.told()
        return keys, values


class _Given:
    """What the tail's layers take for a cache: it shows them the base's keys and values."""

    def __init__(self, keys: Sequence[LayerKeys]) -> None:
        self._keys = keys

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """The base's, whatever the layer has made."""
        known = self._keys[layer_idx]
        if torch.is_autocast_enabled(keys.device.type):  # which brings all to one dtype itself
            return known.keys, known.values
        return known.keys.to(keys.dtype), known.values.to(keys.dtype)


class _Unasked(nn.Module):
    """In the place of a projection whose output is not looked at: zeros that take no memory."""

    def __init__(self, out_features: int) -> None:
        super().__init__()
        self.out_features = out_features

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.new_zeros(self.out_features).expand(*hidden.shape[:-1], -1)


_GROUPED = "ospruner_queries"


def _attend(
    module: nn.Module,
    query: Tensor,  # (B, heads, T, D)
    key: Tensor,  # (B, KV, S, D)
    value: Tensor,
    attention_mask: Tensor,  # (B, 1, T, S), true where a key is seen
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """As sdpa attention, but that keys are not repeated for the heads that share them."""
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

ADAPTER_SCALE = 2  # W x becomes W x + 2 B A x with adapters: LoRA's alpha over the rank


class StoppingPolicy(nn.Module):
    """pi_i = sigmoid(w . h_i + b), with h_i the tail's output after its final norm.

    With the head "price" six numbers of h_i and the price of a token give pi_i (`price_logits`);
    the tail never sees the price. It is made without weights (on the meta device), for `load`.

    Args:
        base: that it follows.
        num_layers: n.
        prices: that it knows; None for the head "fixed".
        queries: whether it attends to the base's keys and values, and so needs no others.

    Attributes:
        copied: the numbers of the base's layers that it copies.
        points: the layers of the base whose input is read (L: what leaves the last one, or with
            n = 0 the final norm).
        tail: the copied layers with the final norm; None for n = 0, where the head reads the base's
            last hidden state.
        head: H to 1, or to 6 with the head "price", in float32.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        num_layers: int,
        prices: PriceRange | None = None,
        queries: bool = False,
    ) -> None:
        super().__init__()
        total = len(decoder_layers(base))
        if not 0 <= num_layers <= total:
            raise ValueError(
                f"num_policy_layers is {num_layers}; it must lie in 0..{total}, the base's layers"
            )
        self.prices = prices
        self.queries = queries and num_layers > 0
        self.copied = list(range(total - num_layers, total))
        if self.queries:
            self.copied, self._windows = _last_with_keys(base, num_layers)
        after = zip(self.copied, [*self.copied[1:], total], strict=False)
        gaps = [(i, i + 1, end) for i, end in after if i + 1 != end]
        self.points = (self.copied or [total])[:1] + [at for _, *ends in gaps for at in ends]
        self._added_to = [self.copied.index(i) for i, *_ in gaps]
        outputs = 1 if prices is None else 1 + PRICE_RAMPS
        with torch.device("meta"):
            self.tail = _new_tail(base, self.copied, self.queries)
            hidden_size = base.get_decoder().config.hidden_size
            self.head = nn.Linear(hidden_size, outputs, dtype=torch.float32)
        # What each layer is given in one call, by thread, so that concurrent calls don't mix.
        self._given: dict[int, list[dict[str, Any]]] = {}
        for i, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(partial(self._give, i), with_kwargs=True)
            if i in self._added_to:
                layer.register_forward_hook(partial(self._add, i))

    @property
    def layers(self) -> nn.ModuleList:
        """The tail's layers; none for n = 0."""
        return nn.ModuleList() if self.tail is None else decoder_layers(self.tail)

    def own_names(self) -> set[str]:
        """Names of the tensors that are saved: all, or beside the head adapters alone."""
        names = set(self.state_dict())
        adapters = {name for name in names if ".lora_" in name}
        return adapters | {n for n in names if n.startswith("head.")} if adapters else names

    def stored_shapes(self, adapter_rank: int) -> dict[str, tuple[int, ...]]:
        """What its file holds: the shape of each tensor; of a policy without weights."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self.state_dict().items()}
        if adapter_rank:  # in place of the layers: A (rank, in) and B (out, rank) of each linear
            shapes = {name: shape for name, shape in shapes.items() if name.startswith("head.")}
            for name, part in self.layers.named_modules():
                if isinstance(part, nn.Linear):
                    shapes[_adapter(f"tail.layers.{name}", "A")] = (adapter_rank, part.in_features)
                    shapes[_adapter(f"tail.layers.{name}", "B")] = (part.out_features, adapter_rank)
        return shapes

    def name_in_base(self, name: str) -> str:
        """What a tensor of the policy's tail is called in the base's decoder."""
        parts = name.removeprefix("tail.").split(".")
        if parts[0] == "layers":
            parts[1] = str(self.copied[int(parts[1])])
        return ".".join(parts)

    def load(self, base: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
        """Fills a policy without weights, each tensor in the dtype that it has in the base.

        Adapters among the tensors are merged into the base's own. What no checkpoint holds, such as
        rotary frequencies, is copied from the base.
        """
        decoder, last = base.get_decoder(), decoder_layers(base)[-1]
        device = execution_device(base, last)
        theirs, buffers = decoder.state_dict(), dict(decoder.named_buffers())
        floats = (p for p in last.parameters() if p.is_floating_point())
        usual = base.dtype if is_quantised(base) else next(floats, torch.empty(0)).dtype
        placed = {}
        for name in self.state_dict():
            same, tensor = theirs.get(self.name_in_base(name)), tensors.get(name)
            if tensor is None:
                tensor = _merged(theirs[self.name_in_base(name)], tensors, name)
            plain = same is not None and same.is_floating_point() and same.itemsize > 1
            dtype = same.dtype if same is not None and plain else usual
            dtype = torch.float32 if name.startswith("head.") else dtype
            dtype = dtype if tensor.is_floating_point() else tensor.dtype
            placed[name] = tensor.detach().to(device, dtype, copy=True)
        self.load_state_dict(placed, assign=True)
        for name, _ in list(self.named_buffers()):
            if name not in placed:
                module, _, own = name.rpartition(".")
                value = buffers[self.name_in_base(name)].detach().to(device, copy=True)
                self.get_submodule(module).register_buffer(own, value, persistent=False)

    def new_cache(self) -> DynamicCache | None:
        """An empty cache for `forward` in pieces; None where nothing is kept."""
        if self.tail is None or self.queries:
            return None
        cache = DynamicCache(config=self.tail.config)
        if cache.layers and not any(isinstance(one, CacheLayerMixin) for one in cache.layers):
            return _CountingCache(config=self.tail.config)
        return cache

    def forward(self, *args: Any, price: float | None = None, **kwargs: Any) -> Tensor:
        """Stop logits (B, S) float32 at a price; other arguments as `outputs`."""
        return self.logits(self.outputs(*args, **kwargs), price)

    def logits(self, outputs: Tensor, price: float | None) -> Tensor:
        """Stop logits (...) of the head's outputs (..., 1 or 6); refuses a price not known."""
        if self.prices is None:
            return outputs[..., 0]
        self.prices.check("StoppingPolicy", price)
        assert price is not None
        return price_logits(outputs, torch.tensor(self.prices.place(price), device=outputs.device))

    def outputs(
        self,
        hidden: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        keys: Sequence[LayerKeys] = (),
        columns: Tensor | None = None,
    ) -> Tensor:
        """What the head says at every position that it is given, (B, S, 1 or 6) float32.

        Args:
            hidden: what entered the first copied layer, (B, S, R), R = H; with n = 0 the base's
                last hidden states after the final norm. Behind it, where the base has other layers
                between or behind those, what they added: R = (1 + gaps) H.
            position_ids: (B, S).
            attention_mask: (B, columns of the text), 1 for tokens; None where there is no padding.
            past_key_values: a cache of `new_cache`, extended by this call.
            keys: with queries those of the whole text; the others may be of any positions of it.
            columns: (B, S) where these stand among the text's columns; None for all of them.
        """
        device = self.head.weight.device
        hidden = hidden.to(device)
        if self.tail is not None:
            hidden = hidden.to(self.tail.dtype)
            position_ids = None if position_ids is None else position_ids.to(device)
            mask = None if attention_mask is None else attention_mask.to(device)
            given: list[dict[str, Any]] = [{} for _ in self.layers]
            if self.queries:
                if columns is None:
                    columns = torch.arange(hidden.shape[1], device=device)[None]
                given, mask = self._shown(keys, columns.to(device), mask), None
                position_ids = columns.to(device) if position_ids is None else position_ids
            hidden, *added = hidden.split(self.head.in_features, dim=-1)
            for i, one in zip(self._added_to, added, strict=True):
                given[i]["added"] = one
            # Some decoders scale the embeddings they are given: the first layer gets them as is.
            given[0]["hidden_states"] = hidden
            self._given[threading.get_ident()] = given
            try:
                hidden = self.tail(
                    inputs_embeds=hidden,
                    position_ids=position_ids,
                    attention_mask=mask,
                    past_key_values=past_key_values,
                    use_cache=past_key_values is not None,
                ).last_hidden_state
            finally:
                del self._given[threading.get_ident()]
            if isinstance(past_key_values, _CountingCache):
                past_key_values.tokens += hidden.shape[1]
        kind = "cpu" if hidden.is_meta else hidden.device.type  # there is no autocast on meta
        with torch.autocast(kind, enabled=False):  # the head stays in its own dtype
            said: Tensor = self.head(hidden.to(self.head.weight.dtype))
        return said.float()

    def _give(self, number: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        given = dict(self._given[threading.get_ident()][number])
        given.pop("added", None)
        if "hidden_states" in given and "hidden_states" not in kwargs:
            args = (given.pop("hidden_states"), *args[1:])
        return args, {**kwargs, **given}

    def _add(self, number: int, module: nn.Module, args: Any, output: Any) -> Any:
        added = self._given[threading.get_ident()][number]["added"]
        return (output[0] + added, *output[1:]) if isinstance(output, tuple) else output + added

    def _shown(
        self, keys: Sequence[LayerKeys], columns: Tensor, tokens: Tensor | None
    ) -> list[dict[str, Any]]:
        """Each layer's arguments: the base's keys as a cache, and which of them are seen."""
        device = columns.device
        known = [LayerKeys(one.keys.to(device), one.values.to(device), one.first) for one in keys]
        if len(known) != len(self.layers):
            raise ValueError(
                f"the policy's {len(self.layers)} layers attend to the base's keys and values, and "
                f"those of {len(known)} layers were given: read them with `Reader`"
            )
        cache, masks, shown = _Given(known), dict[Any, Tensor](), []
        for one, window in zip(known, self._windows, strict=True):
            kind = one.first, one.keys.shape[-2], window
            if kind not in masks:
                masks[kind] = self._mask(*kind, columns, tokens)
            shown.append({"past_key_values": cache, "attention_mask": masks[kind]})
        return shown

    def _mask(
        self, first: int, length: int, window: int | None, columns: Tensor, tokens: Tensor | None
    ) -> Tensor:
        """Which keys queries see, (B, 1, T, S): true, or for eager attention 0 in scores."""
        assert self.tail is not None
        seen, at = torch.arange(first, first + length, device=columns.device), columns[..., None]
        visible = seen <= at  # (B, T, S)
        if window is not None:
            visible &= seen > at - window
        if tokens is not None:
            there = tokens[:, first : first + length].bool()
            there = F.pad(there, (0, length - there.shape[1]))  # room not written yet
            visible = visible & there[:, None] | (seen == at)  # padding sees itself
        if self.tail.config._attn_implementation == _GROUPED:
            return visible[:, None]
        zero = torch.zeros((), dtype=self.tail.dtype, device=columns.device)
        return torch.where(visible[:, None], zero, torch.finfo(zero.dtype).min)


def _adapter(module: str, part: str) -> str:
    return f"{module}.lora_{part}.default.weight"  # peft's names


def _merged(weight: Tensor, tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """The base's tensor, with its adapter, if it has one, added: W + 2 B A."""
    if weight.is_meta or (weight.is_floating_point() and weight.itemsize == 1):
        raise ValueError(
            "the policy's low-rank adapters are merged into the base's own layers, which are "
            "offloaded or quantised here: load the base unquantised and in memory"
        )
    up, down = (tensors.get(_adapter(name.removesuffix(".weight"), part)) for part in "BA")
    if up is None or down is None:
        return weight
    up, down = up.to(weight.device).float(), down.to(weight.device).float()
    whole = weight.to(torch.float32, copy=True)
    return whole.addmm_(up, down, alpha=ADAPTER_SCALE).to(weight.dtype)


def _last_with_keys(base: PreTrainedModel, num_layers: int) -> tuple[list[int], list[int | None]]:
    """A base's last layers with keys, and how many tokens a token sees in each; None for all."""
    cached = DynamicCache(config=base.get_decoder().config).layers
    holding = [i for i, one in enumerate(cached) if isinstance(one, CacheLayerMixin)][-num_layers:]
    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    kinds = {type(cached[i]).__name__ for i in holding if type(cached[i]) not in plain}
    if len(cached) != len(decoder_layers(base)):
        kinds.add(f"what {len(cached)} layers share")
    if kinds or len(holding) < num_layers:
        what = f"some keep {', '.join(sorted(kinds))}" if kinds else f"{len(holding)} hold any"
        raise ValueError(
            f"tuning is 'queries', which reads plain keys and values of {num_layers} layers; of "
            f"this base's ({type(base).__name__}) {what}: use tuning='layers', or fewer policy "
            "layers"
        )
    return holding, [vars(cached[i]).get("sliding_window") for i in holding]


class _Looked(Exception):  # noqa: N818  (it ends a look early; nothing went wrong)
    pass


def _drop_keys(tail: PreTrainedModel) -> None:
    """Leaves nothing in a tail that makes keys and values alone.

    These are the parameters on which depends what a layer's attention gives its cache, but not what
    it makes of what the cache gives back; it is run on the meta device to find them.
    """
    # With a mask, which no flash attention has; eager attention stays each family's own, with
    # sinks or softcaps.
    said, capped = tail.config._attn_implementation, vars(tail.config).get("attn_logit_softcapping")
    eager = said == "eager" or not tail._supports_sdpa or (capped is not None and said != "sdpa")
    tail.config._attn_implementation = "eager" if eager else _GROUPED
    layers, made, unasked = decoder_layers(tail), list[Tensor](), set[Tensor]()

    def update(keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        made.extend((keys, values))
        return keys.detach(), values.detach()

    def through(layer: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        kwargs["past_key_values"] = SimpleNamespace(update=update)
        with suppress(_Looked):
            type(layer).forward(layer, hidden_states, *args, **kwargs)
        return hidden_states

    def look(attention: nn.Module, args: Any, output: Any) -> None:
        if made:
            own = list(attention.parameters())
            asked = output[0].sum() if isinstance(output, tuple) else output.sum()
            kept = torch.stack([one.sum() for one in made]).sum()
            gives, takes = (
                torch.autograd.grad(one, own, retain_graph=True, allow_unused=True)
                for one in (kept, asked)
            )
            both = zip(own, gives, takes, strict=True)
            unasked.update(p for p, one, other in both if one is not None and other is None)
            made.clear()
            raise _Looked

    looking = [m.register_forward_hook(look) for m in layers.modules() if "layer_idx" in vars(m)]
    for layer in layers:
        layer.forward = partial(through, layer)
    turning = [m for m in tail.modules() if "rope_type" in vars(m)]
    for rotary in turning:  # without its look at positions, of which a meta device has none
        rotary.forward = partial(inspect.unwrap(type(rotary).forward), rotary)
    with torch.device("meta"), torch.enable_grad():
        hidden = torch.zeros(1, 1, tail.config.hidden_size, dtype=tail.dtype)
        here, mask = torch.zeros(1, 1, dtype=torch.long), hidden.new_zeros(1, 1, 1, 1)
        tail(inputs_embeds=hidden, position_ids=here, attention_mask=mask, use_cache=False)
    for handle in looking:
        handle.remove()
    for module in [*turning, *layers.modules()]:
        vars(module).pop("forward", None)
        for name, child in list(module.named_children()):
            own = set(child.parameters())
            if own and own <= unasked and not list(child.children()):
                instead: nn.Module = nn.Identity()
                if isinstance(child, nn.Linear):
                    instead = _Unasked(child.out_features)
                setattr(module, name, instead)


class _CountingCache(DynamicCache):
    """The cache of a tail without attention, which transformers' own does not count tokens in."""

    tokens = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.tokens + query_length, 0


# To build one takes half a second; a base's next policy begins with a copy.
_TAILS: WeakKeyDictionary[PreTrainedModel, dict[Any, PreTrainedModel]] = WeakKeyDictionary()


def _new_tail(base: PreTrainedModel, numbers: list[int], queries: bool) -> PreTrainedModel | None:
    """A tail without weights; None of no layers."""
    config, known = base.get_decoder().config, _TAILS.setdefault(base, {})
    kind = tuple(numbers), queries, config._attn_implementation, config.to_json_string()
    if numbers and kind not in known:
        known[kind] = _empty_tail(base.get_decoder(), numbers)
        if queries:
            _drop_keys(known[kind])
    return copy.deepcopy(known.get(kind))


def _empty_tail(decoder: PreTrainedModel, numbers: Sequence[int]) -> PreTrainedModel:
    """Keeps the named layers of a decoder built without weights, renumbered from 0.

    The configuration's lists are cut last: layers read them while they are built, caches and masks
    while they run.
    """
    config = copy.deepcopy(decoder.config)
    if isinstance(config.dtype, str):  # what save_pretrained leaves there; layers may read it
        config.dtype = getattr(torch, config.dtype)
    total = config.num_hidden_layers
    tail = type(decoder)(config)
    tail.layers = nn.ModuleList(decoder_layers(tail)[i] for i in numbers)
    for module in tail.layers.modules():
        if vars(module).get("layer_idx") is not None:
            vars(module)["layer_idx"] = numbers.index(vars(module)["layer_idx"])
    for name, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == total:
            setattr(config, name, type(value)(value[i] for i in numbers))
    config.num_hidden_layers = len(numbers)
    embeds = tail.get_input_embeddings()
    for name in [name for name, child in tail.named_children() if child is embeds]:
        delattr(tail, name)
    return tail
