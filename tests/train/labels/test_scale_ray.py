"""Label runs on a real local Ray cluster of two actors; skipped where Ray is not installed."""

import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
from datasets import Dataset

from ospruner.engines.interface import TraceDesk, TraceRequest
from ospruner.engines.transformers.engine import TransformersEngine
from ospruner.eval.problems.problem import Problem
from ospruner.optional import MissingPackageError
from ospruner.train.labels import label as label_module
from ospruner.train.labels import on_ray
from ospruner.train.labels.folder import read_labels, read_manifest
from ospruner.train.labels.labelling import Labeller, TraceKey
from ospruner.train.labels.making import Work, Worker, label_problems, label_stored, work_here
from ospruner.train.labels.on_ray import UnfinishedRunError, ray_work

from ..conftest import TINY, sums, write_rows

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="Ray is not installed: pip install 'ospruner[ray]' (docs/scale.md)",
)
PROBLEMS = sums(12)
SETTINGS = replace(TINY, temperature=1.0, top_p=1.0, max_new_tokens=24, max_answer_tokens=4)


def died(file: Path) -> list[int]:
    """The processes that ended in the deadly trace."""
    return [int(line) for line in file.read_text().split()] if file.exists() else []


class Faulty(TransformersEngine):
    """The real engine; one prompt raises, and another one kills its process so many times."""

    faults: "MakeWorker"

    def sample_and_fork(self, desk: TraceDesk, *rules: Any) -> None:
        begin, faults = desk.begin, self.faults

        def begun() -> TraceRequest | None:
            request = begin()
            key = None if request is None else request.key
            if key is not None and key == faults.poison:
                raise faults.error("this prompt breaks the engine")
            if key == "p9/0" and faults.deadly and len(died(faults.deadly)) < faults.deaths:
                with faults.deadly.open("a") as file:
                    file.write(f"{os.getpid()}\n")
                os.kill(os.getpid(), signal.SIGKILL)
            return request

        with mock.patch.object(desk, "begin", begun):
            super().sample_and_fork(desk, *rules)


@dataclass(frozen=True)
class MakeWorker:
    """Sent to the actors, which have no fixtures."""

    folder: str
    poison: str | None = None
    deadly: Path | None = None
    deaths: int = 1
    error: type[Exception] = RuntimeError

    def __call__(self) -> Worker:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        engine = Faulty(AutoModelForCausalLM.from_pretrained(self.folder), tokenizer)
        engine.faults = self
        return engine, Labeller.of(tokenizer, SETTINGS)


