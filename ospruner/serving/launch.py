"""What `ospruner serve` does for any engine: it looks at the policy and the options."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from modeling_ospruner.configuration_ospruner import OSPrunerConfig
from modeling_ospruner.stopping_ospruner import StopPolicyConfig
from ospruner.provenance import check_policy

from .requests import StopRequest

__all__ = ["engine_options", "served_policy"]


def engine_options(arguments: Sequence[str]) -> Namespace:
    """What an engine's own arguments say that we need to know."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--revision", default="main")
    parser.add_argument("--reasoning-parser")
    parser.add_argument("--gpu-memory-utilization", type=float)
    parser.add_argument("--kv-cache-memory-bytes")
    return parser.parse_known_args(arguments)[0]


def served_policy(
    policy: str,  # its folder or Hub id
    asked: StopRequest,  # the server's defaults, which what the policy promises is put into
    arguments: Sequence[str],  # the engine's own
    ours: Sequence[str],  # options that `ospruner serve` sets
) -> OSPrunerConfig:
    """The configuration of a policy that is to be served; what that is, is printed.

    Raises:
        ValueError: no policy, wrong defaults, or an option that is set here.
        OSError: the policy is not found.
    """
    if given := [one for one in arguments if one.partition("=")[0] in ours]:
        raise ValueError(f"{', '.join(given)}: `ospruner serve` sets it by itself; leave it out")
    check_policy(policy)
    config: OSPrunerConfig = OSPrunerConfig.from_pretrained(
        policy, revision=engine_options(arguments).revision
    )
    asked.settle(config)
    settings = StopPolicyConfig(**asked.fields).with_defaults(config)
    how = "by draws" if settings.mode == "sample" else f"from probability {settings.threshold:g} on"
    promises = [
        f"at most {one['max_loss']:.3g} of accuracy lost, with confidence {one['confidence']:g}"
        for one in config.calibrations or []
    ]
    print(
        f"Serving {policy} on {config.base_model_name_or_path}: "
        f"{'stops' if asked.on else 'stops those who ask,'} {how}, at price {settings.price:g} of "
        f"a token by default; promises: {'; '.join(promises) or 'none'}",
        flush=True,
    )
    return config
