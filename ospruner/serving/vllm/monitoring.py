"""What a vLLM server tells of its stops: the route `GET /ospruner/stops/{stop_id}`, and counters.

The plug-in with the route also refuses requests in which the policy's keys would do nothing. vLLM
loads it where `VLLM_PLUGINS` names `ospruner_stops` (`ospruner serve` does). Prometheus
counts where the engine runs. A server's `/metrics` sees the counters where vLLM and they share a
folder, `PROMETHEUS_MULTIPROC_DIR` (`ospruner serve` makes one).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.routing import APIRoute
from prometheus_client import Counter

from modeling_ospruner.configuration_ospruner import shown
from modeling_ospruner.stopping_ospruner import StopRecord
from ospruner.serving.traffic import bin_of, observed

from ..requests import DEFAULTS, StopRequest, check_body, in_json
from .plugin import HARMONY_PARSER

__all__ = ["StopRoutes", "count", "count_promised"]

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


def count(record: StopRecord, control: bool) -> None:
    """Counts a request whose thinking has ended."""
    labels = ("control" if control else "policy", record.reason)
    _ENDED.labels(*labels).inc()
    _TOKENS.labels(*labels).inc(record.thinking_tokens)


def count_promised(record: StopRecord, promise: Mapping[str, Any]) -> None:
    """Counts a request that stopped as promised, for `ospruner doctor drift`.

    Args:
        record: of the request, whose thinking has ended.
        promise: the calibration, an entry of the configuration's `calibrations`.
    """
    for signal, value in observed(asdict(record)).items():
        place = bin_of(promise["traffic"][signal]["edges"], value)
        _PROMISED.labels(promise["max_loss"], promise["confidence"], signal, place).inc()


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
        state.ospruner_engine = engine_client
        state.ospruner_config = engine_client.model_config.hf_config
        state.ospruner_defaults = StopRequest(
            (args.additional_config or {}).get(DEFAULTS), server=True
        )
        state.ospruner_parses_calls = args.reasoning_parser != HARMONY_PARSER


async def _checked_body(request: Request) -> None:
    state = request.app.state
    try:
        body = await request.json()  # which is parsed once: FastAPI asks the same object
        check_body(
            body, state.ospruner_defaults, state.ospruner_config, state.ospruner_parses_calls
        )
    except ValueError as error:
        raise HTTPException(400, str(error)) from None


async def stop_record(stop_id: str, request: Request) -> dict[str, Any]:
    """The `StopRecord` of the last request with this `stop_id`.

    Raises:
        HTTPException: 404, where there is none.
    """
    engine: Any = request.app.state.ospruner_engine
    records = await engine.collective_rpc("ospruner_record", args=(stop_id,))
    if records[0] is None:
        raise HTTPException(
            404,
            f"no request had the stop_id {shown(stop_id)}, or its policy was off, or it is long "
            "ago",
        )
    return in_json(records[0])
