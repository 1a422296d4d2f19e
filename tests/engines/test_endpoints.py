"""Engines over servers: real ones on 127.0.0.1 that run the embedded reasoner; which does what."""

import asyncio
import importlib.util
import random
import re
import string
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from modeling_ospruner.formats_ospruner import TokenFormat
from ospruner.demo.shipped import Reasoner
from ospruner.engines.calling import Ask, AskingEngine, Reply, Server, ServerDownError
from ospruner.engines.http import HTTPEngine, OpenAIEngine, SGLangEngine
from ospruner.engines.interface import (
    EnginesDownError,
    ForkedAnswer,
    ForkRequest,
    Sampled,
    SamplingSettings,
    TraceRequest,
)
from ospruner.engines.opening import EngineOptions, default_engine, open_engine, parse_arguments
from ospruner.engines.transformers.engine import TransformersEngine
from ospruner.optional import MissingPackageError

from ..own_process import needs_vllm
from .conftest import GREEDY, Desk, Traces, check_agreement, check_choices, choose_all, fork_all
from .local_server import LocalServer

ENGINES: dict[str, Any] = {"openai": OpenAIEngine, "sglang": SGLangEngine}
Few = tuple[list[ForkRequest], list[list[ForkedAnswer]]]
Servers = list[LocalServer]


@pytest.fixture
def servers(reasoner: Reasoner) -> Iterator[Servers]:
    with LocalServer(reasoner) as first, LocalServer(reasoner) as second:
        yield [first, second]


@pytest.fixture
def few(traces: Traces) -> Few:
    """Three cuts of each trace, with their answers."""
    requests = [replace(request, cuts=request.cuts[-3:]) for request in traces.requests]
    return requests, [answers[-3:] for answers in traces.answers]


def open_over(
    servers: Sequence[LocalServer], reasoner: Reasoner, name: str = "openai", **limits: Any
) -> HTTPEngine:
    limits = {"concurrency": 4, "timeout_seconds": 300, "retries": 0} | limits
    urls = [server.url for server in servers]
    engine: HTTPEngine = ENGINES[name](str(reasoner.folder), reasoner.tokenizer, urls, **limits)
    return engine


@pytest.mark.parametrize("name", ENGINES)
def test_agrees_with_the_transformers_engine(
    name: str, servers: Servers, reasoner: Reasoner, traces: Traces
) -> None:
    engine = open_over(servers, reasoner, name)
    sampled = engine.sample(traces.prompts[:2], GREEDY, reasoner.token_format)
    assert sampled == traces.sampled[:2]
    counts = engine.sample_counts
    assert counts.computed > counts.unique  # this server has no prefix cache
    answers = fork_all(engine, reasoner, traces.requests[:2])
    check_agreement(reasoner, traces.requests[:2], traces.answers[:2], answers)
    assert engine.counts.computed > engine.counts.unique > 0


@pytest.mark.parametrize("faults", [[503], [429, 500], ["hang"]])
def test_what_fails_is_resent(faults: Any, servers: Servers, reasoner: Reasoner, few: Few) -> None:
    servers[0].faults.extend(faults)
    timeout = 5 if faults == ["hang"] else 300
    engine = open_over(servers[:1], reasoner, timeout_seconds=timeout, retries=4)
    answers = fork_all(engine, reasoner, few[0][:1])
    check_agreement(reasoner, few[0][:1], few[1][:1], answers)
    assert len(servers[0].prompts) >= 3 + len(faults)


def test_a_dead_server_s_work_is_taken_up(servers: Servers, reasoner: Reasoner, few: Few) -> None:
    engine = open_over(servers, reasoner, concurrency=1)
    servers[0].faults.extend(["none", "none", 500])
    check_agreement(reasoner, few[0], few[1], fork_all(engine, reasoner, few[0]))
    assert not servers[0].faults
    servers[0].stop()  # the next call finds it dead from the start
    again = fork_all(engine, reasoner, few[0][:1])
    check_agreement(reasoner, few[0][:1], few[1][:1], again)


