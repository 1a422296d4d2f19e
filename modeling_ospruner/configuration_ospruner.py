"""The configuration of a stopping policy: which base it stops, how it was made, how it is used.

Beside it the checks of settings that all files share: their errors name the field, what was given,
and what is allowed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto import CONFIG_MAPPING

__all__ = ["OSPrunerConfig"]


VERSION = "0.1.0"
"""Of this code, also where it was downloaded with a policy; written into each configuration."""

TUNINGS = ("layers", "attention", "lora", "head")
METHODS = ("os-pruner", "probe", "convergence", "flashthink")
MODES = ("sample", "threshold")

CALIBRATION_FIELDS = {
    "max_loss": "of accuracy against the full trace, as a share, that the promise allows",
    "confidence": "how surely it is kept, on problems like those of the calibration",
    "threshold": "the stop probability at which mode 'threshold' keeps it",
    "loss": "mean loss over the calibration's problems",
    "tokens_saved": "share of their full traces' thinking tokens",
    "problems": "how many there were",
    "test": "'exact' or 'betting'",
    "data_hash": "of their labels",
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
            with "lora" nothing is copied, and adapters beside the base's own layers train.
        lora_rank: of these adapters.
        length_penalty: lambda, in reward per thinking token, that the policy was trained for.
        step_stride: the policy decides at every k-th step end, as its labels did.
        method: "os-pruner", or a baseline: "probe", "convergence", "flashthink" (whose base is a
            verifier that reads another model's thinking; it does not generate).
        default_mode: how generate decides with `stop_policy=True`: "sample" or "threshold".
        default_threshold: the stop probability at which mode "threshold" stops.
        reasoning_format: the literals of `ReasoningFormat`.
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
    length_penalty: float = 0.0
    step_stride: int = 1
    method: str = "os-pruner"
    default_mode: str = "sample"
    default_threshold: float = 0.5
    reasoning_format: dict[str, str] | None = None
    calibrations: list[dict[str, Any]] | None = None
    ospruner_version: str | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        known_type = kwargs.pop("model_type", self.model_type)
        if known_type != self.model_type:
            raise ValueError(f"model_type is {known_type!r}; it must be {self.model_type!r}")
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
        check_number(owner, "length_penalty (lambda)", self.length_penalty, 0, math.inf)
        check_number(owner, "default_threshold", self.default_threshold, 0, 1)
        check_integer(owner, "lora_rank", self.lora_rank, 1)
        check_integer(owner, "step_stride", self.step_stride, 1)
        check_integer(owner, "num_policy_layers", self.num_policy_layers, 0)
        if not isinstance(self.base_model_name_or_path, str):
            raise TypeError(
                f"base_model_name_or_path is {self.base_model_name_or_path!r}; it must be the "
                "base's Hub id or folder"
            )
        kinds = (("base_revision", str), ("ospruner_version", str), ("reasoning_format", dict))
        for name, kind in kinds:
            value = vars(self)[name]
            if not (value is None or isinstance(value, kind)):
                words = f"it must be a {kind.__name__}, or None"
                raise TypeError(f"{owner}: {name} is {shown(value)}; {words}")
        check_calibrations(owner, self.calibrations)


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
        for name in ("max_loss", "confidence", "threshold", "tokens_saved"):
            check_number(f"{owner}: calibrations", name, one[name], 0, 1)
        check_number(f"{owner}: calibrations", "loss", abs(one["loss"]), 0, 1)
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
