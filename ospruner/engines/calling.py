"""Engines over servers: which one does what, and how traces and answers are asked for."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from modeling_ospruner.formats_ospruner import TokenFormat
from ospruner.formats import ends_alone

from .asking import Ask, Reply, Server, ServerDownError
from .interface import (
    AnswerStop,
    Engine,
    EnginesDownError,
    ForkedAnswer,
    ForkRequest,
    Sampled,
    SamplingSettings,
    TokenCount,
    TraceDesk,
    TraceRequest,
    UniqueTokens,
    to_fork,
)
from .rows import Branch, SamplingRow

_T = TypeVar("_T")


class _Host:
    """A server, and what is asked of it.

    Attributes:
        down: why it cannot be used any more.
        asked: the requests that it was given, those included that wait for room.
    """

    def __init__(self, server: Server, concurrency: int, changed: asyncio.Event) -> None:
        self._server = server
        self._changed = changed  # set when a request is done
        self._room = asyncio.Semaphore(concurrency)
        self.down: ServerDownError | None = None
        self.asked = 0

    async def do(self, work: Callable[[Server], Awaitable[_T]]) -> _T:
        """Does some work as one request; it counts as asked already."""
        try:
            async with self._room:
                if self.down is not None:
                    raise self.down
                return await work(self._server)
        except ServerDownError as error:
            self.down = self.down or error
            raise
        finally:
            self.asked -= 1
            self._changed.set()


class AskingEngine(Engine, ABC):
    """An `Engine` over servers that answer single requests and share prefixes by themselves.

    All forks of a trace go to the server that sampled it, unless another has nothing to do. Tokens
    are counted as the servers report them; a request that a server had to interrupt and compute
    again is not seen.

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

        A trace is begun wherever a server has room, and its forks come before further traces. What
        a server that goes down has not answered is asked of the others. A request that is refused
        fails its trace alone. The thinking and the natural answer are two requests, so that each
        has its own cap.

        Raises:
            ValueError: as `fork`.
            EnginesDownError: no server is left.
        """
        call = Call(self, desk, settings, fmt, suffix_ids, max_new_tokens, stop)
        try:
            asyncio.run(call.run())
        except BaseExceptionGroup as group:  # of several errors the first one is raised alone
            error: BaseException = group
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise error from None


@dataclass
class Call:
    """One call of an engine; the other fields are the arguments of `sample_and_fork`."""

    engine: AskingEngine
    desk: TraceDesk
    settings: SamplingSettings
    fmt: TokenFormat | None
    suffix_ids: Sequence[int]
    max_new_tokens: int
    stop: Callable[[], AnswerStop] | None

    def __post_init__(self) -> None:
        self.unique = UniqueTokens(self.engine)
        self.hosts: list[_Host] = []
        self.exhausted = False  # a server had room, and there was no trace to begin
        self.changed = asyncio.Event()

    async def run(self) -> None:
        """Begins traces while servers have room, until the desk has no more of them."""
        draws = self.fmt is not None and self.settings.temperature > 0
        if draws:
            self.engine._prepare_sampling(self.settings, [])
        running: set[asyncio.Task[None]] = set()
        concurrency = self.engine.concurrency
        async with self.engine._connect() as servers, asyncio.TaskGroup() as group:
            self.hosts = [_Host(server, concurrency, self.changed) for server in servers]
            while True:
                self.changed.clear()
                request = None
                if any(host.down is None and host.asked < concurrency for host in self.hosts):
                    request = self.desk.begin()
                    self.exhausted = request is None
                if request is not None:
                    if draws and request.trace is None:
                        self.engine._prepare_sampling(self.settings, [request.key])
                    host = None
                    if request.trace is None:
                        host = self._host()
                        host.asked += 1
                    task = group.create_task(self._label(request, host))
                    running.add(task)
                    task.add_done_callback(running.discard)
                    task.add_done_callback(lambda _: self.changed.set())
                    if host is None:
                        await asyncio.sleep(0)  # its forks are asked for
                elif running:
                    await self.changed.wait()
                else:
                    return

    def _host(self, home: _Host | None = None) -> _Host:
        """The server to ask next: the one with the least to do.

        Args:
            home: the one that knows the prompts; another helps out where it has nothing to do.

        Raises:
            EnginesDownError: none is left.
        """
        up = [host for host in self.hosts if host.down is None]
        if not up:
            reasons = "; ".join(str(host.down) for host in self.hosts)
            raise EnginesDownError(
                f"no server is left ({reasons}): see to them and run again; what was finished "
                "before is kept"
            )
        host = min(up, key=lambda one: one.asked)
        if home in up:
            full = home.asked >= self.engine.concurrency
            return host if self.exhausted and full and not host.asked else home
        return host

    async def _label(self, request: TraceRequest, host: _Host | None) -> None:
        """Samples a trace on a server, unless it was before, and forks it."""
        trace = request.trace
        if host is not None:
            sampled = await self._tried(request, self._sampled(request, host))
            if sampled is None:
                return
            trace, host = sampled
        assert trace is not None
        if (fork := to_fork(self.desk, request, trace)) is not None:
            answers = await self._tried(request, self._forked(fork, host))
            if answers is not None:
                self.unique.forked(fork, self.suffix_ids, answers)
                self.desk.done(request, trace, answers)

    async def _tried(self, request: TraceRequest, work: Awaitable[_T]) -> _T | None:
        """What some work on a trace gives; None where it failed, which the desk is told."""
        try:
            return await work
        except EnginesDownError:
            raise
        except Exception as error:  # noqa: BLE001 - the other traces go on
            self.desk.failed(request, error)
            return None

    async def _sampled(self, request: TraceRequest, host: _Host) -> tuple[Sampled, _Host]:
        """Samples a trace; also the server that did."""
        while True:
            try:
                return await host.do(lambda server: self._trace(server, request)), host
            except ServerDownError:
                host = self._host()
                host.asked += 1

    async def _forked(self, fork: ForkRequest, home: _Host | None) -> list[ForkedAnswer]:
        """The answers of a trace, all of one server while it is up."""
        prompts = [[*fork.prompt_ids, *fork.trace_ids[:cut], *self.suffix_ids] for cut in fork.cuts]
        answers: dict[int, ForkedAnswer] = {}
        shares = self.engine.shares_within_batches
        left = sorted(range(len(prompts)), key=lambda place: 0 if shares else -fork.cuts[place])
        while left:
            host = self._host(home)
            for wave in [left] if shares else [left[:1], left[1:]]:
                host.asked += len(wave)
                tasks = (
                    host.do(partial(self._answer, prompts[place], tuple(fork.options)))
                    for place in wave
                )
                results = await asyncio.gather(*tasks, return_exceptions=True)
                for place, result in zip(wave, results, strict=True):
                    if isinstance(result, ForkedAnswer):
                        answers[place] = result
                    elif not isinstance(result, ServerDownError):
                        raise result
            left = [place for place in left if place not in answers]
        return [answers[place] for place in range(len(prompts))]

    async def _trace(self, server: Server, request: TraceRequest) -> Sampled:
        """Samples one thinking part and, where the model ended it by its marker, the answer.

        Where the end marker is several tokens, servers stop at its text, which is then looked at:
        they are asked on where it was none.
        """
        fmt, settings, eos_ids = self.fmt, self.settings, self.engine.eos_ids
        assert fmt is not None
        row = SamplingRow(request, settings.seed, fmt)
        several = fmt.end_marker is not None
        while True:
            thinking, begun = not row.thinking.ended, len(row.tokens)
            limit = settings.max_new_tokens - begun if thinking else settings.max_answer_tokens
            draw = row.draw(begun + bool(begun) if thinking else 1)
            ask = Ask(
                row.text,
                limit,
                eos_ids.union(fmt.think_end_ids) if thinking else eos_ids,
                settings.temperature,
                settings.top_p,
                settings.top_k,
                draw >> 1 if settings.temperature > 0 else None,
                stop=partial(_MarkerStop, fmt, tuple(row.tokens)) if thinking and several else None,
            )
            reply = await _asked(server, ask, self.engine.sample_counts)
            end_ids = eos_ids if reply.end_id is None else eos_ids | {reply.end_id}
            finished = False
            for token in reply.written:
                finished = row.push(token, settings, end_ids)
                if finished or thinking == row.thinking.ended:
                    break
            if finished or not thinking:
                self.unique.sampled(request, len(row.tokens))
                return row.sampled(end_ids)
            if not row.thinking.ended and not (several and reply.ids):
                _check_length(reply, limit)

    async def _answer(
        self, prompt: list[int], options: tuple[int, ...], server: Server
    ) -> ForkedAnswer:
        """Decodes one answer, asking on where a server stopped before the rule is satisfied."""
        if options:
            return await self._choose(prompt, options, server)
        branch, eos_ids = Branch(prompt, (), self.stop), self.engine.eos_ids
        while True:
            limit = self.max_new_tokens - len(branch.ids)
            ask = Ask([*prompt, *branch.ids], limit, eos_ids, scored=True, stop=self.stop)
            reply = await _asked(server, ask, self.engine.counts)
            end_ids = eos_ids if reply.end_id is None else eos_ids | {reply.end_id}
            scores = zip(reply.written, [*reply.logprobs, 0.0], reply.entropies, strict=False)
            for token, logprob, entropy in scores:
                branch.push(token, logprob, entropy, self.max_new_tokens, end_ids)
                if branch.answer is not None:
                    return branch.answer
            if self.stop is None or not reply.ids:
                _check_length(reply, limit)

    async def _choose(
        self, prompt: list[int], options: tuple[int, ...], server: Server
    ) -> ForkedAnswer:
        """The likeliest of the options after a prompt; those left unsaid are asked for singly."""

        async def scores_of(some: tuple[int, ...]) -> list[float | None]:
            ask = Ask(prompt, 1, self.engine.eos_ids, scored=True, options=some)
            return (await _asked(server, ask, self.engine.counts)).option_logprobs

        scores = []
        for option, known in zip(options, await scores_of(options), strict=True):
            score = (await scores_of((option,)))[0] if known is None else known
            if score is None:
                raise ValueError(f"a server gives no log-probability of the token {option}")
            scores.append(score)
        return ForkedAnswer.chosen(options, scores)


class _MarkerStop:
    """The `AnswerStop` of a thinking that an end marker of several tokens ends.

    Args:
        fmt: with that marker.
        taken: what stands there already.
    """

    def __init__(self, fmt: TokenFormat, taken: Sequence[int]) -> None:
        assert fmt.end_marker is not None
        self.final_text = fmt.end_marker.literal
        self._state = ends_alone(fmt).boundary_state()
        for token_id in taken:
            self._state.push(token_id)

    def push(self, token_id: int) -> bool:
        """Takes the next token; whether the marker is complete."""
        self._state.push(token_id)
        return self._state.ended


async def _asked(server: Server, ask: Ask, count: TokenCount) -> Reply:
    """A server's answer, whose tokens are counted."""
    reply = await server.ask(ask)
    fed = max(len(reply.written) - 1, 0)  # nothing follows the last token
    count.computed += len(ask.prompt_ids) - reply.cached_tokens + fed
    return reply


def _check_length(reply: Reply, limit: int) -> None:
    if len(reply.ids) < limit:
        raise ValueError(
            f"a server stopped after {len(reply.ids)} of {limit} tokens without saying why: is "
            "its context (max_model_len, context-length) long enough for prompt and trace cap?"
        )
