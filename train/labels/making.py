"""Labels: at the end of each step of a trace, force the answer and grade it.

Nothing is rolled out again later: the objective and every baseline are computed exactly from these
grades (the paper's section on data preprocessing).
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from modeling_ospruner.formats_ospruner import TokenFormat
from modeling_ospruner.modeling_ospruner import base_fingerprint
from ospruner.durable import room_needed
from ospruner.engines.dispatching import EnginesDownError
from ospruner.engines.interface import Engine, ForkedAnswer, Sampled, TraceRequest
from ospruner.eval.problems.problem import Problem
from ospruner.eval.problems.registry import open_task
from ospruner.eval.problems.task import Task, prompt_token_ids
from ospruner.eval.schema import LabelSettings, validate_row
from ospruner.progress import Progress, silent
from ospruner.provenance import PROVENANCE_FILE, provenance, read_provenance

from .folder import data_hash, read_manifest
from .rows import (
    OptionIds,
    TraceKey,
    grade_rows,
    labelled_step_ends,
    sampling_settings,
    ungraded_row,
    wanted_traces,
)
from .store import Chunk, LabelStore, Lost

__all__ = ["Labeller", "Stream", "label_problems", "label_stored"]


class Labeller:
    """How a base's traces are asked for, answered and graded.

    Args:
        tokenizer: the base's.
        fmt: the base's reasoning format, in the task's shape (`Task.shape`).
        settings: of the run; an empty `reasoning_format` is filled in.
        task: asks, reads and grades; None for the settings' own, which runs no programs.

    Raises:
        ValueError: the settings have another format, or the format another task's shape.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        fmt: TokenFormat,
        settings: LabelSettings,
        task: Task | None = None,
    ) -> None:
        literals, given = fmt.format.to_dict(), settings.reasoning_format
        if given and given != literals:
            raise ValueError(
                f"settings.reasoning_format is {given}, but the format compiled for the tokenizer "
                f"is {literals}; leave the former empty, or make them agree"
            )
        self.tokenizer = tokenizer
        self.fmt = fmt
        self.settings = replace(settings, reasoning_format=literals)
        self.task = open_task(settings.task) if task is None else task
        self._prompts: dict[str, array[int]] = {}
        if self.task.shape(fmt.format) != fmt.format:
            raise ValueError(
                f"the reasoning format forces {fmt.format.box_prefix!r}, but the task "
                f"{settings.task['name']} {self.task.box_prefix or 'a box'!r}: compile "
                "`Task.shape` of it"
            )

    @cached_property
    def options(self) -> OptionIds:
        """Among which answers labels choose."""
        return OptionIds(self.task, self.tokenizer, self.fmt, self.settings.answer)

    def prompt(self, problem: Problem) -> list[int]:
        """The token ids that ask a problem, templated once.

        Raises:
            ValueError: see `prompt_token_ids`.
        """
        if problem.id not in self._prompts:
            message = self.task.message(problem, self.fmt.format)
            ids = prompt_token_ids(problem.id, message, self.tokenizer, self.fmt)
            self._prompts[problem.id] = array("i", ids)
        return self._prompts[problem.id].tolist()


