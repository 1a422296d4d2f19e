"""A label folder loses nothing: killed at each moment, interrupted, out of disk, bytes flipped.

The runs are children made by fork, so that they start at once; the signals are real.
"""

import itertools
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from datasets import Dataset, load_dataset
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from ospruner.cli import app
from ospruner.durable import DamagedError
from ospruner.engines.transformers.engine import TransformersEngine
from ospruner.eval.grading import boxed
from ospruner.eval.grading.boxed import check_grader
from ospruner.eval.grading.pool import Grade
from ospruner.eval.schema import LabelSettings
from ospruner.provenance import file_hash, hash_files, provenance, read_provenance
from ospruner.train.labels.folder import Shard, read_labels, read_manifest, read_shard, shards_of
from ospruner.train.labels.label import regrade
from ospruner.train.labels.loading import load_labels
from ospruner.train.labels.making import Labeller, label_problems
from ospruner.train.labels.statistics import stats_of
from ospruner.train.labels.store import Chunk, LabelStore

from ...conftest import Fuzzed
from ...own_process import ended, start
from ..conftest import TINY, make_labels, sums, write_rows

SETTINGS = replace(
    TINY, temperature=0, max_new_tokens=32, max_answer_tokens=4, samples_per_problem=2
)
Run = Callable[[Path, int], Dataset]


@pytest.fixture
def run(tiny_base: Qwen2ForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast) -> Run:
    """Labels so many problems in a folder, in small chunks."""
    check_grader()  # here, not in every child
    engine = TransformersEngine(tiny_base, tiny_tokenizer, batch_size=4)

    def label_some(folder: Path, problems: int) -> Dataset:
        labeller = Labeller.of(tiny_tokenizer, SETTINGS)
        return label_problems(sums(problems), engine, labeller, folder, chunk_traces=2)

    return label_some


def committed(folder: Path) -> list[dict[str, Any]]:
    """The rows that are safe: those that a reader finds. A shard counts once it is listed."""
    listed = (folder / "manifest.json").exists() and read_manifest(folder)["traces"]
    return read_labels(folder).to_list() if listed else []


