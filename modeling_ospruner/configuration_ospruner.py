"""The configuration of a stopping policy: which base it stops, how it was made, how it is used.

Beside it the prices of a token that one policy may know, what a base's configuration says of its
positions, and the checks of settings that all files share: their errors name the field, what was
given, and what is allowed.

Between them, what may be a base and how its last layers are reached, also where it is quantised or
offloaded: a base qualifies if its decoder keeps L layers in a `ModuleList` and needs token ids for
its embeddings only.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import CONFIG_MAPPING
from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

__all__ = ["OSPrunerConfig"]


VERSION = "0.1.0"
"""Of this code, also where it was downloaded with a policy; written into each configuration."""

TUNINGS = ("layers", "queries", "attention", "lora", "head")
METHODS = (
    "os-pruner",
    "probe",
    "convergence",
    "final-answer",
    "terminator",
    "lynx",
    "thought-calibration",
    "flashthink",
)
MODES = ("sample", "threshold")
HEADS = ("fixed", "price")

CALIBRATION_FIELDS = {
    "max_loss": "of accuracy against the full trace, as a share, that the promise allows",
    "confidence": "how surely it is kept, on problems like those of the calibration",
    "mode": "'threshold' or 'sample', in which it is kept",
    "threshold": "the stop probability at which mode 'threshold' keeps it, else None",
    "price": "the price of a token at which a policy of every price keeps it, else None",
    "loss": "mean loss over the calibration's problems",
    "tokens_saved": "share of their full traces' thinking tokens",
    "problems": "how many there were",
    "test": "'exact' or 'betting'",
    "data_hash": "of their labels",
    "traffic": "how thinking tokens and the policy's first word were distributed there",
}

# What transformers itself writes into a configuration file, or passes beside the fields.
_TRANSFORMERS_KEYS = {
    "_attn_implementation_internal",
    "_commit_hash",
    "_experts_implementation_internal",
    "_name_or_path",
    "attn_implementation",
    "auto_map",
    "experts_implementation",
    "name_or_path",
    "torch_dtype",
    "transformers_version",
}


def saved_by(version: str | None) -> str:
    """What to do about a policy that does not load, by the version that saved it."""
    if version is None or _parts(version) <= _parts(VERSION):
        return f"It was saved by ospruner {version or '(unknown version)'}, this is {VERSION}"
    return (
        f"It was saved by ospruner {version}, this is {VERSION}: upgrade with "
        f"pip install -U 'ospruner>={version}'"
    )


def _parts(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


@dataclass(frozen=True)
class PriceRange:
    """The prices of a token (lambda) that a policy with the head "price" knows: 0 to `high`.

    A price's place is p = 5 log(1 + lambda / e) / log(1 + high / e) in [0, 5] with e = low / 5:
    logarithmic above `low`, linear near 0, so that 0 has a place, too.

    Attributes:
        low: the least price above 0 that it was trained on, in reward per thinking token.
        high: the greatest.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        check_number("price_range", "low", self.low, 0, math.inf, open_low=True)
        check_number("price_range", "high", self.high, self.low, math.inf, open_low=True)

    def check(self, owner: str, price: object) -> None:
        """Checks that a price is one that the policy knows.

        Raises:
            TypeError: it is no number.
            ValueError: it lies outside; the range is named.
        """
        check_number(owner, "price", price, 0, math.inf)
        if price > self.high:  # type: ignore[operator]  # a number
            raise ValueError(
                f"{owner}: price is {price}, but the policy was trained for prices of a "
                f"token from 0 to {self.high:g}: ask for one of these, or train for a wider range "
                "(ospruner train --head price --lambdas LOW,HIGH)"
            )

    def place(self, price: float) -> float:
        """P of a price."""
        unit = self.low / 5
        return PRICE_RAMPS * math.log1p(price / unit) / math.log1p(self.high / unit)

    def price_at(self, place: float) -> float:
        """The price at a place; inf and NaN stay what they are."""
        unit = self.low / 5
        if not place < math.inf:
            return place
        return unit * math.expm1(place / PRICE_RAMPS * math.log1p(self.high / unit))

    def grid(self, count: int = 31) -> tuple[float, ...]:
        """Prices from careful to bold: 0, and `count` - 1 from low to high in even ratios."""
        ratio = self.high / self.low
        between = (self.low * ratio ** (i / (count - 2)) for i in range(1, count - 2))
        return (0.0, self.low, *(float(f"{price:.2e}") for price in between), self.high)


