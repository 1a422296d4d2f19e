"""What a vLLM server tells of its stops and its policy: in replies, by routes, and by counters.

The plug-in with the routes also looks at what is posted to any route: it turns effort and budgets
in other people's dialects into the policy's keys, refuses requests in which these, or such a
budget, would do nothing, and adds to replies how their thinking ended. vLLM loads it where
`VLLM_PLUGINS` names `ospruner_stops` (`ospruner serve` does). Prometheus counts where the engine
runs. A server's `/metrics` sees the counters where vLLM and they share a folder,
`PROMETHEUS_MULTIPROC_DIR` (`ospruner serve` makes one).

The requests of the control group think to their end. Where the policy would have stopped one, a
short request of its own forces the answer there, after the reply was sent, and is compared.
"""

import asyncio
import bisect
import json
import re
import uuid
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from prometheus_client import Counter, Gauge
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm import SamplingParams, TokensPrompt
from vllm.logger import init_logger

from modeling_ospruner.configuration_ospruner import OSPrunerConfig, shown

from ..core import GRAMMAR, IN_THINKING, ServedRow, format_of, log_off
from ..drift import Drift, answers_differ, observed
from ..requests import ID, KEYS, ON, StopRequest, check_places, replaced, said_in, translated
from .plugin import HARMONY_PARSER, REPLY, Defaults, parser_of

logger = init_logger("vllm.ospruner")  # vLLM's own are the ones that its servers write
_TOKENS_ROUTE = "/inference/v1/generate"  # whose bodies hold vLLM's own `SamplingParams`
_BEAMS = "beam search"
_TEXTS = {"prompt", "messages", "input", "token_ids"}  # one of which a request for texts has
_FORMATS = ("response_format", "text.format", "output_config.format")  # of answers
_IN_REPLIES = ("reason", "thinking_tokens", "price")
# In the dialects that vLLM speaks, of a stream's piece with which a text ends.
_ENDS = re.compile(rb'"(finish|stop)_reason": ?"|"type": ?"response\.(completed|incomplete)"')
_BUDGETS = {  # the one of the budgets' names that vLLM reads on a route, where it is another
    "/v1/messages": "thinking.budget_tokens",
    "/v1/messages/count_tokens": "thinking.budget_tokens",
    "/v1/responses": "",
}
_COUNTERS = {
    name: Counter(f"ospruner_{name}_total", what, ("group", "reason"))
    for name, what in {
        "thinking_ended": "Requests whose thinking has ended; group is policy or control",
        "thinking_tokens": "Thinking tokens of the requests that have ended it",
        "thinking_squares": "Their squares, summed: for an interval",
        "answer_tokens": "Answer tokens of the requests that have ended their thinking",
        "rethought": "Of these, requests whose answer thinks on",
    }.items()
}
_PROMISED = Counter(
    "ospruner_promised_total",
    "Requests that stopped as a calibration promised, by the bins of the calibration's traces",
    ("max_loss", "confidence", "signal", "bin"),
)
_OFF = Counter("ospruner_policy_off_total", "Requests without their policy, by why", ("why",))
_PROMISE = ("max_loss", "confidence", "allowed")
_COMPARED = Counter(
    "ospruner_control_answers_total",
    "Control requests whose pruned answer was compared with the one at the end",
    (*_PROMISE, "differs"),
)
_EVIDENCE = Gauge(
    "ospruner_drift_evidence",
    "The highest so far that more answers differ than allowed; alarms at 2 / (1 - confidence)",
    _PROMISE,
    multiprocess_mode="livemax",
)
_UNLIMITED = 64  # tokens of a pruned answer, where the policy's settings limit none


def count_off(why: str) -> None:
    """Counts and logs a request that goes on without its policy."""
    log_off(why)
    _OFF.labels(why).inc()


def count_leaving(row: ServedRow) -> None:
    """Counts a request that leaves a batch after its thinking, perhaps not for the first time.

    The thinking, and what was promised of it, once; of its answer what has come since then.
    """
    record, promise, (tokens, rethinks) = row.record, row.promise, row.told or (0, 0)
    new: dict[str, float] = {"answer_tokens": max(record.answer_tokens - tokens, 0)}
    new["rethought"] = record.rethinks > 0 and not rethinks
    if row.told is None:
        thought = record.thinking_tokens
        new |= {"thinking_ended": 1, "thinking_tokens": thought, "thinking_squares": thought**2}
        if promise is not None and not row.control:
            for signal, value in observed(record).items():
                place = bisect.bisect_right(promise["traffic"][signal]["edges"], value)
                _PROMISED.labels(promise["max_loss"], promise["confidence"], signal, place).inc()
    for name, amount in new.items():
        _COUNTERS[name].labels("control" if row.control else "policy", record.reason).inc(amount)
    row.told = (record.answer_tokens, record.rethinks)


