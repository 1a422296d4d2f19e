"""Both columns from a server; a stand-in speaks vLLM's part; the real one is slow."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from ospruner.app.columns import Question, ServedSource
from ospruner.demo.shipped import Reasoner
from ospruner.train.untrained import untrained

from ..own_process import needs_vllm
from ..served_app import ServedApp
from ..serving.vllm.test_server import serving

WORDS = ("one. ", "two.\n\n", "three.\n\n", "four. ", "five.\n\n")
RECORD = {"step_ends": [2, 3], "probabilities": [0.25, None], "reason": "policy"}


class StandIn(ServedApp):
    """Streams five thinking tokens, three with the policy, and keeps what it was asked."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.refuses = False
        app = FastAPI()

        @app.get("/v1/models")
        async def models() -> Any:
            return {"data": [{"id": "org/policy", "max_model_len": 512}]}

        @app.get("/ospruner/format")
        async def said() -> Any:
            return {"user_instruction": "Reason, check, box."}

        @app.get("/ospruner/stops/{name}")
        async def stops(name: str) -> Any:
            known = [body["vllm_xargs"].get("stop_id") for body in self.bodies]
            return RECORD if name in known else JSONResponse({"detail": "unknown"}, 404)

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Any:
            self.bodies.append(body := await request.json())
            if self.refuses:
                return JSONResponse({"error": {"message": "the prompt is too long"}}, 400)
            return StreamingResponse(parts(body), media_type="text/event-stream")

        super().__init__(app)


def parts(body: dict[str, Any]) -> Iterator[str]:
    """The events of an answer."""
    words = WORDS[:3] if body["vllm_xargs"]["stop_policy"] else WORDS
    names = ("reasoning", "reasoning_content")  # servers differ in it
    deltas = [*({names[n % 2]: word} for n, word in enumerate(words)), {"content": "\\boxed{5}"}]
    events: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "token_ids": [7], "finish_reason": None}]}
        for delta in deltas
    ]
    usage = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), 9)
    details = {"completion_tokens_details": {"reasoning_tokens": len(words)}}
    known = {"id": "1", "created": 0, "model": "m", "object": "chat.completion.chunk"}
    for event in [*events, {"choices": [], "usage": usage | details}]:
        yield f"data: {json.dumps(known | event)}\n\n"
    yield "data: [DONE]\n\n"


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    pytest.importorskip("openai")
    with StandIn() as server:
        yield server


QUESTION = Question("1+4?", {"mode": "threshold", "threshold": 0.5}, 0.6, 7, 100)


def test_both_columns_come_from_the_server(stand_in: StandIn) -> None:
    source = ServedSource(f"{stand_in.url}/v1")
    assert (source.policy, source.positions, source.prices) == ("org/policy", 512, None)
    plain, pruned = (list(source.ask(QUESTION, on))[-1] for on in (False, True))
    assert (plain.tokens, plain.reason, plain.done) == (5, "natural", True)
    texts = ["one. two.\n\n", "three.\n\n", "four. five.\n\n"]
    assert [one.text for one in plain.thinking] == texts
    assert (pruned.tokens, pruned.reason, pruned.answer) == (3, "policy", "\\boxed{5}")
    first, second = pruned.thinking
    assert (first.text, first.tokens, first.probability) == (texts[0], 2, 0.25)
    assert second.text == texts[1]
    assert second.probability != second.probability  # NaN: JSON has none
    off, on = sorted((b["vllm_xargs"] for b in stand_in.bodies), key=lambda x: x["stop_policy"])
    assert off == {"stop_policy": False}
    assert on.pop("stop_id").startswith("app-")
    said = {"stop_mode": "threshold", "stop_threshold": 0.5}
    assert on == {"stop_policy": True, "stop_seed": 7, **said}
    assert all(body["seed"] == 7 for body in stand_in.bodies)
    asked = {body["messages"][0]["content"] for body in stand_in.bodies}
    assert asked == {f"{QUESTION.text}\n\nReason, check, box."}


def test_a_refusal_and_a_server_that_is_gone_say_what_to_do(stand_in: StandIn) -> None:
    source = ServedSource(stand_in.url)
    stand_in.refuses = True
    with pytest.raises(ValueError, match=r"too long.*or shorten the question"):
        list(source.ask(QUESTION, True))
    stand_in.stop()
    with pytest.raises(ConnectionError, match=r"does not answer.*start one with `ospruner serve"):
        list(source.ask(QUESTION, True))
    with pytest.raises(ConnectionError, match=stand_in.url):
        ServedSource(stand_in.url)
    with pytest.raises(ValueError, match="like http://localhost:8000"):
        ServedSource("localhost:8000")


@needs_vllm
@pytest.mark.slow
def test_a_server_of_ospruner_serve_answers_both(reasoner: Reasoner, tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    made = untrained(reasoner.model, reasoner.tokenizer, init_bias=0.0, tuning="layers")
    made.save_pretrained(folder)
    text = "Tom has 45 cards. Tom buys 17. The total grows 3 times. How many cards does Tom have?"
    with serving(folder) as url:
        source = ServedSource(url)
        assert source.positions == 1024
        assert source._instruction == reasoner.token_format.format.user_instruction
        greedy = Question(text, {"mode": "sample"}, 0.0, 0, 300)
        plain, pruned = (list(source.ask(greedy, on))[-1] for on in (False, True))
        short = {"mode": "threshold", "threshold": 1.0, "max_thinking_tokens": 20}
        budget = list(source.ask(Question(text, short, 0.0, 0, 300), True))[-1]
        with pytest.raises(ValueError, match="shorten the question"):
            list(source.ask(Question(text, {}, 0.0, 0, 5000), True))
    assert (plain.reason, pruned.reason, budget.reason) == ("natural", "policy", "budget")
    assert plain.tokens > pruned.tokens > 0
    assert pruned.thinking[-1].tokens == pruned.tokens
    assert all(one.probability == pytest.approx(0.5) for one in pruned.thinking)
    assert "boxed" in pruned.answer
    whole = "".join(one.text for one in plain.thinking)
    assert whole.startswith("".join(one.text for one in pruned.thinking).rstrip())