PRICE_RAMPS = 5
"""Rises of a price head's logit along the prices; with its first value it has one output more."""


def price_logits(outputs: Tensor, places: Tensor) -> Tensor:
    """A price head's stop logits: b + sum_j softplus(d_j) clamp(p - j, 0, 1); they rise with p.

    Args:
        outputs: (..., 6), b and d_0 to d_4 of the head.
        places: p of prices (`PriceRange.place`), of a shape that broadcasts with (...).

    Returns:
        (...) as broadcast.
    """
    starts = torch.arange(PRICE_RAMPS, device=outputs.device)
    ramps = (places[..., None] - starts).clamp(0, 1)
    return outputs[..., 0] + (F.softplus(outputs[..., 1:]) * ramps).sum(-1)


def price_places(outputs: Tensor) -> Tensor:
    """Where a price head's logit is 0, the place p of the price of indifference.

    Args:
        outputs: (..., 6) of the head.

    Returns:
        (...) in [0, 5]; 0 where the policy stops even for nothing, inf where it stops at no price.
    """
    wanted, rises = -outputs[..., :1], F.softplus(outputs[..., 1:])
    below = rises.cumsum(-1) - rises  # of the ramps before
    parts = ((wanted - below) / rises.clamp(min=1e-30)).clamp(0, 1)
    beyond = wanted[..., 0] > rises.sum(-1)
    return parts.sum(-1).masked_fill(beyond, torch.inf)


_OLD_PRICE = "length_penalty"  # what policies of the first days called the price


def _with_price(objects: Any) -> Any:
    """A list of a configuration's objects, with the price under today's name."""
    if not isinstance(objects, list):
        return objects
    return [
        {("price" if key == _OLD_PRICE else key): value for key, value in one.items()}
        if isinstance(one, dict)
        else one
        for one in objects
    ]


