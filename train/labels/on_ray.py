"""Label runs on a Ray cluster: each actor holds one engine; this process writes the folder.

By hand, not by Ray Data or an `ActorPool`: these know tasks, and an engine is kept busy by a stream
of traces, of which the end of its process may cost only those that it has begun.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from ospruner.optional import needed
from ospruner.progress import Progress, silent

from .labelling import TraceKey
from .making import LabelStream, Work, Worker
from .store import Chunk, LabelStore

_DEATHS = 2  # how often a trace may end its actor together with others, and then alone


class UnfinishedRunError(OSError):
    """Some traces of a run could not be done, for reasons outside of it; the others are kept."""


def ray_work(
    make_worker: Callable[[], Worker],
    actors: int,
    *,
    gpus_per_actor: float = 1,
    chunk_traces: int = 128,
    progress: Progress = silent,
) -> Work:
    """What labels a folder's traces (`label_stored`) on the actors of a Ray cluster.

    Another takes the place of an actor that dies, and what that had begun is done again; what has
    been begun in two of them is done alone, so that a deadly trace is found and recorded as failed.
    Some that could not be done raise an UnfinishedRunError; the others are in the folder.

    Each actor makes one worker, in a process of its own, with so many GPUs (for a vLLM replica its
    `tensor_parallel_size`). It may have begun a chunk of traces and not handed them in: what its
    end may cost. The progress has one phase, "label", in traces.

    Raises:
        MissingPackageError: Ray is not installed.
    """
    needed("ray", f"labelling with actors={actors}", "pip install 'ospruner[ray]'")

    def work(store: LabelStore, todo: Sequence[TraceKey], total: int) -> None:
        import ray

        places = {key.place for key in todo}
        foreman: Any = ray.remote(num_cpus=0)(_Foreman).remote(list(todo))
        kind: Any = ray.remote(num_gpus=gpus_per_actor, num_cpus=1)(_Actor)
        count = min(actors, len(todo))
        window = min(chunk_traces, -(-len(todo) // actors))  # none takes another's share
        error, opened = "", 0
        running: dict[Any, tuple[int, Any]] = {}  # by what an actor does: its number and itself

        def receive() -> None:
            for chunk, effects in ray.get(foreman.collect.remote()):
                store.note_effects(effects)
                store.commit(chunk)
            progress("label", total - len(places - store.done), total)

        try:
            while running or opened < count:
                for number in range(opened, count):
                    actor = kind.remote(make_worker, foreman, number, window)
                    running[actor.label.remote()] = number, actor
                opened = count
                ended, _ = ray.wait(list(running), timeout=0.2)
                receive()
                for ref in ended:
                    number, actor = running.pop(ref)
                    try:
                        said = ray.get(ref)
                    except ray.exceptions.RayActorError:
                        if not ray.get(foreman.lost.remote(number)):
                            raise  # it cannot open its engine
                        count += ray.get(foreman.left.remote()) > 0  # another takes its place
                        continue
                    if said:
                        error = error or said
                    elif ray.get(foreman.left.remote()):  # what one that died had begun
                        running[actor.label.remote()] = number, actor
            receive()
        finally:
            for _, actor in running.values():
                ray.kill(actor)
        if left := len(places - store.done):
            raise UnfinishedRunError(
                f"{left} traces are not done; the first error: {error}. The others are kept in "
                f"{store.path}: see to the cause and run again"
            )

    return work


class _Foreman:
    """An actor that gives out traces, and takes what comes of them."""

    def __init__(self, todo: Sequence[TraceKey]) -> None:
        self._todo, self._suspects = deque(todo), deque[TraceKey]()
        self._begun: dict[int, dict[tuple[str, int], TraceKey]] = {}  # by actor
        self._deaths: Counter[tuple[str, int]] = Counter()
        self._chunks: list[tuple[Chunk, str | None]] = []

    def take(self, actor: int) -> TraceKey | None:
        """The next trace for an actor; one that may be deadly is done alone."""
        begun = self._begun.setdefault(actor, {})
        if any(self._deaths[place] >= _DEATHS for place in begun):
            return None
        pile = self._suspects if not self._todo and not begun else self._todo
        if not pile:
            return None
        key = pile.popleft()
        begun[key.place] = key
        return key

    def hand_in(self, actor: int, chunk: Chunk, effects: str | None) -> None:
        """Takes what an actor has finished."""
        self._chunks.append((chunk, effects))
        for place in chunk.places():
            self._begun[actor].pop(place, None)

    def collect(self) -> list[tuple[Chunk, str | None]]:
        """What was handed in since the last time."""
        chunks, self._chunks = self._chunks, []
        return chunks

    def left(self) -> int:
        """How many traces wait to be begun."""
        return len(self._todo) + len(self._suspects)

    def lost(self, actor: int) -> bool:
        """Has done again what an actor that died had begun; False where it never asked for any."""
        for place, key in self._begun.get(actor, {}).items():
            self._deaths[place] += 1
            if self._deaths[place] < _DEATHS:
                self._todo.appendleft(key)
            elif self._deaths[place] < 2 * _DEATHS:
                self._suspects.append(key)
            else:
                why = f"its worker ended {_DEATHS} times while doing it alone"
                self._chunks.append((Chunk(failed=[(*place, why)]), None))
        return self._begun.pop(actor, None) is not None


class _Actor:
    """Labels what the foreman gives it."""

    def __init__(
        self, make_worker: Callable[[], Worker], foreman: Any, number: int, window: int
    ) -> None:
        self._worker = make_worker()
        self._foreman, self._number, self._window = foreman, number, window

    def label(self) -> str:
        """Labels until nothing is left; the error that ended it, or "".

        Errors are answers, so that Ray does not try for ever.
        """
        import ray

        worker, foreman, number = self._worker, self._foreman, self._number
        try:
            LabelStream(
                worker,
                lambda: ray.get(foreman.take.remote(number)),
                lambda done: ray.get(foreman.hand_in.remote(number, done, worker[0].batch_effects)),
                self._window,
            ).run()
        except Exception as error:  # noqa: BLE001 - told to whoever started the run
            return f"{type(error).__name__}: {error}"
        return ""
