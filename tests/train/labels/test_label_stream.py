"""A label run as a stream: forks beside sampling, a window of what a kill loses, lone failures."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from modeling_ospruner.formats_ospruner import TokenFormat
from ospruner.engines.calling import Ask, AskingEngine, Reply, Server
from ospruner.eval.grading import boxed
from ospruner.eval.grading.pool import GradingPool, Verdict
from ospruner.eval.problems.problem import Problem
from ospruner.eval.schema import LabelSettings
from ospruner.formats import DEEPSEEK_R1
from ospruner.train.labels.folder import read_labels, read_manifest
from ospruner.train.labels.label import regrade
from ospruner.train.labels.making import Labeller, label_problems
from ospruner.train.labels.statistics import stats_of, told

SETTINGS = LabelSettings(base_model="tiny", max_new_tokens=500, max_answer_tokens=8)
Run = Callable[..., list[dict[str, Any]]]
PROBLEMS = [Problem(f"p{n}", f"What is {n} + 4?", str(n + 4)) for n in range(12)]


class Scripted(AskingEngine):
    """Servers whose n-th problem has a trace of a length of its own; a token takes a turn.

    Args:
        tokenizer: of the base.
        concurrency: requests that a server works on at once.
        servers: how many there are.
        watch: called with each request before it is answered: what it is of, and its problem.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        concurrency: int,
        servers: int = 1,
        watch: Callable[[str, int], None] = lambda kind, number: None,
    ) -> None:
        super().__init__(frozenset({int(tokenizer.eos_token_id or 0)}), concurrency)
        self.tokenizer = tokenizer
        self.servers = servers
        self.watch = watch
        self.log: list[tuple[str, int, int]] = []  # kind, problem, server
        fmt = TokenFormat.compile(DEEPSEEK_R1, tokenizer)
        self.think_end = fmt.think_end_id

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[Sequence[Server]]:
        yield [_Script(self, number).ask for number in range(self.servers)]


class _Script:
    def __init__(self, engine: Scripted, number: int) -> None:
        self.engine = engine
        self.number = number

    async def ask(self, ask: Ask) -> Reply:
        engine = self.engine
        text = str(engine.tokenizer.decode(ask.prompt_ids))
        problem = int(text.partition("What is ")[2].partition(" + ")[0])
        kind = "fork" if ask.scored else "trace"
        if not ask.scored and ask.prompt_ids[-1] == engine.think_end:
            kind = "natural"
        engine.log.append((kind, problem, self.number))
        engine.watch(kind, problem)
        steps = random.Random(problem).randrange(1, 12)
        said = {"trace": "So 1.\n\n" * steps, "natural": "7", "fork": f"{len(text) % 9}}}"}[kind]
        ids = list(engine.tokenizer.encode(said, add_special_tokens=False))
        for _ in ids:
            await asyncio.sleep(0)
        if kind != "fork":
            return Reply([*ids, min(ask.end_ids - engine.eos_ids or ask.end_ids)], 0)
        return Reply(ids, 0, [-0.5] * len(ids), [[-1.0, -2.0]] * len(ids))