class OSPrunerConfig(PreTrainedConfig):
    """Configuration of `OSPrunerForCausalLM`.

    Attributes:
        text_config: the base's own configuration.
        base_model_name_or_path: the base's repository or folder.
        base_revision: the commit of that repository; None for a folder.
        base_fingerprint: of the weights there (`base_fingerprint` of the loading file); None where
            its files were not at hand.
        num_policy_layers: n, the layers that the policy copies from the base's end; with 0 its
            head reads the base's last hidden state.
        tuning: what of the copies trains: whole "layers", their "attention", or the "head" alone;
            with "queries" all of copies that attend to the base's own keys and values, and have no
            weights to make others; with "lora" nothing is copied, and adapters beside the base's
            own layers train.
        lora_rank: of these adapters.
        head: "fixed" (the paper's, for one lambda), or "price": the price of a token is said when
            generating.
        price: lambda, in reward per thinking token, that the policy was trained for; with
            the head "price" the one that it takes where none is said.
        price_range: [low, high] of `PriceRange`, for the head "price"; None for the other.
        step_stride: the policy decides at every k-th step end, as its labels did.
        trial_every: k, at each k-th of these step ends an answer is forced on trial, and the head
            reads how the answers so far have gone (`TRIAL_NUMBERS` of the rules); 0 for never.
        trial_max_tokens: cap on such an answer, that of the labels.
        method: "os-pruner", or a baseline: "probe", "convergence", "flashthink" (whose base is a
            verifier that reads another model's thinking; it does not generate).
        default_mode: how generate decides with `stop_policy=True`: "sample" or "threshold".
        default_threshold: the stop probability at which mode "threshold" stops.
        reasoning_format: the literals of `ReasoningFormat`.
        task: how the problems were asked, answered and graded that it was trained on, as its
            labels name it; None for mathematics.
        domains: where it was trained on several tasks, by each domain's name: "task" (as `task`,
            which is the first one's) and, with the head "price", "price", the price that
            was chosen on the domain's validation traces. None for one.
        calibrations: what `ospruner calibrate` promised, one object a promise with the fields of
            `CALIBRATION_FIELDS`; None for none.
        ospruner_version: of the package that saved the configuration; None before 0.1.0.
    """

    model_type = "ospruner"
    sub_configs = {"text_config": AutoConfig}  # type: ignore[dict-item]

    text_config: dict[str, Any] | PreTrainedConfig | None = None
    base_model_name_or_path: str = ""
    base_revision: str | None = None
    base_fingerprint: str | None = None
    num_policy_layers: int = 2
    tuning: str = "layers"
    lora_rank: int = 16
    head: str = "fixed"
    price: float = 0.0
    price_range: list[float] | None = None
    step_stride: int = 1
    trial_every: int = 0
    trial_max_tokens: int = 32
    method: str = "os-pruner"
    default_mode: str = "sample"
    default_threshold: float = 0.5
    reasoning_format: dict[str, str] | None = None
    task: dict[str, Any] | None = None
    domains: dict[str, dict[str, Any]] | None = None
    calibrations: list[dict[str, Any]] | None = None
    ospruner_version: str | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        known_type = kwargs.pop("model_type", self.model_type)
        if known_type != self.model_type:
            raise ValueError(f"model_type is {known_type!r}; it must be {self.model_type!r}")
        if _OLD_PRICE in kwargs:
            self.price = kwargs.pop(_OLD_PRICE)
            self.calibrations = _with_price(self.calibrations)
            if isinstance(self.domains, dict):
                self.domains = dict(
                    zip(self.domains, _with_price([*self.domains.values()]), strict=True)
                )
        unknown = sorted(set(kwargs) - _TRANSFORMERS_KEYS)
        if unknown:
            raise ValueError(
                f"OSPrunerConfig has no {', '.join(unknown)}. Its fields are "
                f"{', '.join(name for name in OSPrunerConfig.__annotations__)}. "
                f"{saved_by(self.ospruner_version)}"
            )
        if isinstance(self.text_config, dict):
            literals = dict(self.text_config)
            base_type = literals.pop("model_type", None)
            if not base_type:
                raise ValueError("text_config has no model_type; it must be a base's configuration")
            if base_type in CONFIG_MAPPING:
                self.text_config = _base_config(base_type, literals)
            else:
                # A base with code of its own: whether it may run is decided when it is loaded.
                foreign = type("ForeignConfig", (PreTrainedConfig,), {"model_type": base_type})
                self.text_config = foreign(**literals)
        elif not (self.text_config is None or isinstance(self.text_config, PreTrainedConfig)):
            raise TypeError(
                f"text_config is {self.text_config!r}; it must be a base's configuration"
            )
        self.check_fields()
        super().__post_init__(**kwargs)

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """As in transformers.

        Raises:
            OSError: there is no configuration, or it is no JSON, or nests too deeply to be one.
        """
        try:
            return super().get_config_dict(*args, **kwargs)
        except RecursionError as error:
            where = args[0] if args else kwargs.get("pretrained_model_name_or_path")
            raise OSError(
                f"{str(where)!r} is no policy: its JSON nests too deeply to be a configuration; "
                "give the policy's folder or Hub id"
            ) from error

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The configuration that a file holds.

        Raises:
            ValueError: it holds no fields, or one of a wrong type or value.
        """
        if not isinstance(config_dict, dict):
            raise ValueError(
                f"config.json holds a {type(config_dict).__name__}; it must be an object with the "
                "fields of OSPrunerConfig: copy the policy again"
            )
        try:
            return super().from_dict(config_dict, **kwargs)
        except TypeError as error:  # of a file, each wrong type is a wrong value
            raise ValueError(f"config.json: {error}") from error

    def validate(self) -> None:
        """What transformers calls before it saves a configuration."""
        super().validate()  # type: ignore[misc]  # made by its @strict
        self.check_fields()

    # Not transformers' `@strict`: its errors are no ValueError or TypeError, it lets NaN pass, and
    # it would be a fourth package (huggingface_hub) among the uploaded files' imports.
    def check_fields(self) -> None:
        """Checks every field by itself.

        Raises:
            TypeError: a field is of another type.
            ValueError: naming the field, its value and what is allowed.
        """
        owner = type(self).__name__
        check_choice(owner, "tuning", self.tuning, TUNINGS)
        check_choice(owner, "method", self.method, METHODS)
        check_choice(owner, "default_mode", self.default_mode, MODES)
        check_choice(owner, "head", self.head, HEADS)
        check_number(owner, "price", self.price, 0, math.inf)
        check_number(owner, "default_threshold", self.default_threshold, 0, 1)
        check_integer(owner, "lora_rank", self.lora_rank, 1)
        check_integer(owner, "step_stride", self.step_stride, 1)
        check_integer(owner, "trial_every", self.trial_every, 0)
        check_integer(owner, "trial_max_tokens", self.trial_max_tokens, 1)
        if self.trial_every and self.method != "os-pruner":
            raise ValueError(
                f"{owner}: trial_every is {self.trial_every}, but method {self.method!r} reads no "
                "trial answers: set it to 0"
            )
        check_integer(owner, "num_policy_layers", self.num_policy_layers, 0)
        if not isinstance(self.base_model_name_or_path, str):
            raise TypeError(
                f"base_model_name_or_path is {self.base_model_name_or_path!r}; it must be the "
                "base's Hub id or folder"
            )
        kinds = (
            ("base_revision", str),
            ("ospruner_version", str),
            ("reasoning_format", dict),
            ("task", dict),
            ("domains", dict),
        )
        for name, kind in kinds:
            value = vars(self)[name]
            if not (value is None or isinstance(value, kind)):
                words = f"it must be a {kind.__name__}, or None"
                raise TypeError(f"{owner}: {name} is {shown(value)}; {words}")
        self._check_prices(owner)
        check_calibrations(owner, self.calibrations)
        self._check_domains(owner)

    def _check_domains(self, owner: str) -> None:
        for name, one in (self.domains or {}).items():
            task = one.get("task") if isinstance(one, dict) else None
            if not (isinstance(task, dict) and isinstance(task.get("name"), str)):
                raise ValueError(
                    f"{owner}: domains holds {shown(one)} for {name!r}; it must have the settings "
                    "of a task, with its name, under 'task'"
                )
            if "price" in one:
                if self.prices is None:
                    raise ValueError(
                        f"{owner}: domains holds a price for {name!r}, but the head "
                        f"{self.head!r} knows one lambda alone"
                    )
                self.prices.check(f"{owner}: domains[{name!r}]", one["price"])

    def domain_price(self, owner: str, domain: str) -> float:
        """The price of a token that was chosen for a domain.

        Args:
            owner: who asks, for the message.
            domain: its name in `domains`.

        Raises:
            ValueError: the policy has no such domain, or no price for it.
        """
        known = {name: one["price"] for name, one in (self.domains or {}).items() if "price" in one}
        if domain not in known:
            has = f"one of {sorted(known)}" if known else "left out: the policy has none"
            raise ValueError(
                f"{owner}: domain is {shown(domain)}; it must be {has} (a policy has a price for "
                "each domain after `ospruner train --head price --labels A --labels B`)"
            )
        return float(known[domain])

    def _check_prices(self, owner: str) -> None:
        if (self.price_range is None) is (self.head == "price"):
            raise ValueError(
                f"{owner}: head is {self.head!r} and price_range {shown(self.price_range)}; the "
                "head 'price' has one, [low, high], and no other has"
            )
        if self.price_range is None:
            return
        if not isinstance(self.price_range, list | tuple) or len(self.price_range) != 2:
            raise ValueError(
                f"{owner}: price_range is {shown(self.price_range)}; it must be [low, high]"
            )
        if self.method != "os-pruner":
            raise ValueError(
                f"{owner}: head is 'price', but method {self.method!r} is a classifier, which has "
                "no length penalty"
            )
        PriceRange(*self.price_range).check(owner, self.price)

    @property
    def prices(self) -> PriceRange | None:
        """The prices that the policy knows; None with the head "fixed"."""
        return None if self.price_range is None else PriceRange(*self.price_range)


def check_calibrations(owner: str, calibrations: object) -> None:
    """Checks a configuration's `calibrations`.

    Raises:
        TypeError: it is no list of objects, or a number in one is none.
        ValueError: an object has other fields, or a number lies outside its range.
    """
    if calibrations is None:
        return
    if not isinstance(calibrations, list):
        raise TypeError(
            f"{owner}: calibrations is {shown(calibrations)}; it must be a list, or None"
        )
    for one in calibrations:
        if not isinstance(one, dict) or set(one) != set(CALIBRATION_FIELDS):
            raise ValueError(
                f"{owner}: calibrations holds {shown(one)}; each must have the fields "
                f"{', '.join(CALIBRATION_FIELDS)}: make it again with `ospruner calibrate`"
            )
        check_choice(f"{owner}: calibrations", "mode", one["mode"], MODES)
        names = ["max_loss", "confidence", "tokens_saved"]
        for name in [*names, "threshold"] if one["mode"] == "threshold" else names:
            check_number(f"{owner}: calibrations", name, one[name], 0, 1)
        check_number(f"{owner}: calibrations", "loss", abs(one["loss"]), 0, 1)
        if (price := one["price"]) is not None:
            check_number(f"{owner}: calibrations", "price", price, 0, math.inf)
        check_integer(f"{owner}: calibrations", "problems", one["problems"], 1)


def _base_config(base_type: str, literals: dict[str, Any]) -> PreTrainedConfig:
    """A base's configuration from its fields; transformers' own classes check what fits what.

    Raises:
        ValueError: they contradict each other, or one is of a wrong type.
    """
    try:
        return CONFIG_MAPPING[base_type](**literals)
    except Exception as error:  # what checks raise is private to huggingface_hub
        layers, kinds = literals.get("num_hidden_layers"), literals.get("layer_types")
        why = str(error)
        if isinstance(kinds, list) and layers != len(kinds):
            why = f"num_hidden_layers is {layers!r}, but layer_types names {len(kinds)} layers"
        raise ValueError(
            f"text_config is no configuration of a {base_type!r} base: {why}. It was edited or "
            "damaged: give it the base's own values, or copy the policy again"
        ) from error


def plain_text_config(base_config: PreTrainedConfig) -> dict[str, Any]:
    """The text part of a base's configuration, without how this copy of it was loaded."""
    literals: dict[str, Any] = base_config.get_text_config().to_dict()
    for name in ("auto_map", "quantization_config"):
        literals.pop(name, None)
    return literals