def label_with_ray(problems: list[Problem], make: MakeWorker, out: Path, **options: Any) -> Dataset:
    work = ray_work(make, **{"actors": 2, "gpus_per_actor": 0, "chunk_traces": 4} | options)
    return label_stored(SETTINGS, [TraceKey(one, 0) for one in problems], out, work)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Three logical CPUs: Ray Data needs one beside those of its two actors."""
    import ray
    import ray.cloudpickle

    # The actors cannot import this file: it travels by value, as does who gives out the traces.
    for module in (sys.modules[__name__], on_ray):
        ray.cloudpickle.register_pickle_by_value(module)
    small: dict[str, Any] = {"num_cpus": 3, "object_store_memory": 200_000_000}
    ray.init("local", include_dashboard=False, log_to_driver=False, **small)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_ray, "_DEATHS", 1)  # each new actor imports all anew
        yield ray
    ray.shutdown()


@needs_ray
def test_faulty_traces_cost_themselves(cluster: Any, tiny_base_dir: Path, tmp_path: Path) -> None:
    """One kills its actor with others and alone; what these had begun is kept."""
    deadly, out = tmp_path / "killed", tmp_path / "labels"
    make = MakeWorker(str(tiny_base_dir), poison="p3/0", deadly=deadly, deaths=99)
    seen: list[tuple[Any, ...]] = []
    labels = label_with_ray(PROBLEMS, make, out, progress=lambda *said: seen.append(said))
    assert len(set(died(deadly))) == 2
    assert os.getpid() not in died(deadly)
    manifest = read_manifest(out)
    assert manifest["finished"]
    assert sorted(manifest["failed"]) == [
        ["p3", 0, "RuntimeError: this prompt breaks the engine"],
        ["p9", 0, "its worker ended 1 times while doing it alone"],
    ]
    assert (seen[0][:3], seen[-1][:3]) == (("label", 0, 12), ("label", 12, 12))
    # The same traces as one process without faults gives; nothing is done again.
    alone = label_problems(PROBLEMS, *MakeWorker(str(tiny_base_dir))(), tmp_path / "alone")
    kept = alone.filter(lambda row: row["problem_id"] not in ("p3", "p9"))
    assert labels["problem_id"] == kept["problem_id"]
    assert labels["trace_ids"] == kept["trace_ids"]
    again = label_with_ray(PROBLEMS, make, out)
    assert again["trace_ids"] == labels["trace_ids"]


def broken() -> Worker:
    raise OSError("nothing is here")


@needs_ray
@pytest.mark.slow
def test_a_run_that_cannot_end_says_why(cluster: Any, tiny_base_dir: Path, tmp_path: Path) -> None:
    out, never = tmp_path / "labels", ray_work(broken, 1, gpus_per_actor=0)
    with pytest.raises(Exception, match="nothing is here"):
        label_stored(SETTINGS, [TraceKey(PROBLEMS[0], 0)], out, never)
    full = MakeWorker(str(tiny_base_dir), poison="p3/0", error=OSError)
    with pytest.raises(UnfinishedRunError, match="traces are not done; .* OSError: this prompt"):
        label_with_ray(PROBLEMS[:4], full, out, actors=1, chunk_traces=1)
    assert {"p0", "p1"} <= set(read_labels(out)["problem_id"])


def test_a_run_by_names_opens_its_engine_where_the_actors_are(
    tiny_base_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sent to the actors, sent as Ray does and taken here."""
    cloudpickle = pytest.importorskip("ray.cloudpickle")

    def taken(make: Any, actors: int, *, gpus_per_actor: float, **how: Any) -> Work:
        assert (actors, gpus_per_actor) == (3, 0.5)
        return work_here(cloudpickle.loads(cloudpickle.dumps(make)), **how)

    monkeypatch.setattr(label_module, "ray_work", taken)
    problems, out = write_rows(tmp_path / "p.jsonl", map(vars, PROBLEMS[:3])), tmp_path / "labels"
    how: dict[str, Any] = {"max_thinking_tokens": 16, "max_answer_tokens": 4, "dtype": "float32"}
    how |= {"device": "cpu", "actors": 3, "gpus_per_actor": 0.5}
    label_module.label(str(tiny_base_dir), problems, out=out, **how)
    assert read_labels(out)["problem_id"] == [p.id for p in PROBLEMS[:3]]
    source = read_manifest(out)["source"]
    assert (source["engine"], source["scale"]) == ("transformers", "ray")


def test_a_deadly_trace_is_begun_with_others_then_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As who gives out the traces counts it; the runs on the cluster are of one death each."""
    monkeypatch.setattr(on_ray, "_DEATHS", 2)
    deadly, other = (cast("Any", SimpleNamespace(place=(n, 0))) for n in ("deadly", "other"))
    foreman = on_ray._Foreman([deadly, other])
    for actor in (0, 1):
        assert foreman.take(actor) is deadly
        assert foreman.lost(actor)
    assert (foreman.take(2), foreman.take(2)) == (other, None), "the deadly one is done alone"
    assert foreman.take(3) is deadly
    assert foreman.lost(2)
    assert foreman.take(3) is None, "not even what is to be done again stands beside it"
    assert foreman.take(4) is other
    assert foreman.lost(3)
    assert (foreman.take(5), foreman.take(5)) == (deadly, None)
    assert foreman.lost(5)
    [(chunk, _)] = foreman.collect()
    assert chunk.failed == [("deadly", 0, "its worker ended 2 times while doing it alone")]
    assert not foreman.lost(6), "it never asked for any"


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "ray.data", raising=False)
    with pytest.raises(MissingPackageError, match=r"ray, which is not.*ospruner\[ray\]"):
        label_with_ray(PROBLEMS, MakeWorker(""), tmp_path)
    assert list(tmp_path.iterdir()) == []
