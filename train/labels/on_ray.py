"""Label runs on a Ray cluster: each actor holds one engine and does units of the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset

from modeling_ospruner.formats_ospruner import ReasoningFormat, TokenFormat
from ospruner.durable import lock_folder
from ospruner.engines.opening import EngineOptions, load_tokenizer, open_engine
from ospruner.eval.problems.problem import Problem
from ospruner.eval.schema import LabelSettings
from ospruner.optional import needed
from ospruner.progress import Progress, silent

from .rows import TraceKey, wanted_traces
from .units import PARTS, Worker, do_unit, merge_units, open_units, unit_size

__all__ = ["EngineWorker", "RayOptions", "UnfinishedUnitsError", "label_with_ray"]

_PIP_LINE = "pip install 'ospruner[ray]'"


class UnfinishedUnitsError(OSError):
    """Some units of a run could not be done, for reasons outside of it; the others are kept."""


@dataclass(frozen=True)
class RayOptions:
    """How a run spreads over a cluster.

    Attributes:
        actors: engines, each in a process of its own.
        gpus_per_actor: GPUs of each; for a vLLM replica its `tensor_parallel_size`.
        cpus_per_actor: logical CPUs of each. The cluster must have more than all actors take.
        chunk_traces: traces that an actor may have begun and not committed: what its end may cost.
    """

    actors: int = 1
    gpus_per_actor: float = 1
    cpus_per_actor: float = 1
    chunk_traces: int = 128

    def __post_init__(self) -> None:
        for name, value, least in (
            ("actors", self.actors, 1),
            ("gpus_per_actor", self.gpus_per_actor, 0),
            ("cpus_per_actor", self.cpus_per_actor, 0),
            ("chunk_traces", self.chunk_traces, 1),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}; it must be {least} or more")


@dataclass(frozen=True)
class EngineWorker:
    """Makes an actor's worker from names; it is sent to the actors.

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
        engine = open_engine(self.engine_name, tokenizer, self.options)
        fmt = TokenFormat.compile(literals, tokenizer)
        return Worker(engine, tokenizer, fmt, self.settings)


def label_with_ray(
    problems: Sequence[Problem],
    make_worker: Callable[[], Worker],
    settings: LabelSettings,
    out_dir: str | Path,
    options: RayOptions,
    *,
    retry_failed: bool = False,
    source: Mapping[str, Any] | None = None,
    progress: Progress = silent,
) -> Dataset:
    """What `label` does, on the actors of a Ray cluster; the folder must be seen by all nodes.

    An actor that dies is started anew by Ray and its unit done again, from what it had committed.
    A stopped run continues.

    Args:
        problems: what to reason about; ids are unique.
        make_worker: called once in each actor.
        settings: of the run, its reasoning format filled in.
        out_dir: an empty folder, or one of an earlier run with the same settings.
        options: how the run spreads over the cluster.
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
    ray = needed("ray.data", "--scale ray", _PIP_LINE)
    out = Path(out_dir).resolve()
    wanted = wanted_traces(problems, settings.samples_per_problem)
    size = unit_size(len(wanted), options.actors, options.chunk_traces)
    todo = open_units(out, settings, wanted, size, retry_failed)
    with lock_folder(out / PARTS):
        left = sum(map(len, todo.values()))
        finished = len(wanted) - left
        progress("label", finished, len(wanted))
        failed: dict[int, str] = {}
        for row in _mapped(ray, todo, make_worker, out, options):
            finished += len(todo[row["unit"]])
            progress("label", finished, len(wanted))
            if row["error"]:
                failed[row["unit"]] = row["error"]
        dataset = merge_units(out, settings, not failed, source)
    if dataset is None:
        unit, error = min(failed.items())
        raise UnfinishedUnitsError(
            f"{len(failed)} of {len(todo)} units are not done; the first, unit {unit}, because of "
            f"{error}. The others are kept in {out}: see to the cause and run again"
        )
    return dataset


def _mapped(
    ray: Any,
    todo: Mapping[int, Sequence[TraceKey]],
    make_worker: Callable[[], Worker],
    out: Path,
    options: RayOptions,
) -> Any:
    """One row a unit, {"unit", "error"}, as they are done."""
    if not todo:
        return []
    items = [{"unit": unit, "traces": _packed(keys)} for unit, keys in todo.items()]
    rows = ray.from_items(items, override_num_blocks=len(items))
    return rows.map_batches(
        UnitActor,
        fn_constructor_args=(make_worker, str(out), options.chunk_traces),
        batch_size=1,
        compute=ray.ActorPoolStrategy(size=min(options.actors, len(items))),
        num_gpus=options.gpus_per_actor,
        num_cpus=options.cpus_per_actor,
    ).iter_rows()


class UnitActor:
    """Does units, one after the other; errors are answers, so that Ray does not try for ever.

    Args:
        make_worker: loads the engine.
        out_dir: the label folder of the whole run.
        chunk_traces: as in `RayOptions`.
    """

    def __init__(self, make_worker: Callable[[], Worker], out_dir: str, chunk_traces: int) -> None:
        self._worker = make_worker()
        self._out = Path(out_dir)
        self._chunk_traces = chunk_traces

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        """Does the one unit of a batch."""
        unit, error = int(batch["unit"][0]), ""
        try:
            keys = _unpacked(str(batch["traces"][0]))
            do_unit(self._out, unit, keys, self._worker, self._chunk_traces)
        except Exception as failure:  # noqa: BLE001 - told to whoever started the run
            error = f"{type(failure).__name__}: {failure}"
        return {"unit": [unit], "error": [error]}


def _packed(keys: Sequence[TraceKey]) -> str:
    return json.dumps([[asdict(key.problem), key.sample_index] for key in keys])


def _unpacked(text: str) -> list[TraceKey]:
    return [TraceKey(Problem(**problem), index) for problem, index in json.loads(text)]