def rotary_settings(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """A base's rotary settings: one for all layers, or one for each type of layer."""
    text = config.get_text_config()
    rope: dict[str, Any] = vars(text).get("rope_parameters") or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]


def position_switch(config: PreTrainedConfig) -> tuple[str, int] | None:
    """Where rotary frequencies begin to change with a text's length; None where they never do.

    Returns:
        The `rope_type`, and the longest text (in tokens) before the change.
    """
    for one in rotary_settings(config):
        kind = str(one.get("rope_type"))
        if kind == "longrope":
            return kind, int(one["original_max_position_embeddings"])
        if "dynamic" in kind:
            return kind, int(config.get_text_config().max_position_embeddings)
    return None


def check_length(config: PreTrainedConfig, tokens: int | Tensor, what: str) -> None:
    """Refuses a text in which the base's positions change while it is written.

    Step by step each token sees the frequencies of the length so far; in one pass, as in training
    and scoring, all see those of the whole. Up to the change the two are equal.

    Args:
        config: the base's.
        tokens: the text's length.
        what: has this length, for the message.

    Raises:
        ValueError: naming the length, and the one from which on positions change.
    """
    switch = position_switch(config)
    if switch is not None and tokens >= switch[1]:
        raise ValueError(
            f"{what} may reach {int(tokens)} tokens, but this base's positions (rope_type "
            f"{switch[0]!r}) change from {switch[1]} tokens on, and the policy would read other "
            "hidden states than it was trained on: keep texts shorter (max_new_tokens, "
            "--max-tokens), or use the base without a policy"
        )


