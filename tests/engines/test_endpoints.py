"""Engines over HTTP, against real servers on 127.0.0.1 that run the embedded reasoner."""

from __future__ import annotations

import string
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ospruner.demo.shipped import Reasoner, draw_split
from ospruner.engines import ForkedAnswer, ForkRequest, SamplingSettings
from ospruner.engines.dispatching import EnginesDownError
from ospruner.engines.http import HTTPEngine, OpenAIEngine, SGLangEngine
from ospruner.eval.schema import LabelSettings
from ospruner.optional import MissingPackageError
from ospruner.progress import Progress, silent
from ospruner.train.labels.folder import read_labels
from ospruner.train.labels.making import Labeller, label_problems

from .conftest import GREEDY, Traces, check_agreement, check_choices, choose_all, fork_all
from .local_server import LocalServer

ENGINES: dict[str, type[OpenAIEngine] | type[SGLangEngine]] = {
    "openai": OpenAIEngine,
    "sglang": SGLangEngine,
}


@pytest.fixture
def servers(reasoner: Reasoner) -> Iterator[list[LocalServer]]:
    with LocalServer(reasoner) as first, LocalServer(reasoner) as second:
        yield [first, second]


@pytest.fixture
def few(traces: Traces) -> tuple[list[ForkRequest], list[list[ForkedAnswer]]]:
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
    done: dict[int, object] = {}
    sampled = engine.sample(
        traces.prompts[:2], GREEDY, reasoner.token_format, on_done=done.__setitem__
    )
    assert sampled == traces.sampled[:2] == [done[0], done[1]]
    unique = engine.sample_counts.unique
    assert engine.sample_counts.computed > unique  # this server has no prefix cache
    answers = fork_all(engine, reasoner, traces.requests[:2])
    check_agreement(reasoner, traces.requests[:2], traces.answers[:2], answers)
    assert engine.counts.computed > engine.counts.unique > 0


def test_the_forks_of_a_trace_go_to_the_server_that_sampled_it(
    servers: list[LocalServer], reasoner: Reasoner, traces: Traces
) -> None:
    engine = open_over(servers, reasoner, concurrency=100)
    assert engine.sample(traces.prompts, GREEDY, reasoner.token_format) == traces.sampled
    starts = [tuple(prompt) for prompt in traces.prompts]

    def seen(server: LocalServer) -> set[int]:
        return {i for p in server.prompts for i, s in enumerate(starts) if tuple(p[: len(s)]) == s}

    sampled_by = [seen(server) for server in servers]
    assert sorted(map(len, sampled_by)) == [2, 2]
    for server in servers:
        server.prompts.clear()
    fork_all(engine, reasoner, [replace(r, cuts=r.cuts[-2:]) for r in traces.requests])
    assert [seen(server) for server in servers] == sampled_by


def test_concurrency_is_bounded_and_used(
    servers: list[LocalServer],
    reasoner: Reasoner,
    few: tuple[list[ForkRequest], list[list[ForkedAnswer]]],
) -> None:
    engine = open_over(servers[:1], reasoner, concurrency=3)
    assert [[a.ids for a in row] for row in fork_all(engine, reasoner, few[0])] == [
        [a.ids for a in row] for row in few[1]
    ]
    assert servers[0].most_at_once == 3


def test_sglang_computes_a_trace_before_its_forks_are_asked_for(
    servers: list[LocalServer],
    reasoner: Reasoner,
    few: tuple[list[ForkRequest], list[list[ForkedAnswer]]],
) -> None:
    """It shares nothing among requests of one batch: 3.2 times the unique tokens otherwise."""
    engine = open_over(servers[:1], reasoner, "sglang", concurrency=100)
    check_agreement(reasoner, few[0][:1], few[1][:1], fork_all(engine, reasoner, few[0][:1]))
    lengths = [len(prompt) for prompt in servers[0].prompts]
    assert lengths[0] == max(lengths)
    assert servers[0].others_inside[:2] == [0, 0]


@pytest.mark.parametrize("faults", [[503], [429, 500], ["hang"]])
def test_what_fails_is_sent_again(
    faults: list[int | str],
    servers: list[LocalServer],
    reasoner: Reasoner,
    few: tuple[list[ForkRequest], list[list[ForkedAnswer]]],
) -> None:
    servers[0].faults.extend(faults)
    timeout = 5 if faults == ["hang"] else 300
    engine = open_over(servers[:1], reasoner, timeout_seconds=timeout, retries=4)
    answers = fork_all(engine, reasoner, few[0][:1])
    check_agreement(reasoner, few[0][:1], few[1][:1], answers)
    assert len(servers[0].prompts) >= 3 + len(faults)


