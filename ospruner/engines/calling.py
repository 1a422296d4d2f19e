"""Engines over servers: what one is asked and answers, which does what, and how traces are made."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from modeling_ospruner.formats_ospruner import MarkerState, TokenFormat

from .interface import (
    AnswerStop,
    Call,
    Engine,
    EnginesDownError,
    ForkedAnswer,
    ForkJob,
    ForkRequest,
    Sampled,
    SamplingSettings,
    TokenCount,
    TraceRequest,
    top_entropy,
)
from .rows import Branch, SamplingRow

_Made = TypeVar("_Made")
_Work = tuple[TraceRequest, ForkJob | None]  # a trace to be sampled, or, if it is, to be forked


class ServerDownError(Exception):
    """A server, which is named, cannot be used any more; another one may do its work."""


@dataclass(frozen=True)
class Ask:
    """One request: a prompt to be continued; the draws are as in `SamplingSettings`."""

    prompt_ids: list[int]
    max_new_tokens: int
    end_ids: frozenset[int]  # that end it
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None  # of the draws, below 2**63; None for a greedy request
    scored: bool = False  # whether log-probabilities are asked for
    # Makes the rule that completes it, beside `end_ids`. A server may go on beyond that, or stop
    # before it, wherever the rule's `final_text` appears.
    stop: Callable[[], AnswerStop] | None = None
    options: tuple[int, ...] = ()  # whose log-probabilities at the first token are asked for


@dataclass
class Reply:
    """What a server answered; scores where they were asked for."""

    ids: list[int]  # the continuation, with the token that ended it
    cached_tokens: int  # of the prompt's tokens, how many were not computed again
    logprobs: list[float] = field(default_factory=list)  # natural ones of `ids` at temperature 1
    # Of the ENTROPY_TOKENS most likely tokens at each of `ids`, or at a few more.
    top_logprobs: list[list[float]] = field(default_factory=list)
    # Natural ones of `Ask.options`; None where the server gives only those of the likeliest tokens,
    # and it is none of them.
    option_logprobs: Sequence[float | None] = ()
    ended: bool = False  # the last of `ids` ends a text for the server, whatever `Ask.end_ids` says

    def end_ids(self, ask: Ask) -> frozenset[int]:
        """The ids that ended it, or could have."""
        return ask.end_ids.union(self.ids[-1:] if self.ended else ())


Server = Callable[[Ask], Awaitable[Reply]]
"""Answers requests, one of possibly many.

Raises:
    ServerDownError: it cannot be used any more.
    ValueError: it refuses this request.
