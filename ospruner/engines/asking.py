"""Sampling and forking by single requests: what vLLM, SGLang and HTTP endpoints have in common."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import torch

from modeling_ospruner.formats_ospruner import TokenFormat
from modeling_ospruner.stopping_ospruner import mix64
from ospruner.logits import top_entropy

from .dispatching import Dispatcher, EnginesDownError, ServerDownError, first_error
from .interface import (
    AnswerStop,
    Engine,
    ForkedAnswer,
    ForkRequest,
    OpenPrompts,
    Sampled,
    SamplingSettings,
    TokenCount,
    TraceDesk,
    TraceRequest,
    row_state,
)

__all__ = ["Ask", "AskingEngine", "Reply", "Server"]

_Made = Sampled | ForkedAnswer | Exception
"""What a request of a stream gives; an error where it was refused."""


@dataclass(frozen=True)
class Ask:
    """One request: a prompt to be continued.

    Attributes:
        prompt_ids: the prompt.
        max_new_tokens: cap on the continuation.
        end_ids: ids that end it.
        temperature: 0 decodes greedily.
        top_p: as in `SamplingSettings`.
        top_k: as in `SamplingSettings`.
        seed: of the draws, below 2**63; None for a greedy request.
        scored: whether log-probabilities are asked for.
        stop: makes the rule that completes it, beside `end_ids`. A server may go on beyond that,
            or stop before it, wherever the rule's `final_text` appears.
        options: token ids whose log-probabilities at the first token are asked for; () for none.
    """

    prompt_ids: list[int]
    max_new_tokens: int
    end_ids: frozenset[int]
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    scored: bool = False
    stop: Callable[[], AnswerStop] | None = None
    options: tuple[int, ...] = ()


@dataclass(frozen=True)
class Reply:
    """What a server answered.

    Attributes:
        ids: the continuation, without the token that ended it.
        end_id: the one of `Ask.end_ids` that ended it; None where something else did.
        cached_tokens: of the prompt's tokens, how many were not computed again.
        logprobs: natural log-probability of each of `ids` at temperature 1, where asked for.
        entropies: in nats, of the distribution at each generated token, that of `end_id` last, over
            its ENTROPY_TOKENS most likely tokens, where asked for.
        option_logprobs: natural log-probability of each of `Ask.options`; None where the server
            gives only those of the likeliest tokens, and it is none of them.
    """

    ids: list[int]
    end_id: int | None
    cached_tokens: int
    logprobs: list[float]
    entropies: list[float]
    option_logprobs: list[float | None] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        ask: Ask,
        ids: Sequence[int],
        cached_tokens: int,
        logprobs: Sequence[float] = (),
        top_logprobs: Sequence[Sequence[float]] = (),
        server_ended: bool = False,
    ) -> Reply:
        """The reply in generated ids, of which the last may be the one that ended them.

        Args:
            ask: what was asked.
            ids: what was generated.
            cached_tokens: see the class.
            logprobs: of all of `ids`.
            top_logprobs: of the most likely tokens at each of `ids`, in any order, or a few more of
                them.
            server_ended: the server says that the last one ends a text for it.
        """
        ends = bool(ids) and (server_ended or ids[-1] in ask.end_ids)
        kept = len(ids) - ends
        entropies = [float(top_entropy(torch.tensor(list(top)))) for top in top_logprobs]
        end_id = ids[-1] if ends else None
        return cls(list(ids[:kept]), end_id, cached_tokens, list(logprobs[:kept]), entropies)


class Server(Protocol):
    """Something that answers requests, one of possibly many."""

    async def ask(self, ask: Ask) -> Reply:
        """Answers one request.

        Raises:
            ServerDownError: it cannot be used any more.
            ValueError: it refuses this request.
        """


class AskingEngine(Engine, ABC):
    """An `Engine` over servers that answer single requests and share prefixes by themselves.

    All forks of a trace go to one server, in order, the one that sampled it where it has room.
    Tokens are counted as the servers report them; a request that a server had to interrupt and
    compute again is not seen.

    Args:
        eos_ids: ids that end a text.
        concurrency: requests that a server works on at once.

    Raises:
        ValueError: a concurrency below 1.
    """

    shares_within_batches = True
    """Whether a server shares the prefixes of requests that it computes at the same time. Where it
    does not, the longest fork of a trace is answered before its others are asked for."""
    batch_effects: str | None = (
        "servers compute rows in changing batches, whose kernels may round differently"
    )
    """See `Engine`."""

    def __init__(self, eos_ids: frozenset[int], concurrency: int) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}; it must be 1 or more")
        self.eos_ids = eos_ids
        self.concurrency = concurrency
        self.counts = TokenCount()
        self.sample_counts = TokenCount()
        self._homes: dict[int, int] = {}  # hash of prompt and trace: the server that knows them

    @abstractmethod
    def _connect(self) -> AbstractAsyncContextManager[Sequence[Server]]:
        """The servers, for one call."""

    @abstractmethod
    def _prepare_sampling(self, settings: SamplingSettings, keys: Sequence[str]) -> None:
        """Gets ready to sample rows with these further keys, or refuses to; none begin a call."""

    def sample_and_fork(
        self,
        desk: TraceDesk,
        settings: SamplingSettings,
        fmt: TokenFormat | None,
        suffix_ids: Sequence[int],
        max_new_tokens: int,
        stop: Callable[[], AnswerStop] | None = None,
    ) -> None:
        """Samples and forks a stream of traces; see `Engine.sample_and_fork`.

        A server with room first takes forks of a trace that it sampled, then a new trace, then
        forks of servers that have no room. A request that is refused fails its trace alone. The
        thinking and the natural answer are two requests, so that each has its own cap.

        Raises:
            ValueError: as `fork`.
            EnginesDownError: no server is left.
        """
        draws = fmt is not None and settings.temperature > 0
        if draws:
            self._prepare_sampling(settings, [])
        prompts = OpenPrompts(self)
        asked: dict[int, TraceRequest] = {}  # by job
        forks: dict[int, tuple[Sampled, _Forks]] = {}  # by job, where it is one of forks

        def forked(
            dispatcher: Dispatcher[_Made], request: TraceRequest, trace: Sampled, home: int | None
        ) -> None:
            """Goes on with a sampled trace: with its forks, or with nothing."""
            if not (cuts := desk.sampled(request, trace)):
                prompts.end(request)
                desk.done(request, trace, [])
                return
            whole = ForkRequest(request.prompt_ids, trace.trace_ids, cuts, request.options)
            number = dispatcher.add(len(cuts), home)
            asked[number] = request
            forks[number] = trace, _Forks(whole, self._order(cuts))

        def more(dispatcher: Dispatcher[_Made]) -> bool:
            if (request := desk.begin()) is None:
                return False
            prompts.begin(request)
            if request.trace is not None:
                known = _trace_hash(request.prompt_ids, request.trace.trace_ids)
                forked(dispatcher, request, request.trace, self._homes.pop(known, None))
            else:
                if draws:
                    self._prepare_sampling(settings, [request.key])
                asked[dispatcher.add(1)] = request
            return True

        async def work(server: Server, index: int, part: int) -> _Made:
            request = asked[index]
            try:
                if index in forks:
                    return await self._fork(
                        server, forks[index][1], part, suffix_ids, max_new_tokens, stop
                    )
                assert fmt is not None
                return await self._trace(server, request, settings, fmt, prompts)
            except ServerDownError:
                raise
            except Exception as error:  # noqa: BLE001 - told to the desk; the others go on
                if index in forks:
                    forks[index][1].begun.set()
                return error

        def done(
            dispatcher: Dispatcher[_Made], index: int, results: list[_Made], server: int
        ) -> None:
            request, (trace, own) = asked.pop(index), forks.pop(index, (None, None))
            if error := next((one for one in results if isinstance(one, Exception)), None):
                prompts.end(request)
                desk.failed(request, error)
            elif trace is None or own is None:
                (sampled,) = (one for one in results if isinstance(one, Sampled))
                self._homes[_trace_hash(request.prompt_ids, sampled.trace_ids)] = server
                forked(dispatcher, request, sampled, server)
            else:
                answers = own.placed([one for one in results if isinstance(one, ForkedAnswer)])
                self._homes.pop(_trace_hash(request.prompt_ids, trace.trace_ids), None)
                prompts.forked(request, own.request, suffix_ids, answers)
                prompts.end(request)
                desk.done(request, trace, answers)

        _run(self._dispatch(work, done, more))

    def _order(self, cuts: Sequence[int]) -> list[int]:
        """In which order the forks of a trace are asked for, by their places in `cuts`."""
        places = list(range(len(cuts)))
        if self.shares_within_batches:
            return places
        return sorted(places, key=lambda place: cuts[place], reverse=True)

    async def _fork(
        self,
        server: Server,
        forks: _Forks,
        part: int,
        suffix_ids: Sequence[int],
        max_new_tokens: int,
        stop: Callable[[], AnswerStop] | None,
    ) -> ForkedAnswer:
        """Decodes one answer of a trace, in the trace's order."""
        if part and not self.shares_within_batches:
            await forks.begun.wait()
        request = forks.request
        kept = request.trace_ids[: request.cuts[forks.order[part]]]
        prompt = [*request.prompt_ids, *kept, *suffix_ids]
        if request.options:
            answer = await self._choose(server, prompt, tuple(request.options))
            forks.begun.set()
            return answer
        answer = await self._answer(server, prompt, max_new_tokens, stop)
        forks.begun.set()
        return answer

    async def _dispatch(
        self,
        work: Callable[[Server, int, int], Awaitable[_Made]],
        done: Callable[[Dispatcher[_Made], int, list[_Made], int], None],
        more: Callable[[Dispatcher[_Made]], bool],
    ) -> None:
        async with self._connect() as servers:
            dispatcher = Dispatcher[_Made](
                len(servers),
                self.concurrency,
                lambda server, index, part: work(servers[server], index, part),
                lambda index, results, server: done(dispatcher, index, results, server),
                lambda: more(dispatcher),
            )
            try:
                await dispatcher.run()
            except ServerDownError as error:
                reasons = "; ".join(map(str, dispatcher.down))
                raise EnginesDownError(
                    f"no server is left ({reasons}): see to them and run again; what was "
                    "finished before is kept"
                ) from error

    async def _trace(
        self,
        server: Server,
        request: TraceRequest,
        settings: SamplingSettings,
        fmt: TokenFormat,
        prompts: OpenPrompts,
    ) -> Sampled:
        """Samples one thinking part and, where the model ended it by its marker, the answer.

        Where the end marker is several tokens, servers stop at its text, which is then looked at:
        they are asked on where it was none.
        """
        state = row_state(settings.seed, request.key)
        prompt, ids = list(request.prompt_ids), list[int]()
        marker = _ThinkingEnd(fmt) if fmt.end_marker is not None else None
        ends = self.eos_ids.union(() if marker else fmt.think_end_ids)

        async def continued(limit: int, end_ids: frozenset[int], draw: int, stop: Any) -> Reply:
            ask = Ask(
                [*prompt, *ids],
                limit,
                end_ids,
                settings.temperature,
                settings.top_p,
                settings.top_k,
                mix64(state ^ draw) >> 1 if settings.temperature > 0 else None,
                stop=stop,
            )
            reply = await server.ask(ask)
            _count(self.sample_counts, ask, reply)
            return reply

        while True:
            limit = settings.max_new_tokens - len(ids)
            stop = partial(_ThinkingEnd, fmt, tuple(ids)) if marker else None
            # The answer's draw is 1.
            reply = await continued(limit, ends, len(ids) + 1 if ids else 0, stop)
            ids += reply.ids if marker is None else reply.ids[: marker.take(reply.ids)]
            length = len(ids)
            if marker is not None and marker.state.ended:
                length = marker.state.thinking_tokens
            elif marker is None and reply.end_id is not None and reply.end_id == fmt.think_end_id:
                ids.append(reply.end_id)
            elif reply.end_id is not None:
                prompts.sampled(request, [*prompt, *ids])
                return Sampled(ids, [], "natural")
            elif len(ids) >= settings.max_new_tokens:
                prompts.sampled(request, [*prompt, *ids[:-1]])
                return Sampled(ids, [], "cap")
            else:
                if marker is None or not reply.ids:
                    _check_length(reply, limit)
                continue
            answer = await continued(settings.max_answer_tokens, self.eos_ids, 1, None)
            fed = answer.ids if answer.end_id is not None else answer.ids[:-1]
            prompts.sampled(request, [*prompt, *ids, *fed])
            written = ids[length:] if marker is not None else []
            return Sampled(ids[:length], answer.ids, "natural", written)

    async def _choose(
        self, server: Server, prompt: list[int], options: tuple[int, ...]
    ) -> ForkedAnswer:
        """The likeliest of the options after a prompt; those left unsaid are asked for singly."""

        async def scores_of(some: tuple[int, ...]) -> list[float | None]:
            ask = Ask(prompt, 1, self.eos_ids, scored=True, options=some)
            reply = await server.ask(ask)
            _count(self.counts, ask, reply)
            return reply.option_logprobs

        known = dict(zip(options, await scores_of(options), strict=True))
        scores = []
        for option, score in known.items():
            score = (await scores_of((option,)))[0] if score is None else score
            if score is None:
                raise ValueError(f"a server gives no log-probability of the token {option}")
            scores.append(score)
        return ForkedAnswer.chosen(options, scores)

    async def _answer(
        self,
        server: Server,
        prompt: list[int],
        limit: int,
        stop: Callable[[], AnswerStop] | None,
    ) -> ForkedAnswer:
        """Decodes one answer, asking on where a server stopped before the rule is satisfied."""
        rule = stop() if stop is not None else None
        ids: list[int] = []
        logprobs: list[float] = []
        entropies: list[float] = []

        def answer(ended: Literal["closed", "eos", "length"]) -> ForkedAnswer:
            first = entropies[0] if entropies else 0.0
            return ForkedAnswer(ids, ended, logprobs, first, math.fsum(entropies))

        while True:
            ask = Ask([*prompt, *ids], limit - len(ids), self.eos_ids, scored=True, stop=stop)
            reply = await server.ask(ask)
            _count(self.counts, ask, reply)
            for place, token in enumerate(reply.ids):
                ids.append(token)
                logprobs.append(reply.logprobs[place])
                entropies.append(reply.entropies[place])
                if rule is not None and rule.push(token):
                    return answer("closed")
            if reply.end_id is not None:
                entropies.append(reply.entropies[-1])
                return answer("eos")
            if len(ids) >= limit:
                return answer("length")
            if rule is None or not reply.ids:
                _check_length(reply, ask.max_new_tokens)


