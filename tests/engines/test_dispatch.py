"""Which server does which request, whatever goes down when."""

from __future__ import annotations

import asyncio
import random

import pytest

from ospruner.engines.dispatching import Dispatcher, ServerDownError, first_error


def run(
    sizes: list[int],
    homes: list[int | None],
    servers: int = 3,
    concurrency: int = 2,
    dies_at: dict[int, int] | None = None,
    seed: int = 0,
) -> tuple[dict[int, tuple[list[tuple[int, int]], int]], list[tuple[int, int, int]], Dispatcher]:
    """Runs jobs whose requests take a few turns of the loop; a server dies at its n-th request."""
    draws = random.Random(seed)
    log: list[tuple[int, int, int]] = []
    inside = [0] * servers
    results: dict[int, tuple[list[tuple[int, int]], int]] = {}

    async def work(server: int, index: int, part: int) -> tuple[int, int]:
        log.append((server, index, part))
        inside[server] += 1
        try:
            assert inside[server] <= concurrency
            for _ in range(draws.randrange(4)):
                await asyncio.sleep(0)
            if sum(entry[0] == server for entry in log) >= (dies_at or {}).get(server, 10**9):
                raise ServerDownError(f"s{server}", "it is dead")
            return index, part
        finally:
            inside[server] -= 1

    def done(index: int, parts: list[tuple[int, int]], server: int) -> None:
        assert index not in results
        results[index] = parts, server

    dispatcher = Dispatcher(servers, concurrency, work, done)
    for size, home in zip(sizes, homes, strict=True):
        dispatcher.add(size, home)
    asyncio.run(dispatcher.run())
    return results, log, dispatcher


@pytest.mark.parametrize("seed", range(20))
def test_every_job_is_done_once_by_one_server(seed: int) -> None:
    draws = random.Random(seed)
    sizes = [draws.randrange(1, 6) for _ in range(20)]
    results, log, _ = run(sizes, [None] * 20, concurrency=1 + seed % 3, seed=seed)
    assert {i: parts for i, (parts, _) in results.items()} == {
        i: [(i, part) for part in range(size)] for i, size in enumerate(sizes)
    }
    assert len(log) == len(set(log)) == sum(sizes)
    for index in range(20):
        own = [entry for entry in log if entry[1] == index]
        assert len({server for server, _, _ in own}) <= 1
        assert [part for _, _, part in own] == sorted(part for _, _, part in own)


@pytest.mark.parametrize("seed", range(20))
def test_dead_servers_jobs_are_done_by_the_others(seed: int) -> None:
    sizes = [3] * 15
    results, log, dispatcher = run(
        sizes, [i % 3 for i in range(15)], dies_at={0: 1 + seed, 1: 2 + seed // 2}, seed=seed
    )
    assert all(results[i][0] == [(i, part) for part in range(3)] for i in range(15))
    assert len(dispatcher.down) <= 2
    # What a server finished before it died is not done again for the part's own sake.
    assert len(log) <= sum(sizes) + 2 * 2 * len(dispatcher.down) + 4


def test_a_job_goes_home_while_that_server_has_room() -> None:
    results, _, _ = run([2] * 9, [i % 3 for i in range(9)], concurrency=100)
    assert [results[i][1] for i in range(9)] == [i % 3 for i in range(9)]
    results, _, _ = run([1] * 9, [0] * 9, concurrency=1)
    assert {server for _, server in results.values()} == {0, 1, 2}  # idle ones help


def test_servers_take_turns_even_with_room_for_all() -> None:
    results, _, _ = run([1] * 90, [None] * 90, concurrency=100)
    served = [server for _, server in results.values()]
    assert [served.count(server) for server in range(3)] == [30, 30, 30]


def test_with_all_servers_down_the_first_reason_is_raised() -> None:
    with pytest.raises(ServerDownError, match="s[012]: it is dead"):
        run([2] * 9, [None] * 9, dies_at={0: 2, 1: 3, 2: 4})
    assert run([], [])[0] == {}


def test_other_errors_end_the_run() -> None:
    async def work(server: int, index: int, part: int) -> int:
        raise KeyError(index)

    dispatcher = Dispatcher(2, 2, work, lambda index, parts, server: None)
    dispatcher.add(1)
    with pytest.raises(BaseExceptionGroup) as error:
        asyncio.run(dispatcher.run())
    assert isinstance(first_error(error.value), KeyError)