def check_body(
    body: object,  # what was sent, as JSON; all else that is wrong in it is vLLM's to refuse
    defaults: StopRequest,
    config: OSPrunerConfig,
    parses_calls: bool,  # whether calls of tools are found in replies
    path: str = "/v1/chat/completions",
    grammars: str | None = None,  # why requests with a grammar go on without the policy, if so
) -> str | None:
    """Refuses a request over HTTP in which the policy's keys would do nothing, or break a call.

    Returns:
        Why it goes on without the policy, which is on by default; None where it does not.

    Raises:
        ValueError: a key, or a budget of thinking, stands where nobody reads it, or where beam
            search or a grammar excludes it; the policy does not know the price; or tools are
            offered where none could be called.
    """
    if not isinstance(body, dict):
        return None
    place, own = _places(path)
    extra = said_in(body, place)
    extra = extra if isinstance(extra, dict) else {}
    check_places(body, (place, own), repr(place))
    beams = body.get("use_beam_search")
    if beams and (asked := sorted({ON, ID, *KEYS}.intersection(extra))):
        raise ValueError(
            f"use_beam_search is {shown(beams)}, and {place} has {asked}: beam search does not "
            "stop with the policy; leave one of them out"
        )
    request = StopRequest(extra, place)
    request.check_price(config)
    tools, choice = body.get("tools"), body.get("tool_choice") or "auto"
    if isinstance(choice, dict):  # Anthropic's, or one that names a tool
        choice = choice.get("type")
    if tools and not parses_calls and choice != "none":
        raise ValueError(
            "tools are offered, but of a GPT-OSS policy's replies calls are not parsed here: "
            "send tool_choice 'none', or the rendered prompt to /v1/completions with stop_answer "
            "'tools', and parse the text"
        )
    request.check_tools(tools, choice, defaults)
    if request.settings(defaults) is None:
        return None
    holder = said_in(body, "sampling_params") if path == _TOKENS_ROUTE else body
    formats = (said_in(body, one) for one in _FORMATS)
    formatted = any(isinstance(one, dict) and one.get("type", "text") != "text" for one in formats)
    called = tools and choice not in ("auto", "none")
    why = None
    if beams:
        why = _BEAMS
    elif said_in(holder, "allowed_token_ids"):
        why = "allowed_token_ids"
    elif formatted or called or said_in(holder, "structured_outputs"):
        why = IN_THINKING if body.get("include_reasoning") is False else grammars
    if request.on and why is not None:
        raise ValueError(
            f"{place} asks for the policy, and the request has {why}: they exclude each other; "
            "leave one of them out"
        )
    return why


def _places(path: str) -> tuple[str, str]:
    """Where on a route the policy's keys stand, and the budget that vLLM itself reads."""
    if path == _TOKENS_ROUTE:
        return "sampling_params.extra_args", "sampling_params.thinking_token_budget"
    return "vllm_xargs", _BUDGETS.get(path, "thinking_token_budget")


def apart(told: bytes) -> bytes:
    """A part of a streamed chat, where one delta holds reasoning and more, as two of one kind."""
    if not told.startswith(b"data: {") or b'"reasoning":"' not in told:
        return told
    first = json.loads(told.removeprefix(b"data: "))
    [choice] = first["choices"]
    rest = {k: v for k, v in choice["delta"].items() if k not in ("role", "reasoning")}
    if not (rest.get("content") or rest.get("tool_calls")):
        return told
    told_once = {k: v for k, v in choice.items() if k not in ("token_ids", "logprobs")}
    second = {**first, "choices": [{**told_once, "delta": rest}]}
    thought = {k: v for k, v in choice["delta"].items() if k not in rest}
    first = {k: v for k, v in first.items() if k != "usage"}
    first["choices"] = [{**choice, "delta": thought, "finish_reason": None}]
    return b"".join(f"data: {json.dumps(one)}\n\n".encode() for one in (first, second))


