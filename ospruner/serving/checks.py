"""Which policies an engine can serve: looked at once, when it starts."""

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

import torch
from transformers import AutoConfig
from transformers.core_model_loading import revert_weight_conversion

from modeling_ospruner.configuration_ospruner import OSPrunerConfig, position_switch
from modeling_ospruner.modeling_ospruner import (
    base_fingerprint,
    check_base,
    check_fingerprint,
    empty_policy,
    read_tensors,
)
from modeling_ospruner.policy_ospruner import ADAPTER_SCALE, StoppingPolicy
from ospruner.bases import empty_base

# Tensors as an engine reads them: by their names in their files, the base's under `base.`.
Weights = Iterable[tuple[str, torch.Tensor]]
# By the name of a setting: the values with which a policy works, and what to do about others.
Works = Mapping[str, tuple[tuple[Any, ...], str]]


def check_settings(settings: object, works: Works, engine: str) -> None:
    """Refuses an engine in which a policy would be silently wrong, or was never thought of.

    Its `settings` hold each name in `works`, which may have dots.
    """
    for name, (allowed, advice) in works.items():
        value = attrgetter(name)(settings)
        if value not in allowed:
            raise ValueError(
                f"{name.rpartition('.')[2]} is {value!r}, and the policy inside {engine} works "
                f"with {' or '.join(map(repr, allowed))}: {advice}"
            )


def check_policy(
    config: OSPrunerConfig,
    policy: str,  # its folder or Hub id
    engine: str,  # as it calls itself
    unfit: str | None,  # why it cannot run the policy on its base; None if it can
    revision: str | None = None,  # of the policy's repository
    download_dir: str | None = None,  # of the engine's; None for the Hub's own cache
    weights: bool = True,  # whether the engine will read any
) -> None:
    """Refuses a policy that no engine stops with, that does not fit its base, or that is broken.

    Raises:
        ValueError: naming what does not fit and what to do; or see `read_tensors`.
        OSError: the base or the policy's file is not found.
    """
    where, kind = config.base_model_name_or_path, config.get_text_config().model_type
    if config.method == "flashthink":
        raise ValueError(
            f"the policy on {where!r} is a verifier, which reads another model's thinking; inside "
            f"{engine} a policy stops the model that it is served with"
        )
    if unfit is not None:
        raise ValueError(
            f"the base {where!r} is a {kind}; inside {engine} {unfit}: serve it with another "
            "engine (ospruner serve --engine), or generate with transformers: "
            "model.generate(stop_policy=True)"
        )
    try:
        base_config = AutoConfig.from_pretrained(where, revision=config.base_revision)
    except OSError as error:
        raise OSError(
            f"the base {where!r} at revision {config.base_revision!r}, which the policy pins, "
            f"cannot be loaded: {error}"
        ) from error
    check_base(config, base_config, where)
    if (switch := position_switch(base_config)) is not None:
        raise ValueError(
            f"the base {where!r} has rope_type {switch[0]!r}, whose positions change with the "
            f"text's length (from {switch[1]} tokens on), and {engine} computes them otherwise "
            "than transformers, where the policy was trained: generate with transformers"
        )
    if weights:
        check_base_weights(config, download_dir)
        hub = {"revision": revision, "cache_dir": download_dir}
        read_tensors(policy, config, empty_policy(config, empty_base(base_config)), hub)


def check_base_weights(config: OSPrunerConfig, download_dir: str | None) -> None:
    """Refuses a pinned base of other weights than the policy's, by their fingerprints.

    A quantised base's are not compared: they may be another version of the same weights.
    """
    where, revision = config.base_model_name_or_path, config.base_revision
    if quantisation(config) is None:
        check_fingerprint(config, where, base_fingerprint(where, revision, cache_dir=download_dir))


def stored_tail(
    config: OSPrunerConfig, own: Mapping[str, torch.Tensor]
) -> tuple[StoppingPolicy, dict[str, torch.Tensor]]:
    """A policy without weights, and its tail's as checkpoints name and stack them.

    Engines' models read no other form.
    """
    policy = empty_policy(config, empty_base(config.get_text_config()))
    assert policy.tail is not None
    named = {name.removeprefix("tail."): own[name] for name in own if name.startswith("tail.")}
    return policy, revert_weight_conversion(policy.tail, named)


def quantisation(config: OSPrunerConfig) -> dict[str, object] | None:
    """How the pinned base's checkpoint is quantised; None where it is not."""
    where, revision = config.base_model_name_or_path, config.base_revision
    stored = AutoConfig.from_pretrained(where, revision=revision)
    return vars(stored).get("quantization_config")


def base_weights(weights: Weights, config: OSPrunerConfig, own: dict[str, torch.Tensor]) -> Weights:
    """The base's tensors by its own names; the policy's, by its own, are put into `own`.

    Those of a policy of adapters become layers: W + scale B A, in copies of the base's tensors.

    Raises:
        ValueError: an adapter stands beside a tensor that is quantised, or beside none.
    """
    names, copied = dict[str, str](), dict[str, torch.Tensor]()
    if config.adapter_rank:
        layers = empty_policy(config, empty_base(config.get_text_config())).copied
        names = {f"model.layers.{number}.": f"tail.layers.{i}." for i, number in enumerate(layers)}
        names["model.norm."] = "tail.norm."
    for place, tensor in weights:
        name = place.removeprefix("base.")
        if name == place:
            own[place.removeprefix("policy.")] = tensor
            continue
        for theirs, ours in names.items():
            if name.startswith(theirs):
                copied[ours + name.removeprefix(theirs)] = tensor
        yield name, tensor
    for name in [one for one in own if ".lora_A." in one]:
        module = name.partition(".lora_A.")[0]
        down, up = own.pop(name), own.pop(name.replace(".lora_A.", ".lora_B."))  # (r, in), (out, r)
        weight = copied.get(f"{module}.weight")
        if weight is None or not weight.is_floating_point() or weight.itemsize < 2:
            raise ValueError(
                f"the policy's adapter of {module} cannot be merged: the base's checkpoint holds "
                "its weight quantised: train the policy with adapter_rank 0"
            )
        change = ADAPTER_SCALE * (up.float() @ down.float())  # (out, in)
        copied[f"{module}.weight"] = (weight.float() + change.to(weight.device)).to(weight.dtype)
    own.update(copied)
