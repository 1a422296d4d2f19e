"""Bit rot: a damaged file of a label folder is refused, or reads as if it were whole."""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ospruner.cli import app
from ospruner.durable import DamagedError
from ospruner.eval.schema import LabelSettings
from ospruner.provenance import hash_files, provenance, read_provenance
from ospruner.train.label_sets import load_labels
from ospruner.train.labels.folder import (
    StoredChunk,
    chunks_of,
    content_of,
    data_hash,
    faults_of,
    parquet_bytes,
    read_labels,
    read_manifest,
    read_shard,
)
from ospruner.train.labels.looking import stats_of
from ospruner.train.labels.regrading import regrade
from ospruner.train.labels.writer import Chunk, LabelFolder

from ...conftest import Fuzzed
from ..conftest import MakeLabels

SETTINGS = LabelSettings(base_model="tiny")
NOT_CONTENT = {"README.md", ".lock"}  # written anew by each run, and read by none


def write(folder: Path, chunks: list[list[dict[str, Any]]]) -> Path:
    """A finished folder; chunks whose traces it has already are not written again."""
    with LabelFolder(folder, SETTINGS) as writer:
        for rows in chunks:
            missing = [r for r in rows if (r["problem_id"], r["sample_index"]) not in writer.done]
            if missing:
                writer.commit(Chunk(missing, [(f"lost {rows[0]['problem_id']}", 0, "no thinking")]))
        writer.finish()
        provenance(folder, seed=0, data_hash=data_hash(writer.chunks))
    return folder


def content(folder: Path) -> tuple[Any, ...]:
    labels = load_labels(folder)
    return labels.traces.to_list(), labels.settings, read_manifest(folder)


def flip(file: Path, place: int, bits: int) -> bytes:
    whole = file.read_bytes()
    file.write_bytes(whole[:place] + bytes([whole[place] ^ bits]) + whole[place + 1 :])
    return whole


def refused_or_identical(
    read: Callable[[], Any], whole: Any, file: Path, place: int, bits: int
) -> bool:
    """Whether the flipped file was refused by name; fails where it reads as something else."""
    kept = flip(file, place, bits)
    refusal = None
    try:
        assert read() == whole, (file, place, bits)
    except ValueError as error:
        refusal = str(error)
    file.write_bytes(kept)
    assert refusal is None or file.name in refusal, refusal
    return refusal is not None


def test_each_flipped_byte_is_refused_or_changes_nothing(
    make_labels: MakeLabels, tmp_path: Path, fuzzed: Fuzzed
) -> None:
    folder = write(tmp_path / "labels", [make_labels(1).to_list()])
    readers: dict[str, Callable[[], Any]] = {
        "data/train-00000.parquet": lambda: read_labels(folder).to_list(),
        "provenance.json": lambda: read_provenance(folder),
        "manifest.json": lambda: read_manifest(folder),
        ".manifest.json.copy": lambda: read_manifest(folder),
    }
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert names - {"prefixes/train-00000.parquet"} - NOT_CONTENT == set(readers)
    draws = random.Random(0)

    def flipped(name: str, step: int = 1) -> float:
        """The share of flips that is refused, of each `step`th byte."""
        file, content = folder / name, readers[name]()
        places = range(0, file.stat().st_size, step)
        refused = sum(
            refused_or_identical(readers[name], content, file, place, 1 << draws.randrange(8))
            for place in places
        )
        fuzzed(
            f"label folder, {name}",
            flips=len(places),
            refused=refused,
            identical=len(places) - refused,
        )
        return refused / len(places)

    assert flipped("data/train-00000.parquet", 37) == 1
    shard = folder / "data/train-00000.parquet"
    whole = shard.read_bytes()
    (chunk,) = chunks_of(read_manifest(folder))
    for place in range(len(whole)):  # what every reader asks first, for each byte
        flip(shard, place, 1 << draws.randrange(8))
        assert content_of(shard, chunk.sha256) is None
        shard.write_bytes(whole)
    fuzzed("label folder, hash of a shard", flips=len(whole), refused=len(whole))
    assert flipped("provenance.json") > 0.9
    # The manifest and its copy stand in for each other.
    assert flipped("manifest.json") == flipped(".manifest.json.copy") == 0
    (folder / ".manifest.json.copy").write_bytes(b"{}")
    assert flipped("manifest.json") > 0.8  # the others are white space


@pytest.mark.slow
def test_many_flips_of_a_larger_shard(
    make_labels: MakeLabels, tmp_path: Path, fuzzed: Fuzzed
) -> None:
    folder = write(tmp_path / "labels", [make_labels(2_000).to_list()])
    shard = folder / "data" / "train-00000.parquet"
    size = shard.stat().st_size
    assert size > 60_000
    whole = read_labels(folder).to_list()
    draws = random.Random(1)
    flips = [(draws.randrange(size), 1 << draws.randrange(8)) for _ in range(300)]
    refused = sum(
        refused_or_identical(lambda: read_labels(folder).to_list(), whole, shard, *one)
        for one in flips
    )
    fuzzed("label folder, larger shard", flips=len(flips), refused=refused)
    assert refused == len(flips)