def test_sigint(tiny_base_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder, problems = tmp_path / "labels", write_rows(tmp_path / "p.jsonl", map(vars, sums(2000)))
    arguments = ["label", "--base", str(tiny_base_dir), "--dataset", problems]
    arguments += ["--out", str(folder), "--max-thinking-tokens", "32", "--set", "chunk=2"]

    def command() -> None:
        code = app(arguments, standalone_mode=False)
        sys.stdout.flush()
        os._exit(code)

    pid = start(command)
    while not committed(folder):
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "it ended before it could be interrupted"
        time.sleep(0.01)
    os.kill(pid, signal.SIGINT)
    assert ended(pid) == 130
    manifest, loaded = read_manifest(folder), load_dataset(str(folder), cache_dir=str(tmp_path))
    traces = manifest["traces"]
    assert len(loaded["train"]) == traces >= 2
    assert not manifest["finished"]
    said = " ".join(capfd.readouterr().out.split())
    assert f"Stopped: {traces} labelled traces in" in said


@pytest.mark.parametrize("room", [2_000, 6_000])
def test_full_disk(room: int, run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """From the third chunk on, no file may grow: writing fails in the middle of a shard."""
    folder = tmp_path / "labels"
    commit = LabelStore.commit

    def on_a_full_disk(self: LabelStore, chunk: Chunk) -> None:
        if self.manifest["traces"] == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        commit(self, chunk)

    def cramped() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        LabelStore.commit = on_a_full_disk  # type: ignore[method-assign]
        run(folder, 12)

    assert ended(start(cramped)) == 3
    assert "no room left to write in" in capfd.readouterr().out
    safe = committed(folder)
    assert len(safe) == 4
    assert not list(folder.rglob("*.partial"))  # the torn file was taken back
    again = run(folder, 12).to_list()
    assert len(again) == 24
    assert all(row in again for row in safe)


def die_at(moment: int) -> None:
    """Ends this process at the n-th step that makes something durable, before or after it."""
    steps = iter(range(moment + 1))
    fsync, rename = os.fsync, Path.replace

    def step(work: Callable[[], object]) -> None:
        for when in ("before", "after"):
            if next(steps) == moment:
                os._exit(9)
            if when == "before":
                work()

    os.fsync = lambda descriptor: step(lambda: fsync(descriptor))  # type: ignore[assignment]
    Path.replace = lambda path, to: step(lambda: rename(path, to))  # type: ignore[assignment, method-assign, return-value]


def killed(work: Callable[[Path], object], root: Path, given: Path | None = None) -> Iterator[Path]:
    """A folder for each moment at which the work was killed in it, and one in which it ended."""
    for moment in itertools.count():
        folder = root / f"{moment}"
        if given is not None:
            shutil.copytree(given, folder)

        def dying(folder: Path = folder, moment: int = moment) -> None:
            die_at(moment)
            work(folder)

        code = ended(start(dying))
        yield folder
        if code != 9:
            assert code == 0
            return


def test_killed_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fuzzed: Fuzzed) -> None:
    """The steps are fsyncs and renames; the system keeps all that was written before the kill."""
    # A kill loses nothing that was written: fsync only counts as a moment here, and costs no time.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    rows = make_labels(4).to_list()
    chunks = [
        Chunk(rows[:2], [("lost", 0, "why")], costs=Counter(computed_tokens=3, unique_tokens=2)),
        Chunk(rows[2:], failed=[("lost", 1, "why")], costs=Counter(computed_tokens=5)),
    ]

    def work(folder: Path) -> None:
        with LabelStore(folder, SETTINGS) as writer:
            for chunk in chunks:
                if not chunk.places() <= writer.done:
                    writer.commit(chunk)
            writer.finish()

    def state(folder: Path) -> tuple[Any, ...]:
        manifest = read_manifest(folder)
        counts = ("traces", "dropped", "failed", "computed_tokens", "finished", "steps")
        return (read_labels(folder).to_list(), *(manifest[name] for name in counts))

    work(tmp_path / "undisturbed")
    whole = state(tmp_path / "undisturbed")
    kills, seen = -1, set()
    for folder in killed(work, tmp_path):
        kills += 1  # not in the last
        found = committed(folder)
        assert found == whole[0][: len(found)]  # before it goes on: whole chunks, in order
        seen.add(len(found))
        work(folder)
        assert state(folder) == whole
    assert seen == {0, 2, 4}
    fuzzed("label commits killed at each moment", kills=kills, taken_up_again=kills)
    assert kills > 39


def test_grading_again_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed at each fsync and rename, by a grader of another opinion: nothing can be read."""
    check_grader()
    monkeypatch.setattr(boxed, "_at_once", lambda reference, answer: Grade(None, "unreadable"))
    rows = make_labels(4).to_list()
    write(tmp_path / "graded", [rows[:2], rows[2:]])
    seen: list[bool] = []
    for folder in killed(regrade, tmp_path, tmp_path / "graded"):
        found = read_labels(folder).to_list()
        new = {grade is None for row in found for grade in row["forced_correct"]}
        assert len(new) == 1
        seen.append(new.pop())
        assert [row["trace_ids"] for row in found] == [row["trace_ids"] for row in rows]
        if len(seen) % 8 == 0:
            regrade(folder)
    assert seen == sorted(seen)
    assert not seen[3]
    assert seen[-2]


# Bit rot: a damaged file is refused, or reads as if it were whole.


def write(folder: Path, chunks: list[list[dict[str, Any]]]) -> Path:
    """A finished folder; of chunks that stand there already, only what lacks is written."""
    with LabelStore(folder, SETTINGS) as store:
        for rows in chunks:
            store.commit(Chunk(rows, dropped=[(f"lost {rows[0]['problem_id']}", 0, "why")]))
        store.finish()
    provenance(folder, seed=0, data_hash=hash_files(sorted(folder.glob("data/*.parquet"))))
    return folder


def flip(file: Path, place: int, bits: int) -> bytes:
    """Flips bits of one byte; what the file held."""
    whole = file.read_bytes()
    file.write_bytes(whole[:place] + bytes([whole[place] ^ bits]) + whole[place + 1 :])
    return whole


def refused_share(
    file: Path, read: Callable[[], Any], step: int, fuzzed: Fuzzed, kind: str
) -> float:
    """The share of flips, one in each `step`th byte, that is refused by name; fails where a flipped
    file reads as something else."""
    whole, draws, refused = read(), random.Random(0), 0
    places = range(0, file.stat().st_size, step)
    for place in places:
        bits = 1 << draws.randrange(8)
        kept = flip(file, place, bits)
        said = None
        try:
            assert read() == whole, (file, place, bits)
        except ValueError as error:
            said = str(error)
        assert said is None or file.name in said, said
        refused += said is not None
        file.write_bytes(kept)
    fuzzed(kind, flips=len(places), refused=refused, identical=len(places) - refused)
    return refused / len(places)


def test_each_flipped_byte_is_refused_or_changes_nothing(tmp_path: Path, fuzzed: Fuzzed) -> None:
    folder = write(tmp_path / "labels", [make_labels(1).to_list()])
    (shard,) = shards_of(read_manifest(folder))
    readers: dict[str, tuple[Callable[[], Any], int, float]] = {
        shard.file: (lambda: read_shard(folder, shard), 37, 1),
        "provenance.json": (lambda: read_provenance(folder), 3, 0.9),
        "manifest.json": (lambda: read_manifest(folder), 3, 0.8),  # the others are white space
    }
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert names - {shard.view, "README.md", ".lock"} == set(readers)
    for name, (read, step, least) in readers.items():
        share = refused_share(folder / name, read, step, fuzzed, f"label folder, {name}")
        assert share >= least, name


def test_damage_is_named_set_aside_and_made_good(tmp_path: Path) -> None:
    chunks = [make_labels(n, seed=n, prefix=f"c{n}-").to_list() for n in (2, 3, 4)]
    folder = write(tmp_path / "labels", chunks)
    before = read_labels(folder).to_list()
    shards = {path: path.read_bytes() for path in folder.glob("data/*.parquet")}
    broken = folder / "data" / "train-00001.parquet"
    flip(broken, 300, 1)
    with pytest.raises(OSError, match="CRC"):  # pages carry checksums of their own
        pq.read_table(broken, page_checksum_verification=True)
    for read in (read_labels, stats_of, regrade, load_labels):
        with pytest.raises(DamagedError, match=r"train-00001\.parquet is damaged.* its 3 traces"):
            read(folder)

    with pytest.warns(UserWarning, match=r"renamed to \.unlisted, and its 3 traces are labelled"):
        write(folder, chunks)
    assert read_labels(folder).to_list() == [*before[:2], *before[5:], *before[2:5]]
    assert broken.with_suffix(".unlisted").is_file()
    kept = {path: content for path, content in shards.items() if path != broken}
    assert {path: path.read_bytes() for path in kept} == kept
    lost = [drop[0] for drop in read_manifest(folder)["dropped"]]
    assert lost == ["lost c2-0", "lost c3-0", "lost c4-0"]
    views = pq.read_table(folder / "prefixes").column("trace").to_pylist()
    assert sorted(set(views)) == list(range(9))  # numbers of today
    (folder / "data" / "train-00000.parquet").unlink()
    with pytest.raises(DamagedError, match=r"train-00000\.parquet is missing"):
        read_labels(folder)


def test_data_of_another_record_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "labels", [make_labels(2).to_list()])
    other = write(tmp_path / "other", [make_labels(3).to_list()])
    load_labels(folder)
    shutil.copy(other / "provenance.json", folder)
    with pytest.raises(ValueError, match=r"provenance\.json has data_hash .* beside it have"):
        load_labels(folder)


def test_labels_from_before_a_column_are_read_with_nulls(tmp_path: Path) -> None:
    later = ["forced_answer_entropy", "option_probabilities"]
    old = make_labels(3).remove_columns(later)

    def shard(table: Any) -> Shard:
        pq.write_table(table, tmp_path / "old.parquet")
        return Shard("old.parquet", file_hash(tmp_path / "old.parquet"), 3)

    found = read_shard(tmp_path, shard(old.data.table)).to_pylist()
    for row, before in zip(found, old.to_list(), strict=True):
        nulls = [None] * len(row["step_ends"])
        assert row == before | dict.fromkeys(later, nulls)
    with pytest.raises(ValueError, match="were they made by another version"):
        read_shard(tmp_path, shard(old.remove_columns("step_ends").data.table))


def test_folders_of_version_2_are_read_and_continued(repo_dir: Path, tmp_path: Path) -> None:
    """Their manifest lists `chunks`, each with what was lost in it, and the views' hashes."""
    folder = shutil.copytree(repo_dir / "benchmarks/real-labels/math500", tmp_path / "labels")
    manifest, rows = read_manifest(folder), read_labels(folder).to_list()
    assert len(rows) == 60 == manifest["traces"]
    assert load_labels(folder).data_hash == hash_files(sorted((folder / "data").iterdir()))
    with LabelStore(folder, LabelSettings.from_dict(manifest["settings"])) as store:
        store.commit(Chunk([rows[0], {**rows[1], "problem_id": "new"}]))
        assert store.finish().to_list() == [*rows, {**rows[1], "problem_id": "new"}]
    costs = ("computed_tokens", "unique_tokens", "sampling_computed_tokens")
    assert {k: read_manifest(folder)[k] for k in costs} == {k: manifest[k] for k in costs}


def test_a_known_trace_costs_its_chunk_nothing_but_itself(tmp_path: Path) -> None:
    rows = make_labels(5).to_list()
    with LabelStore(tmp_path, SETTINGS) as store:
        store.commit(Chunk(rows[:2], failed=[("p4", 0, "an error")]))
        store.commit(Chunk(rows[1:4], dropped=[("p0", 0, "why"), ("q", 0, "why")]))
        store.forget_failed()
        store.commit(Chunk(rows[4:]))
        assert store.finish().to_list() == rows
    manifest = read_manifest(tmp_path)
    assert (manifest["dropped"], manifest["failed"]) == ([["q", 0, "why"]], [])
