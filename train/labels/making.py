"""Labels: at the end of each step of a trace, force the answer and grade it.

Nothing is rolled out again later: the objective and every baseline are computed exactly from these
grades (the paper's section on data preprocessing).
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from datasets import Dataset

from modeling_ospruner.modeling_ospruner import base_fingerprint
from ospruner.durable import room_needed
from ospruner.engines.interface import Engine, EnginesDownError, ForkedAnswer, Sampled, TraceRequest
from ospruner.eval.problems.problem import Problem
from ospruner.eval.problems.task import Task
from ospruner.eval.schema import LabelSettings
from ospruner.progress import Progress, silent
from ospruner.provenance import PROVENANCE_FILE, provenance, read_provenance

from .features import validate_row
from .importing import ImportedTrace
from .labelling import Labeller, TraceKey, grade_rows
from .store import Chunk, LabelStore

__all__ = ["LabelStream", "Labeller", "Work", "label_problems", "label_stored"]

Work = Callable[[LabelStore, Sequence[TraceKey], int], None]
"""Commits traces: is given the folder, the traces that it lacks (one at least), and how many all
are."""


def label_problems(
    problems: Sequence[Problem],
    engine: Engine | Callable[[], Engine],
    labeller: Labeller,
    out_dir: str | Path,
    *,
    chunk_traces: int = 128,
    imported: Sequence[ImportedTrace] = (),
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
        imported: traces of the problems that others made; by default `samples_per_problem` of each
            are sampled.
        retry_failed: try those again that failed in an earlier run.
        source: where the problems come from, JSON values; kept in the manifest.
        progress: called with phases "sample", "fork" and "grade", in traces.

    Returns:
        The labelled traces, columns `features.FEATURES`.

    Raises:
        ValueError: bad problems, a folder that holds something else or other settings, a full disk,
            or a broken grader.
        EnginesDownError: no server is left; what was committed is kept.
        Exception: that of the first trace, where several raise one in a row, and again alone.
    """
    labeller.task.check()
    given = {trace.key.name: trace for trace in imported}

    def work(store: LabelStore, todo: Sequence[TraceKey], total: int) -> None:
        running = engine() if callable(engine) else engine
        store.note_effects(running.batch_effects)
        seen: dict[str, set[str]] = defaultdict(set)  # one that is tried again counts once

        def told(phase: str, name: str) -> None:
            seen[phase].add(name)
            progress(phase, total - len(todo) + len(seen[phase]), total)

        progress("sample", total - len(todo), total)
        left = deque(todo)
        take = lambda: left.popleft() if left else None  # noqa: E731
        LabelStream(labeller, running, take, store.commit, chunk_traces, given, told).run()

    wanted = [trace.key for trace in imported] or None
    return label_stored(labeller.settings, problems, out_dir, work, wanted, retry_failed, source)


def label_stored(
    settings: LabelSettings,
    problems: Sequence[Problem],
    out_dir: str | Path,
    work: Work,
    traces: Sequence[TraceKey] | None = None,
    retry_failed: bool = False,
    source: Mapping[str, Any] | None = None,
) -> Dataset:
    """Opens a label folder, has the traces done that it lacks, and finishes it.

    Arguments are those of `label_problems`, and `traces` which they are: by default
    `samples_per_problem` of each problem.
    """
    given: dict[str, Problem] = {}
    for problem in problems:
        if problem.id in given:
            raise ValueError(f"two problems share the id {problem.id!r}; ids must be unique")
        given[problem.id] = problem
    if not given:
        raise ValueError("problems is empty; give at least one problem to label")
    samples = range(settings.samples_per_problem)
    wanted = traces or [TraceKey(problem, k) for problem in problems for k in samples]
    source = dict(source or {})
    if settings.base_fingerprint is None:
        where, revision = settings.base_model, settings.base_revision
        settings = replace(settings, base_fingerprint=base_fingerprint(where, revision))
        if settings.base_fingerprint is None:
            why = f"no safetensors files of {where!r} at revision {revision!r} on this machine"
            source["base_fingerprint"] = f"unknown: {why}"
    with room_needed(Path(out_dir)), LabelStore(out_dir, settings, source) as store:
        _refuse_other_problems(store, given)
        if retry_failed:
            store.forget_failed()
        todo = [key for key in wanted if key.place not in store.done]
        if todo:
            work(store, todo, len(wanted))
        dataset = store.finish({key.place: n for n, key in enumerate(wanted)})
        recorded = (store.path / PROVENANCE_FILE).is_file()
        if not recorded or read_provenance(store.path).data_hash != store.data_hash:
            provenance(
                store.path,
                seed=settings.seed,
                base_model=settings.base_model,
                base_revision=settings.base_revision,
                data_hash=store.data_hash,
                details={"settings": settings.to_dict()},
            )
    return dataset


