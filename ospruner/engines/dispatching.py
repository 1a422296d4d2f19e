"""Jobs of several requests, handed to servers as these have room, and taken back from dead ones."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Dispatcher", "EnginesDownError", "ServerDownError", "first_error"]

_T = TypeVar("_T")


class EnginesDownError(ConnectionError):
    """No server is left to do the work. What was finished before has been handed on."""


class ServerDownError(Exception):
    """A server cannot be used any more; another one may do its work.

    Args:
        server: its name.
        reason: what it did.
    """

    def __init__(self, server: str, reason: str) -> None:
        super().__init__(f"{server}: {reason}")


@dataclass
class _Job(Generic[_T]):
    results: list[_T | None]
    missing: set[int]


class Dispatcher(Generic[_T]):
    """Runs jobs on servers. A job is one or more requests that one server should do together.

    Servers take jobs in turn, each when it has room for another request: first those that have it
    as their home, then those without a home, then those that `more` adds, then those of servers
    that have no room. A server gets the requests of a job in order. The jobs of a server that goes
    down are done by the others; finished requests are kept.

    Args:
        servers: how many there are.
        concurrency: requests a server works on at once.
        work: does request `part` of job `index` on a server: `work(server, index, part)`. It
            raises `ServerDownError` where the server is to blame.
        done: called with a job's index, its results and its server, as soon as all are there. It
            may add jobs.
        more: called where a server has room and no job waits for it; adds one or more, or says
            that there are none. While nothing runs, that is the end.
    """

    def __init__(
        self,
        servers: int,
        concurrency: int,
        work: Callable[[int, int, int], Awaitable[_T]],
        done: Callable[[int, list[_T], int], None],
        more: Callable[[], bool] = lambda: False,
    ) -> None:
        self._servers = servers
        self._concurrency = concurrency
        self._work = work
        self._done = done
        self._more = more
        self.down: list[ServerDownError] = []
        self._numbers = itertools.count()
        self._jobs: dict[int, _Job[_T]] = {}  # the unfinished ones
        self._changed = asyncio.Condition()
        self._waiting: dict[int | None, deque[int]] = {None: deque()}
        self._waiting |= {server: deque() for server in range(servers)}
        self._full: set[int] = set()  # servers without room

    def add(self, size: int, home: int | None = None) -> int:
        """Adds a job; its index.

        Args:
            size: how many requests it has, 1 or more.
            home: the server that knows it already, or None.
        """
        index = next(self._numbers)
        self._jobs[index] = _Job([None] * size, set(range(size)))
        self._waiting[home if home in self._waiting else None].append(index)
        return index

    async def run(self) -> None:
        """Does the jobs that were added, and all that are.

        Raises:
            ServerDownError: every server went down; the first one's reason.
        """
        async with asyncio.TaskGroup() as group:
            for server in range(self._servers):
                group.create_task(self._serve(server))
        if self._jobs:
            raise self.down[0]

    async def _serve(self, server: int) -> None:
        taken: set[int] = set()
        slots = asyncio.Semaphore(self._concurrency)
        try:
            async with asyncio.TaskGroup() as group:
                await slots.acquire()
                while (index := await self._take(server)) is not None:
                    taken.add(index)
                    for part in sorted(self._jobs[index].missing):
                        group.create_task(self._part(server, index, part, slots))
                        await self._room(server, slots)
                    taken &= self._jobs.keys()
                    await asyncio.sleep(0)  # the next server's turn
        except* ServerDownError as downs:
            error = first_error(downs)
            assert isinstance(error, ServerDownError)
            self.down.append(error)
            self._full.discard(server)
            async with self._changed:
                back = sorted(taken & self._jobs.keys())
                own = self._waiting.pop(server)
                self._waiting[None].extendleft(reversed([*back, *own]))
                self._changed.notify_all()

    async def _room(self, server: int, slots: asyncio.Semaphore) -> None:
        """Waits until a server has room for another request, which it then has to be given."""
        if not slots.locked():
            await slots.acquire()
            return
        self._full.add(server)
        async with self._changed:
            self._changed.notify_all()
        await slots.acquire()
        self._full.discard(server)

    async def _take(self, server: int) -> int | None:
        """The next job for a server; None once all are finished."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._queue(server) or not self._jobs)
            queue = self._queue(server)
            return queue.popleft() if queue else None

    def _queue(self, server: int) -> deque[int]:
        """Where the next job of a server waits; empty where there is none."""
        own, anyone = self._waiting[server], self._waiting[None]
        while not own and not anyone and self._more():
            pass  # it may have added one that is at home elsewhere
        if own or anyone:
            return own or anyone
        others = [self._waiting[full] for full in self._full if full in self._waiting]
        return max(others, key=len, default=anyone)

    async def _part(self, server: int, index: int, part: int, slots: asyncio.Semaphore) -> None:
        try:
            result = await self._work(server, index, part)
        finally:
            slots.release()
        job = self._jobs[index]
        job.results[part] = result
        job.missing.discard(part)
        if not job.missing:
            self._done(index, [r for r in job.results if r is not None], server)
            del self._jobs[index]
        async with self._changed:  # what was full has room, and `more` may have more
            self._changed.notify_all()


def first_error(group: BaseException) -> BaseException:
    """The first single exception in a (nested) group."""
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group
