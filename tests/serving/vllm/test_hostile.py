"""Hostile requests to a small app with our plug-in alone: each is refused in words or cut off, and
good ones get what they got before.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import re
import urllib.parse
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.testclient import TestClient
from pydantic import BaseModel

from modeling_ospruner.configuration_ospruner import OSPrunerConfig, shown
from modeling_ospruner.stopping_ospruner import StopRecord
from ospruner.serving.requests import CALIBRATION_FIELDS, ID, KEYS, OF_SERVERS, ON, StopRequest
from ospruner.serving.vllm import plugin
from ospruner.serving.vllm.plugin import REPLY

MARK = "h0stile"  # what no metric may hold
MEGABYTE = 2**20
LONGEST_REFUSAL = 20_000  # characters, whatever was sent
ALL_KEYS = (ON, ID, *(key for key in KEYS if key not in OF_SERVERS))
GOOD = {"stop_policy": "true", "stop_seed": 5, "max_thinking_tokens": 4, "max_answer_tokens": 3}

Case = tuple[bytes, Sequence[str] | None]
"""A body, and what its refusal says among other things; None where it is answered."""


def request(extra: object, **fields: Any) -> bytes:
    """A request with these extra arguments; NaN and infinity as Python's JSON writes them."""
    body: dict[str, Any] = {"model": "toy", "prompt": [1, 5, 6], "max_tokens": 4}
    return json.dumps(body | {"vllm_xargs": extra} | fields).encode()


VALUES: list[Any] = [
    *("", "x", "nan", "True", "0.5", "\0", "\x1b[31m", "é\u202e", "9" * 400, MARK * 2000),
    *(math.nan, math.inf, -math.inf, -1, -(2**63), 2**64 - 1, 2, 1.5, -1e308, 1e308, 5e-324),
    *([], [1], ["x"], [math.nan], ["x" * 9999]),
]


def is_allowed(key: str, value: Any) -> bool:
    """The documented values of each key, written down again (docs/serving.md)."""
    whole = isinstance(value, int)
    return {
        "stop_policy": value in ("true", "false") or (value in (0, 1) and whole),
        "stop_answer_sample": value in ("true", "false") or (value in (0, 1) and whole),
        "stop_mode": value in ("sample", "threshold"),
        "stop_answer": value in ("forced", "free", "tools"),
        "stop_threshold": isinstance(value, int | float) and 0 <= value <= 1,
        "stop_price": value == 0 and isinstance(value, int | float),
        "stop_seed": whole,
        "stop_sample_index": whole and value >= 0,
        "min_thinking_tokens": whole and value >= 0,
        "max_thinking_tokens": whole and value >= 1,
        "max_answer_tokens": whole and value >= 1,
        "stop_id": isinstance(value, str) and 1 <= len(value) <= 256 and value.isprintable(),
    }[key]