def _refuse_other_problems(store: LabelStore, given: Mapping[str, Problem]) -> None:
    for problem_id, stored in store.problems.items():
        if problem_id not in given:
            raise ValueError(
                f"{store.path} holds traces of problem {problem_id!r}, which is not among the "
                f"{len(given)} given: give all of its problems to continue it, or use another "
                "folder"
            )
        asked = given[problem_id].problem, given[problem_id].answer
        if asked != stored:
            raise ValueError(
                f"{store.path} holds traces of problem {problem_id!r} with (problem, answer) "
                f"{stored}, given is {asked}: use another folder"
            )


class LabelStream:
    """Labels traces with an engine, as its `TraceDesk`, and tells whose its errors are.

    Traces are committed once a quarter of the window is finished and no other can be begun before.

    Args:
        labeller: asks and reads.
        engine: runs the base.
        take: the next trace to be begun; None where there is none now and, while none is begun, the
            end.
        commit: takes what is finished.
        window: how many traces may be begun and not committed.
        given: traces that others made, by name; where there are any, none is sampled.
        told: is told of a phase ("sample", "fork", "grade") and a trace's name.
        alone: whether this is one trace that an error ended before.
    """

    def __init__(
        self,
        labeller: Labeller,
        engine: Engine,
        take: Callable[[], TraceKey | None],
        commit: Callable[[Chunk], None],
        window: int,
        given: Mapping[str, ImportedTrace] | None = None,
        told: Callable[[str, str], None] = lambda phase, name: None,
        alone: bool = False,
    ) -> None:
        self._labeller, self._engine = labeller, engine
        self._take, self._commit, self._window = take, commit, window
        self._given, self._told, self._alone = given or {}, told, alone
        self._spent = _costs(engine)
        self._step_ends: dict[str, list[int]] = {}
        self._begun: dict[str, TraceKey] = {}
        self._ungraded: list[dict[str, Any]] = []
        self._grading: tuple[Future[None], list[dict[str, Any]]] | None = None
        self._ready = Chunk()
        self._suspects: list[tuple[TraceKey, Exception]] = []
        self._done_since_error = 0
        self._ended = False

    def run(self) -> None:
        """Labels until there is nothing to take."""
        settings, fmt = self._labeller.settings, self._labeller.fmt
        with ThreadPoolExecutor(1) as self._grader:  # beside the engine
            while not self._ended:
                try:
                    self._engine.sample_and_fork(
                        self,
                        self._labeller.sampling,
                        None if self._given else fmt,
                        fmt.forced_suffix(settings.answer),
                        settings.max_answer_tokens,
                        fmt.box_state if settings.answer == "forced" else None,
                    )
                except EnginesDownError:
                    self._settle()
                    raise
                except OSError:  # such as a full disk
                    raise
                except Exception as error:
                    if not self._begun:
                        raise
                    for name in list(self._begun):
                        self._suspect(name, error)
                self._settle()
                self._judge()

    def begin(self) -> TraceRequest | None:
        """See `TraceDesk.begin`."""
        if not self._begun:
            self._settle()
        self._collect()
        if self._held() >= self._window and 4 * len(self._ready) >= self._window:
            self._hand_on()
        while self._held() < self._window:
            key = self._take()
            if key is None:
                self._ended = not self._begun
                break
            self._begun[key.name] = key
            try:
                prompt = self._labeller.prompt(key.problem)
            except ValueError as error:  # such as a chat template that takes no such text
                self._suspect(key.name, error)
                continue
            trace = None
            if self._given:
                trace = self._given[key.name].sampled(prompt, self._labeller)
            return TraceRequest(prompt, key.name, self._labeller.options(key.problem), trace)
        return None

    def sampled(self, request: TraceRequest, trace: Sampled) -> list[int]:
        """See `TraceDesk.sampled`."""
        ends = self._step_ends[request.key] = self._labeller.step_ends(trace.trace_ids)
        self._told("sample", request.key)
        return ends

    def done(self, request: TraceRequest, trace: Sampled, answers: Sequence[ForkedAnswer]) -> None:
        """See `TraceDesk.done`."""
        key, ends = self._begun.pop(request.key), self._step_ends.pop(request.key)
        self._done_since_error += 1
        self._told("fork", request.key)
        if not trace.trace_ids:
            self._ready.dropped.append((*key.place, "the trace has no thinking tokens"))
            return
        self._ungraded.append(self._labeller.row(key, request.prompt_ids, trace, ends, answers))
        self._collect()

    def failed(self, request: TraceRequest, error: Exception) -> None:
        """See `TraceDesk.failed`."""
        self._suspect(request.key, error)

    def _suspect(self, name: str, error: Exception) -> None:
        """Takes note of an error that ended a trace, which need not be its own."""
        if not self._suspects:
            self._done_since_error = 0
        self._step_ends.pop(name, None)
        self._suspects.append((self._begun.pop(name), error))

    def _judge(self) -> None:
        """Labels what an error ended one by one: a trace that raises one again has failed."""
        suspects, self._suspects = self._suspects, []
        for key, error in suspects if self._alone else ():
            lost = (*key.place, f"{type(error).__name__}: {error}")
            self._commit(Chunk(failed=[lost]))
        if self._alone or not suspects:
            return
        tried: list[Chunk] = []
        for key, _ in suspects:
            one = iter([key])
            take = lambda one=one: next(one, None)  # noqa: E731
            rest = (tried.append, 1, self._given, self._told, True)
            LabelStream(self._labeller, self._engine, take, *rest).run()
        failed = sum(len(chunk.failed) for chunk in tried)
        if failed == len(suspects) > 1 and not self._done_since_error:
            raise suspects[0][1]  # the engine is broken, not they
        for chunk in tried:
            self._ready = self._ready.plus(chunk)
        self._hand_on()

    def _settle(self) -> None:
        """Grades and commits all that was handed in."""
        while self._grading or self._ungraded:
            self._collect(wait=True)
        if len(self._ready):
            self._hand_on()

    def _hand_on(self) -> None:
        """Commits what is finished."""
        spent = _costs(self._engine)
        chunk, self._ready = replace(self._ready, costs=spent - self._spent), Chunk()
        self._spent = spent
        self._commit(chunk)

    def _held(self) -> int:
        """Traces that are begun and not committed."""
        grading = len(self._grading[1]) if self._grading else 0
        waiting = len(self._begun) + len(self._suspects) + len(self._ungraded)
        return waiting + grading + len(self._ready)

    def _collect(self, wait: bool = False) -> None:
        """Takes rows that are graded, and hands over those that wait to be."""
        if self._grading and (wait or self._grading[0].done()):
            (graded, rows), self._grading = self._grading, None
            graded.result()
            self._ready.rows.extend(rows)
            for row in rows:
                self._told("grade", f"{row['problem_id']}/{row['sample_index']}")
        if self._ungraded and self._grading is None:
            rows, self._ungraded = self._ungraded, []
            self._grading = self._grader.submit(_grade, rows, self._labeller.task), rows


def _grade(rows: list[dict[str, Any]], task: Task) -> None:
    grade_rows(rows, task)
    for row in rows:
        validate_row(row)


def _costs(engine: Engine) -> Counter[str]:
    forks, sampling = engine.counts, engine.sample_counts
    return Counter(
        computed_tokens=forks.computed,
        unique_tokens=forks.unique,
        padding_tokens=forks.padding,
        sampling_computed_tokens=sampling.computed,
        sampling_unique_tokens=sampling.unique,
    )