@pytest.fixture
def run(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Run:
    fmt = TokenFormat.compile(DEEPSEEK_R1, tiny_tokenizer)

    def label_all(engine: Scripted, folder: str, chunk: int, **more: Any) -> list[dict[str, Any]]:
        out = tmp_path / folder
        labeller = Labeller(tiny_tokenizer, fmt, SETTINGS)
        made = label_problems(PROBLEMS, engine, labeller, out, chunk_traces=chunk, **more)
        assert made.to_list() == read_labels(out).to_list()
        return made.to_list()

    return label_all


def test_rows_and_their_order_are_those_of_one_trace_after_the_other(
    run: Run, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    one_by_one = run(Scripted(tiny_tokenizer, 1), "one", 1)
    assert [row["problem_id"] for row in one_by_one] == [problem.id for problem in PROBLEMS]
    assert len({len(row["step_ends"]) for row in one_by_one}) > 3
    for chunk, concurrency, servers in ((4, 100, 3), (100, 4, 1)):
        engine = Scripted(tiny_tokenizer, concurrency, servers)
        assert run(engine, f"{chunk}", chunk) == one_by_one
        finished = [problem for kind, problem, _ in engine.log if kind == "natural"]
        assert finished != sorted(finished)  # they did not end in the order of the rows
    manifests = [read_manifest(tmp_path / name) for name in ("one", "4", "100")]
    for name in ("computed_tokens", "unique_tokens", "sampling_computed_tokens"):
        assert len({manifest[name] for manifest in manifests}) == 1


def test_forks_begin_while_others_are_sampled_and_where_their_trace_was(
    run: Run, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    engine = Scripted(tiny_tokenizer, 4, servers=2)
    run(engine, "labels", 12)
    last = max(i for i, (kind, _, _) in enumerate(engine.log) if kind == "trace")
    sampled_by = {problem: server for kind, problem, server in engine.log if kind == "trace"}
    forks = [(problem, server) for kind, problem, server in engine.log[:last] if kind == "fork"]
    assert len(forks) > 10
    # Only once no other trace can be begun does an idle server help out.
    assert all(sampled_by[problem] == server for problem, server in forks)


@pytest.mark.parametrize("chunk", [1, 4, 9])
def test_at_no_moment_are_more_traces_begun_than_a_kill_may_lose(
    chunk: int, run: Run, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    begun: set[int] = set()
    held: list[int] = []

    def watch(kind: str, number: int) -> None:
        begun.add(number)
        held.append(len(begun) - read_manifest(tmp_path / "labels")["traces"])

    run(Scripted(tiny_tokenizer, 100, watch=watch), "labels", chunk)
    assert max(held) == chunk


def test_a_trace_that_is_refused_does_not_stop_the_others(
    run: Run, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    refused = {("trace", 3), ("fork", 5), ("natural", 7)}

    def watch(kind: str, number: int) -> None:
        if (kind, number) in refused:
            raise ValueError(f"no room for {number}")

    whole = run(Scripted(tiny_tokenizer, 4), "whole", 8)
    engine = Scripted(tiny_tokenizer, 4, watch=watch)
    rows = run(engine, "labels", 8)
    lost = ("p3", "p5", "p7")
    assert rows == [row for row in whole if row["problem_id"] not in lost]
    failed = read_manifest(tmp_path / "labels")["failed"]
    assert sorted(failed) == [[name, 0, f"ValueError: no room for {name[1:]}"] for name in lost]
    summary = told(tmp_path / "labels", stats_of(tmp_path / "labels"))
    assert "Failed: trace 0 of problem p3: ValueError: no room for 3" in summary
    assert "3 of 12 traces failed" in summary
    assert run(engine, "labels", 8) == rows  # nothing is tried again unless that is asked for
    traces = [problem for kind, problem, _ in engine.log if kind == "trace"]
    # Those three were tried with others and alone; none of the others was sampled twice.
    assert sorted(traces) == sorted([*range(12), 3, 5, 7])
    refused.clear()
    assert run(engine, "labels", 8, retry_failed=True) == whole


def test_an_engine_that_breaks_ends_the_run_and_what_was_done_is_kept(
    run: Run, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    asked: list[int] = []

    def watch(kind: str, number: int) -> None:
        asked.append(number)
        if len(asked) > 30:  # so that some are done, and others not begun, whoever is slow
            raise RuntimeError("CUDA error")

    with pytest.raises(RuntimeError, match="CUDA error"):
        run(Scripted(tiny_tokenizer, 4, watch=watch), "labels", 8)
    manifest = read_manifest(tmp_path / "labels")
    assert manifest["failed"] == []
    assert 0 < manifest["traces"] < 12
    assert run(Scripted(tiny_tokenizer, 4), "labels", 8) == run(
        Scripted(tiny_tokenizer, 4), "whole", 12
    )


def test_a_broken_grader_is_found_before_anything_is_sampled(
    run: Run,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run(Scripted(tiny_tokenizer, 4), "made", 8)
    boxed.check_grader.cache_clear()
    unreadable = Verdict(None, "unreadable")
    monkeypatch.setattr(GradingPool, "compare", lambda *_: unreadable)
    broken = r"the grader is broken: of '0.5' .* it says None \(unreadable\), which is True: .* pip"
    engine = Scripted(tiny_tokenizer, 4)
    with pytest.raises(ValueError, match=broken):
        run(engine, "out", 8)
    assert engine.log == []
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=broken):
        regrade(tmp_path / "made")