def label_problems(
    problems: Sequence[Problem],
    engine: Engine | Callable[[], Engine],
    labeller: Labeller,
    out_dir: str | Path,
    *,
    chunk_traces: int = 128,
    traces: Sequence[TraceKey] | None = None,
    retry_failed: bool = False,
    source: Mapping[str, Any] | None = None,
    progress: Progress = silent,
) -> Dataset:
    """Samples traces of problems, labels every step, and keeps all in a folder.

    The engine is kept busy: a finished trace is forked and graded while others are sampled, and
    another is begun in its place. A run that was killed continues, and as a trace depends only on
    the seed, the problem and its sample index, the result is that of an undisturbed run, with any
    `chunk_traces`; where the engine cannot promise that (`Engine.batch_effects`), the manifest says
    why. More problems may be added later.

    Traces that an error ended are done again, one by one; those that raise one again are recorded
    as failed, with the error. Errors that keep out long traces bias the labels: look at
    their number.

    Args:
        problems: what to reason about; ids are unique.
        engine: runs the base; a function is called where a trace is left to do.
        labeller: asks, reads and grades; its settings' unknown `base_fingerprint` is filled in.
        out_dir: an empty folder, or one of an earlier run with the same settings.
        chunk_traces: traces that may be begun and not committed: a kill loses at most these. Give
            a third more than the engine works on at once.
        traces: which traces of the problems; by default `samples_per_problem` of each.
        retry_failed: try those again that failed in an earlier run.
        source: where the problems come from, JSON values; kept in the manifest.
        progress: called with phases "sample", "fork" and "grade", in traces.

    Returns:
        The labelled traces, columns `schema.FEATURES`.

    Raises:
        ValueError: bad problems, a folder that holds something else or other settings, a full disk,
            or a broken grader.
        EnginesDownError: no server is left; what was committed is kept.
        Exception: that of the first trace, where several raise one in a row, and again alone.
    """
    if chunk_traces < 1:
        raise ValueError(f"chunk_traces is {chunk_traces}; it must be 1 or more")
    labeller.task.check()
    labeller.options.check(problems)

    def work(store: LabelStore, todo: Sequence[TraceKey], total: int) -> None:
        running = engine() if callable(engine) else engine
        if running.batch_effects and running.batch_effects not in store.batch_effects:
            store.batch_effects.append(running.batch_effects)
        counter = _Counter(progress, total - len(todo), total)
        Stream(labeller, running, counter).do(todo, chunk_traces, store.commit)

    return label_stored(labeller.settings, problems, out_dir, work, traces, retry_failed, source)


def label_stored(
    settings: LabelSettings,
    problems: Sequence[Problem],
    out_dir: str | Path,
    work: Callable[[LabelStore, Sequence[TraceKey], int], None],
    traces: Sequence[TraceKey] | None = None,
    retry_failed: bool = False,
    source: Mapping[str, Any] | None = None,
) -> Dataset:
    """Opens a label folder, has the traces done that it lacks, and finishes it.

    Args:
        settings: of the run.
        problems: as for `label_problems`, and so are the others.
        out_dir: likewise.
        work: commits traces: is given the folder, those that are left, and how many all are; not
            called where none is left.
        traces: likewise.
        retry_failed: likewise.
        source: likewise.
    """
    wanted = wanted_traces(problems, settings.samples_per_problem) if traces is None else traces
    order = {(key.problem.id, key.sample_index): n for n, key in enumerate(wanted)}
    source = dict(source or {})
    if settings.base_fingerprint is None:
        where, revision = settings.base_model, settings.base_revision
        settings = replace(settings, base_fingerprint=base_fingerprint(where, revision))
        if settings.base_fingerprint is None:
            why = f"no safetensors files of {where!r} at revision {revision!r} on this machine"
            source["base_fingerprint"] = f"unknown: {why}"
    with room_needed(Path(out_dir)):
        try:
            with LabelStore(out_dir, settings, source) as store:
                _check_problems(store, problems)
                if retry_failed and store.lost.failed:
                    store.forget_failed()
                todo = [k for k in wanted if (k.problem.id, k.sample_index) not in store.done]
                if todo:
                    work(store, todo, len(wanted))
                dataset = store.finish(order)
        except KeyboardInterrupt:
            # It may have come in the middle of a commit: opening tidies up.
            with LabelStore(out_dir, settings, source):
                raise
    found = data_hash(read_manifest(out_dir))
    recorded = (Path(out_dir) / PROVENANCE_FILE).is_file()
    if not recorded or read_provenance(out_dir).data_hash != found:
        provenance(
            out_dir,
            seed=settings.seed,
            base_model=settings.base_model,
            base_revision=settings.base_revision,
            data_hash=found,
            details={"settings": settings.to_dict()},
        )
    return dataset