def test_a_dead_server_s_work_is_done_by_the_other(
    servers: list[LocalServer],
    reasoner: Reasoner,
    few: tuple[list[ForkRequest], list[list[ForkedAnswer]]],
) -> None:
    engine = open_over(servers, reasoner, concurrency=1)
    stopped: list[int] = []

    def stop_once(index: int, answers: list[ForkedAnswer]) -> None:
        if not stopped:
            stopped.append(index)
            servers[0].stop()

    fmt = reasoner.token_format
    answers = engine.fork(few[0], fmt.forced_suffix(), 16, fmt.box_state, stop_once)
    check_agreement(reasoner, few[0], few[1], answers)
    # The next call finds it dead from the start, and a server that answers 500 for ever too.
    again = fork_all(engine, reasoner, few[0][:1])
    check_agreement(reasoner, few[0][:1], few[1][:1], again)


def test_without_any_server_left_what_is_done_is_handed_on(
    servers: list[LocalServer],
    reasoner: Reasoner,
    few: tuple[list[ForkRequest], list[list[ForkedAnswer]]],
) -> None:
    engine = open_over(servers, reasoner, concurrency=1)
    done: dict[int, list[ForkedAnswer]] = {}

    def stop_all(index: int, answers: list[ForkedAnswer]) -> None:
        done[index] = answers
        for server in servers:
            server.faults.extend([500] * 50)

    fmt = reasoner.token_format
    with pytest.raises(EnginesDownError, match="no server is left") as error:
        engine.fork(few[0], fmt.forced_suffix(), 16, fmt.box_state, stop_all)
    assert all(server.url in str(error.value) for server in servers)
    assert done
    for index, answers in done.items():
        check_agreement(reasoner, [few[0][index]], [few[1][index]], [answers])
    for server in servers:
        server.faults.clear()
    check_agreement(reasoner, few[0], few[1], fork_all(engine, reasoner, few[0]))


def test_a_label_run_outlives_its_servers(
    servers: list[LocalServer], reasoner: Reasoner, tmp_path: Path
) -> None:
    """What was committed before the last server died is kept, and another server goes on."""
    problems = draw_split("test", 4, 0)
    how = LabelSettings(base_model="toy", temperature=0, max_new_tokens=24, max_answer_tokens=8)

    def run(server: LocalServer, progress: Progress = silent) -> list[dict[str, Any]]:
        labeller, engine = (
            Labeller(reasoner.tokenizer, reasoner.token_format, how),
            open_over([server], reasoner),
        )
        label_problems(problems, engine, labeller, tmp_path, chunk_traces=1, progress=progress)
        return read_labels(tmp_path).to_list()

    def stop_at_the_third(phase: str, done: int, total: int, note: str = "") -> None:
        if (phase, done) == ("sample", 3):  # its forks are still to come
            servers[0].stop()

    with pytest.raises(EnginesDownError, match="no server is left"):
        run(servers[0], stop_at_the_third)
    kept = read_labels(tmp_path).to_list()
    assert [row["problem_id"] for row in kept] == [problem.id for problem in problems[:2]]
    finished = run(servers[1])
    assert finished[:2] == kept
    assert [row["problem_id"] for row in finished] == [problem.id for problem in problems]


def test_a_refused_request_is_told_apart_from_a_dead_server(
    servers: list[LocalServer], reasoner: Reasoner, traces: Traces
) -> None:
    engine = open_over(servers[:1], reasoner)
    servers[0].faults.append(400)
    with pytest.raises(ValueError, match=r"refuses a request of \d+ prompt tokens.*fault 400"):
        engine.sample(traces.prompts[:1], GREEDY, reasoner.token_format)


def test_a_server_without_token_ids_is_refused(
    servers: list[LocalServer], reasoner: Reasoner, traces: Traces
) -> None:
    engine = open_over(servers[:1], reasoner)
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


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(
    ("urls", "message"),
    [
        ([], "urls is empty"),
        (["localhost:8000"], "urls holds 'localhost:8000.*give addresses such as"),
        (["http://a:1", "http://a:1/"], "each server must be named once"),
    ],
)
def test_bad_urls_are_refused(name: str, urls: list[str], message: str, reasoner: Reasoner) -> None:
    with pytest.raises(ValueError, match=message):
        ENGINES[name](str(reasoner.folder), reasoner.tokenizer, urls)


def test_bad_limits_are_refused(reasoner: Reasoner) -> None:
    for changed, message in (
        ({"timeout_seconds": 0}, "timeout_seconds is 0"),
        ({"retries": -1}, "retries -1"),
        ({"concurrency": 0}, "concurrency is 0; it must be 1 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            OpenAIEngine(str(reasoner.folder), reasoner.tokenizer, ["http://a:1"], **changed)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ENGINES)
def test_a_missing_client_names_the_pip_line(
    name: str, reasoner: Reasoner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(MissingPackageError, match=r"openai, which.*pip install 'ospruner\[openai"):
        ENGINES[name](str(reasoner.folder), reasoner.tokenizer, ["http://a:1"])
