"""Units of a label run: what a worker's end, a poisoned trace and a broken engine leave behind."""

from __future__ import annotations

import dataclasses
import io
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from modeling_ospruner.formats_ospruner import DEEPSEEK_R1, TokenFormat
from ospruner.engines.dispatching import EnginesDownError
from ospruner.engines.interface import TraceDesk, TraceRequest
from ospruner.engines.transformers.engine import TransformersEngine
from ospruner.eval.grading import boxed
from ospruner.eval.grading.boxed import Verdict
from ospruner.eval.grading.pool import GradingPool
from ospruner.eval.online.command import OnlineRequest, run_online
from ospruner.eval.problems.problem import Problem
from ospruner.eval.schema import LabelSettings
from ospruner.train.labels.folder import read_labels, read_manifest
from ospruner.train.labels.looking import print_run
from ospruner.train.labels.making import label
from ospruner.train.labels.regrading import regrade
from ospruner.train.labels.rows import wanted_traces
from ospruner.train.labels.units import Worker, do_unit, merge_units, open_units, unit_of, unit_size

PROBLEMS = [Problem(f"p{n}", f"What is {n} + 4?", str(n + 4)) for n in range(12)]


class Faulty(TransformersEngine):
    """The real engine, with something that happens before it samples a row."""

    def __init__(
        self,
        model: Qwen2ForCausalLM,
        tokenizer: PreTrainedTokenizerFast,
        fault: Callable[[str], None],
    ) -> None:
        super().__init__(model, tokenizer)
        self.fault = fault
        self.calls: list[list[str]] = []  # the traces begun in each stream

    def sample_and_fork(self, desk: TraceDesk, *rules: Any) -> None:
        begin, begun, fresh = desk.begin, list[str](), list[str]()

        def watched() -> TraceRequest | None:
            if (request := begin()) is not None:
                if not begun:
                    self.calls.append(begun)
                begun.append(request.key)
                fresh.append(request.key)
            return request

        def run(*_: Any) -> None:
            while fresh:
                self.fault(fresh.pop(0))

        hook = self.model.register_forward_pre_hook(run)
        try:
            with mock.patch.object(desk, "begin", watched):
                super().sample_and_fork(desk, *rules)
        finally:
            hook.remove()


def nothing(key: str) -> None:
    """No fault."""


