"""Labels: at the end of each step of a trace, force the answer and grade it.

Nothing is rolled out again later: the objective and every baseline are computed exactly from these
grades (the paper's section on data preprocessing).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from modeling_ospruner.formats_ospruner import TokenFormat
from modeling_ospruner.loading_ospruner import base_fingerprint
from ospruner.durable import room_needed
from ospruner.engines.dispatching import EnginesDownError
from ospruner.engines.interface import Engine, ForkedAnswer, Sampled, TraceRequest
from ospruner.eval.problems.problem import Problem
from ospruner.eval.problems.registry import open_task
from ospruner.eval.problems.task import Task, prompt_token_ids
from ospruner.eval.schema import LabelSettings, validate_row
from ospruner.progress import Progress, silent
from ospruner.provenance import PROVENANCE_FILE, provenance, read_provenance

from .folder import MANIFEST, TokenCosts, data_hash
from .rows import (
    OptionIds,
    TraceKey,
    grade_rows,
    labelled_step_ends,
    sampling_settings,
    ungraded_row,
    wanted_traces,
)
from .writer import Chunk, LabelFolder

__all__ = ["label", "labels_at_hand"]


def label(
    problems: Sequence[Problem],
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    fmt: TokenFormat,
    settings: LabelSettings,
    out_dir: str | Path,
    *,
    chunk_traces: int = 512,
    traces: Sequence[TraceKey] | None = None,
    retry_failed: bool = False,
    source: Mapping[str, Any] | None = None,
    allow_code: bool = False,
    progress: Progress = silent,
) -> Dataset:
    """Samples traces of the problems, labels every step, and keeps all in a folder.

    The engine is kept busy: a finished trace is forked and graded while others are sampled, and
    another is begun in its place.

    A run that was killed continues: what was committed is kept, and as a trace depends only on the
    seed, the problem and its sample index, the result is that of an undisturbed run, with any
    `chunk_traces`; where the engine cannot promise that (`Engine.batch_effects`), the manifest says
    why. More problems may be added later. Damaged shards are set aside and their traces labelled
    again.

    Traces that an error ended are done again, one by one; those that raise one again are recorded
    as failed, with the error. Errors that keep out long traces bias the labels: look at
    their number.

    Args:
        problems: what to reason about; ids are unique.
        engine: runs the base.
        tokenizer: the base's.
        fmt: the base's reasoning format, in the task's shape (`Task.shape`).
        settings: of the run, its task included; an empty `reasoning_format` and an unknown
            `base_fingerprint` are filled in.
        out_dir: an empty folder, or one of an earlier run with the same settings.
        chunk_traces: traces that may be begun and not committed: a kill loses at most these. Give
            a third more than the engine works on at once.
        traces: which traces of the problems; by default `samples_per_problem` of each.
        retry_failed: try those again that failed in an earlier run.
        source: where the problems come from, JSON values; kept in the manifest.
        allow_code: whether programs that the model wrote may be run, as the task `code` does.
        progress: called with phases "sample", "fork" and "grade", in traces.

    Returns:
        The labelled traces, columns `schema.FEATURES`.

    Raises:
        ValueError: bad problems, a folder that holds something else or other settings, settings
            whose reasoning format is not `fmt`, a full disk, or a broken grader.
        EnginesDownError: no server is left; what was committed is kept.
        Exception: that of the first trace, where several raise one in a row, and again alone.
    """
    if chunk_traces < 1:
        raise ValueError(f"chunk_traces is {chunk_traces}; it must be 1 or more")
    settings = _with_format(settings, fmt)
    task = open_task(settings.task, allow_code)
    if task.shape(fmt.format) != fmt.format:
        raise ValueError(
            f"the reasoning format forces {fmt.format.box_prefix!r}, but the task "
            f"{settings.task['name']} {task.box_prefix or 'a box'!r}: compile `Task.shape` of it"
        )
    task.check()
    options = OptionIds(task, tokenizer, fmt, settings.answer)
    options.check(problems)
    source = dict(source or {})
    if settings.base_fingerprint is None:
        where, revision = settings.base_model, settings.base_revision
        found = base_fingerprint(where, revision)
        settings = replace(settings, base_fingerprint=found)
        if found is None:
            why = f"no safetensors files of {where!r} at revision {revision!r} on this machine"
            source["base_fingerprint"] = f"unknown: {why}"
    if traces is None:
        traces = wanted_traces(problems, settings.samples_per_problem)
    order = {(key.problem.id, key.sample_index): n for n, key in enumerate(traces)}
    with room_needed(Path(out_dir)):
        try:
            with LabelFolder(out_dir, settings, source) as folder:
                _check_problems(folder, problems)
                folder.note_effects([engine.batch_effects] if engine.batch_effects else [])
                if retry_failed:
                    folder.forget_failed()
                todo = [k for k in traces if (k.problem.id, k.sample_index) not in folder.done]
                counter = _Counter(progress, len(traces) - len(todo), len(traces))
                with ThreadPoolExecutor(1) as grader:
                    work = _Work(
                        engine, tokenizer, fmt, settings, task, options, grader, order, counter
                    )
                    work.do(todo, chunk_traces, folder.commit)
                folder.sort(order)
                return _finished(folder, settings)
        except KeyboardInterrupt:
            # It may have come in the middle of a commit: opening completes that, or takes it back.
            with LabelFolder(out_dir, settings, source):
                raise


def labels_at_hand(
    problems: Sequence[Problem],
    settings: LabelSettings,
    out_dir: str | Path,
    *,
    traces: Sequence[TraceKey] | None = None,
    retry_failed: bool = False,
) -> Dataset | None:
    """The labels of a folder that lacks none of the traces, so that no engine need be opened.

    Args:
        problems: as for `label`.
        settings: likewise.
        out_dir: likewise.
        traces: likewise.
        retry_failed: traces that failed count as left to do.

    Returns:
        The labelled traces; None where something is left to do.

    Raises:
        ValueError: the folder holds something else or other settings.
    """
    if not (Path(out_dir) / MANIFEST).is_file():
        return None
    if settings.base_fingerprint is None:
        found = base_fingerprint(settings.base_model, settings.base_revision)
        settings = replace(settings, base_fingerprint=found)
    if traces is None:
        traces = wanted_traces(problems, settings.samples_per_problem)
    keys = [(key.problem.id, key.sample_index) for key in traces]
    with LabelFolder(out_dir, settings) as folder:
        _check_problems(folder, problems)
        again = retry_failed and any(chunk.failed for chunk in folder.chunks)
        if again or not folder.done.issuperset(keys):
            return None
        folder.sort({key: n for n, key in enumerate(keys)})
        return _finished(folder, settings)


def _finished(folder: LabelFolder, settings: LabelSettings) -> Dataset:
    dataset = folder.finish()
    found = data_hash(folder.chunks)
    recorded = (folder.path / PROVENANCE_FILE).is_file()
    if not recorded or read_provenance(folder.path).data_hash != found:
        provenance(
            folder.path,
            seed=settings.seed,
            base_model=settings.base_model,
            base_revision=settings.base_revision,
            data_hash=found,
            details={"settings": settings.to_dict()},
        )
    return dataset


@dataclass(frozen=True)
class _Work:
    """What it takes to label traces.

    Attributes:
        engine: runs the base.
        tokenizer: the base's.
        fmt: the base's reasoning format.
        settings: of the run.
        task: asks, reads and grades.
        options: among which answers are chosen.
        grader: a thread that grades beside the engine.
        order: the place of each trace among the wanted ones.
        counter: is told of progress.
    """

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    fmt: TokenFormat
    settings: LabelSettings
    task: Task
    options: OptionIds
    grader: Executor
    order: Mapping[tuple[str, int], int]
    counter: _Counter

    def do(self, keys: Sequence[TraceKey], window: int, commit: Callable[[Chunk], None]) -> None:
        """Labels traces and, where an error ends several, those one by one, to see whose it is.

        Args:
            keys: which traces.
            window: how many may be begun and not committed.
            commit: takes what is finished.
        """
        desk = _Desk(self, keys, window, commit)
        settings, fmt = self.settings, self.fmt
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
                desk.abandon(error)
            desk.settle()
            if len(keys) == 1:
                commit(Chunk([], failed=[_lost(key, error) for key, error in desk.suspects]))
                return
            self._do_alone(desk)

    def _do_alone(self, desk: _Desk) -> None:
        """Tries again, alone, what an error ended; what it ends again has failed."""
        suspects, desk.suspects = desk.suspects, []
        if not suspects:
            return
        tried = Chunk([])
        for key, _ in suspects:
            self.do([key], 1, tried.add)
        if len(tried.failed) == len(suspects) > 1 and not desk.done_since_error:
            raise suspects[0][1]  # the engine is broken, not they
        desk.hand_in(tried)


class _Desk:
    """A label run as an engine sees it; see `TraceDesk`.

    Traces are committed once a quarter of the window is finished and no other can be begun before.

    Args:
        work: what it takes to label traces.
        keys: which traces.
        window: how many may be begun and not committed.
        commit: takes what is finished.
    """

    def __init__(
        self,
        work: _Work,
        keys: Sequence[TraceKey],
        window: int,
        commit: Callable[[Chunk], None],
    ) -> None:
        self._work = work
        self.todo = deque(keys)
        self._window = window
        self._commit = commit
        self.in_flight: dict[str, TraceKey] = {}
        self._step_ends: dict[str, list[int]] = {}
        self._ungraded: list[dict[str, Any]] = []
        self._grading: tuple[Future[None], list[dict[str, Any]]] | None = None
        self._ready = Chunk([])
        self._spent = _costs(work.engine)
        self.suspects: list[tuple[TraceKey, Exception]] = []
        self.done_since_error = 0

    def begin(self) -> TraceRequest | None:
        """See `TraceDesk.begin`."""
        if not self.in_flight:
            self.settle()
        self._collect()
        if self._held() >= self._window and 4 * self._finished() >= self._window:
            self._hand_on()
        while self.todo and self._held() < self._window:
            key = self.todo.popleft()
            self.in_flight[key.name] = key
            self._work.counter.begun()
            try:
                message = self._work.task.message(key.problem, self._work.fmt.format)
                ids = prompt_token_ids(
                    key.problem.id, message, self._work.tokenizer, self._work.fmt
                )
            except ValueError as error:  # such as a chat template that takes no such text
                self._suspect(key.name, error)
                continue
            return TraceRequest(ids, key.name, self._work.options.of(key.problem))
        return None

    def sampled(self, request: TraceRequest, trace: Sampled) -> list[int]:
        """See `TraceDesk.sampled`."""
        stride = self._work.settings.step_stride
        ends = labelled_step_ends(self._work.fmt, trace.trace_ids, stride)
        self._step_ends[request.key] = ends
        self._work.counter("sample", request.key)
        return ends

    def done(self, request: TraceRequest, trace: Sampled, answers: Sequence[ForkedAnswer]) -> None:
        """See `TraceDesk.done`."""
        key = self.in_flight.pop(request.key)
        ends = self._step_ends.pop(request.key)
        self.done_since_error += 1
        self._work.counter("fork", request.key)
        if not trace.trace_ids:
            why = "the trace has no thinking tokens"
            self._ready.dropped.append((key.problem.id, key.sample_index, why))
            return
        forced = self._work.settings.answer == "forced"
        row = ungraded_row(
            key,
            request.prompt_ids,
            trace,
            ends,
            answers,
            self._work.tokenizer,
            self._work.task,
            forced,
            fmt=self._work.fmt,
        )
        self._ungraded.append(row)
        self._collect()

    def failed(self, request: TraceRequest, error: Exception) -> None:
        """See `TraceDesk.failed`."""
        self._suspect(request.key, error)

    def abandon(self, error: Exception) -> None:
        """Takes note of an error that ended all traces in flight."""
        for name in list(self.in_flight):
            self._suspect(name, error)

    def settle(self) -> None:
        """Grades and commits all that was handed in."""
        while self._grading or self._ungraded:
            self._collect(wait=True)
        if self._finished():
            self._hand_on()

    def hand_in(self, chunk: Chunk) -> None:
        """Commits a chunk that was made otherwise."""
        self._ready.add(chunk)
        self._hand_on()

    def _suspect(self, name: str, error: Exception) -> None:
        if not self.suspects:
            self.done_since_error = 0
        self._step_ends.pop(name, None)
        self.suspects.append((self.in_flight.pop(name), error))

    def _held(self) -> int:
        """Traces that are begun and not committed."""
        grading = len(self._grading[1]) if self._grading else 0
        waiting = len(self.in_flight) + len(self.suspects) + len(self._ungraded)
        return waiting + grading + self._finished()

    def _finished(self) -> int:
        return len(self._ready.rows) + len(self._ready.dropped) + len(self._ready.failed)

    def _collect(self, wait: bool = False) -> None:
        """Takes rows that are graded, and hands over those that wait to be."""
        if self._grading and (wait or self._grading[0].done()):
            graded, rows = self._grading
            self._grading = None
            graded.result()
            self._ready.rows.extend(rows)
            for row in rows:
                self._work.counter("grade", f"{row['problem_id']}/{row['sample_index']}")
        if self._ungraded and self._grading is None:
            rows, self._ungraded = self._ungraded, []
            self._grading = self._work.grader.submit(_grade, rows, self._work.task), rows

    def _hand_on(self) -> None:
        """Commits what is finished."""
        spent = _costs(self._work.engine)
        costs = {name: n - vars(self._spent)[name] for name, n in vars(spent).items()}
        chunk, self._ready, self._spent = self._ready, Chunk([]), spent
        order = self._work.order
        chunk.rows.sort(key=lambda row: order[row["problem_id"], row["sample_index"]])
        self._commit(replace(chunk, costs=TokenCosts(**costs)))


def _grade(rows: list[dict[str, Any]], task: Task) -> None:
    grade_rows(rows, task)
    for row in rows:
        validate_row(row)


def _lost(key: TraceKey, error: Exception) -> tuple[str, int, str]:
    return key.problem.id, key.sample_index, f"{type(error).__name__}: {error}"


class _Counter:
    """Tells the progress of a run, in traces.

    Args:
        progress: is told.
        done: traces of earlier runs.
        total: all traces.
    """

    def __init__(self, progress: Progress, done: int, total: int) -> None:
        self._progress = progress
        self._done = done
        self._total = total
        self._seen: dict[str, set[str]] = {}

    def begun(self) -> None:
        """Shows the first phase before its first trace."""
        if not self._seen:
            self._seen["sample"] = set()
            self._progress("sample", self._done, self._total)

    def __call__(self, phase: str, name: str) -> None:
        """Counts a trace, which may come again where it is tried again."""
        seen = self._seen.setdefault(phase, set())
        seen.add(name)
        self._progress(phase, self._done + len(seen), self._total)


def _costs(engine: Engine) -> TokenCosts:
    forks, sampling = engine.counts, engine.sample_counts
    return TokenCosts(
        forks.computed, forks.unique, forks.padding, sampling.computed, sampling.unique
    )


def _with_format(settings: LabelSettings, fmt: TokenFormat) -> LabelSettings:
    literals = fmt.format.to_dict()
    if settings.reasoning_format and settings.reasoning_format != literals:
        raise ValueError(
            f"settings.reasoning_format is {settings.reasoning_format}, but the format compiled "
            f"for the tokenizer is {literals}; leave the former empty, or make them agree"
        )
    return replace(settings, reasoning_format=literals)


def _check_problems(folder: LabelFolder, problems: Sequence[Problem]) -> None:
    given = {problem.id: (problem.problem, problem.answer) for problem in problems}
    for problem_id, stored in folder.problems.items():
        if problem_id not in given:
            raise ValueError(
                f"{folder.path} holds traces of problem {problem_id!r}, which is not among the "
                f"{len(given)} given: give all of its problems to continue it, or use another "
                "folder"
            )
        if given[problem_id] != stored:
            raise ValueError(
                f"{folder.path} holds traces of problem {problem_id!r} with (problem, answer) "
                f"{stored}, given is {given[problem_id]}: use another folder"
            )
