"""Bit rot: a damaged file of a label folder is refused, or reads as if it were whole."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from ospruner.durable import DamagedError
from ospruner.eval.schema import LabelSettings
from ospruner.provenance import file_hash, hash_files, provenance, read_provenance
from ospruner.train.labels.folder import (
    Shard,
    data_hash,
    read_labels,
    read_manifest,
    read_shard,
    shards_of,
)
from ospruner.train.labels.label import regrade
from ospruner.train.labels.loading import load_labels
from ospruner.train.labels.statistics import stats_of
from ospruner.train.labels.store import Chunk, LabelStore

from ...conftest import Fuzzed
from ..conftest import MakeLabels

SETTINGS = LabelSettings(base_model="tiny")
NOT_CONTENT = {"README.md", ".lock"}


def write(folder: Path, chunks: list[list[dict[str, Any]]]) -> Path:
    """A finished folder; of chunks that stand there already, only what lacks is written."""
    with LabelStore(folder, SETTINGS) as store:
        for rows in chunks:
            lost = (f"lost {rows[0]['problem_id']}", 0, "no thinking")
            store.commit(Chunk(rows, dropped=[lost]))
        store.finish()
    provenance(folder, seed=0, data_hash=data_hash(read_manifest(folder)))
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


def test_each_flipped_byte_is_refused_or_changes_nothing(
    make_labels: MakeLabels, tmp_path: Path, fuzzed: Fuzzed
) -> None:
    folder = write(tmp_path / "labels", [make_labels(1).to_list()])
    (shard,) = shards_of(read_manifest(folder))
    readers: dict[str, tuple[Callable[[], Any], int, float]] = {
        shard.file: (lambda: read_shard(folder, shard), 37, 1),
        "provenance.json": (lambda: read_provenance(folder), 3, 0.9),
        "manifest.json": (lambda: read_manifest(folder), 3, 0.8),  # the others are white space
    }
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert names - {shard.view} - NOT_CONTENT == set(readers)
    for name, (read, step, least) in readers.items():
        share = refused_share(folder / name, read, step, fuzzed, f"label folder, {name}")
        assert share >= least, name


def test_damage_is_named_set_aside_and_made_good(make_labels: MakeLabels, tmp_path: Path) -> None:
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


def test_data_of_another_record_are_refused(make_labels: MakeLabels, tmp_path: Path) -> None:
    folder = write(tmp_path / "labels", [make_labels(2).to_list()])
    other = write(tmp_path / "other", [make_labels(3).to_list()])
    assert read_provenance(folder).data_hash == hash_files(sorted((folder / "data").iterdir()))
    shutil.copy(other / "provenance.json", folder)
    with pytest.raises(ValueError, match=r"provenance\.json has data_hash .* beside it have"):
        load_labels(folder)


def test_labels_from_before_a_column_are_read_with_nulls(
    make_labels: MakeLabels, tmp_path: Path
) -> None:
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


@pytest.mark.parametrize(("name", "count"), [("train", 800), ("math500", 60)])
def test_folders_of_version_2_are_read_and_continued(
    name: str, count: int, repo_dir: Path, tmp_path: Path
) -> None:
    """Their manifest lists `chunks`, each with what was lost in it, and the views' hashes."""
    old = repo_dir / "benchmarks" / "real-labels" / name
    manifest = read_manifest(old)
    rows = read_labels(old).to_list()
    assert len(rows) == count == manifest["traces"]
    assert load_labels(old).data_hash == hash_files(sorted((old / "data").iterdir()))
    if name != "math500":
        return
    folder = shutil.copytree(old, tmp_path / "labels")
    settings = LabelSettings.from_dict(manifest["settings"])
    with LabelStore(folder, settings) as store:
        store.commit(Chunk([rows[0], {**rows[1], "problem_id": "new"}]))
        assert store.finish().to_list() == [*rows, {**rows[1], "problem_id": "new"}]
    costs = ("computed_tokens", "unique_tokens", "sampling_computed_tokens")
    assert {k: read_manifest(folder)[k] for k in costs} == {k: manifest[k] for k in costs}


def test_a_known_trace_costs_its_chunk_nothing_but_itself(
    make_labels: MakeLabels, tmp_path: Path
) -> None:
    rows = make_labels(5).to_list()
    with LabelStore(tmp_path, SETTINGS) as store:
        store.commit(Chunk(rows[:2], failed=[("p4", 0, "an error")]))
        store.commit(Chunk(rows[1:4], dropped=[("p0", 0, "why"), ("q", 0, "why")]))
        store.forget_failed()
        store.commit(Chunk(rows[4:]))
        assert store.finish().to_list() == rows
    manifest = read_manifest(tmp_path)
    assert (manifest["dropped"], manifest["failed"]) == ([["q", 0, "why"]], [])