@dataclass(frozen=True)
class Stream:
    """Labels traces with an engine, whose errors it tells apart.

    Attributes:
        labeller: asks, reads and grades.
        engine: runs the base.
        count: is told of a phase and a trace.
    """

    labeller: Labeller
    engine: Engine
    count: Callable[[str, str], None] = lambda phase, name: None

    def do(self, keys: Sequence[TraceKey], window: int, commit: Callable[[Chunk], None]) -> None:
        """Labels traces and, where an error ends several, those one by one, to see whose it is.

        Args:
            keys: which traces.
            window: how many may be begun and not committed.
            commit: takes what is finished.
        """
        with ThreadPoolExecutor(1) as grader:
            self._do(keys, window, commit, grader)

    def _do(
        self,
        keys: Sequence[TraceKey],
        window: int,
        commit: Callable[[Chunk], None],
        grader: Executor,
    ) -> None:
        desk = _Desk(self, keys, window, commit, grader)
        settings, fmt = self.labeller.settings, self.labeller.fmt
        while desk.todo:
            try:
                self.engine.sample_and_fork(
                    desk,
                    sampling_settings(settings),
                    fmt,
                    fmt.forced_suffix(settings.answer),
                    settings.max_answer_tokens,
                    fmt.box_state if settings.answer == "forced" else None,
                )
            except EnginesDownError:
                desk.settle()
                raise
            except OSError:  # such as a full disk
                raise
            except Exception as error:
                if not desk.in_flight:
                    raise
                for name in list(desk.in_flight):
                    desk.suspect(name, error)
            desk.settle()
            suspects, desk.suspects = desk.suspects, []
            if len(keys) == 1:
                commit(Chunk(failed=[_lost(key, error) for key, error in suspects]))
            elif suspects:
                tried: list[Chunk] = []
                for key, _ in suspects:
                    self._do([key], 1, tried.append, grader)
                all_failed = sum(len(chunk.failed) for chunk in tried) == len(suspects) > 1
                if all_failed and not desk.done_since_error:
                    raise suspects[0][1]  # the engine is broken, not they
                for chunk in tried:
                    desk.ready = desk.ready.plus(chunk)
                desk.hand_on()


class _Desk:
    """A label run as an engine sees it; see `TraceDesk`.

    Traces are committed once a quarter of the window is finished and no other can be begun before.

    Args:
        stream: what it takes to label traces.
        keys: which traces.
        window: how many may be begun and not committed.
        commit: takes what is finished.
        grader: a thread that grades beside the engine.
    """

    def __init__(
        self,
        stream: Stream,
        keys: Sequence[TraceKey],
        window: int,
        commit: Callable[[Chunk], None],
        grader: Executor,
    ) -> None:
        self._count, self._engine = stream.count, stream.engine
        self._labeller = stream.labeller
        self._window = window
        self._commit = commit
        self._grader = grader
        self._order = {key.name: n for n, key in enumerate(keys)}
        self._spent = _costs(self._engine)
        self._step_ends: dict[str, list[int]] = {}
        self._ungraded: list[dict[str, Any]] = []
        self._grading: tuple[Future[None], list[dict[str, Any]]] | None = None
        self.todo = deque(keys)
        self.in_flight: dict[str, TraceKey] = {}
        self.suspects: list[tuple[TraceKey, Exception]] = []
        self.done_since_error = 0
        self.ready = Chunk()

    def begin(self) -> TraceRequest | None:
        """See `TraceDesk.begin`."""
        if not self.in_flight:
            self.settle()
        self._collect()
        if self._held() >= self._window and 4 * len(self.ready) >= self._window:
            self.hand_on()
        while self.todo and self._held() < self._window:
            key = self.todo.popleft()
            self.in_flight[key.name] = key
            self._count("begin", key.name)
            try:
                prompt = self._labeller.prompt(key.problem)
            except ValueError as error:  # such as a chat template that takes no such text
                self.suspect(key.name, error)
                continue
            return TraceRequest(prompt, key.name, self._labeller.options.of(key.problem))
        return None

    def sampled(self, request: TraceRequest, trace: Sampled) -> list[int]:
        """See `TraceDesk.sampled`."""
        stride = self._labeller.settings.step_stride
        ends = labelled_step_ends(self._labeller.fmt, trace.trace_ids, stride)
        self._step_ends[request.key] = ends
        self._count("sample", request.key)
        return ends

    def done(self, request: TraceRequest, trace: Sampled, answers: Sequence[ForkedAnswer]) -> None:
        """See `TraceDesk.done`."""
        key, ends = self.in_flight.pop(request.key), self._step_ends.pop(request.key)
        self.done_since_error += 1
        self._count("fork", request.key)
        if not trace.trace_ids:
            why = "the trace has no thinking tokens"
            self.ready.dropped.append((key.problem.id, key.sample_index, why))
            return
        self._ungraded.append(
            ungraded_row(
                key,
                request.prompt_ids,
                trace,
                ends,
                answers,
                self._labeller.tokenizer,
                self._labeller.task,
                self._labeller.settings.answer == "forced",
                self._labeller.fmt,
            )
        )
        self._collect()

    def failed(self, request: TraceRequest, error: Exception) -> None:
        """See `TraceDesk.failed`."""
        self.suspect(request.key, error)

    def suspect(self, name: str, error: Exception) -> None:
        """Takes note of an error that ended a trace, which need not be its own."""
        if not self.suspects:
            self.done_since_error = 0
        self._step_ends.pop(name, None)
        self.suspects.append((self.in_flight.pop(name), error))

    def settle(self) -> None:
        """Grades and commits all that was handed in."""
        while self._grading or self._ungraded:
            self._collect(wait=True)
        if len(self.ready):
            self.hand_on()

    def hand_on(self) -> None:
        """Commits what is finished."""
        spent = _costs(self._engine)
        chunk, self.ready = replace(self.ready, costs=spent - self._spent), Chunk()
        self._spent = spent
        chunk.rows.sort(key=lambda row: self._order[_name(row)])
        self._commit(chunk)

    def _held(self) -> int:
        """Traces that are begun and not committed."""
        grading = len(self._grading[1]) if self._grading else 0
        waiting = len(self.in_flight) + len(self.suspects) + len(self._ungraded)
        return waiting + grading + len(self.ready)

    def _collect(self, wait: bool = False) -> None:
        """Takes rows that are graded, and hands over those that wait to be."""
        if self._grading and (wait or self._grading[0].done()):
            (graded, rows), self._grading = self._grading, None
            graded.result()
            self.ready.rows.extend(rows)
            for row in rows:
                self._count("grade", _name(row))
        if self._ungraded and self._grading is None:
            rows, self._ungraded = self._ungraded, []
            self._grading = self._grader.submit(_grade, rows, self._labeller.task), rows


