"""Label runs on a Ray cluster: each actor holds one engine; this process writes the folder."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset

from modeling_ospruner.formats_ospruner import ReasoningFormat, TokenFormat
from ospruner.engines.interface import Engine
from ospruner.engines.opening import EngineOptions, load_tokenizer, open_engine
from ospruner.eval.problems.problem import Problem
from ospruner.eval.schema import LabelSettings
from ospruner.optional import needed
from ospruner.progress import Progress, silent

from .making import Labeller, Stream, label_stored
from .rows import TraceKey
from .store import Chunk, LabelStore

__all__ = ["EngineWorker", "UnfinishedUnitsError", "label_with_ray"]

_PIP_LINE = "pip install 'ospruner[ray]'"
_CHUNKS = 8  # of a unit, at most: the others cannot take over what a slow actor has begun
_DEATHS = 2  # how often a unit, and then a trace alone, may end its actor

Worker = tuple[Engine, Labeller]


class UnfinishedUnitsError(OSError):
    """Some units of a run could not be done, for reasons outside of it; the others are kept."""


@dataclass(frozen=True)
class EngineWorker:
    """Opens an actor's engine by names; it is sent to the actors.

    Attributes:
        engine_name: one of `ospruner.engines.opening.ENGINES`.
        options: which base, and how it is run.
        settings: of the run, its reasoning format filled in.
    """

    engine_name: str
    options: EngineOptions
    settings: LabelSettings

    def __call__(self) -> Worker:
        """Opens the engine."""
        tokenizer = load_tokenizer(self.options.base, self.options.revision)
        literals = ReasoningFormat.from_dict(self.settings.reasoning_format)
        fmt = TokenFormat.compile(literals, tokenizer)
        engine = open_engine(self.engine_name, tokenizer, self.options)
        return engine, Labeller(tokenizer, fmt, self.settings)


def label_with_ray(
    problems: Sequence[Problem],
    make_worker: Callable[[], Worker],
    settings: LabelSettings,
    out_dir: str | Path,
    actors: int,
    *,
    gpus_per_actor: float = 1,
    chunk_traces: int = 128,
    retry_failed: bool = False,
    source: Mapping[str, Any] | None = None,
    progress: Progress = silent,
) -> Dataset:
    """What `label_problems` does, on the actors of a Ray cluster.

    Another takes the place of an actor that dies, and does again what that had begun; where it ends
    in that, too, one by one, so that a deadly trace is found and recorded as failed.

    Args:
        problems: what to reason about; ids are unique.
        make_worker: called once in each actor.
        settings: of the run, its reasoning format filled in.
        out_dir: an empty folder, or one of an earlier run with the same settings.
        actors: engines, each in a process of its own.
        gpus_per_actor: GPUs of each; for a vLLM replica its `tensor_parallel_size`.
        chunk_traces: traces that an actor may have begun and not handed in: what its end may cost.
        retry_failed: try those again that failed in an earlier run.
        source: where the problems come from; kept in the manifest.
        progress: called with phase "label", in traces.

    Returns:
        The labelled traces, columns `schema.FEATURES`.

    Raises:
        MissingPackageError: Ray is not installed.
        ValueError: bad problems, or a folder that holds something else or is being written.
        UnfinishedUnitsError: some units could not be done; the others are in the folder.
    """
    for name, value in (("actors", actors), ("chunk_traces", chunk_traces)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be 1 or more")
    if gpus_per_actor < 0:
        raise ValueError(f"gpus_per_actor is {gpus_per_actor}; it must be 0 or more")
    needed("ray", f"labelling with actors={actors}", _PIP_LINE)

    def work(store: LabelStore, todo: Sequence[TraceKey], total: int) -> None:
        size = max(1, min(-(-len(todo) // actors), _CHUNKS * chunk_traces))
        units = deque(_Unit(todo[n : n + size]) for n in range(0, len(todo), size))
        cluster = _Cluster(make_worker, min(actors, len(units)), gpus_per_actor, chunk_traces)
        try:
            cluster.run(units, store, lambda done: progress("label", total - done, total))
        finally:
            cluster.end()

    return label_stored(settings, problems, out_dir, work, None, retry_failed, source)


@dataclass(frozen=True)
class _Unit:
    """Traces that one actor labels in a stream, and how many actors have ended in it."""

    keys: Sequence[TraceKey]
    deaths: int = 0


class _Actor:
    """Labels units. Errors are answers, so that Ray does not try for ever."""

    def __init__(self, make_worker: Callable[[], Worker], chunks: Any) -> None:
        self._engine, self._labeller = make_worker()
        self._chunks = chunks

    def effects(self) -> str | None:
        """`Engine.batch_effects`, once the engine is there."""
        return self._engine.batch_effects

    def label(self, keys: Sequence[TraceKey], window: int) -> str:
        """Labels a unit; the error that ended it, or ""."""
        try:
            Stream(self._labeller, self._engine).do(keys, window, self._chunks.put)
        except Exception as error:  # noqa: BLE001 - told to whoever started the run
            return f"{type(error).__name__}: {error}"
        return ""


class _Cluster:
    """The actors, and the queue of what they have finished."""

    def __init__(
        self, make_worker: Callable[[], Worker], actors: int, gpus: float, window: int
    ) -> None:
        import ray
        from ray.util.queue import Queue

        self._ray, self._window = ray, window
        self._chunks: Any = Queue()
        kind: Any = ray.remote(num_gpus=gpus, num_cpus=1)(_Actor)
        self._open = lambda: kind.remote(make_worker, self._chunks)
        self._actors = {self._open() for _ in range(actors)}

    def run(self, units: deque[_Unit], store: LabelStore, left: Callable[[int], None]) -> None:
        """Has units labelled, and commits what comes of it.

        Args:
            units: what is to be done; emptied.
            store: takes what is finished.
            left: is told how many traces are still to be done.

        Raises:
            UnfinishedUnitsError: some could not be done.
        """
        ray, errors = self._ray, list[str]()
        alone: Counter[str] = Counter()  # how often a trace ended an actor that did it alone
        todo = {(k.problem.id, k.sample_index) for unit in units for k in unit.keys}
        # An actor that has opened its engine says so; one that cannot ends the run.
        running: dict[Any, tuple[Any, _Unit | None]] = {
            actor.effects.remote(): (actor, None) for actor in self._actors
        }
        while running:
            ready, _ = ray.wait(list(running), timeout=0.2)
            left(len(todo - store.done))
            self._receive(store)
            for ref in ready:
                actor, unit = running.pop(ref)
                try:
                    said = ray.get(ref)
                except ray.exceptions.RayActorError:
                    if unit is None:
                        raise
                    self._receive(store)
                    units.extendleft(self._again(unit, store, alone))
                    self._actors.remove(actor)
                    if units:
                        self._actors.add(new := self._open())
                        running[new.effects.remote()] = new, None
                    continue
                if unit is not None and said:
                    errors.append(said)
                elif unit is None and said and said not in store.batch_effects:
                    store.batch_effects.append(said)
                if units:
                    following = units.popleft()
                    task = actor.label.remote(following.keys, self._window)
                    running[task] = actor, following
        self._receive(store)
        left(len(todo - store.done))
        if errors:
            raise UnfinishedUnitsError(
                f"{len(errors)} units are not done; the first because of {errors[0]}. The others "
                f"are kept in {store.path}: see to the cause and run again"
            )

    def end(self) -> None:
        """Ends the actors."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._chunks.shutdown()

    def _receive(self, store: LabelStore) -> None:
        while not self._chunks.empty():
            store.commit(self._chunks.get())

    def _again(self, unit: _Unit, store: LabelStore, alone: Counter[str]) -> list[_Unit]:
        """What is to be done of a unit in which an actor ended.

        Traces are begun in order: it ended in none but the first `window` unfinished ones.
        """
        keys = [key for key in unit.keys if (key.problem.id, key.sample_index) not in store.done]
        if len(unit.keys) == 1 and keys:
            alone[keys[0].name] += 1
            if alone[keys[0].name] >= _DEATHS:
                why = f"its worker ended {_DEATHS} times while doing it alone"
                key = keys[0]
                store.commit(Chunk(failed=[(key.problem.id, key.sample_index, why)]))
                return []
            return [unit]
        if unit.deaths + 1 < _DEATHS:
            return [_Unit(keys, unit.deaths + 1)] if keys else []
        rest = [_Unit(keys[self._window :])] if keys[self._window :] else []
        return [*rest, *(_Unit([key]) for key in keys[: self._window])]
