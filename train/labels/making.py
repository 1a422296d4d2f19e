"""Labels: at the end of each step of a trace, force the answer and grade it.

Nothing is rolled out again later: the objective and every baseline are computed exactly from these
grades (the paper's section on data preprocessing).
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset

from modeling_ospruner.modeling_ospruner import base_fingerprint
from ospruner.durable import room_needed
from ospruner.engines.interface import Engine, EnginesDownError, ForkedAnswer, Sampled, TraceRequest
from ospruner.eval.problems.problem import Problem
from ospruner.eval.schema import LabelSettings
from ospruner.progress import Progress, silent
from ospruner.provenance import PROVENANCE_FILE, provenance, read_provenance

from .features import validate_row
from .folder import data_hash
from .labelling import Labeller as Labeller
from .labelling import TraceKey, grade_rows
from .store import COSTS, Chunk, LabelStore

Worker = tuple[Engine, Labeller]
# Commits traces: is given the folder, the traces that it lacks (one at least), how many all are.
Work = Callable[[LabelStore, Sequence[TraceKey], int], None]


def label_problems(
    problems: Sequence[Problem],
    engine: Engine,
    labeller: Labeller,
    out_dir: str | Path,
    *,
    chunk_traces: int = 128,
    retry_failed: bool = False,
    progress: Progress = silent,
) -> Dataset:
    """Samples `samples_per_problem` traces of each problem, in this process; see `label_stored`."""
    labeller.task.check()
    samples = range(labeller.settings.samples_per_problem)
    traces = [TraceKey(problem, k) for problem in problems for k in samples]
    work = work_here(lambda: (engine, labeller), chunk_traces=chunk_traces, progress=progress)
    return label_stored(labeller.settings, traces, out_dir, work, retry_failed)


def work_here(make_worker: Callable[[], Worker], *, chunk_traces: int, progress: Progress) -> Work:
    """What labels a folder's traces in this process; it makes a worker where a trace is left to do.

    At most a chunk of traces are begun and not committed, which a kill loses: give a third more
    than the engine works on at once. The progress has phases "sample", "fork", "grade", in traces.
    """

    def work(store: LabelStore, todo: Sequence[TraceKey], total: int) -> None:
        worker = make_worker()
        store.note_effects(worker[0].batch_effects)
        seen: dict[str, set[str]] = defaultdict(set)  # one that is tried again counts once

        def told(phase: str, name: str) -> None:
            seen[phase].add(name)
            progress(phase, total - len(todo) + len(seen[phase]), total)

        progress("sample", total - len(todo), total)
        take = partial(next, iter(todo), None)
        LabelStream(worker, take, store.commit, chunk_traces, told).run()

    return work


def label_stored(
    settings: LabelSettings,
    traces: Sequence[TraceKey],
    out_dir: str | Path,
    work: Work,
    retry_failed: bool = False,
    source: Mapping[str, Any] | None = None,
) -> Dataset:
    """Labels every step of traces, keeps all in a folder, and gives it: columns `FEATURES`.

    A finished trace is forked and graded while others are sampled, and another is begun in its
    place. A killed run continues. As a trace depends only on the seed, the problem and its sample
    index, the result is that of an undisturbed run, whatever is begun at once; where the engine
    cannot promise that (`Engine.batch_effects`), the manifest says why. More problems may follow.

    Traces that an error ended are done again, one by one; those that raise one again are recorded
    as failed, with the error. Errors that keep out long traces bias the labels: look at their
    number.

    The folder is empty, or that of an earlier run with the same settings, whose unknown
    `base_fingerprint` is filled in. It shall hold the traces in this order; the work labels those
    that it lacks, among them, to retry them, those that failed in an earlier run. Its manifest
    keeps the source, JSON values that say where the problems come from.

    Raises:
        ValueError: bad problems, a folder that holds something else or other settings, a full disk,
            or a broken grader.
        EnginesDownError: no server is left; what was finished is kept.
        Exception: that of the first trace, where all that raise one do so again alone, and so does
            one that was done before.
    """
    if not traces:
        raise ValueError("problems is empty; give at least one problem to label")
    order = {key.place: number for number, key in enumerate(traces)}
    twice = [key.problem.id for number, key in enumerate(traces) if order[key.place] > number]
    if twice:
        raise ValueError(f"two problems share the id {twice[0]!r}; ids must be unique")
    source = dict(source or {})
    if settings.base_fingerprint is None:
        where, revision = settings.base_model, settings.base_revision
        settings = replace(settings, base_fingerprint=base_fingerprint(where, revision))
        if settings.base_fingerprint is None:
            why = f"no safetensors files of {where!r} at revision {revision!r} on this machine"
            source["base_fingerprint"] = f"unknown: {why}"
    with room_needed(Path(out_dir)), LabelStore(out_dir, settings, source) as store:
        asked = {key.problem.id: (key.problem.problem, key.problem.answer) for key in traces}
        _refuse_other_problems(store, asked)
        if retry_failed:
            store.forget_failed()
        if todo := [key for key in traces if key.place not in store.done]:
            work(store, todo, len(traces))
        dataset = store.finish(order)
        recorded, hashed = (store.path / PROVENANCE_FILE).is_file(), data_hash(store.manifest)
        if not recorded or read_provenance(store.path).data_hash != hashed:
            names = ("seed", "base_model", "base_revision")
            pinned: dict[str, Any] = {name: vars(settings)[name] for name in names}
            details = {"settings": settings.to_dict()}
            provenance(store.path, data_hash=hashed, details=details, **pinned)
    return dataset


def _refuse_other_problems(store: LabelStore, given: Mapping[str, tuple[str, str]]) -> None:
    for problem_id, stored in store.problems.items():
        held = f"{store.path} holds traces of problem {problem_id!r}"
        if problem_id not in given:
            raise ValueError(
                f"{held}, which is not among the {len(given)} given: give all of its problems to "
                "continue it, or use another folder"
            )
        if given[problem_id] != stored:
            raise ValueError(
                f"{held} with (problem, answer) {stored}, given is {given[problem_id]}: use "
                "another folder"
            )


@dataclass(eq=False)
class LabelStream:
    """Labels traces with an engine, as its `TraceDesk`, and tells whose its errors are.

    Traces are committed once a quarter of the window is finished and no other can be begun before.
    """

    worker: Worker  # runs the base; asks and reads
    # The next trace to be begun; None where there is none now and, while none is begun, the end.
    take: Callable[[], TraceKey | None]
    commit: Callable[[Chunk], None]  # takes what is finished
    window: int  # how many traces may be begun and not committed
    # Is told of a phase ("sample", "fork", "grade") and a trace's name.
    told: Callable[[str, str], None] = lambda phase, name: None
    alone: bool = False  # whether this is one trace that an error ended before

    def __post_init__(self) -> None:
        self._engine, self._labeller = self.worker
        self._spent = _costs(self._engine)
        self._step_ends: dict[str, list[int]] = {}
        self._begun: dict[str, TraceKey] = {}
        self._ungraded: deque[dict[str, Any]] = deque()
        self._grading: list[Future[list[dict[str, Any]]]] = []  # as many as rows
        self._ready = Chunk()
        self._suspects: list[tuple[TraceKey, Exception]] = []
        self._done: TraceKey | None = None  # the last one
        self._ended = False

    def run(self) -> None:
        """Labels until there is nothing to take."""
        settings, fmt = self._labeller.settings, self._labeller.fmt
        thinking = None if settings.imported_from else fmt
        stop = fmt.box_state if settings.answer == "forced" else None
        forced = fmt.forced_suffix(settings.answer), settings.max_answer_tokens, stop
        with ThreadPoolExecutor(1) as self._grader:  # beside the engine
            while not self._ended:
                try:
                    self._engine.sample_and_fork(self, self._labeller.sampling, thinking, *forced)
                except (EnginesDownError, KeyboardInterrupt):
                    self._settle()
                    raise
                except Exception as error:
                    if not self._begun or isinstance(error, OSError):  # such as a full disk
                        raise
                    for name in list(self._begun):
                        self._suspect(name, error)
                self._settle()
                self._judge()

    def begin(self) -> TraceRequest | None:
        """See `TraceDesk.begin`."""
        self._collect()
        full = self._held() >= self.window and 4 * len(self._ready) >= self.window
        if full or not self._begun:
            self._settle(not self._begun)
        while self._held() < self.window:
            key = self.take()
            if key is None:
                self._ended = not self._begun
                break
            self._begun[key.name] = key
            try:
                prompt = self._labeller.prompt(key.problem)
            except ValueError as error:  # such as a chat template that takes no such text
                self._suspect(key.name, error)
                continue
            trace = None if key.given is None else self._labeller.imported(key.given, prompt)
            return TraceRequest(prompt, key.name, self._labeller.options(key.problem), trace)
        return None

    def sampled(self, request: TraceRequest, trace: Sampled) -> list[int]:
        """See `TraceDesk.sampled`."""
        ends = self._step_ends[request.key] = self._labeller.step_ends(trace.trace_ids)
        self.told("sample", request.key)
        return ends

    def done(self, request: TraceRequest, trace: Sampled, answers: Sequence[ForkedAnswer]) -> None:
        """See `TraceDesk.done`."""
        key, ends = self._begun.pop(request.key), self._step_ends.pop(request.key)
        self._done = key
        self.told("fork", request.key)
        if not trace.trace_ids:
            self._ready.dropped.append((*key.place, "the trace has no thinking tokens"))
            return
        self._ungraded.append(self._labeller.row(key, trace, ends, answers))
        self._grading.append(self._grader.submit(self._grade))

    def failed(self, request: TraceRequest, error: Exception) -> None:
        """See `TraceDesk.failed`."""
        self._suspect(request.key, error)

    def _suspect(self, name: str, error: Exception) -> None:
        """Takes note of an error that ended a trace, which need not be its own."""
        self._step_ends.pop(name, None)
        self._suspects.append((self._begun.pop(name), error))

    def _judge(self) -> None:
        """Labels what an error ended one by one: a trace that raises one again has failed.

        Where all do, one that was done before shows whether the engine is broken, and not they.
        """
        suspects, self._suspects = self._suspects, []
        if self.alone:
            self._ready.failed.extend(
                (*key.place, f"{type(error).__name__}: {error}") for key, error in suspects
            )
        elif suspects:
            tried = [self._tried(key) for key, _ in suspects]
            if all(chunk.failed for chunk in tried) and (
                len(suspects) > 1 if self._done is None else self._tried(self._done).failed
            ):
                raise suspects[0][1]
            for chunk in tried:
                self._ready.rows.extend(chunk.rows)
                self._ready.dropped.extend(chunk.dropped)
                self._ready.failed.extend(chunk.failed)
        self._settle()

    def _tried(self, key: TraceKey) -> Chunk:
        """A trace by itself."""
        made, take = list[Chunk](), partial(next, iter([key]), None)
        LabelStream(self.worker, take, made.append, 1, self.told, True).run()
        return made[0]

    def _held(self) -> int:
        """Traces that are begun and not committed."""
        stages: tuple[Sized, ...] = (self._begun, self._suspects, self._grading, self._ready)
        return sum(map(len, stages))

    def _collect(self) -> None:
        """Takes rows that are graded."""
        while self._grading and self._grading[0].done():  # they are graded in turn
            rows = self._grading[0].result()  # a broken grader's error stays, and ends the run
            self._ready.rows.extend(rows)
            del self._grading[0]
            for row in rows:
                self.told("grade", f"{row['problem_id']}/{row['sample_index']}")

    def _grade(self) -> list[dict[str, Any]]:
        """All rows that wait for it, together; none where one before has done them."""
        rows = [self._ungraded.popleft() for _ in range(len(self._ungraded))]
        grade_rows(rows, self._labeller.task)
        for row in rows:
            validate_row(row)
        return rows

    def _settle(self, wait_for_grades: bool = True) -> None:
        """Commits what is finished; all that was handed in, unless it need not wait."""
        if wait_for_grades:
            wait(self._grading)
            self._collect()
        if len(self._ready):
            spent = _costs(self._engine)
            chunk, self._ready = replace(self._ready, costs=spent - self._spent), Chunk()
            self._spent = spent
            self.commit(chunk)


def _costs(engine: Engine) -> Counter[str]:
    forks, sampling = engine.counts, engine.sample_counts
    spent = (forks.computed, forks.unique, forks.padding, sampling.computed, sampling.unique)
    return Counter(dict(zip(COSTS, spent, strict=True)))