_POSITIONS = "max_position_embeddings"
# Kinds of scaled rotary positions whose longest text the configuration names already.
_NAMED_LENGTH = ("default", "llama3", "longrope", "su")


def max_positions(config: PreTrainedConfig) -> int | None:
    """The longest text, in tokens, that a base was made for; None where nothing limits it.

    What scales positions (yarn, linear, dynamic) stretches the length it was trained on.

    Args:
        config: a base's.
    """
    fields = config.get_text_config().to_dict()
    names = {_POSITIONS, config.get_text_config().attribute_map.get(_POSITIONS, _POSITIONS)}
    trained = next((fields[name] for name in names if isinstance(fields.get(name), int)), None)
    if trained is None:
        return None
    scaled = fields.get("rope_parameters") or {}
    kinds = [scaled, *(kind for kind in scaled.values() if isinstance(kind, dict))]
    lengths = [
        kind["factor"] * (kind.get(f"original_{_POSITIONS}") or trained)
        for kind in kinds
        if kind.get("factor") and kind.get("rope_type") not in _NAMED_LENGTH
    ]
    return max([trained, *map(int, lengths)])


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


def shown(value: object) -> str:
    """A value in an error message: the beginning of a long one, which may come from anywhere."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"


def check_choice(owner: str, name: str, value: object, allowed: Sequence[str]) -> None:
    """Checks that a setting is one of a few words.

    Raises:
        ValueError: it is none of them.
    """
    if value not in allowed:
        words = " or ".join(map(repr, allowed))
        raise ValueError(f"{owner}: {name} is {shown(value)}; it must be {words}")


def check_integer(owner: str, name: str, value: object, low: int | None = None) -> None:
    """Checks that a setting is an integer (True and False are none), and not below `low`.

    Raises:
        TypeError: it is of another type.
        ValueError: it is too small.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{owner}: {name} is {shown(value)}; it must be an integer")
    if low is not None and value < low:
        raise ValueError(f"{owner}: {name} is {value}; it must be {low} or more")


def check_number(
    owner: str, name: str, value: object, low: float, high: float, open_low: bool = False
) -> None:
    """Checks that a setting is a number (True and False are none) in [low, high].

    Args:
        owner: whose setting it is.
        name: the setting.
        value: what was given.
        low: the least allowed value.
        high: the greatest; inf for none.
        open_low: whether `low` itself is not allowed.

    Raises:
        TypeError: it is of another type.
        ValueError: it lies outside, or is NaN.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{owner}: {name} is {shown(value)}; it must be a number")
    # Compared, not converted: an integer may be too large for a float. NaN lies nowhere.
    inside = (low < value if open_low else low <= value) and value <= high and value < math.inf
    if not inside:
        bracket = "(" if open_low else "["
        allowed = f"{bracket}{low}, inf)" if high == math.inf else f"{bracket}{low}, {high:.4g}]"
        raise ValueError(f"{owner}: {name} is {value}; it must lie in {allowed}")


def check_flag(owner: str, name: str, value: object) -> None:
    """Checks that a setting is True or False.

    Raises:
        TypeError: it is anything else.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{owner}: {name} is {shown(value)}; it must be True or False")
