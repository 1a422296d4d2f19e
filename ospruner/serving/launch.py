"""What `ospruner serve` does for any engine: it looks at the policy and the options."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from modeling_ospruner.configuration_ospruner import OSPrunerConfig

from .requests import StopRequest

__all__ = ["served_policy"]


def served_policy(
    policy: str, asked: StopRequest, arguments: Sequence[str], ours: Sequence[str]
) -> tuple[OSPrunerConfig, Namespace]:
    """The configuration of a policy that is to be served.

    Args:
        policy: its folder or Hub id.
        asked: the server's defaults, which what the policy promises is put into.
        arguments: the engine's own.
        ours: options that `ospruner serve` sets.

    Returns:
        With it what the engine's options say of `revision` and `reasoning_parser`.

    Raises:
        ValueError: no policy, wrong defaults, or an option that is set here.
        OSError: the policy is not found.
    """
    if given := [one for one in arguments if one.partition("=")[0] in ours]:
        raise ValueError(f"{', '.join(given)}: `ospruner serve` sets it by itself; leave it out")
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--revision", default="main")
    parser.add_argument("--reasoning-parser")
    options, _ = parser.parse_known_args(arguments)
    config: OSPrunerConfig = OSPrunerConfig.from_pretrained(policy, revision=options.revision)
    asked.settle(config)
    return config, options