def test_damage_is_named_set_aside_and_made_good(make_labels: MakeLabels, tmp_path: Path) -> None:
    chunks = [make_labels(n, seed=n, prefix=f"c{n}-").to_list() for n in (2, 3, 4)]
    folder = write(tmp_path / "labels", chunks)
    before = read_labels(folder).to_list()
    shards = {path: path.read_bytes() for path in folder.glob("data/*.parquet")}
    broken = folder / "data" / "train-00001.parquet"
    flip(broken, 300, 1)
    for read in (read_labels, stats_of, regrade, load_labels):
        with pytest.raises(DamagedError, match=r"train-00001\.parquet is damaged in row group 0"):
            read(folder)
    checked = CliRunner().invoke(app, ["labels", "check", str(folder)])
    assert checked.exit_code == 1
    said = "".join(checked.output.split())
    assert "train-00001.parquetisdamagedinrowgroup0" in said
    assert "labelsits3tracesanew" in said

    with pytest.warns(UserWarning, match=r"set aside in .*damaged, and its 3 traces are labelled"):
        write(folder, chunks)
    after = read_labels(folder).to_list()
    assert after == [*before[:2], *before[5:], *before[2:5]]
    assert not broken.exists()
    assert (folder / "damaged" / broken.name).is_file()
    assert all(path.read_bytes() == shards[path] for path in shards if path != broken)
    assert sorted(drop[0] for drop in read_manifest(folder)["dropped"]) == [
        "lost c2-0", "lost c3-0", "lost c3-0", "lost c4-0"
    ]  # fmt: skip
    assert CliRunner().invoke(app, ["labels", "check", str(folder)]).exit_code == 0


@pytest.mark.parametrize("name", ["prefixes/train-00001.parquet", "manifest.json"])
def test_what_is_derived_or_copied_is_restored(
    name: str, make_labels: MakeLabels, tmp_path: Path
) -> None:
    chunks = [make_labels(n, seed=n, prefix=f"c{n}-").to_list() for n in (2, 3)]
    folder = write(tmp_path / "labels", chunks)
    before = (folder / name).read_bytes()
    flip(folder / name, 300, 1)
    (fault,) = faults_of(folder)
    assert f"{name} is damaged" in fault
    whole = content(folder)
    write(folder, chunks)
    assert (folder / name).read_bytes() == before
    assert faults_of(folder) == []
    assert content(folder) == whole


def test_a_manifest_damaged_beside_its_copy_names_the_way_out(
    make_labels: MakeLabels, tmp_path: Path
) -> None:
    folder = write(tmp_path / "labels", [make_labels(2).to_list()])
    for name in ("manifest.json", ".manifest.json.copy"):
        flip(folder / name, 300, 1)
    with pytest.raises(DamagedError, match=r"manifest\.json.* is damaged.*an earlier copy"):
        read_labels(folder)


def test_data_of_another_record_are_refused(make_labels: MakeLabels, tmp_path: Path) -> None:
    folder = write(tmp_path / "labels", [make_labels(2).to_list()])
    other = write(tmp_path / "other", [make_labels(3).to_list()])
    shards = sorted((folder / "data").iterdir())
    assert read_provenance(folder).data_hash == hash_files(shards)
    shutil.copy(other / "provenance.json", folder)
    with pytest.raises(ValueError, match=r"provenance\.json has data_hash .* beside it have"):
        load_labels(folder)
    assert "data_hash" in faults_of(folder)[0]


def test_labels_from_before_a_column_are_read_with_nulls(
    make_labels: MakeLabels, tmp_path: Path
) -> None:
    later = ["forced_answer_entropy", "option_probabilities"]
    old = make_labels(3).remove_columns(later)
    whole = parquet_bytes(old.data.table)
    (tmp_path / "old.parquet").write_bytes(whole)
    chunk = StoredChunk("old.parquet", hashlib.sha256(whole).hexdigest(), 3)
    found = read_shard(tmp_path, chunk)
    assert found.remove_columns(later).to_list() == old.to_list()
    for name in later:
        assert found[name][:] == [[None] * len(row) for row in old["step_ends"]]
    nothing = parquet_bytes(old.remove_columns("step_ends").data.table)
    (tmp_path / "old.parquet").write_bytes(nothing)
    chunk = StoredChunk("old.parquet", hashlib.sha256(nothing).hexdigest(), 3)
    with pytest.raises(ValueError, match="were they made by another version"):
        read_shard(tmp_path, chunk)