def _grade(rows: list[dict[str, Any]], task: Task) -> None:
    grade_rows(rows, task)
    for row in rows:
        validate_row(row)


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['problem_id']}/{row['sample_index']}"


def _lost(key: TraceKey, error: Exception) -> Lost:
    return key.problem.id, key.sample_index, f"{type(error).__name__}: {error}"


class _Counter:
    """Tells the progress of a run, in traces; one that is tried again counts once.

    Args:
        progress: is told.
        done: traces of earlier runs.
        total: all traces.
    """

    def __init__(self, progress: Progress, done: int, total: int) -> None:
        self._progress, self._done, self._total = progress, done, total
        self._seen: dict[str, set[str]] = {}

    def __call__(self, phase: str, name: str) -> None:
        if phase == "begin":  # shows the first phase before its first trace
            if not self._seen:
                self._seen["sample"] = set()
                self._progress("sample", self._done, self._total)
            return
        seen = self._seen.setdefault(phase, set())
        seen.add(name)
        self._progress(phase, self._done + len(seen), self._total)


def _costs(engine: Engine) -> Counter[str]:
    forks, sampling = engine.counts, engine.sample_counts
    return Counter(
        computed_tokens=forks.computed,
        unique_tokens=forks.unique,
        padding_tokens=forks.padding,
        sampling_computed_tokens=sampling.computed,
        sampling_unique_tokens=sampling.unique,
    )


def _check_problems(store: LabelStore, problems: Sequence[Problem]) -> None:
    given = {problem.id: (problem.problem, problem.answer) for problem in problems}
    for problem_id, stored in store.problems.items():
        if problem_id not in given:
            raise ValueError(
                f"{store.path} holds traces of problem {problem_id!r}, which is not among the "
                f"{len(given)} given: give all of its problems to continue it, or use another "
                "folder"
            )
        if given[problem_id] != stored:
            raise ValueError(
                f"{store.path} holds traces of problem {problem_id!r} with (problem, answer) "
                f"{stored}, given is {given[problem_id]}: use another folder"
            )