class _Bodies:
    """Middleware that looks at each body of JSON, whatever route it is posted to, and its reply."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive) if scope["type"] == "http" else None
        kind = "" if request is None else request.headers.get("content-type", "")
        if request is None or request.method != "POST" or "json" not in kind.lower():
            await self._app(scope, receive, send)
            return
        bodies, state = [await request.body()], request.app.state

        async def again() -> Message:
            return {"type": "http.request", "body": bodies.pop()} if bodies else await receive()

        try:
            sent = await request.json()
        except (ValueError, RecursionError):  # vLLM's to refuse
            sent = None
        try:
            body, why, name = state.ospruner_read(sent, scope["path"])
            if body != sent:
                bodies[0] = json.dumps(body).encode()
        except RecursionError:  # vLLM's to refuse
            why = name = None
        except ValueError as error:
            said = {"message": str(error), "type": "BadRequestError", "param": None, "code": 400}
            await JSONResponse({"error": said}, 400)(scope, again, send)
            return
        if why == _BEAMS:  # an engine counts the others itself
            count_off(why)
        headers = [] if why is None else [(b"x-ospruner-policy", f"off: {why}".encode())]
        chat = scope["path"].endswith("/chat/completions")
        await self._app(scope, again, _ToldReply(send, state, name, headers, chat))


@dataclass
class _ToldReply:
    """Sends a reply, and adds how the thinking of its texts ended, as the field `ospruner`.

    A whole reply has it at its end, a stream in the piece with which its last text ends.
    """

    send: Send
    state: Any  # of the app
    name: str | None  # the reply's; None where nothing is added
    headers: list[tuple[bytes, bytes]]  # that it gets
    chat: bool
    start: Message | None = None  # of a whole reply, kept until its length is known
    held: bytes = b""  # of a whole reply
    ended: int = 0  # texts of a stream

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *self.headers]
            kind = dict(message["headers"]).get(b"content-type", b"")
            if message["status"] != 200 or not kind.startswith((b"application/json", b"text/ev")):
                self.name = None
            if self.name is None or b"json" not in kind:
                await self.send(message)
            else:
                self.start = message
            return
        body: bytes = message.get("body", b"")
        body = self.held + (apart(body) if self.chat else body)
        if self.start is not None and message.get("more_body"):
            self.held = body
            return
        if self.name is not None and (self.start is not None or _ENDS.search(body)):
            said = await _ask(self.state.ospruner_engine, REPLY, self.name)
            self.ended += 1
            texts = len(said) if self.start is None else 1
            if self.ended == texts:
                self.state.ospruner_controls.take(one["fork"] for one in said)
            begin, brace, end = body.rpartition(b"}")  # of an object, perhaps in an event
            if self.ended >= texts and said and brace:
                told = [{name: one[name] for name in _IN_REPLIES} for one in said]
                body = begin + b',"ospruner":' + json.dumps(told).encode() + brace + end
        if self.start is not None:
            length = (b"content-length", str(len(body)).encode())
            others = [one for one in self.start["headers"] if one[0] != length[0]]
            await self.send({**self.start, "headers": [*others, length]})
        await self.send({**message, "body": body})


async def _ask(engine: Any, *what: Any) -> list[dict[str, Any]]:
    """What the engine's first worker tells; see `StopRecords.ospruner_told`."""
    return (await engine.collective_rpc("ospruner_told", args=what))[0]


