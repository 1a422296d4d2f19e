"""Labels as they are read: by `datasets`, by split, from the Hub's form, mixed; graded again."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict, load_dataset

from ospruner.durable import write_checked
from ospruner.eval.grading import boxed
from ospruner.eval.grading.pool import Grade
from ospruner.eval.schema import LabelSettings
from ospruner.train.labels.features import COLUMNS, PREFIX_COLUMNS
from ospruner.train.labels.folder import MANIFEST, read_labels, read_manifest
from ospruner.train.labels.label import regrade
from ospruner.train.labels.loading import load_labels, load_splits, split_by_text, split_of
from ospruner.train.labels.statistics import stats_of, told, told_regraded
from ospruner.train.labels.store import Chunk, LabelStore

from ..conftest import make_labels

SETTINGS = LabelSettings(base_model="tiny")
Load = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "labels"
    with LabelStore(path, SETTINGS, {"dataset": "data-v1.5.jsonl"}) as store:
        store.commit(Chunk(make_labels(5).to_list(), [("lost", 0, "the trace has no thinking")]))
        store.commit(Chunk(make_labels(3, seed=1, prefix="q").to_list()))
        store.finish()
    return path


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """`datasets.load_dataset`, with one cache, as one user has."""

    def rows(folder: Path, *config: str, streaming: bool = False) -> list[dict[str, Any]]:
        cache = str(tmp_path / "cache")
        return list(
            load_dataset(str(folder), *config, split="train", cache_dir=cache, streaming=streaming)
        )

    return rows


@pytest.mark.parametrize("streaming", [False, True])
def test_what_is_loaded_is_what_is_on_the_disk_now(
    streaming: bool, folder: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grown, graded again, and of two folders with one name the one that is asked for."""
    card = (folder / "README.md").read_text()
    assert all(f"| `{name}` |" in card for name in COLUMNS)
    assert not any("ids" in name for name in PREFIX_COLUMNS)

    def check(path: Path) -> None:
        traces = load(path, streaming=streaming)
        prefixes = load(path, "prefixes", streaming=streaming)
        assert traces == read_labels(path).to_list()
        assert len(prefixes) == sum(len(trace["step_ends"]) for trace in traces)
        for row in prefixes:
            trace, step = traces[row["trace"]], row["step"] - 1
            assert row["problem_id"] == trace["problem_id"]
            assert (row["end"], row["steps"]) == (trace["step_ends"][step], len(trace["step_ends"]))
            assert row["correct"] == trace["forced_correct"][step]
            assert row["fraction"] == pytest.approx(row["end"] / len(trace["trace_ids"]))
        places = [(row["trace"], row["step"]) for row in prefixes]
        assert places == sorted(set(places))

    check(folder)
    with LabelStore(folder, SETTINGS) as store:
        store.commit(Chunk(make_labels(2, seed=2, prefix="r").to_list()))
        assert load(folder, streaming=streaming) == read_labels(folder).to_list()  # not finished
        store.finish({("r0", 0): -9, ("r1", 0): -8})
    check(folder)
    other = folder.parent / "elsewhere" / folder.name
    with LabelStore(other, SETTINGS) as store:
        store.commit(Chunk(make_labels(4, seed=3, prefix="s").to_list()))
        store.finish()
    check(other)
    check(folder)
    monkeypatch.setattr(boxed, "_at_once", lambda *pair: Grade(None, "unreadable"))
    regrade(folder)
    assert all(None in row["forced_correct"] for row in read_labels(folder))
    check(folder)


def test_a_shard_that_nothing_lists_is_read_by_nobody(folder: Path, load: Load) -> None:
    """A kill between a shard and its manifest leaves one."""
    shutil.copy(folder / "data/train-00000.parquet", folder / "data/train-00007.parquet")
    assert len(load(folder)) == len(read_labels(folder)) == 8
    with LabelStore(folder, SETTINGS) as store:
        assert store.manifest["traces"] == 8
    assert (folder / "data/train-00007.unlisted").is_file()


