"""The route of a vLLM server that tells why a request stopped: `GET /ospruner/stops/{stop_id}`.

vLLM loads it where `VLLM_PLUGINS` names `ospruner_stops` (`ospruner serve` does).
"""

from __future__ import annotations

import math
from argparse import Namespace
from typing import Any

from fastapi import FastAPI, HTTPException, Request

__all__ = ["StopRoutes"]


class StopRoutes:
    """An endpoint plug-in of vLLM (its `EndpointPlugin`)."""

    name = "ospruner_stops"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Adds the route."""
        app.add_api_route("/ospruner/stops/{stop_id}", stop_record, methods=["GET"])

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Keeps what the route asks."""
        state.ospruner_engine = engine_client


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
            f"no request had the stop_id {stop_id!r}, or its policy was off, or it is long ago",
        )
    record: dict[str, Any] = records[0]
    # JSON has no NaN: a step at which the policy gave none.
    record["probabilities"] = [None if math.isnan(p) else p for p in record["probabilities"]]
    return record