def test_refused_requests_and_servers_without_token_ids_are_told_from_dead_ones(
    servers: Servers, reasoner: Reasoner, traces: Traces
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
    name: str, servers: Servers, reasoner: Reasoner, traces: Traces
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


def test_each_row_has_its_own_seed(servers: Servers, reasoner: Reasoner, traces: Traces) -> None:
    settings = SamplingSettings(temperature=0.6, max_new_tokens=4, seed=1)
    fmt, seeds = reasoner.token_format, []
    for name in ENGINES:
        engine = open_over(servers[:1], reasoner, name)
        engine.sample([traces.prompts[0]] * 2, settings, fmt, ["p0/0", "p0/1"])
        seeds.append(sorted(seed for seed in servers[0].seeds if seed is not None))
        servers[0].seeds.clear()
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 2
    assert all(0 <= seed < 2**63 for seed in seeds[0])
    engine = open_over(servers[:1], reasoner, seeds=False)
    engine.sample(traces.prompts[:1], settings, fmt)
    assert servers[0].seeds == [None]


def test_bad_settings_are_refused(reasoner: Reasoner, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(**given: Any) -> HTTPEngine:
        given = {"urls": ["http://a:1"]} | given
        return OpenAIEngine(str(reasoner.folder), reasoner.tokenizer, **given)

    twice = ["http://a:1", "http://a:1/"]
    limits = {"timeout_seconds": 0, "retries": -1, "concurrency": 0}
    for name, value in (("urls", twice), *limits.items()):
        with pytest.raises(ValueError, match=f"{name} "):
            opened(**{name: value})
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(MissingPackageError, match=r"openai, which.*pip install 'ospruner\[openai"):
        opened()


@pytest.mark.parametrize("name", ["transformers", *ENGINES])
def test_a_trace_ends_where_its_text_holds_the_marker(
    name: str, servers: Servers, reasoner: Reasoner, traces: Traces
) -> None:
    """A greedy trace's own text is made the marker: all before it stays, the answer follows."""
    engine = open_over(servers, reasoner, name) if name in ENGINES else reasoner.engine
    tokenizer = reasoner.tokenizer
    whole = traces.sampled[0]
    ids = [*whole.trace_ids, reasoner.token_format.think_end_id, *whole.answer_ids]
    for size in (2, 3):
        literal, at = "", 0
        for at in range(8, len(whole.trace_ids) - size):
            literal = str(tokenizer.decode(ids[at : at + size]))
            before = str(tokenizer.decode(ids[: at + size - 1]))
            if "\n" not in literal and literal.isascii() and literal not in before:
                break
        form = replace(reasoner.token_format.format, think_end=literal, closing=f"{literal}\n")
        fmt = TokenFormat.compile(form, tokenizer)
        assert fmt.end_marker is not None
        after = ids[at + size :][: GREEDY.max_answer_tokens]
        expected = Sampled(ids[:at], after, "natural", ids[at : at + size])
        assert engine.sample([traces.prompts[0]], GREEDY, fmt) == [expected]
        short = replace(GREEDY, max_new_tokens=at)
        assert engine.sample([traces.prompts[0]], short, fmt) == [Sampled(ids[:at], [], "cap")]
    absent = replace(reasoner.token_format.format, think_end="</none>", closing="</none>\n")
    fmt = TokenFormat.compile(absent, tokenizer)
    (told,) = engine.sample([traces.prompts[0]], GREEDY, fmt)
    assert (told.trace_ids, told.ended, told.end_ids) == (ids, "natural", [])


def test_what_a_server_takes_for_the_marker_is_looked_at(
    servers: Servers, reasoner: Reasoner, traces: Traces
) -> None:
    """Markers are found by their text: a token that holds more than the marker ends it, too."""
    fmt = reasoner.token_format
    form = replace(fmt.format, think_end="/think>", closing="/think>\n")
    spelled = TokenFormat.compile(form, reasoner.tokenizer)
    (told,) = open_over(servers, reasoner).sample([traces.prompts[0]], GREEDY, spelled)
    assert (told.trace_ids, told.end_ids) == (traces.sampled[0].trace_ids, [fmt.think_end_id])


SUFFIX = [3]


class Fake(AskingEngine):
    """Servers that take a few turns of the loop, and answer a prompt with its length.

    `dies_at` says at which of its requests one goes down, `breaks_at` which of all raises.
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
        self.inside, self.asked = Counter[int](), Counter[int]()  # of each server
        self.most_inside = 0
        self.draws = random.Random(0)
        self.refused: set[int] = set()  # traces of which no request is answered

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[Sequence[Server]]:
        yield [partial(self._ask, number) for number in range(3)]

    async def _ask(self, number: int, ask: Ask) -> Reply:
        trace = ask.prompt_ids[0]
        self.log.append((number, trace, len(ask.prompt_ids)))
        self.answered_before.append(self.answered[trace])
        place = len(self.log)
        self.asked[number] += 1
        self.inside[number] += 1
        self.most_inside = max(self.most_inside, self.inside[number])
        for _ in range(self.draws.randrange(4)):
            await asyncio.sleep(0)
        self.inside[number] -= 1
        if self.asked[number] >= self.dies_at.get(number, 10**9):
            raise ServerDownError(f"s{number}: it is dead")
        if trace in self.refused:
            raise ValueError(trace)
        if place == self.breaks_at:
            raise KeyError(place)
        self.answered[trace] += 1
        return Reply([len(ask.prompt_ids)], 0, [0.0], [[0.0]])


def made(count: int, seed: int = 0) -> list[ForkRequest]:
    draws = random.Random(seed)
    return [
        ForkRequest([n], [5] * 9, sorted(draws.sample(range(10), draws.randrange(1, 6))))
        for n in range(count)
    ]


def check_answers(engine: Fake, asked: Sequence[ForkRequest]) -> None:
    found = [[answer.ids for answer in row] for row in engine.fork(asked, SUFFIX, 1)]
    assert found == [[[1 + cut + len(SUFFIX)] for cut in one.cuts] for one in asked]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shares", [True, False])
def test_every_trace_is_done_once_by_one_server(seed: int, shares: bool) -> None:
    engine, asked = Fake(1 + seed % 3), made(20, seed)
    engine.shares_within_batches = shares
    check_answers(engine, asked)
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
    engine, asked = Fake(2, {0: 1 + 3 * seed, 1: 2 + 4 * seed // 2}), made(15, seed)
    check_answers(engine, asked)
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
        Fake(2, {0: 6, 1: 9, 2: 12}).fork(made(20), SUFFIX, 1)
    with pytest.raises(KeyError, match="5"):
        Fake(2, breaks_at=5).fork(made(20), SUFFIX, 1)
    assert Fake(2).fork([], SUFFIX, 1) == []


# Engines by name: their arguments as the command line gives them.


def test_values_have_the_types_that_they_say() -> None:
    texts = ["size=2", "--gpu-memory=0.8", "eager=true", 'limit={"image": 0}', "seed=null", "n=a=b"]
    found = {"size": 2, "gpu_memory": 0.8, "eager": True, "limit": {"image": 0}, "seed": None}
    assert parse_arguments(texts, "engine argument") == found | {"n": "a=b"}


@pytest.mark.parametrize("text", ["max_seqs", "=2", "a b=2", "", "max-len=3"])
def test_an_argument_without_name_or_value_or_given_twice_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be name=value"):
        parse_arguments(["max_len=2", text], "engine argument")


@pytest.mark.parametrize(
    ("cuda", "vllm", "device", "said"),
    [
        (True, True, None, "vllm: .*a CUDA GPU and vLLM"),
        (True, True, "cuda:1", r"transformers: .*a given device \(cuda:1\)"),
        (True, False, None, "transformers: .*vLLM, .* is not installed"),
        (False, True, None, "transformers: .*no CUDA GPU"),
    ],
)
def test_the_default_engine(
    cuda: bool, vllm: bool, device: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if vllm else None)
    assert re.match(said, ": ".join(default_engine(device)))


def opened(name: str, base: Path, tokenizer: Any, **arguments: Any) -> Any:
    urls = ("http://127.0.0.1:9",) if name in ("openai", "sglang") else ()
    dtype = "auto" if urls else "float32"
    options = EngineOptions(str(base), dtype=dtype, urls=urls, arguments=arguments)
    return open_engine(name, tokenizer, options)


def test_transformers_takes_its_own_and_loadings(tiny_base_dir: Path, tiny_tokenizer: Any) -> None:
    arguments = {"attn_implementation": "eager", "fork_tokens": 99}
    engine = opened("transformers", tiny_base_dir, tiny_tokenizer, **arguments)
    assert isinstance(engine, TransformersEngine)
    assert engine.fork_tokens == 99
    assert engine.model.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="cannot be loaded with {'attn_implementation': 'none"):
        opened("transformers", tiny_base_dir, tiny_tokenizer, attn_implementation="none such")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("openai", "the openai engine takes"),
        ("sglang", "the sglang engine takes"),
        pytest.param("vllm", "vLLM's EngineArgs has none", marks=needs_vllm),
    ],
)
def test_what_an_engine_does_not_take_is_refused(
    name: str, said: str, tiny_base_dir: Path, tiny_tokenizer: Any
) -> None:
    with pytest.raises(ValueError, match=rf"\['tensor_paralel_size'\]: {said}"):
        opened(name, tiny_base_dir, tiny_tokenizer, tensor_paralel_size=2)