def test_splits_are_by_problem_and_know_how_they_were_made(folder: Path) -> None:
    splits = load_splits(folder)
    assert isinstance(splits, DatasetDict)
    whole = load_labels(folder)
    for name, traces in splits.items():
        assert {split_of(problem) for problem in traces["problem_id"]} == {name}
        part = load_labels(traces.select(range(1)))
        assert (part.settings, part.source) == (whole.settings, "data-v1.5")
        assert part.data_hash not in {
            whole.data_hash,
            *(load_labels(other).data_hash for key, other in splits.items() if key != name),
        }
    assert len(load_labels(splits).traces) == len(whole.traces) == 8
    one_text = replace(whole, traces=whole.traces.map(lambda row: {"problem": "The same."}))
    assert len(split_by_text(one_text)) == 1, "copies of a text are on one side"
    halves = split_by_text(whole, {"train": 0.5, "validation": 0.5})
    assert sum(len(half.traces) for half in halves.values()) == 8
    with pytest.raises(ValueError, match="do not say how they were made"):
        load_labels(Dataset.from_list(read_labels(folder).to_list()))
    # Labels of another split than "train" are that split.
    source = {"dataset": "math500", "split": "test[:3]"}
    write_checked(folder / MANIFEST, read_manifest(folder) | {"source": source})
    assert {name: len(rows) for name, rows in load_splits(folder).items()} == {"test": 8}


def test_stats_say_what_the_rows_say(folder: Path) -> None:
    stats, rows = stats_of(folder), read_labels(folder).to_list()
    assert (stats["traces"], stats["problems"], stats["dropped_traces"]) == (8, 8, 1)
    assert stats["steps"] == sum(len(row["step_ends"]) for row in rows)
    assert stats["full_accuracy"] == stats["ever_right"] == stats["natural_accuracy"] == 1.0
    assert stats["tokens_per_trace"] == sum(len(row["trace_ids"]) for row in rows) / 8
    for share, right in stats["accuracy_at"].items():
        last = 0.0
        for row in rows:
            steps = sum(end <= float(share) * len(row["trace_ids"]) for end in row["step_ends"])
            last += sum(row["forced_correct"][:steps][-1:])
        assert right == pytest.approx(last / 8)
    assert "8 traces of 8 problems" in told(folder, json.loads(json.dumps(stats)))


def test_regrade_changes_grades_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, files = read_labels(folder).to_list(), sorted((folder / "data").iterdir())
    costs = read_manifest(folder)["computed_tokens"]
    unchanged = regrade(folder)
    assert not unchanged.changed
    assert unchanged.steps == sum(len(row["step_ends"]) for row in before)
    assert read_labels(folder).to_list() == before
    assert sorted((folder / "data").iterdir()) == files
    # A grader of another opinion: "3" cannot be read.
    at_once, unreadable = boxed._at_once, Grade(None, "unreadable")
    monkeypatch.setattr(
        boxed, "_at_once", lambda *pair: unreadable if pair[1] == "3" else at_once(*pair)
    )
    phases: list[tuple[Any, ...]] = []
    changed = regrade(folder, lambda *phase: phases.append(phase))
    after = read_labels(folder).to_list()
    wrong = sum(row["forced_correct"].count(0.0) for row in before)
    assert dict(changed.changed) == {"0.0 -> None": wrong}
    assert dict(changed.ungraded) == {"unreadable": wrong}
    said, numbers = told_regraded(changed)
    assert f"{wrong} grades changed; 0.0 -> None: {wrong}" in said
    assert numbers["changed"] == {"0.0 -> None": wrong}
    assert phases[-1] == ("grade", 8, 8)
    for old, new in zip(before, after, strict=True):
        assert new["ungraded_reasons"].count("unreadable") == old["forced_correct"].count(0.0)
        kept = ("trace_ids", "step_ends", "forced_answers", "natural_correct", "forced_logprob")
        assert all(new[name] == old[name] for name in kept)
    manifest = read_manifest(folder)
    assert manifest["ungraded_steps"] == wrong
    assert (manifest["computed_tokens"], manifest["dropped"][0][0]) == (costs, "lost")
