"""A policy of the embedded reasoner, a task's data, and the policy behind a real HTTP server."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.demo.shipped import Reasoner, draw_split
from ospruner.eval.harness.replies import Asked, LocalPolicy
from ospruner.eval.problems.problem import user_message
from ospruner.serving.requests import StopRequest

from ...vllm_plugin.plugin_replay import make_policy

COUNT = 6


@pytest.fixture(scope="session")
def policy(
    reasoner: Reasoner, tmp_path_factory: pytest.TempPathFactory
) -> tuple[OSPrunerForCausalLM, Path]:
    folder = tmp_path_factory.mktemp("policy")
    return make_policy(reasoner, folder), folder


@pytest.fixture(scope="session")
def rows(reasoner: Reasoner) -> list[dict[str, str]]:
    """Test problems as their users would ask them, with the answers."""
    fmt = reasoner.token_format.format
    return [
        {"problem": user_message(one, fmt), "answer": str(one.answer)}
        for one in draw_split("test", COUNT, 0)
    ]


@pytest.fixture(scope="session")
def data_file(rows: list[dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


class ChatServer:
    """Answers as `ospruner serve` does, by the policy in transformers; keeps what was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.bodies: list[dict[str, Any]] = []
        self.records: dict[str, dict[str, Any]] = {}
        app = FastAPI()
        app.post("/v1/chat/completions")(self._chat)
        app.get("/ospruner/stops/{stop_id}")(self._stop)
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen()  # so that requests wait while uvicorn's thread starts
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True
        )
        self._lock = threading.Lock()

    def __enter__(self) -> ChatServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def _chat(self, body: dict[str, Any]) -> JSONResponse:
        extra = body["vllm_xargs"]
        asked = StopRequest(extra)
        with self._lock:
            self.bodies.append(body)
            settings = asked.settings(StopRequest({}, server=True))
            local = LocalPolicy(self.folder, settings, None, "float32", "cpu", 1)
            limits = Asked(body["max_tokens"], (), body["temperature"])
            (reply,) = local.ask([body["messages"]], limits)
        if asked.name is not None:
            self.records[asked.name] = {
                "thinking_tokens": reply.thinking_tokens,
                "reason": reply.reason,
            }
        message = {"reasoning": reply.thinking, "content": reply.answer}
        usage = {
            "prompt_tokens": reply.prompt_tokens,
            "completion_tokens": reply.tokens,
            "completion_tokens_details": {"reasoning_tokens": reply.thinking_tokens},
        }
        choice = {"message": message, "finish_reason": "stop"}
        return JSONResponse({"choices": [choice], "usage": usage})

    def _stop(self, stop_id: str, request: Request) -> JSONResponse:
        record = self.records.get(stop_id)
        return JSONResponse(record or {"detail": "unknown"}, 404 if record is None else 200)


@pytest.fixture(scope="session")
def chat_server(policy: tuple[OSPrunerForCausalLM, Path]) -> Iterator[ChatServer]:
    with ChatServer(policy[1]) as server:
        yield server
