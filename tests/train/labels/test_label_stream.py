"""A label run as a stream: forks beside sampling, a window of what a kill loses, lone failures."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from transformers import PreTrainedTokenizerFast

from ospruner.engines.calling import Ask, AskingEngine, Reply, Server
from ospruner.eval.grading import boxed
from ospruner.eval.grading.pool import Grade, GradingPool
from ospruner.train.labels.folder import read_labels, read_manifest
from ospruner.train.labels.label import regrade
from ospruner.train.labels.making import Labeller, label_problems
from ospruner.train.labels.statistics import stats_of, told

from ..conftest import TINY, sums

SETTINGS = replace(TINY, max_new_tokens=500, max_answer_tokens=8)
PROBLEMS = sums(12)


class Scripted(AskingEngine):
    """Servers whose n-th problem has a trace of a length of its own; a token takes a turn."""

    tokenizer: PreTrainedTokenizerFast
    servers: int
    log: list[tuple[str, int, int]]  # what each request is of, its problem, and its server
    watch: Callable[[str, int], None]  # called with the first two before a request is answered

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[Sequence[Server]]:
        yield [partial(self._ask, number) for number in range(self.servers)]

    async def _ask(self, server: int, ask: Ask) -> Reply:
        text = str(self.tokenizer.decode(ask.prompt_ids))
        problem = int(text.partition("What is ")[2].partition(" + ")[0])
        kind = "fork" if ask.scored else "trace"
        if text.endswith("</think>") and not ask.scored:
            kind = "natural"
        self.log.append((kind, problem, server))
        self.watch(kind, problem)
        steps = random.Random(problem).randrange(1, 12)
        said = {"trace": "So 1.\n\n" * steps, "natural": "7", "fork": f"{len(text) % 9}}}"}[kind]
        ids = list(self.tokenizer.encode(said, add_special_tokens=False))
        for _ in ids:
            await asyncio.sleep(0)
        if kind != "fork":
            return Reply([*ids, min(ask.end_ids - self.eos_ids or ask.end_ids)], 0)
        return Reply(ids, 0, [-0.5] * len(ids), [[-1.0, -2.0]] * len(ids))


@dataclass
class Runs:
    """Label runs in folders of one: what they give, and what was asked for."""

    tokenizer: PreTrainedTokenizerFast
    root: Path
    log: list[tuple[str, int, int]] = field(default_factory=list)

    def __call__(
        self,
        folder: str = "labels",
        chunk: int = 8,
        concurrency: int = 4,
        servers: int = 1,
        watch: Callable[[str, int], None] = lambda kind, number: None,
        **more: Any,
    ) -> list[dict[str, Any]]:
        engine = Scripted(frozenset({int(self.tokenizer.eos_token_id or 0)}), concurrency)
        engine.tokenizer, engine.servers = self.tokenizer, servers
        engine.log, engine.watch = self.log, watch
        labeller, out = Labeller.of(self.tokenizer, SETTINGS), self.root / folder
        made = label_problems(PROBLEMS, engine, labeller, out, chunk_traces=chunk, **more)
        assert made.to_list() == read_labels(out).to_list()
        return made.to_list()

    def manifest(self, folder: str = "labels") -> dict[str, Any]:
        return read_manifest(self.root / folder)

    def asked(self, what: str) -> list[int]:
        """The problems of which it was asked for."""
        return [problem for kind, problem, _ in self.log if kind == what]


@pytest.fixture
def run(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Runs:
    return Runs(tiny_tokenizer, tmp_path)


def test_rows_and_their_order_are_those_of_one_trace_after_the_other(run: Runs) -> None:
    one_by_one = run("one", chunk=1, concurrency=1)
    assert [row["problem_id"] for row in one_by_one] == [problem.id for problem in PROBLEMS]
    assert len({len(row["step_ends"]) for row in one_by_one}) > 3
    for chunk, concurrency, servers in ((4, 100, 3), (100, 4, 1)):
        run.log.clear()
        assert run(f"{chunk}", chunk, concurrency, servers) == one_by_one
        finished = run.asked("natural")
        assert finished != sorted(finished)  # they did not end in the order of the rows
    for name in ("computed_tokens", "unique_tokens", "sampling_computed_tokens"):
        assert len({run.manifest(folder)[name] for folder in ("one", "4", "100")}) == 1


def test_forks_begin_while_others_are_sampled_and_where_their_trace_was(run: Runs) -> None:
    run(chunk=12, servers=2)
    last = max(i for i, (kind, _, _) in enumerate(run.log) if kind == "trace")
    sampled_by = {problem: server for kind, problem, server in run.log if kind == "trace"}
    forks = [(problem, server) for kind, problem, server in run.log[:last] if kind == "fork"]
    assert len(forks) > 10
    # Only once no other trace can be begun does an idle server help out.
    assert all(sampled_by[problem] == server for problem, server in forks)


@pytest.mark.parametrize("chunk", [1, 4, 9])
def test_at_no_moment_are_more_traces_begun_than_a_kill_may_lose(chunk: int, run: Runs) -> None:
    begun: set[int] = set()
    held: list[int] = []

    def watch(kind: str, number: int) -> None:
        begun.add(number)
        held.append(len(begun) - run.manifest()["traces"])

    run(chunk=chunk, concurrency=100, watch=watch)
    assert max(held) == chunk


def test_a_trace_that_is_refused_does_not_stop_the_others(run: Runs) -> None:
    refused = {("trace", 3), ("fork", 5), ("natural", 7)}

    def watch(kind: str, number: int) -> None:
        if (kind, number) in refused:
            raise ValueError(f"no room for {number}")

    whole = run("whole")
    run.log.clear()
    rows = run(watch=watch)
    lost = ("p3", "p5", "p7")
    assert rows == [row for row in whole if row["problem_id"] not in lost]
    failed = [[name, 0, f"ValueError: no room for {name[1:]}"] for name in lost]
    assert sorted(run.manifest()["failed"]) == failed
    summary = told(run.root / "labels", stats_of(run.root / "labels"))
    assert "Failed: trace 0 of problem p3: ValueError: no room for 3" in summary
    assert "3 of 12 traces failed" in summary
    assert run(watch=watch) == rows  # nothing is tried again unless that is asked for
    # Those three were tried with others and alone; then one shows that the engine is sound.
    again = Counter(run.asked("trace")) - Counter(range(12))
    assert {3, 5, 7} < set(again)
    assert again.total() == 4
    refused.clear()
    assert run(watch=watch, retry_failed=True) == whole


@pytest.mark.parametrize(("requests", "chunk"), [(30, 8), (45, 8), (45, 1), (80, 8)])
def test_an_engine_that_breaks_ends_the_run(requests: int, chunk: int, run: Runs) -> None:
    """Also where traces that were asked for before are done after its first error."""

    def watch(kind: str, number: int) -> None:
        if len(run.log) > requests:
            raise RuntimeError("CUDA error")

    with pytest.raises(RuntimeError, match="CUDA error"):
        run(chunk=chunk, watch=watch)
    assert run.manifest()["failed"] == []
    assert 0 < run.manifest()["traces"] < 12
    if chunk == 1:
        assert run() == run("whole", 12)


def test_an_interrupted_run_keeps_what_is_finished(run: Runs) -> None:
    """Also before a quarter of the window is."""

    def watch(kind: str, number: int) -> None:
        if len(run.log) > 45:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(chunk=12, watch=watch)
    assert 0 < run.manifest()["traces"] < 12
    assert run(chunk=12) == run("whole", 12)


def test_a_row_that_is_none_ends_the_run_and_is_not_left_out(run: Runs) -> None:
    """It is the first that is done, while others are sampled."""
    first = [ValueError("it is no row"), *[None] * 99]
    with mock.patch("ospruner.train.labels.making.validate_row", side_effect=first):
        with pytest.raises(ValueError, match="it is no row"):
            run(chunk=12)
        assert len(run()) == 12


def test_a_broken_grader_is_found_first(run: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    run("made")
    run.log.clear()
    boxed.check_grader.cache_clear()
    unreadable = Grade(None, "unreadable")
    monkeypatch.setattr(GradingPool, "compare", lambda *_: unreadable)
    broken = r"the grader is broken: of '0.5' .* it says None \(unreadable\), which is True: .* pip"
    with pytest.raises(ValueError, match=broken):
        run("out")
    assert run.log == []
    assert not (run.root / "out").exists()
    with pytest.raises(ValueError, match=broken):
        regrade(run.root / "made")