def wrong_values() -> Iterator[Case]:
    """Each key with each value that it does not take, and where it does nothing."""
    for key in ALL_KEYS:
        for value in (one for one in VALUES if not is_allowed(key, one)):
            number = isinstance(value, int | float)
            given = str(value) if number else shown(value)
            says = (f"{key} is {given}", "it must ")
            if key == "stop_price" and number and 0 <= value < math.inf:
                says = (f"{key} is ", "but the policy was trained for 0 alone")
            yield request({"stop_seed": 1} | {key: value}), says
        for value in (None, {"a": {"b": 1}}, [[1]]):
            yield request({key: value}), ()
        huge = request({key: MARK * (MEGABYTE // len(MARK))})
        yield huge, (f"{key} is ", "it must ", "characters)")
        yield request({}, **{key: 1}), (f"['{key}']", "within 'vllm_xargs'")
        extra = {key: next((v for v in ("x", "free", "sample", 1, 0) if is_allowed(key, v)), "x")}
        beams = request({"stop_seed": 1, **extra}, use_beam_search=True)
        yield beams, ("use_beam_search is True", f"'{key}'", "leave one of them out")


def names(drawn: random.Random) -> Iterator[Case]:
    """Names that begin like ours, long ones, and thousands at once; others' keys are others'."""
    says = "the policy's keys are ['stop_policy', "
    for key in ALL_KEYS:
        place = drawn.randrange(5 if key.startswith("stop") else key.rindex("_"), len(key))
        near = [key.upper(), f" {key}", f"{key}\0", f"{key}s", f"{key}\u0301", f"_{key}", key[:-1]]
        near += [key.replace("_", other) for other in ("-", " ", "", ".")]
        for name in (*near, key[:place] + drawn.choice("xqz") + key[place:]):
            yield request({name: 1}), (repr(name)[1:-1], says)
    for extra in ({f"{MARK}_{i}": i for i in range(5_000)}, {MARK * (MEGABYTE // len(MARK)): 1}):
        yield request({f"stop_{name}": value for name, value in extra.items()}), (says,)
        yield request(extra), None


def malformed() -> Iterator[Case]:
    """What is no JSON or no object, lone surrogates, and lists and objects in each other."""
    for body in (b"", b"\xff\xfe", b"null", b"[]", b"3", b"NaN", b"{" * 99, request(GOOD)[:-1]):
        yield body, ()
    for whole in (MARK, 3, math.nan, [1], True):
        yield request(whole), ()
    for text in ('{"stop_id": "\\ud800"}', '{"stop_\\udfff": 1}', '{"stop_mode": "\\udc80x"}'):
        yield request({}).replace(b"{}", text.encode()), ()
    for depth in (20, 900, 50_000):
        for opened, closed in (("[", "]"), ('{"a":', "1}")):
            value = (opened * depth + closed * depth).encode().replace(b":1}", b":1}")
            for key in (b'{"stop_mode":%s}', b'{"h0stile":%s}', b"%s"):
                yield request({}).replace(b"{}", key % value), ()


class Body(BaseModel):
    """What of a request's types vLLM checks before we see it."""

    prompt: list[int]
    max_tokens: int = 16
    vllm_xargs: dict[str, str | int | float | list[str | int | float]] | None = None


class SmallApp:
    """Our plug-in on an app whose one route reads a request's keys as vLLM's does."""

    def __init__(self) -> None:
        monitoring = pytest.importorskip("ospruner.serving.vllm.monitoring")
        app = FastAPI()

        @app.exception_handler(ValueError)
        async def refused(request: object, error: ValueError) -> JSONResponse:
            return JSONResponse({"error": str(error)}, 400)

        @app.post("/v1/completions")
        async def complete(body: Body) -> dict[str, str]:
            return {"settings": repr(StopRequest(body.vllm_xargs).settings(StopRequest(None)))}

        @app.post("/v1/chat/completions")
        async def stream() -> StreamingResponse:
            told = [f"data: {one}\n\n" for one in self.pieces]
            return StreamingResponse(iter(told), media_type="text/event-stream")

        routes = monitoring.StopRoutes()
        routes.attach_router(app)
        app.router.routes.reverse()  # vLLM lets a plug-in's routes take the place of its own
        self.asked: list[str] = []
        self.texts, self.pieces = 0, list[str]()  # of a reply
        config = OSPrunerConfig(reasoning_format={"think_end": ""})  # of lambda 0 alone
        self.model_config = Namespace(hf_config=config)
        structured = Namespace(reasoning_parser="")
        options = Namespace(structured_outputs_config=structured, speculative_config=None)
        asyncio.run(routes.init_state(self, app.state, options))
        self.client = TestClient(app, raise_server_exceptions=False)

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[list[Any]]:
        """What a worker of vLLM would say: of "known" and the like, and of replies."""
        assert method == "ospruner_told"
        key, name, *answer = args
        self.asked.append(name)
        known = vars(StopRecord(reason="request" if answer == [True] else "policy"))
        known |= {"price": 0.5, "fork": None}  # no request of the control group
        return [[known] * (self.texts if key == REPLY else name.startswith("known"))]

    def send(self, body: bytes) -> tuple[int, str]:
        headers = {"Content-Type": "application/json"}
        reply = self.client.post("/v1/completions", content=body, headers=headers)
        return reply.status_code, reply.text

    def ask(self) -> object:
        status, text = self.send(request(GOOD))
        assert status == 200, text
        return json.loads(text)

    def attack(self, cases: Iterable[Case]) -> None:
        """Sends the cases one by one, with a good request after each."""
        before = self.ask()
        for body, says in cases:
            status, text = self.send(body)
            case = f"{body[:300]!r} got {status}, {len(text)} characters: {text[:600]}"
            assert (status // 100 == 4) is (says is not None), case
            assert len(text) <= LONGEST_REFUSAL, case
            if says:
                message = json.loads(text)["error"]["message"]
                assert all(one in message for one in says), f"{case} without some of {says}"
            assert self.ask() == before, f"{case}; a good request gets something else"


@pytest.fixture(scope="module")
def small_app() -> SmallApp:
    return SmallApp()


def test_hostile_bodies_to_the_plug_in_alone(small_app: SmallApp) -> None:
    small_app.attack(itertools.chain(wrong_values(), names(random.Random(0)), malformed()))


def test_each_route_is_checked(small_app: SmallApp) -> None:
    for path in ("/v1/chat/completions/batch", "/invocations", "/whatever/comes/next"):
        reply = small_app.client.post(path, json={"extra_body": {"max_thinking_tokens": 3}})
        assert reply.status_code == 400, path
        assert "['extra_body.max_thinking_tokens'] would do" in reply.json()["error"]["message"]
        assert small_app.client.post(path, json={}).status_code == 404
        assert small_app.client.post(path, data={"max_thinking_tokens": 3}).status_code == 404


def test_no_delta_of_a_stream_holds_reasoning_and_content(small_app: SmallApp) -> None:
    """Each is told once, with its token ids and its end at the right place."""
    call = [{"index": 0, "function": {"name": "add"}}]
    thought: dict[str, Any] = {"reasoning": "I add."}
    answers: list[dict[str, Any]] = [{"content": "5"}, {"tool_calls": call}]
    answers.append({"content": "5", "tool_calls": call})
    cases = [(one, [one]) for one in (thought, {"content": '"reasoning":"'})]
    for delta, wanted in cases + [(thought | one, [thought, one]) for one in answers]:
        choice = {"index": 0, "delta": delta, "finish_reason": "stop", "token_ids": [1, 2]}
        piece = json.dumps({"id": "a", "choices": [choice]}, separators=(",", ":"))
        small_app.pieces = [piece, "[DONE]"]
        reply = small_app.client.post("/v1/chat/completions", json={})
        *told, done, end = reply.text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        choices = [json.loads(one.removeprefix("data: "))["choices"][0] for one in told]
        assert [one["delta"] for one in choices] == wanted
        assert [one["finish_reason"] for one in choices] == [None, "stop"][-len(wanted) :]
        assert [one.get("token_ids") for one in choices] == [[1, 2], None][: len(wanted)]


def test_a_reply_tells_how_the_thinking_of_its_texts_ended() -> None:
    app, told = SmallApp(), {"reason": "policy", "thinking_tokens": 0, "price": 0.5}
    app.texts = 2
    reply = app.client.post("/v1/completions", json={"prompt": [1], "vllm_xargs": {"stop_id": "a"}})
    assert reply.json()["ospruner"] == [told, told]
    assert reply.json()["settings"]
    assert int(reply.headers["content-length"]) == len(reply.content)
    off = {"prompt": [1], "vllm_xargs": {"stop_policy": False}}
    assert "ospruner" not in app.client.post("/v1/completions", json=off).json()
    assert len(app.asked) == len(set(app.asked)) == 1
    spoken = {"finish_reason": None, "delta": {"content": '"finish_reason":"stop"}'}}
    begun, ended = ({"choices": [one]} for one in (spoken, {"finish_reason": "stop"}))
    delta: dict[str, Any] = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}
    for pieces in ([begun, ended, begun, ended], [{"type": "response.created"}, delta, delta]):
        app.pieces = [json.dumps(one) for one in pieces]
        lines = app.client.post("/v1/chat/completions", json={"prompt": [1]}).text.split("\n\n")
        got = [json.loads(line.removeprefix("data: ")) for line in lines if line]
        assert got == [*pieces[:-1], {**pieces[-1], "ospruner": [told, told]}]


def test_a_request_under_way_is_told_to_answer(small_app: SmallApp) -> None:
    assert small_app.client.post("/ospruner/answer/known-1").json()["reason"] == "request"
    assert small_app.client.get("/ospruner/stops/known-1").json()["reason"] == "policy"
    assert small_app.client.post("/ospruner/answer/nobody").status_code == 404


def test_the_reply_says_that_the_policy_was_off_and_why() -> None:
    app = SmallApp()
    for extra, why in (
        ({"response_format": {"type": "json_object"}}, "off: a grammar, which holds in the thin"),
        ({"use_beam_search": True}, "off: beam search"),
        ({}, "None"),
    ):
        reply = app.client.post("/v1/completions", json={"prompt": [1], **extra})
        assert reply.status_code == 200
        assert str(reply.headers.get("x-ospruner-policy")).startswith(why)
    assert counted("policy_off", why="beam search") == 1


IDS = ("no", "\0", "a/b", "../..", "a\nb", "é\u202e", "é 7", MARK * 1000, *"?# .\x1b")


def test_hostile_names_to_the_route(small_app: SmallApp) -> None:
    root = "http://testserver/ospruner/stops"
    for name in IDS:
        quoted = urllib.parse.quote(name, safe="")
        reply = small_app.client.get(f"{root}/x{quoted}")
        assert reply.status_code == 404
        if name.isprintable():  # others are refused as names
            assert f"no request had the stop_id {shown('x' + name)}" in reply.json()["detail"]
            reply = small_app.client.get(f"{root}/known{quoted}")
            assert reply.json()["price"] == 0.5, name
            assert small_app.asked[-1] == f"known{name}"


def counted(name: str, **labels: str) -> float:
    prometheus = pytest.importorskip("prometheus_client")
    return prometheus.REGISTRY.get_sample_value(f"ospruner_{name}_total", labels) or 0.0


def test_counters_have_no_labels_of_a_request() -> None:
    """And answers are counted as they come."""
    monitoring = pytest.importorskip("ospruner.serving.vllm.monitoring")
    for control in (False, True):
        record = StopRecord(reason="budget", thinking_tokens=3)
        row = Namespace(record=record, control=control, told=None, promise=None)
        for _ in range(2):  # preempted once
            monitoring.count_leaving(row)
    assert counted("thinking_ended", group="control", reason="budget") == 1
    told = pytest.importorskip("prometheus_client").generate_latest().decode()
    series = re.findall(r"^ospruner_thinking_ended_total\{(.*?)\}", told, re.MULTILINE)
    assert sorted(series) == [f'group="{one}",reason="budget"' for one in ("control", "policy")]
    row = Namespace(record=StopRecord(reason="length"), control=True, told=(0, 0), promise=None)
    for tokens, rethinks, wanted in ((4, 0, 0), (4, 0, 0), (9, 2, 1), (12, 3, 1)):
        row.record.answer_tokens, row.record.rethinks = tokens, rethinks
        monitoring.count_leaving(row)
        labels = {"group": "control", "reason": "length"}
        assert counted("answer_tokens", **labels) == tokens
        assert counted("rethought", **labels) == wanted


def test_an_effort_reaches_the_engine_as_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = StopRequest({"stop_efforts": {"low": 0.25}}, server=True)
    defaults.settle(OSPrunerConfig())
    monkeypatch.setattr(plugin.Defaults, "here", defaults)
    app = SmallApp()
    # What excludes the policy puts it off, as it did: an effort does not ask for it.
    low, on = {"reasoning_effort": "low"}, {"stop_policy": True}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    cases: list[tuple[dict[str, Any], dict[str, Any], int, str]] = [
        (on, low, 200, "threshold=0.25"),
        (on, {"reasoning_effort": "high"}, 200, "threshold=None"),
        (on, {"thinking_budget": 70}, 200, "max_thinking_tokens=70"),
        ({}, low | {"response_format": schema}, 200, '"None"'),
        ({}, low | {"use_beam_search": True}, 200, '"None"'),
        (on, {"reasoning_effort": "huge"}, 400, "reasoning_effort is 'huge'"),
        ({"stop_policy": False}, {"thinking_budget": 70}, 400, "['thinking_budget'] would do"),
    ]
    for extra, more, wanted, said in cases:
        status, told = app.send(request(extra, **more))
        assert (status, said in told) == (wanted, True), told


def test_what_is_accepted_never_fails_later() -> None:
    """An engine reads each request again, over the server's defaults: an error there ends it."""
    drawn = random.Random(0)
    likely: list[Any] = [0, 1, 2, 50, 0.5, "true", "false", "sample", "threshold", "forced", "free"]

    def draw(server: bool) -> StopRequest:
        while True:
            keys = drawn.sample((*ALL_KEYS, *OF_SERVERS), drawn.randrange(1, 5))
            extra = {key: drawn.choice(likely if drawn.random() < 0.9 else VALUES) for key in keys}
            try:
                return StopRequest(extra, server=server)
            except ValueError as error:
                if not str(error).startswith("vllm_xargs: "):
                    raise

    config = OSPrunerConfig(head="price", price_range=[1e-4, 1.0])
    promise: dict[str, Any] = dict.fromkeys(CALIBRATION_FIELDS) | {"mode": "threshold"}
    promise |= {"threshold": 0.5, "price": 0.2, "max_loss": 0.0, "confidence": 0.95}
    config.calibrations = [promise]
    unknown = 0
    for _ in range(500):
        asked, defaults = draw(server=False), draw(server=True)
        try:
            defaults.settle(config)
        except ValueError:  # at the server's start: a price that the policy does not know
            unknown += 1
            continue
        settings = asked.settings(defaults)
        on = defaults.on if asked.on is None else asked.on
        assert (settings is not None) == bool(on)
        if settings is not None:
            assert asked.fields.items() <= vars(settings).items()
            if "price" not in asked.fields:
                settings.with_defaults(config)  # of a price that it does not know, it is told
    assert 0 < unknown < 150
