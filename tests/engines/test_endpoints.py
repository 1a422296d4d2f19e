"""Engines over HTTP, against real servers on 127.0.0.1 that run the embedded reasoner."""

import string
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from ospruner.demo.shipped import Reasoner
from ospruner.engines.http import HTTPEngine, OpenAIEngine, SGLangEngine
from ospruner.engines.interface import ForkedAnswer, ForkRequest, SamplingSettings
from ospruner.optional import MissingPackageError

from .conftest import GREEDY, Traces, check_agreement, check_choices, choose_all, fork_all
from .local_server import LocalServer

ENGINES: dict[str, type[OpenAIEngine] | type[SGLangEngine]] = {
    "openai": OpenAIEngine,
    "sglang": SGLangEngine,
}


Few = tuple[list[ForkRequest], list[list[ForkedAnswer]]]


@pytest.fixture
def servers(reasoner: Reasoner) -> Iterator[list[LocalServer]]:
    with LocalServer(reasoner) as first, LocalServer(reasoner) as second:
        yield [first, second]


@pytest.fixture
def few(traces: Traces) -> Few:
    """Three cuts of each trace, with their answers."""
    requests = [replace(request, cuts=request.cuts[-3:]) for request in traces.requests]
    return requests, [answers[-3:] for answers in traces.answers]


def open_over(
    servers: Sequence[LocalServer],
    reasoner: Reasoner,
    name: str = "openai",
    concurrency: int = 4,
    timeout_seconds: float = 300,
    retries: int = 0,
) -> HTTPEngine:
    return ENGINES[name](
        str(reasoner.folder),
        reasoner.tokenizer,
        [server.url for server in servers],
        concurrency=concurrency,
        timeout_seconds=timeout_seconds,
        retries=retries,
    )


@pytest.mark.parametrize("name", ENGINES)
def test_agrees_with_the_transformers_engine(
    name: str, servers: list[LocalServer], reasoner: Reasoner, traces: Traces
) -> None:
    engine = open_over(servers, reasoner, name)
    sampled = engine.sample(traces.prompts[:2], GREEDY, reasoner.token_format)
    assert sampled == traces.sampled[:2]
    unique = engine.sample_counts.unique
    assert engine.sample_counts.computed > unique  # this server has no prefix cache
    answers = fork_all(engine, reasoner, traces.requests[:2])
    check_agreement(reasoner, traces.requests[:2], traces.answers[:2], answers)
    assert engine.counts.computed > engine.counts.unique > 0


@pytest.mark.parametrize("faults", [[503], [429, 500], ["hang"]])
def test_what_fails_is_sent_again(
    faults: list[int | str], servers: list[LocalServer], reasoner: Reasoner, few: Few
) -> None:
    servers[0].faults.extend(faults)
    timeout = 5 if faults == ["hang"] else 300
    engine = open_over(servers[:1], reasoner, timeout_seconds=timeout, retries=4)
    answers = fork_all(engine, reasoner, few[0][:1])
    check_agreement(reasoner, few[0][:1], few[1][:1], answers)
    assert len(servers[0].prompts) >= 3 + len(faults)


def test_a_dead_server_s_work_is_done_by_the_other(
    servers: list[LocalServer], reasoner: Reasoner, few: Few
) -> None:
    engine = open_over(servers, reasoner, concurrency=1)
    servers[0].faults.extend(["none", "none", 500])
    check_agreement(reasoner, few[0], few[1], fork_all(engine, reasoner, few[0]))
    assert not servers[0].faults
    servers[0].stop()  # the next call finds it dead from the start
    again = fork_all(engine, reasoner, few[0][:1])
    check_agreement(reasoner, few[0][:1], few[1][:1], again)


def test_refused_requests_and_servers_without_token_ids_are_told_from_dead_ones(
    servers: list[LocalServer], reasoner: Reasoner, traces: Traces
) -> None:
    engine = open_over(servers[:1], reasoner)
    servers[0].faults.append(400)
    with pytest.raises(ValueError, match=r"refuses a request of \d+ prompt tokens.*fault 400"):
        engine.sample(traces.prompts[:1], GREEDY, reasoner.token_format)
    servers[0].gives_ids = False
    with pytest.raises(ValueError, match="lacks 'token_ids'.*return_token_ids"):
        engine.sample(traces.prompts[:1], GREEDY, reasoner.token_format)
    with pytest.raises(ValueError, match="lacks .*token_id:.*SGLang's is spoken to by"):
        fork_all(engine, reasoner, [replace(traces.requests[0], cuts=[3])])


@pytest.mark.parametrize("name", ENGINES)
def test_letters_are_read_where_they_are_unlikely(
    name: str, servers: list[LocalServer], reasoner: Reasoner, traces: Traces
) -> None:
    """OpenAI's interface tells of the 20 likeliest tokens: a letter beyond is asked for alone."""
    engine = open_over(servers[:1], reasoner, name)
    requests = [replace(request, cuts=request.cuts[-3:]) for request in traces.requests]
    ours = choose_all(reasoner.engine, reasoner, requests)
    check_choices(ours, choose_all(engine, reasoner, requests))
    cuts = sum(len(request.cuts) for request in requests)
    if name == "sglang":
        assert len(servers[0].prompts) == cuts
        return
    assert cuts < len(servers[0].prompts) <= 6 * cuts
    servers[0].knows_allowed = False
    with pytest.raises(ValueError, match=r"where only \[.*were allowed .allowed_token_ids.*decode"):
        choose_all(engine, reasoner, requests[:1])
    with pytest.raises(ValueError, match="26 options, of which a server .* tells 20 apart"):
        choose_all(engine, reasoner, requests[:1], string.ascii_uppercase)


def test_each_row_has_its_own_seed(
    servers: list[LocalServer], reasoner: Reasoner, traces: Traces
) -> None:
    settings = SamplingSettings(temperature=0.6, max_new_tokens=4, seed=1)
    seeds = []
    for name in ENGINES:
        engine = open_over(servers[:1], reasoner, name)
        keys = ["p0/0", "p0/1"]
        engine.sample([traces.prompts[0]] * 2, settings, reasoner.token_format, keys)
        seeds.append(sorted(seed for seed in servers[0].seeds if seed is not None))
        servers[0].seeds.clear()
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 2
    assert all(0 <= seed < 2**63 for seed in seeds[0])
    engine = OpenAIEngine(str(reasoner.folder), reasoner.tokenizer, [servers[0].url], seeds=False)
    engine.sample(traces.prompts[:1], settings, reasoner.token_format)
    assert servers[0].seeds == [None]


def test_bad_settings_are_refused(reasoner: Reasoner, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(urls: Sequence[str] = ("http://a:1",), **more: Any) -> HTTPEngine:
        return OpenAIEngine(str(reasoner.folder), reasoner.tokenizer, urls, **more)

    for urls in ([], ["localhost:8000"], ["http://a:1", "http://a:1/"]):
        with pytest.raises(ValueError, match="^urls "):
            opened(urls)
    changes: list[dict[str, Any]] = [{"timeout_seconds": 0}, {"retries": -1}, {"concurrency": 0}]
    for changed in changes:
        with pytest.raises(ValueError, match=f"{next(iter(changed))} .*-?[01]"):
            opened(**changed)
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(MissingPackageError, match=r"openai, which.*pip install 'ospruner\[openai"):
        opened()