"""


@dataclass
class _Host:
    """A server; `down` is why it cannot be used any more."""

    server: Server
    room: asyncio.Semaphore
    down: ServerDownError | None = None

    async def ask(self, ask: Ask, count: TokenCount) -> Reply:
        """Its answer, whose tokens are counted."""
        async with self.room:
            if self.down is not None:
                raise self.down
            try:
                reply = await self.server(ask)
            except ServerDownError as error:
                self.down = self.down or error
                raise
        fed = max(len(reply.ids) - 1, 0)  # nothing follows the last token
        count.computed += len(ask.prompt_ids) - reply.cached_tokens + fed
        return reply


@dataclass
class _Call(Call):
    """A server has as many traces in work as requests, and begins another where one is done.

    What a server that goes down has not answered is asked of the others. A request that is refused
    fails its trace alone. The thinking and the natural answer are two requests, so that each has
    its own cap.
    """

    engine: AskingEngine

    def __post_init__(self) -> None:
        self.draws = self.fmt is not None and self.settings.temperature > 0
        self.left: list[_Work] = []  # by servers that went down
        self.running = 0  # traces
        self.asking = asyncio.Lock()  # of the desk
        self.changed = asyncio.Event()  # set when a trace is done, or left

    def run(self) -> None:
        """Makes traces on all servers, until the desk has no more of them."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        concurrency = self.engine.concurrency
        if self.draws:
            self.engine._prepare_sampling(self.settings, None)
        async with self.engine._connect() as servers:
            hosts = [_Host(server, asyncio.Semaphore(concurrency)) for server in servers]
            # The hosts take turns.
            working = [asyncio.create_task(self._work(host)) for host in hosts * concurrency]
            try:
                await asyncio.gather(*working)  # of several errors the first one is raised
            finally:
                for task in working:
                    task.cancel()
                await asyncio.gather(*working, return_exceptions=True)
        if self.left:
            reasons = "; ".join(str(host.down) for host in hosts)
            raise EnginesDownError(
                f"no server is left ({reasons}): see to them and run again; what was finished "
                "before is kept"
            )

    async def _work(self, host: _Host) -> None:
        """Makes traces on a server, one after the other, while it is up."""
        while (work := await self._next(host)) is not None:
            request, job = work
            if job is None:
                trace = request.trace or await self._tried(work, self._sample(request, host))
                job = self.sampled(request, trace) if trace is not None else None
            if job is not None:
                answers = await self._tried((request, job), self._answer_all(job, host))
                if answers is not None:
                    self.forked(job, answers)
            self.running -= 1
            self.changed.set()

    async def _next(self, host: _Host) -> _Work | None:
        """What a server does next; None where nothing is left, or it is down."""
        async with self.asking:
            while host.down is None:
                if self.left:
                    self.running += 1
                    return self.left.pop()
                if (request := self.desk.begin()) is not None:
                    if self.draws and request.trace is None:
                        self.engine._prepare_sampling(self.settings, request.key)
                    self.running += 1
                    return request, None
                if not self.running:
                    return None
                self.changed.clear()
                await self.changed.wait()
        return None

    async def _tried(self, work: _Work, doing: Awaitable[_Made]) -> _Made | None:
        """What is made of a trace; or others do the work, or the desk is told why not."""
        try:
            return await doing
        except ServerDownError:
            self.left.append(work)
        except Exception as error:  # noqa: BLE001 - the other traces go on
            self.desk.failed(work[0], error)
        return None

    async def _answer_all(self, job: ForkJob, host: _Host) -> list[ForkedAnswer]:
        """Forks a trace's answers, those that no server has given yet; all of them."""
        fork, shares = job.fork, self.engine.shares_within_batches
        left = [place for place in range(len(fork.cuts)) if place not in job.answers]
        left.sort(key=lambda place: 0 if shares else -fork.cuts[place])
        for wave in [left] if shares else [left[:1], left[1:]]:
            results = await asyncio.gather(
                *(self._answer(fork, fork.cuts[place], host) for place in wave),
                return_exceptions=True,
            )
            known = zip(wave, results, strict=True)
            job.answers |= {n: one for n, one in known if isinstance(one, ForkedAnswer)}
            errors = [one for one in results if isinstance(one, BaseException)]
            if errors:  # a refusal goes before a server that is down
                raise min(errors, key=lambda error: isinstance(error, ServerDownError))
        return [job.answers[place] for place in range(len(fork.cuts))]

    async def _sample(self, request: TraceRequest, host: _Host) -> Sampled:
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
            stop = partial(_marker_stop, fmt, tuple(row.tokens)) if thinking and several else None
            ask = Ask(
                row.text,
                limit,
                eos_ids.union(fmt.think_end_ids) if thinking else eos_ids,
                settings.temperature,
                settings.top_p,
                settings.top_k,
                draw >> 1 if settings.temperature > 0 else None,
                stop=stop,
            )
            reply = await host.ask(ask, self.engine.sample_counts)
            end_ids = reply.end_ids(ask)
            for token in reply.ids:
                row.push(token, settings, end_ids)
                if row.finished or thinking == row.thinking.ended:
                    break
            if row.finished or not thinking:
                self.count_sampled(request, len(row.tokens))
                return row.sampled(end_ids)
            if not row.thinking.ended and not (several and reply.ids):
                _check_length(reply, limit)

    async def _answer(self, fork: ForkRequest, cut: int, host: _Host) -> ForkedAnswer:
        """Decodes one answer, asking on where a server stopped before the rule is satisfied."""
        prompt = [*fork.prompt_ids, *fork.trace_ids[:cut], *self.suffix_ids]
        if fork.options:
            return await self._choose(prompt, tuple(fork.options), host)
        branch, eos_ids = Branch(self.stop), self.engine.eos_ids
        while True:
            limit = self.max_new_tokens - len(branch.ids)
            ask = Ask([*prompt, *branch.ids], limit, eos_ids, scored=True, stop=self.stop)
            reply = await host.ask(ask, self.engine.counts)
            end_ids = reply.end_ids(ask)
            scores = zip(reply.ids, reply.logprobs, reply.top_logprobs, strict=False)
            for token, logprob, top in scores:
                entropy = float(top_entropy(torch.tensor(top)))
                branch.push(token, logprob, entropy, self.max_new_tokens, end_ids)
                if branch.answer is not None:
                    return branch.answer
            if self.stop is None or not reply.ids:
                _check_length(reply, limit)

    async def _choose(
        self, prompt: list[int], options: tuple[int, ...], host: _Host
    ) -> ForkedAnswer:
        """The likeliest of the options after a prompt; those left unsaid are asked for singly."""

        async def scores_of(some: tuple[int, ...]) -> Sequence[float | None]:
            ask = Ask(prompt, 1, self.engine.eos_ids, scored=True, options=some)
            return (await host.ask(ask, self.engine.counts)).option_logprobs

        scores = []
        for option, known in zip(options, await scores_of(options), strict=True):
            score = (await scores_of((option,)))[0] if known is None else known
            if score is None:
                raise ValueError(f"a server gives no log-probability of the token {option}")
            scores.append(score)
        return ForkedAnswer.chosen(options, scores)


class AskingEngine(Engine, ABC):
    """An `Engine` over servers that answer single requests and share prefixes by themselves.

    All forks of a trace go to the server that sampled it. Tokens are counted as the servers report
    them; a request that a server had to interrupt and compute again is not seen.

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
    calls = _Call

    def __init__(self, eos_ids: frozenset[int], concurrency: int) -> None:
        super().__init__()
        if concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}; it must be 1 or more")
        self.eos_ids = eos_ids  # that end a text
        self.concurrency = concurrency  # requests that a server works on at once

    @abstractmethod
    def _connect(self) -> AbstractAsyncContextManager[Sequence[Server]]:
        """The servers, for one call."""

    def _prepare_sampling(self, settings: SamplingSettings, key: str | None) -> None:
        """Gets ready to sample a further row with this key, or refuses to; None begins a call.

        Nothing where each request carries its seed.
        """


def _marker_stop(fmt: TokenFormat, taken: Sequence[int]) -> AnswerStop:
    """Says where a thinking, begun already, ends with a marker of several tokens."""
    assert fmt.end_marker is not None
    state = MarkerState(fmt.end_marker)
    state.final_text = fmt.end_marker.literal  # whose last letter alone stands everywhere
    for token in taken:
        state.push(token)
    return state


def _check_length(reply: Reply, limit: int) -> None:
    if len(reply.ids) < limit:
        raise ValueError(
            f"a server stopped after {len(reply.ids)} of {limit} tokens without saying why: is "
            "its context (max_model_len, context-length) long enough for prompt and trace cap?"
        )
