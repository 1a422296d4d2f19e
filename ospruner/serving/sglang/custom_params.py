"""What a request to an SGLang server says about stopping: the keys of `serving.requests`.

They stand in `custom_params`: of `sampling_params` in SGLang's own dialect, else of the body.
Nothing here knows SGLang, so that it is tested where SGLang is not installed.
"""

from __future__ import annotations

import json
import os
from typing import Any

from modeling_ospruner.configuration_ospruner import OSPrunerConfig, shown

from ..requests import ID, StopRequest, check_places, translated

OWNER = "custom_params"
DEFAULTS_VARIABLE = "OSPRUNER_SERVER_DEFAULTS"  # of the environment: its defaults, as JSON
RECORD = "stop_record"  # in an answer's `meta_info`, what happened: a list of one record
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


def server_defaults(config: OSPrunerConfig) -> StopRequest:
    """The defaults of this process's server, with what its policy promises."""
    said = json.loads(os.environ.get(DEFAULTS_VARIABLE, "null"))
    defaults = StopRequest(said, DEFAULTS_VARIABLE, server=True)
    defaults.settle(config)
    return defaults


def excluded(params: Any) -> dict[str, Any]:
    """What in a request's parameters (SGLang's `SamplingParams`) excludes the policy, by name."""
    found = {name: getattr(params, name) for name in (*_GRAMMARS, "beam_width")}
    return {name: value for name, value in found.items() if value and (name, value) != _ONE_BEAM}


def check_body(request: Any) -> None:
    """Refuses a body over HTTP in which our keys, or budgets, stand where nobody reads.

    All else that is wrong in it is SGLang's to refuse. The request is FastAPI's, which keeps the
    body once it has been read; None for none.
    """
    body = None if request is None else vars(request).get("_body")
    try:
        sent = json.loads(body or "null")
    except (ValueError, RecursionError):
        return
    if isinstance(sent, dict):
        own = f"{OWNER!r} (in SGLang's own dialect that of 'sampling_params')"
        check_places(sent, (OWNER, f"sampling_params.{OWNER}"), own)


def read_chat(request: Any, config: OSPrunerConfig, parser: str | None) -> None:
    """Puts the effort of a chat (SGLang's `ChatCompletionRequest`) into its keys.

    The `parser` is the server's `--reasoning-parser`, which looks at replies alone.

    Raises:
        ValueError: tools beside a forced box, or a prefilled reply that does not think.
    """
    defaults = server_defaults(config)
    body = {OWNER: request.custom_params, "reasoning_effort": request.reasoning_effort}
    _, keys = translated(body, OWNER, "", defaults, config)
    formed = request.response_format or request.regex or request.ebnf
    if keys is not None and not formed and request.tool_choice in ("auto", "none"):
        request.custom_params = keys  # else the policy, which they would ask for, is off
    asked = StopRequest(request.custom_params, OWNER)
    asked.check_tools(request.tools, request.tool_choice, defaults)
    if parser is None or not (request.continue_final_message and request.separate_reasoning):
        return
    begun = str(request.messages[-1].content)
    if "<think>" not in begun or "</think>" in begun:
        raise ValueError(
            "continue_final_message is True, and the reply that it begins does not think: "
            f"SGLang's parser {parser!r} takes what follows for thinking. Send separate_reasoning "
            "false, or the rendered prompt to /generate"
        )


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
    request.check_price(config)
    settings = request.settings(server_defaults(config), params.min_new_tokens)
    marked = (config.reasoning_format or {}).get("think_end", True)
    strings = [*(params.stop_strs or ()), *(params.stop_regex_strs or ())]
    if marked and strings and settings is not None:
        raise ValueError(
            f"stop is {shown(strings)}, for which SGLang looks in the thinking, too, and "
            "would cut it: send stop_token_ids, or stop_policy false in custom_params, or serve "
            "with vLLM, where strings end answers alone"
        )
    if params.n > 1 and "seed" in request.fields:
        raise ValueError(
            f"{OWNER}: stop_seed is {request.fields['seed']} and n is {params.n}, and nothing "
            "tells SGLang's n texts apart: send n requests, each with its stop_sample_index, or "
            "leave stop_seed out"
        )
    return request