class _Forks:
    """The forks of one trace, as they are asked for.

    Args:
        request: the trace and its cuts.
        order: the places of the cuts, in the order in which they are asked for.
    """

    def __init__(self, request: ForkRequest, order: list[int]) -> None:
        self.request = request
        self.order = order
        self.begun = asyncio.Event()  # the first one is answered

    def placed(self, answers: Sequence[ForkedAnswer]) -> list[ForkedAnswer]:
        """The answers in the order of the cuts."""
        by_place = dict(zip(self.order, answers, strict=True))
        return [by_place[place] for place in range(len(by_place))]


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Runs to the end; of several errors in concurrent requests the first one is raised alone."""
    try:
        asyncio.run(work)
    except BaseExceptionGroup as group:
        raise first_error(group) from None


def _count(count: TokenCount, ask: Ask, reply: Reply) -> None:
    generated = len(reply.ids) + (reply.end_id is not None)
    fed = max(generated - 1, 0)  # nothing follows the last token
    count.computed += len(ask.prompt_ids) - reply.cached_tokens + fed


class _ThinkingEnd:
    """The `AnswerStop` of a thinking that an end marker of several tokens ends.

    Args:
        fmt: with that marker.
        taken: what stands there already.
    """

    def __init__(self, fmt: TokenFormat, taken: Sequence[int] = ()) -> None:
        assert fmt.end_marker is not None
        self.final_text = fmt.end_marker.literal
        self.state = fmt.boundary_state(alone=True)
        self.take(taken)

    def push(self, token_id: int) -> bool:
        """Takes the next token; whether the marker is complete."""
        self.state.push(token_id)
        return self.state.ended

    def take(self, ids: Sequence[int]) -> int:
        """Takes tokens up to the marker's last; how many."""
        return next((i + 1 for i, token_id in enumerate(ids) if self.push(token_id)), len(ids))


def _check_length(reply: Reply, limit: int) -> None:
    if len(reply.ids) < limit:
        raise ValueError(
            f"a server stopped after {len(reply.ids)} of {limit} tokens without saying why: is "
            "its context (max_model_len, context-length) long enough for prompt and trace cap?"
        )


def _trace_hash(prompt_ids: Sequence[int], trace_ids: Sequence[int]) -> int:
    return hash((tuple(prompt_ids), tuple(trace_ids)))
