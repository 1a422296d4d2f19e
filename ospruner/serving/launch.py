"""What `ospruner serve` does for any engine: it looks at the policy and the options."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from modeling_ospruner.configuration_ospruner import OSPrunerConfig

from .requests import StopRequest

__all__ = ["served_policy", "value_of"]


def served_policy(
    policy: str, asked: StopRequest, arguments: Sequence[str], ours: Sequence[str]
) -> OSPrunerConfig:
    """The configuration of a policy that is to be served.

    Args:
        policy: its folder or Hub id.
        asked: the server's defaults, which what the policy promises is put into.
        arguments: the engine's own, `--revision` among them.
        ours: options that `ospruner serve` sets.

    Raises:
        ValueError: no policy, wrong defaults, or an option that is set here.
        OSError: the policy is not found.
    """
    if given := [one for one in arguments if one.partition("=")[0] in ours]:
        raise ValueError(f"{', '.join(given)}: `ospruner serve` sets it by itself; leave it out")
    revision = value_of("--revision", arguments)
    config: OSPrunerConfig = OSPrunerConfig.from_pretrained(policy, revision=revision or "main")
    asked.settle(config)
    return config


def value_of(name: str, arguments: Sequence[str]) -> str | None:
    """What a command line gives to an option: `--name value` or `--name=value`; None for none."""
    for one, following in pairwise([*arguments, ""]):
        if one == name:
            return following
        if one.startswith(f"{name}="):
            return one.partition("=")[2]
    return None
