"""Which server does which request, whatever goes down when."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from ospruner.engines.calling import Ask, AskingEngine, Reply, Server, ServerDownError
from ospruner.engines.interface import (
    EnginesDownError,
    ForkedAnswer,
    ForkRequest,
    Sampled,
    SamplingSettings,
    TraceRequest,
)

from .conftest import Desk

SUFFIX = [3]


class Fake(AskingEngine):
    """Servers that take a few turns of the loop, and answer a prompt with its length.

    Args:
        concurrency: requests that each works on at once.
        dies_at: of a server, the request at which it goes down.
        breaks_at: of all, the request that raises another error.
    """

    def __init__(
        self, concurrency: int, dies_at: dict[int, int] | None = None, breaks_at: int = 0
    ) -> None:
        super().__init__(frozenset({0}), concurrency)
        self.dies_at = dies_at or {}
        self.breaks_at = breaks_at
        self.log: list[tuple[int, int, int]] = []  # server, trace, prompt's length
        self.answered: Counter[int] = Counter()  # requests of each trace
        self.answered_before: list[int] = []  # of the same trace, for each entry of the log
        self.most_inside = 0
        self.draws = random.Random(0)
        self.refused: set[int] = set()  # traces of which no request is answered

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[Sequence[Server]]:
        yield [_FakeServer(self, number).ask for number in range(3)]


class _FakeServer:
    def __init__(self, engine: Fake, number: int) -> None:
        self.engine = engine
        self.number = number
        self.inside = self.asked = 0

    async def ask(self, ask: Ask) -> Reply:
        engine = self.engine
        trace = ask.prompt_ids[0]
        engine.log.append((self.number, trace, len(ask.prompt_ids)))
        engine.answered_before.append(engine.answered[trace])
        place = len(engine.log)
        self.asked += 1
        self.inside += 1
        engine.most_inside = max(engine.most_inside, self.inside)
        for _ in range(engine.draws.randrange(4)):
            await asyncio.sleep(0)
        self.inside -= 1
        if self.asked >= engine.dies_at.get(self.number, 10**9):
            raise ServerDownError(f"s{self.number}: it is dead")
        if trace in engine.refused:
            raise ValueError(trace)
        if place == engine.breaks_at:
            raise KeyError(engine.breaks_at)
        engine.answered[trace] += 1
        return Reply([len(ask.prompt_ids)], 0, [0.0], [[0.0]])


def traces(count: int, seed: int = 0) -> list[ForkRequest]:
    draws = random.Random(seed)
    return [
        ForkRequest([n], [5] * 9, sorted(draws.sample(range(10), draws.randrange(1, 6))))
        for n in range(count)
    ]


def answers(asked: Sequence[ForkRequest]) -> list[list[list[int]]]:
    return [[[1 + cut + len(SUFFIX)] for cut in one.cuts] for one in asked]


def ids(forks: Sequence[Sequence[ForkedAnswer]]) -> list[list[list[int]]]:
    return [[answer.ids for answer in row] for row in forks]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shares", [True, False])
def test_every_trace_is_done_once_by_one_server(seed: int, shares: bool) -> None:
    engine, asked = Fake(1 + seed % 3), traces(20, seed)
    engine.shares_within_batches = shares
    assert ids(engine.fork(asked, SUFFIX, 1)) == answers(asked)
    assert len(engine.log) == len(set(engine.log)) == sum(len(one.cuts) for one in asked)
    assert engine.most_inside == engine.concurrency
    for number in range(20):
        own = [n for n, (_, trace, _) in enumerate(engine.log) if trace == number]
        assert len({engine.log[n][0] for n in own}) == 1
        lengths = [engine.log[n][2] for n in own]
        if shares:
            assert lengths == sorted(lengths)
        else:  # 3.2 times the unique tokens are computed otherwise
            assert lengths == sorted(lengths, reverse=True)
            assert all(engine.answered_before[n] for n in own[1:])


@pytest.mark.parametrize("seed", range(6))
def test_dead_servers_work_is_done_by_the_others(seed: int) -> None:
    engine, asked = Fake(2, {0: 1 + 3 * seed, 1: 2 + 4 * seed // 2}), traces(15, seed)
    assert ids(engine.fork(asked, SUFFIX, 1)) == answers(asked)
    # What a server finished before it died is not done again: at most what it was working on.
    assert len(engine.log) <= sum(len(one.cuts) for one in asked) + 2 * 2


def test_servers_take_turns_even_with_room_for_all() -> None:
    engine = Fake(100)
    engine.fork([ForkRequest([n], [5], [0, 0, 1, 1]) for n in range(90)], SUFFIX, 1)
    served = [server for server, _, _ in engine.log]
    assert all(served.count(server) > 60 for server in range(3))


@pytest.mark.parametrize("shares", [True, False])
def test_a_refused_trace_fails_alone(shares: bool) -> None:
    """Also where its other forks were not asked for yet: the room that they would take is free."""
    engine = Fake(1)
    engine.shares_within_batches = shares
    engine.refused = {2, 3, 4, 11}
    trace = Sampled([5] * 9, [], "natural")
    desk = Desk([TraceRequest([n], str(n), (), trace) for n in range(20)])
    engine.sample_and_fork(desk, SamplingSettings(), None, SUFFIX, 1)
    assert set(desk.errors) == set(map(str, engine.refused))
    assert len(desk.errors) + len(desk.traces) == 20


def test_errors_end_the_run() -> None:
    with pytest.raises(EnginesDownError, match="s0: it is dead; s1: it is dead; s2: it is dead"):
        Fake(2, {0: 6, 1: 9, 2: 12}).fork(traces(20), SUFFIX, 1)
    with pytest.raises(KeyError, match="5"):
        Fake(2, breaks_at=5).fork(traces(20), SUFFIX, 1)
    assert Fake(2).fork([], SUFFIX, 1) == []
