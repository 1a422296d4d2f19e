"""A label folder loses nothing: killed at each moment, interrupted, out of disk.

The run is a child process made by fork, so that it starts at once; the signals are real.
"""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, load_dataset
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from modeling_ospruner.formats_ospruner import TokenFormat
from ospruner.cli import app
from ospruner.engines.transformers.engine import TransformersEngine
from ospruner.eval.grading import boxed
from ospruner.eval.grading.boxed import check_grader
from ospruner.eval.grading.pool import Grade
from ospruner.eval.schema import LabelSettings
from ospruner.formats import DEEPSEEK_R1
from ospruner.train.labels.folder import read_labels, read_manifest
from ospruner.train.labels.label import regrade
from ospruner.train.labels.making import Labeller, label_problems
from ospruner.train.labels.store import Chunk, LabelStore

from ...conftest import Fuzzed
from ...own_process import ended, start
from ..conftest import MakeLabels, sums, write_rows

SETTINGS = LabelSettings(
    base_model="tiny", temperature=0, max_new_tokens=32, max_answer_tokens=4, samples_per_problem=2
)
Run = Callable[[Path, int], Dataset]


@pytest.fixture
def run(tiny_base: Qwen2ForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast) -> Run:
    """Labels so many problems in a folder, in small chunks."""
    check_grader()  # here, not in every child
    engine = TransformersEngine(tiny_base, tiny_tokenizer, batch_size=4)
    fmt = TokenFormat.compile(DEEPSEEK_R1, tiny_tokenizer)

    def label_some(folder: Path, problems: int) -> Dataset:
        labeller = Labeller(tiny_tokenizer, fmt, SETTINGS)
        return label_problems(sums(problems), engine, labeller, folder, chunk_traces=2)

    return label_some


def committed(folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """The rows that are safe: those that a reader finds."""
    rows = read_labels(folder).to_list() if read_manifest(folder)["traces"] else []
    return {(row["problem_id"], row["sample_index"]): row for row in rows}


def wait_for_progress(folder: Path, pid: int, known: int) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "the run ended before it could be killed"
        if size_of(folder) != known:
            return
        time.sleep(0.002)
    raise AssertionError("the run made no progress")


def size_of(folder: Path) -> int:
    """The traces that are committed: a shard counts once the manifest lists it."""
    return read_manifest(folder)["traces"] if (folder / "manifest.json").exists() else 0


def test_ctrl_c_leaves_what_is_done_and_says_so(
    tiny_base_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, problems = tmp_path / "labels", write_rows(tmp_path / "p.jsonl", map(vars, sums(2000)))
    arguments = ["label", "--base", str(tiny_base_dir), "--dataset", problems]
    arguments += ["--out", str(folder), "--max-thinking-tokens", "32", "--set", "chunk=2"]

    def command() -> None:
        code = app(arguments, standalone_mode=False)
        sys.stdout.flush()
        os._exit(code)

    pid = start(command)
    wait_for_progress(folder, pid, 0)
    wait_for_progress(folder, pid, size_of(folder))  # the first chunk is safe
    os.kill(pid, signal.SIGINT)
    assert ended(pid) == 130
    manifest, loaded = read_manifest(folder), load_dataset(str(folder), cache_dir=str(tmp_path))
    traces = manifest["traces"]
    assert len(loaded["train"]) == traces >= 2
    assert not manifest["finished"]
    said = " ".join(capfd.readouterr().out.split())
    assert f"Stopped: {traces} labelled traces in" in said


@pytest.mark.parametrize("room", [2_000, 6_000])
def test_full_disk_loses_nothing(
    room: int, run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
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
    assert len(run(folder, 12)) == 24
    assert safe.items() <= committed(folder).items()


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


def killed_at_each_moment(
    work: Callable[[Path], object], root: Path, given: Path | None = None
) -> Iterator[Path]:
    """A folder for each moment at which the work was killed, and one in which it ended.

    Args:
        work: in a folder.
        root: of these folders.
        given: a copy of it is worked in.
    """
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


def test_killed_at_each_moment_of_each_commit(
    make_labels: MakeLabels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fuzzed: Fuzzed
) -> None:
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
    for folder in killed_at_each_moment(work, tmp_path):
        kills += 1  # not in the last
        if (folder / "manifest.json").exists():
            found = list(committed(folder).values())
            assert found == whole[0][: len(found)]  # before it goes on: whole chunks, in order
            assert len(found) % 2 == 0
            seen.add(len(found))
        work(folder)
        assert state(folder) == whole
    assert seen == {0, 2, 4}
    fuzzed("label commits killed at each moment", kills=kills, taken_up_again=kills)
    assert kills > 39


def test_grading_again_changes_all_or_nothing(
    make_labels: MakeLabels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at each fsync and rename, by a grader of another opinion: nothing can be read."""
    check_grader()
    monkeypatch.setattr(boxed, "_at_once", lambda reference, answer: Grade(None, "unreadable"))
    rows = make_labels(4).to_list()
    with LabelStore(tmp_path / "graded", SETTINGS) as writer:
        for first in (0, 2):
            writer.commit(Chunk(rows[first : first + 2]))
        writer.finish()
    seen: list[bool] = []
    for folder in killed_at_each_moment(regrade, tmp_path, tmp_path / "graded"):
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
