"""What a policy's `config.json` says: which base it stops, how it was trained, how it is used.

Beside it prices, a base's positions, and the checks of settings that all files share: their errors
name the field, what was given, and what is allowed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto import CONFIG_MAPPING

VERSION = "0.1.0"
"""Of this code, also where it was downloaded with a policy; written into each configuration."""

TUNINGS = ("layers", "queries")
MODES = ("sample", "threshold")
HEADS = ("fixed", "price")
PRICE_RAMPS = 5  # rises of a price head's logit along the prices; it has one output more

# What transformers itself writes into a configuration file, or passes beside the fields.
_TRANSFORMERS_KEYS = {
    *("_attn_implementation_internal", "_commit_hash", "_experts_implementation_internal"),
    *("_name_or_path", "attn_implementation", "auto_map", "experts_implementation"),
    *("name_or_path", "torch_dtype", "transformers_version"),
}


@dataclass(frozen=True)
class PriceRange:
    """The prices of a token that a policy with the head "price" knows: 0 to `high`.

    A price's place is p = 5 log(1 + lambda / e) / log(1 + high / e) in [0, 5] with e = low / 5:
    logarithmic above `low`, linear near 0, so that 0 has a place, too.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        check_number("price_range", "low", self.low, 0, math.inf, open_low=True)
        check_number("price_range", "high", self.high, self.low, math.inf, open_low=True)

    def check(self, owner: str, price: object) -> None:
        """Refuses what is no price that the policy knows, by name."""
        check_number(owner, "price", price, 0, math.inf)
        if price > self.high:  # type: ignore[operator]  # a number
            raise ValueError(
                f"{owner}: price is {price}, but the policy was trained for prices of a token from "
                f"0 to {self.high:g}: ask for one of these"
            )

    def place(self, price: float) -> float:
        """P of a price."""
        unit = self.low / 5
        return PRICE_RAMPS * math.log1p(price / unit) / math.log1p(self.high / unit)

    def price_at(self, place: float) -> float:
        """The price at a place; inf and NaN stay what they are."""
        if not place < math.inf:
            return place
        unit = self.low / 5
        return unit * math.expm1(place / PRICE_RAMPS * math.log1p(self.high / unit))


