"""What a request to an SGLang server says about stopping: the keys of `serving.requests`.

They stand in `custom_params`: of `sampling_params` in SGLang's own dialect, else of the body.
Nothing here knows SGLang, so that it is tested where SGLang is not installed.
"""

from __future__ import annotations

import json
import os
from typing import Any

from modeling_ospruner.configuration_ospruner import OSPrunerConfig, shown

from ..requests import ID, StopRequest

__all__ = [
    "DEFAULTS_VARIABLE",
    "OWNER",
    "RECORD",
    "check_params",
    "check_tuning",
    "excluded",
    "server_defaults",
]

OWNER = "custom_params"

DEFAULTS_VARIABLE = "OSPRUNER_SERVER_DEFAULTS"
"""The environment variable that holds a server's defaults, as JSON."""

RECORD = "stop_record"
"""Under this name an answer's `meta_info` tells what happened: a list of one record."""

_ONE_BEAM = ("beam_width", 1)
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")


def check_tuning(config: OSPrunerConfig) -> None:
    """Refuses a policy of another kind than SGLang runs."""
    if config.tuning != "queries" or not config.num_policy_layers:
        raise ValueError(
            f"the policy has tuning {config.tuning!r} and {config.num_policy_layers} layers; "
            "inside SGLang policies of tuning 'queries' work, with one layer or more: serve this "
            "one with vLLM (ospruner serve --engine vllm), or train one with --tuning queries"
        )


def server_defaults() -> StopRequest:
    """The defaults of this process's server."""
    said = json.loads(os.environ.get(DEFAULTS_VARIABLE, "null"))
    return StopRequest(said, DEFAULTS_VARIABLE, server=True)


def excluded(params: Any) -> dict[str, Any]:
    """What in a request's parameters (SGLang's `SamplingParams`) excludes the policy, by name."""
    found = {name: getattr(params, name) for name in (*_GRAMMARS, "beam_width")}
    return {name: value for name, value in found.items() if value and (name, value) != _ONE_BEAM}


def check_params(params: Any, config: OSPrunerConfig) -> StopRequest:
    """The keys of SGLang's `SamplingParams`; refuses wrong ones by name: over HTTP, a 400."""
    request = StopRequest(params.custom_params, OWNER)
    if request.name is not None:
        raise ValueError(
            f"{OWNER}: {ID} is {shown(request.name)}; SGLang tells what happened with each answer, "
            "in meta_info: leave it out"
        )
    if request.on and (found := excluded(params)):
        raise ValueError(
            f"{OWNER}: stop_policy and {shown(found)} exclude each other: neither knows what the "
            "other one forces. Leave one of them out"
        )
    if params.n > 1 and "seed" in request.fields:
        raise ValueError(
            f"{OWNER}: stop_seed is {request.fields['seed']} and n is {params.n}, and nothing "
            "tells SGLang's n texts apart: send n requests, each with its stop_sample_index, or "
            "leave stop_seed out"
        )
    request.check_price(config)
    request.settings(server_defaults(), params.min_new_tokens)
    return request
