"""What is made of a label folder: the derived view, statistics, the picture, showing, regrading."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from datasets import load_dataset
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from ospruner.eval.grading import boxed
from ospruner.eval.grading.boxed import Verdict
from ospruner.eval.schema import COLUMNS, FEATURES, PREFIX_FEATURES, LabelSettings, TraceTable
from ospruner.train.labels.folder import read_labels, read_manifest
from ospruner.train.labels.looking import (
    FRACTIONS,
    accuracy_by_fraction,
    print_stats,
    show_trace,
    stats_of,
    trace_text,
)
from ospruner.train.labels.regrading import regrade
from ospruner.train.labels.writer import Chunk, LabelFolder

from ..conftest import MakeLabels

SETTINGS = LabelSettings(base_model="tiny")


@pytest.fixture
def folder(make_labels: MakeLabels, tmp_path: Path) -> Path:
    path = tmp_path / "labels"
    with LabelFolder(path, SETTINGS) as writer:
        writer.commit(Chunk(make_labels(5).to_list(), [("lost", 0, "the trace has no thinking")]))
        writer.commit(Chunk(make_labels(3, seed=1, prefix="q").to_list()))
        writer.finish()
    return path


def test_prefixes_point_to_their_traces(folder: Path, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    traces = load_dataset(str(folder), split="train", cache_dir=cache)
    prefixes = load_dataset(str(folder), "prefixes", split="train", cache_dir=cache)
    assert traces.features == FEATURES
    assert prefixes.features == PREFIX_FEATURES
    assert len(prefixes) == sum(map(len, traces["step_ends"]))
    for prefix in prefixes:
        trace = traces[prefix["trace"]]
        step = prefix["step"] - 1
        assert prefix["problem_id"] == trace["problem_id"]
        assert prefix["end"] == trace["step_ends"][step]
        assert prefix["correct"] == trace["forced_correct"][step]
        assert prefix["steps"] == len(trace["step_ends"])
        assert prefix["fraction"] == pytest.approx(prefix["end"] / len(trace["trace_ids"]))
    assert not any("ids" in name for name in prefixes.column_names)
    streamed = load_dataset(str(folder), split="train", streaming=True)
    assert list(streamed) == list(traces)
    card = (folder / "README.md").read_text()
    assert all(f"| `{name}` |" in card for name in COLUMNS)


def test_stats_say_what_the_rows_say(folder: Path) -> None:
    stats = stats_of(folder)
    rows = read_labels(folder).to_list()
    assert (stats["traces"], stats["problems"], stats["dropped_traces"]) == (8, 8, 1)
    assert stats["steps"] == sum(len(row["step_ends"]) for row in rows)
    assert stats["full_accuracy"] == stats["ever_right"] == 1.0
    assert stats["right_then_wrong"] == 0.0
    for share, accuracy in zip(FRACTIONS, stats["accuracy_by_fraction"], strict=True):
        right = 0.0
        for row in rows:
            within = [
                grade
                for end, grade in zip(row["step_ends"], row["forced_correct"], strict=True)
                if end <= share * len(row["trace_ids"]) + 1e-9
            ]
            right += within[-1] if within else 0.0
        assert accuracy == pytest.approx(right / len(rows))
    firsts = [
        row["step_ends"][row["forced_correct"].index(1.0)] / len(row["trace_ids"]) for row in rows
    ]
    assert stats["first_right_fraction"]["0.5"] == pytest.approx(np.median(firsts))
    assert accuracy_by_fraction(TraceTable.from_dataset(read_labels(folder)))[-1] == 1.0


def test_stats_are_printed_and_drawn(folder: Path, tmp_path: Path) -> None:
    console = Console(record=True, width=120)
    numbers = tmp_path / "stats.json"
    stats = print_stats(folder, None, console, numbers)
    text = console.export_text()
    assert "right, forced at the end" in text
    assert "8 of 8 problems" in text
    picture = folder / "statistics.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000
    assert json.loads(numbers.read_text()) == stats


def test_a_trace_is_shown_with_its_grades(
    folder: Path, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    row = read_labels(folder)[0]
    row["forced_correct"][1] = None
    row["ungraded_reasons"][1] = "time limit"
    text = trace_text(row, tiny_tokenizer)
    for step, right in enumerate(row["forced_correct"]):
        words = f"[step {step + 1} of {len(row['step_ends'])}, {row['step_ends'][step]} tokens"
        at = text.plain.index(words)
        styles = {str(s.style) for s in text.spans if s.start <= at < s.end}
        assert styles == {f"dim {'yellow' if right is None else 'green' if right else 'red'}"}
    assert "not graded: time limit" in text.plain
    assert str(tiny_tokenizer.decode(row["trace_ids"][: row["step_ends"][0]])).strip() in text.plain
    tiny_tokenizer.save_pretrained(tmp_path / "tokenizer")
    console = Console(record=True, width=100)
    show_trace(folder, 7, str(tmp_path / "tokenizer"), console)
    assert "q2, sample 0" in console.export_text()
    with pytest.raises(ValueError, match=r"row is 8; .* holds the traces 0 \.\. 7"):
        show_trace(folder, 8, str(tmp_path / "tokenizer"), console)
    with pytest.raises(ValueError, match="of which no tokenizer can be loaded"):
        show_trace(folder, 0, str(tmp_path / "absent"), console)


def test_regrade_changes_grades_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = read_labels(folder).to_list()
    costs = read_manifest(folder)["computed_tokens"]
    # Grading it again gives the natural answer's grade too, and nothing else changes.
    unchanged = regrade(folder)
    assert not unchanged.changed
    assert unchanged.steps == sum(len(row["step_ends"]) for row in before)
    assert read_labels(folder).to_list() == before
    # A grader of another opinion: "3" cannot be read.
    at_once = boxed._at_once

    def opinion(reference: str, answer: str) -> Verdict | None:
        return Verdict(None, "unreadable") if answer == "3" else at_once(reference, answer)

    monkeypatch.setattr(boxed, "_at_once", opinion)
    phases: list[tuple[str, int, int]] = []
    changed = regrade(
        folder, lambda phase, done, total, note="": phases.append((phase, done, total))
    )
    after = read_labels(folder).to_list()
    wrong = sum(row["forced_correct"].count(0.0) for row in before)
    assert dict(changed.changed) == {("0.0", "None"): wrong}
    assert dict(changed.ungraded) == {"unreadable": wrong}
    assert phases[-1] == ("grade", 8, 8)
    for old, new in zip(before, after, strict=True):
        assert new["ungraded_reasons"].count("unreadable") == old["forced_correct"].count(0.0)
        kept = ("trace_ids", "step_ends", "forced_answers", "natural_correct", "forced_logprob")
        assert all(new[name] == old[name] for name in kept)
    manifest = read_manifest(folder)
    assert manifest["ungraded_steps"] == wrong
    assert (manifest["computed_tokens"], manifest["dropped"][0][0]) == (costs, "lost")
    prefixes = load_dataset(
        "parquet", data_files=str(folder / "prefixes/*.parquet"), split="train",
        cache_dir=str(folder.parent / "cache"),
    )  # fmt: skip
    assert prefixes["correct"].count(None) == wrong


def test_regrade_refuses_what_holds_no_labels(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no manifest\.json: it is no label folder"):
        regrade(tmp_path)