class ControlWatch:
    """Takes what is told of control requests, and follows each promise."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine  # vLLM's client
        self._drifts: dict[tuple[str, ...], Drift] = {}
        self._running: set[asyncio.Task[None]] = set()

    def take(self, forks: Iterable[Mapping[str, Any] | None]) -> None:
        """Begins to compare; see `ServedRow.fork`."""
        for fork in forks:
            if fork is not None:
                task = asyncio.create_task(self._compare(fork))
                self._running.add(task)  # a loop holds its tasks weakly
                task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("a control request's answers could not be compared: %s", error)

    async def _compare(self, fork: Mapping[str, Any]) -> None:
        whole = pruned = self._answer(fork["answer_ids"])
        if fork["ids"] is not None:  # where the policy would have stopped: greedy, and without it
            most, ids = fork["max_tokens"] or _UNLIMITED, list[int]()
            params = SamplingParams(temperature=0.0, max_tokens=most, extra_args={ON: False})
            prompt = TokensPrompt(prompt_token_ids=list(fork["ids"]))
            name = f"ospruner-{uuid.uuid4().hex}"
            async for output in self._engine.generate(prompt, params, name):
                ids = output.outputs[0].token_ids
            pruned = self._answer(ids)
        promise = fork["promise"]
        allowed = min(promise["disagreement"] + promise["max_loss"], 0.99)
        labels = (str(promise["max_loss"]), str(promise["confidence"]), f"{allowed:.4f}")
        # The other half of the chance is that the calibration saw too few differ.
        drift = self._drifts.setdefault(labels, Drift(allowed, (1 - promise["confidence"]) / 2))
        known = bool(drift.alarmed[0])
        drift.see(differs := answers_differ(whole, pruned))
        _COMPARED.labels(*labels, "yes" if differs else "no").inc()
        _EVIDENCE.labels(*labels).set(float(drift.highest[0]))
        if drift.alarmed[0] and not known:
            logger.warning(
                "the promise of max_loss %s may no longer hold: of %d control requests %d have "
                "another answer where the policy stops than at the end, %.1f %% are allowed; "
                "calibrate on today's problems, or ask for a more careful price",
                *(promise["max_loss"], drift.seen, drift.differed[0], 100 * allowed),
            )

    def _answer(self, ids: Sequence[int]) -> str:
        """What stands in the box; all of it where it does not close."""
        fmt = format_of(self._engine.model_config.tokenizer)
        box = fmt.box_state()
        closed = (i for i, token in enumerate(ids, start=1) if box.push(token))
        return str(fmt.text(ids[: next(closed, None)]))


class StopRoutes:
    """An endpoint plug-in of vLLM (its `EndpointPlugin`)."""

    name = "ospruner_stops"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Adds the routes, and a look at the bodies of all routes."""
        app.add_api_route("/ospruner/stops/{stop_id:path}", stop_record, methods=["GET"])
        app.add_api_route("/ospruner/answer/{stop_id:path}", stop_record, methods=["POST"])
        app.add_api_route("/ospruner/format", reasoning_format, methods=["GET"])
        app.add_middleware(_Bodies)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Keeps what the routes ask."""
        config, structured = engine_client.model_config.hf_config, args.structured_outputs_config
        literals = config.reasoning_format or {}
        harmony, end = parser_of(literals) == HARMONY_PARSER, literals.get("think_end")
        grammars = None
        if args.speculative_config:
            grammars = f"{GRAMMAR} beside speculative decoding"
        elif not structured.reasoning_parser:
            grammars = IN_THINKING
        elif harmony or end not in engine_client.get_tokenizer().get_added_vocab():
            grammars = GRAMMAR
        state.ospruner_engine = engine_client
        state.ospruner_controls = ControlWatch(engine_client)

        def read(body: Any, path: str) -> tuple[Any, str | None, str | None]:
            if not isinstance(body, dict):
                return body, None, None
            place, own = _places(path)
            body, keys = translated(body, place, own, Defaults.here, config)
            why = check_body(body, Defaults.here, config, not harmony, path, grammars)
            sent, name = said_in(body, place), None
            if why is not None or not isinstance(sent, dict | None):
                return body, why, None
            extra = (sent or {}) if keys is None else keys
            if _TEXTS & set(body) and StopRequest(extra, place).settings(Defaults.here) is not None:
                name = uuid.uuid4().hex
                keys = {**extra, REPLY: name}
            # They ask for nothing that could not be.
            return body if keys is None else replaced(body, place, keys), None, name

        state.ospruner_read = read


async def reasoning_format(request: Request) -> dict[str, Any]:
    """The policy's reasoning format, whose instruction its problems were asked with."""
    config: OSPrunerConfig = request.app.state.ospruner_engine.model_config.hf_config
    return config.reasoning_format or {}


async def stop_record(stop_id: str, request: Request) -> dict[str, Any]:
    """The `StopRecord` so far of the last request with this `stop_id`; 404 where there is none.

    Posted to, it also closes its thinking before its next token; one whose thinking has ended goes
    on as it is.
    """
    answer = request.method == "POST"
    told = await _ask(request.app.state.ospruner_engine, ID, stop_id, answer)
    if not told:
        raise HTTPException(
            404,
            f"no request had the stop_id {shown(stop_id)}, or its policy was off, or it is long "
            "ago",
        )
    return told[0]
