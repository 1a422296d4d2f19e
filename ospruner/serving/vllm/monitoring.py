"""What a vLLM server tells of its stops: the route `GET /ospruner/stops/{stop_id}`, and counters.

The plug-in with the route also refuses requests in which the policy's keys would do nothing. vLLM
loads it where `VLLM_PLUGINS` names `ospruner_stops` (`ospruner serve` does). Prometheus
counts where the engine runs. A server's `/metrics` sees the counters where vLLM and they share a
folder, `PROMETHEUS_MULTIPROC_DIR` (`ospruner serve` makes one).
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.routing import APIRoute
from prometheus_client import Counter

from modeling_ospruner.configuration_ospruner import OSPrunerConfig, shown
from modeling_ospruner.stopping_ospruner import StopRecord

from ..requests import DEFAULTS, ID, KEYS, ON, StopRequest
from ..rows import ServedRow, in_json
from ..traffic import bin_of, observed
from .plugin import HARMONY_PARSER

__all__ = ["StopRoutes", "check_body", "count_ended"]

_GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
_LABELS = ("group", "reason")
_ENDED = Counter(
    "ospruner_thinking_ended_total",
    "Requests whose thinking has ended: group is policy or control, reason policy, budget, natural",
    _LABELS,
)
_TOKENS = Counter(
    "ospruner_thinking_tokens_total", "Thinking tokens of the requests that have ended it", _LABELS
)

_PROMISED = Counter(
    "ospruner_promised_total",
    "Requests that stopped as a calibration promised, by the bins of the calibration's traces",
    ("max_loss", "confidence", "signal", "bin"),
)


def count_ended(row: ServedRow) -> None:
    """Counts a request whose thinking has ended, and what was promised of it."""
    record, promise = row.record, row.promise
    labels = ("control" if row.control else "policy", record.reason)
    _ENDED.labels(*labels).inc()
    _TOKENS.labels(*labels).inc(record.thinking_tokens)
    if promise is not None:
        for signal, value in observed(record).items():
            place = bin_of(promise["traffic"][signal]["edges"], value)
            _PROMISED.labels(promise["max_loss"], promise["confidence"], signal, place).inc()


def check_body(
    body: object, defaults: StopRequest, config: OSPrunerConfig, parses_calls: bool
) -> None:
    """Refuses a request over HTTP in which the policy's keys would do nothing, or break a call.

    Args:
        body: what was sent, as JSON. All else that is wrong in it is vLLM's to refuse.
        defaults: the server's.
        config: the policy's.
        parses_calls: whether calls of tools are found in replies.

    Raises:
        ValueError: a key stands beside `vllm_xargs`, or in it where beam search ignores it; the
            policy does not know the price; or tools are offered where none could be called.
    """
    if not isinstance(body, dict):
        return
    keys, extra = {ON, ID, *KEYS}, body.get("vllm_xargs")
    extra = extra if isinstance(extra, dict) else {}
    if beside := sorted(keys.intersection(body)):
        raise ValueError(f"{beside} would do nothing here: send it within 'vllm_xargs'")
    if body.get("use_beam_search") and (asked := sorted(keys.intersection(extra))):
        raise ValueError(
            f"use_beam_search is {shown(body['use_beam_search'])}, and vllm_xargs has {asked}: "
            "beam search does not stop with the policy; leave one of them out"
        )
    request = StopRequest(extra)
    request.check_price(config)
    tools, choice = body.get("tools"), body.get("tool_choice", "auto")
    if tools and not parses_calls and choice != "none":
        raise ValueError(
            "tools are offered, but of a GPT-OSS policy's replies calls are not parsed here: "
            "send tool_choice 'none', or the rendered prompt to /v1/completions with stop_answer "
            "'tools', and parse the text"
        )
    request.check_tools(tools, choice, defaults)


class StopRoutes:
    """An endpoint plug-in of vLLM (its `EndpointPlugin`)."""

    name = "ospruner_stops"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Adds the route, and a look at the bodies of vLLM's own routes."""
        app.add_api_route("/ospruner/stops/{stop_id:path}", stop_record, methods=["GET"])
        for route in list(app.routes):
            if isinstance(route, APIRoute) and route.path in _GENERATING:
                app.add_api_route(  # vLLM lets a plug-in's route replace its own
                    route.path,
                    route.endpoint,
                    methods=sorted(route.methods),
                    dependencies=[*route.dependencies, Depends(_checked_body)],
                    responses=route.responses,
                )

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Keeps what the routes ask."""
        defaults = StopRequest((args.additional_config or {}).get(DEFAULTS), server=True)
        config = engine_client.model_config.hf_config
        parses_calls = args.reasoning_parser != HARMONY_PARSER
        state.ospruner_engine = engine_client
        state.ospruner_check = lambda body: check_body(body, defaults, config, parses_calls)


async def _checked_body(request: Request) -> None:
    try:  # the body is parsed once: FastAPI asks the same object
        request.app.state.ospruner_check(await request.json())
    except ValueError as error:
        raise HTTPException(400, str(error)) from None


async def stop_record(stop_id: str, request: Request) -> dict[str, Any]:
    """The `StopRecord` of the last request with this `stop_id`; 404 where there is none."""
    engine: Any = request.app.state.ospruner_engine
    records = await engine.collective_rpc("ospruner_record", args=(stop_id,))
    if records[0] is None:
        raise HTTPException(
            404,
            f"no request had the stop_id {shown(stop_id)}, or its policy was off, or it is long "
            "ago",
        )
    return in_json(StopRecord(**records[0]))