@pytest.fixture
def make_worker(
    tiny_base: Qwen2ForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> Callable[[Callable[[str], None]], Worker]:
    fmt = TokenFormat.compile(DEEPSEEK_R1, tiny_tokenizer)
    settings = LabelSettings(
        base_model="tiny",
        reasoning_format=DEEPSEEK_R1.to_dict(),
        temperature=1.0,
        top_p=1.0,
        max_new_tokens=24,
        max_answer_tokens=4,
    )

    def make(fault: Callable[[str], None] = nothing) -> Worker:
        return Worker(Faulty(tiny_base, tiny_tokenizer, fault), tiny_tokenizer, fmt, settings)

    return make


def traces_of(folder: Path) -> dict[str, list[int]]:
    labels = read_labels(folder)
    assert len(set(labels["problem_id"])) == len(labels)
    return dict(zip(labels["problem_id"], labels["trace_ids"], strict=True))


def run_units(out: Path, worker: Worker, unit_traces: int = 4, chunk_traces: int = 12) -> list[int]:
    """Does what is open; the units that it did."""
    todo = open_units(out, worker.settings, wanted_traces(PROBLEMS, 1), unit_traces)
    for unit, keys in todo.items():
        do_unit(out, unit, keys, worker, chunk_traces)
    merge_units(out, worker.settings, finished=True)
    return list(todo)


def test_units_give_the_traces_of_one_run(
    make_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    worker = make_worker()
    assert run_units(tmp_path / "units", worker) == [0, 1, 2]
    label(PROBLEMS, worker.engine, worker.tokenizer, worker.fmt, worker.settings, tmp_path / "one")
    assert traces_of(tmp_path / "units") == traces_of(tmp_path / "one")
    manifest, other = (read_manifest(tmp_path / name) for name in ("units", "one"))
    assert manifest["finished"]
    assert {k: manifest[k] for k in ("traces", "problems", "steps")} == {
        k: other[k] for k in ("traces", "problems", "steps")
    }
    assert not (tmp_path / "units" / "parts").exists()
    assert run_units(tmp_path / "units", worker) == []  # nothing is left to do


def test_a_unit_is_large_but_leaves_no_worker_idle() -> None:
    assert unit_size(40_000, 8, 128) == 1024  # eight chunks
    assert unit_size(1000, 8, 128) == 125  # one unit a worker
    assert unit_size(3, 8, 128) == 1


def test_a_problem_s_unit_depends_on_its_id_only() -> None:
    units = [unit_of(f"p{n}", 16) for n in range(2000)]
    assert units[:4] == [unit_of(f"p{n}", 16) for n in range(4)]
    shares = [units.count(unit) for unit in range(16)]
    assert min(shares) > 80  # 125 on average


def test_a_poisoned_trace_is_recorded_and_not_tried_again(
    make_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    def poison(key: str) -> None:
        if key == "p3/0":
            raise RuntimeError("this prompt breaks the engine")

    worker = make_worker(poison)
    run_units(tmp_path, worker)
    assert set(traces_of(tmp_path)) == {p.id for p in PROBLEMS} - {"p3"}
    assert read_manifest(tmp_path)["failed"] == [
        ["p3", 0, "RuntimeError: this prompt breaks the engine"]
    ]
    assert isinstance(worker.engine, Faulty)
    assert sum("p3/0" in keys for keys in worker.engine.calls) == 2  # with others, and alone
    assert run_units(tmp_path, worker) == []


def test_a_trace_that_failed_is_tried_again_when_asked(
    make_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    broken = {"p3/0"}

    def fault(key: str) -> None:
        if key in broken:
            raise MemoryError("out of memory")

    worker = make_worker(fault)

    def run(retry_failed: bool = False) -> list[list[str]]:
        worker.engine.calls.clear()  # type: ignore[attr-defined]
        label(
            PROBLEMS[:6], worker.engine, worker.tokenizer, worker.fmt, worker.settings, tmp_path,
            chunk_traces=4, retry_failed=retry_failed,
        )  # fmt: skip
        return list(worker.engine.calls)  # type: ignore[attr-defined]

    together = [f"p{n}/0" for n in range(4)]
    assert run() == [together, *([key] for key in together), ["p4/0", "p5/0"]]
    assert read_manifest(tmp_path)["failed"] == [["p3", 0, "MemoryError: out of memory"]]
    assert run() == []
    assert run(retry_failed=True) == [["p3/0"]]
    assert read_manifest(tmp_path)["failed"] == [["p3", 0, "MemoryError: out of memory"]]
    summary = io.StringIO()
    print_run(tmp_path, Console(file=summary, width=200), None)
    assert "Failed: trace 0 of problem p3: MemoryError: out of memory" in summary.getvalue()
    assert "1 of 6 traces failed" in summary.getvalue()
    before = traces_of(tmp_path)
    broken.clear()
    assert run(retry_failed=True) == [["p3/0"]]
    assert read_manifest(tmp_path)["failed"] == []
    assert set(traces_of(tmp_path)) == {*before, "p3"}


def test_a_broken_grader_is_found_before_anything_is_sampled(
    make_worker: Callable[..., Worker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker()
    given = (worker.engine, worker.tokenizer, worker.fmt, worker.settings)
    label(PROBLEMS[:1], *given, tmp_path / "made")
    worker.engine.calls.clear()  # type: ignore[attr-defined]
    boxed.check_grader.cache_clear()
    unreadable = Verdict(None, "unreadable")
    monkeypatch.setattr(GradingPool, "compare", lambda *_: unreadable)
    broken = r"the grader is broken: of '0.5' .* it says None \(unreadable\), which is True: .* pip"
    with pytest.raises(ValueError, match=broken):
        label(PROBLEMS, *given, tmp_path / "out")
    assert worker.engine.calls == []  # type: ignore[attr-defined]
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=broken):
        regrade(tmp_path / "made")
    with pytest.raises(ValueError, match=broken):
        run_online(OnlineRequest(dataset="absent", base="absent"), tmp_path / "online")


def test_a_broken_engine_drops_nothing(make_worker: Callable[..., Worker], tmp_path: Path) -> None:
    def broken(key: str) -> None:
        raise RuntimeError("CUDA error")

    with pytest.raises(RuntimeError, match="CUDA error"):
        run_units(tmp_path, make_worker(broken))

    def gone(key: str) -> None:
        raise EnginesDownError("no server is left")

    with pytest.raises(EnginesDownError):
        run_units(tmp_path, make_worker(gone))
    run_units(tmp_path, make_worker())
    assert set(traces_of(tmp_path)) == {p.id for p in PROBLEMS}
    assert read_manifest(tmp_path)["failed"] == []


def test_a_trace_that_kills_its_workers_is_dropped_after_four_deaths(
    make_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    begun = tmp_path / "begun.txt"

    def watched(key: str) -> None:
        with begun.open("a") as file:
            file.write(f"{key} {len(worker.engine.calls[-1])}\n")  # type: ignore[attr-defined]
        if key == "p5/0":
            os.kill(os.getpid(), signal.SIGKILL)

    worker, deaths = make_worker(watched), 0
    while True:
        child = multiprocessing.get_context("fork").Process(
            target=run_units, args=(tmp_path, worker, 12, 4)
        )
        child.start()
        child.join()
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
        deaths += 1
        assert deaths < 9
    assert deaths == 4  # twice with the others, twice alone
    assert set(traces_of(tmp_path)) == {p.id for p in PROBLEMS} - {"p5"}
    assert read_manifest(tmp_path)["failed"] == [
        ["p5", 0, "the worker ended 2 times while doing it alone"]
    ]
    # Only what a worker may have ended in was done alone: four traces; the others in one stream.
    times = Counter(line.split()[0] for line in begun.read_text().splitlines())
    assert times["p5/0"] == 4
    assert sum(times.values()) <= len(PROBLEMS) + 4 * 4
    alone = {line.split()[0] for line in begun.read_text().splitlines() if line.endswith(" 1")}
    assert alone <= {f"p{n}/0" for n in range(2, 9)}


def test_an_unfinished_merge_keeps_what_is_done(
    make_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    worker = make_worker()
    todo = open_units(tmp_path, worker.settings, wanted_traces(PROBLEMS, 1), 4)
    unit, keys = next(iter(todo.items()))
    do_unit(tmp_path, unit, keys, worker, 4)
    assert merge_units(tmp_path, worker.settings, finished=False) is None
    assert set(traces_of(tmp_path)) == {key.problem.id for key in keys}
    assert not read_manifest(tmp_path)["finished"]
    assert run_units(tmp_path, worker, unit_traces=1) == [u for u in todo if u != unit]
    assert set(traces_of(tmp_path)) == {p.id for p in PROBLEMS}


def test_another_run_s_settings_are_refused(
    make_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    worker = make_worker()
    run_units(tmp_path, worker)
    other = dataclasses.replace(worker.settings, seed=1)
    with pytest.raises(ValueError, match="other settings.*seed"):
        open_units(tmp_path, other, wanted_traces(PROBLEMS, 1), 4)