class OSPrunerConfig(PreTrainedConfig):
    """Configuration of `OSPrunerForCausalLM`."""

    model_type = "ospruner"
    sub_configs = {"text_config": AutoConfig}  # type: ignore[dict-item]

    text_config: dict[str, Any] | PreTrainedConfig | None = None  # the base's own
    base_model_name_or_path: str = ""  # the base's repository or folder
    base_revision: str | None = None  # the commit of that repository; None for a folder
    base_fingerprint: str | None = None  # of its weights; None where its files were not at hand
    # n, the layers that the policy copies from the base's end; with 0 its head reads the base's
    # last hidden state.
    num_policy_layers: int = 2
    # "layers" for whole copies (what a file without the field means, for defaults are not written);
    # "queries" attend to the base's own keys and values, and have no weights to make others.
    tuning: str = "layers"
    # Of low-rank adapters, which the file then holds in place of the copies' weights, and which are
    # merged into them when they are loaded; 0 for none.
    adapter_rank: int = 0
    head: str = "fixed"  # for one price (the paper's), or "price": said when generating
    price: float = 0.0  # of a token, in reward: the head's, or the one taken where none is said
    price_range: list[float] | None = None  # low and high of `PriceRange`, for the head "price"
    step_stride: int = 1  # the policy decides at every k-th step end, as its labels did
    method: str = "os-pruner"  # or the baseline that it is
    default_mode: str = "sample"  # how generate decides with `stop_policy=True`, or "threshold"
    default_threshold: float = 0.5  # the stop probability at which mode "threshold" stops
    reasoning_format: dict[str, Any] | None = None  # the literals of `ReasoningFormat`
    # How the problems that it was trained on were asked and graded; None for mathematics.
    task: dict[str, Any] | None = None
    # What `ospruner calibrate` promised, one object a promise; and by an effort's name the setting
    # that a server takes for it, with the mean thinking tokens, their share, the accuracy lost.
    calibrations: list[dict[str, Any]] | None = None
    efforts: dict[str, dict[str, Any]] | None = None
    ospruner_version: str | None = None  # of the package that saved the configuration
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        known_type = kwargs.pop("model_type", self.model_type)
        unknown = sorted(set(kwargs) - _TRANSFORMERS_KEYS)
        if unknown or known_type != self.model_type:
            raise ValueError(
                f"OSPrunerConfig of model_type {known_type!r} has no {', '.join(unknown)}. Its "
                f"fields are {', '.join(OSPrunerConfig.__annotations__)} (the first policies said "
                f"length_penalty for price: rename it). {saved_by(self.ospruner_version)}"
            )
        if isinstance(self.text_config, dict):
            self.text_config = _base_config(dict(self.text_config))
        self.check_fields()
        super().__post_init__(**kwargs)

    @classmethod
    def get_config_dict(cls, path: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """As transformers', with where it was found."""
        found, rest = super().get_config_dict(path, **kwargs)
        return found, {**rest, "name_or_path": str(path)}  # as AutoConfig says it

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """What a file holds, or ValueError; a base that begins with "../" lies beside it."""
        try:
            own, name = kwargs.get("name_or_path", ""), "base_model_name_or_path"
            if str(config_dict.get(name)).startswith("../") and os.path.isdir(own):
                beside = os.path.abspath(os.path.join(own, config_dict[name]))
                config_dict = config_dict | {name: beside}
            return super().from_dict(config_dict, **kwargs)
        except (TypeError, AttributeError, RecursionError) as error:  # wrong types, in a file
            raise ValueError(f"config.json: {error}: copy the policy again") from error

    def validate(self) -> None:
        """What transformers calls before it saves a configuration."""
        super().validate()  # type: ignore[misc]  # made by its @strict
        self.check_fields()

    # Not transformers' `@strict`: its errors are no ValueError or TypeError, and it lets NaN pass.
    def check_fields(self) -> None:
        """Refuses a field of a wrong type or value: names it, its value and what is allowed."""
        owner = type(self).__name__
        for name, words in (("tuning", TUNINGS), ("default_mode", MODES), ("head", HEADS)):
            check_choice(owner, name, vars(self)[name], words)
        check_number(owner, "price", self.price, 0, math.inf)
        check_number(owner, "default_threshold", self.default_threshold, 0, 1)
        for name, low in (("step_stride", 1), ("adapter_rank", 0), ("num_policy_layers", 0)):
            check_integer(owner, name, vars(self)[name], low)
        for names, kind in (
            ("text_config", PreTrainedConfig | None),
            ("base_model_name_or_path method", str),
            ("base_revision ospruner_version", str | None),
            ("reasoning_format task efforts", dict | None),
            ("calibrations", list | None),
        ):
            for name in names.split():
                if not isinstance(value := vars(self)[name], kind):
                    raise TypeError(f"{owner}: {name} is {shown(value)}; it must be {kind}")
        for one in self.calibrations or ():
            if lacks := {"max_loss", "confidence", "mode", "threshold", "price"} - {*one}:
                raise ValueError(f"{owner}: {sorted(lacks)} lack in calibrations: calibrate anew")
        ranged = self.price_range
        pair = isinstance(ranged, list | tuple) and len(ranged) == 2
        if not pair if self.head == "price" else ranged is not None:
            raise ValueError(
                f"{owner}: head is {self.head!r} and price_range {shown(ranged)}; the "
                "head 'price' has one, [low, high], and no other has"
            )
        if self.prices is not None:
            self.prices.check(owner, self.price)

    @property
    def prices(self) -> PriceRange | None:
        """The prices that the policy knows; None with the head "fixed"."""
        return None if self.price_range is None else PriceRange(*self.price_range)


def saved_by(version: str | None) -> str:
    """What to do about a policy that does not load, by the version that saved it."""
    newer = version is not None and version.split(".") > VERSION.split(".")
    said = f"It was saved by ospruner {version or '(unknown version)'}, this is {VERSION}"
    return f"{said}: upgrade with pip install -U 'ospruner>={version}'" if newer else said


def _base_config(literals: dict[str, Any]) -> PreTrainedConfig:
    """A base's configuration from its fields; transformers' own classes check what fits what."""
    base_type = literals.pop("model_type", None)
    if base_type and base_type not in CONFIG_MAPPING:
        # Code of its own: whether it may run is decided when the base is loaded.
        return type("ForeignConfig", (PreTrainedConfig,), {"model_type": base_type})(**literals)
    try:
        return CONFIG_MAPPING[base_type](**literals)
    except Exception as error:  # what checks raise is private to huggingface_hub
        said = f"text_config is no base's configuration (model_type {base_type!r}: {error})"
        raise ValueError(f"{said}: config.json is damaged; copy the policy again") from error


def rotary_settings(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """A base's rotary settings: one for all layers, or one for each type of layer."""
    rope: dict[str, Any] = vars(config.get_text_config()).get("rope_parameters") or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]


def max_positions(config: PreTrainedConfig) -> int | None:
    """The longest text, in tokens, that a base was made for; None where nothing limits it.

    What scales positions (yarn, linear, dynamic) stretches the length it was trained on.
    """
    # By the name that the family gives it.
    trained = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(trained, int):
        return None
    lengths = [
        int(one["factor"] * (one.get("original_max_position_embeddings") or trained))
        for one in rotary_settings(config)
        # The other kinds name their longest text already.
        if one.get("factor") and one.get("rope_type") not in ("default", "llama3", "longrope", "su")
    ]
    return max([trained, *lengths])


def position_switch(config: PreTrainedConfig) -> tuple[str, int] | None:
    """Of which `rope_type`, and from what length in tokens on, positions change; None for never."""
    for one in rotary_settings(config):
        kind = str(one.get("rope_type"))
        if kind == "longrope":
            return kind, int(one["original_max_position_embeddings"])
        if "dynamic" in kind:
            return kind, int(config.get_text_config().max_position_embeddings)
    return None


def check_length(config: PreTrainedConfig, tokens: int | Tensor, what: str) -> None:
    """Refuses a text in which the base's positions change while it is written.

    Step by step a token sees the frequencies of the length so far, in one pass those of the whole.
    """
    switch = position_switch(config)
    if switch is not None and tokens >= switch[1]:
        raise ValueError(
            f"{what} may reach {int(tokens)} tokens, but this base's positions (rope_type "
            f"{switch[0]!r}) change from {switch[1]} tokens on, and the policy would read other "
            "hidden states than it was trained on: keep texts shorter (max_new_tokens, "
            "--max-tokens), or use the base without a policy"
        )


def shown(value: object) -> str:
    """A value in an error message: the beginning of a long one, which may come from anywhere."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"


def check_choice(owner: str, name: str, value: object, allowed: Sequence[str]) -> None:
    """Refuses what is none of a few words."""
    if value not in allowed:
        words = " or ".join(map(repr, allowed))
        raise ValueError(f"{owner}: {name} is {shown(value)}; it must be {words}")


def check_integer(owner: str, name: str, value: object, low: float = -math.inf) -> None:
    """Refuses what is no integer (True and False are none) of `low` or more."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{owner}: {name} is {shown(value)}; it must be an integer")
    if value < low:
        raise ValueError(f"{owner}: {name} is {value}; it must be {low} or more")


def check_number(
    owner: str, name: str, value: object, low: float, high: float, open_low: bool = False
) -> None:
    """Refuses what is no number (True, False and NaN are none) in [low, high] or (low, high]."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{owner}: {name} is {shown(value)}; it must be a number")
    # Compared, not converted: an integer may be too large for a float. NaN lies nowhere.
    inside = (low < value if open_low else low <= value) and value <= high and value < math.inf
    if not inside:
        bracket = "(" if open_low else "["
        allowed = f"{bracket}{low}, inf)" if high == math.inf else f"{bracket}{low}, {high:.4g}]"
        raise ValueError(f"{owner}: {name} is {value}; it must lie in {allowed}")
