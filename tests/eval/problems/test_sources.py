from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from ospruner.eval.problems.problem import Problem, problems_from_rows, text_key
from ospruner.eval.problems.sources import (
    BENCHMARKS,
    drop_overlaps,
    held_out_keys,
    load_source,
)


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(path)
    else:
        text = "".join(json.dumps(row) + "\n\n" for row in rows).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return str(path)


HUB_ROWS: dict[str, list[dict[str, Any]]] = {
    "openai/gsm8k": [
        {"question": "1+1?", "answer": "It is <<1+1=2>>2.\n#### 2"},
        {"question": "Much?", "answer": "So\n#### 1,234,567"},
    ],
    "HuggingFaceH4/MATH-500": [
        {
            "problem": "2+2?",
            "solution": "...",
            "answer": "4",
            "subject": "Algebra",
            "level": 1,
            "unique_id": "test/algebra/7.json",
        }
    ],
    "HuggingFaceH4/aime_2024": [{"id": 60, "problem": "A?", "answer": "204", "year": "2024"}],
    "MathArena/aime_2025": [{"problem_idx": 1, "problem": "B?", "answer": 70}],
    "agentica-org/DeepScaleR-Preview-Dataset": [
        {"problem": "C?", "answer": "5", "solution": "..."},
        {"problem": "$C$ ?", "answer": "5", "solution": "a copy"},
        {"problem": "D?", "answer": "", "solution": "..."},
        {"problem": "E?", "answer": "x^2", "solution": "..."},
    ],
}
EXPECTED = {
    ("gsm8k", "test"): [
        Problem("gsm8k/test/0", "1+1?", "2"),
        Problem("gsm8k/test/1", "Much?", "1234567"),
    ],
    ("math500", None): [Problem("math500/algebra/7", "2+2?", "4", "Algebra")],
    ("aime", None): [
        Problem("aime24/60", "A?", "204", "2024"),
        Problem("aime25/1", "B?", "70"),
    ],
    ("aime25", "test"): [Problem("aime25/1", "B?", "70")],
    ("deepscaler", None): [
        Problem(f"deepscaler/{text_key('C?')}", "C?", "5"),
        Problem(f"deepscaler/{text_key('E?')}", "E?", "x^2"),
    ],
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmarks' layouts as folders that `datasets` finds under their Hub ids."""
    for hub_id, rows in HUB_ROWS.items():
        folder = tmp_path / hub_id
        folder.mkdir(parents=True)
        config, splits = next(
            (part[1], sorted(set(one.splits.values())))
            for one in BENCHMARKS.values()
            for part in one.parts
            if part[0] == hub_id
        )
        files = "".join(f"  - split: {name}\n    path: {name}.parquet\n" for name in splits)
        (folder / "README.md").write_text(
            f"---\nconfigs:\n- config_name: {config or 'default'}\n  data_files:\n{files}---\n"
        )
        for name in splits:
            write(folder / f"{name}.parquet", rows)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(("name", "split"), EXPECTED)
def test_benchmarks_by_their_hub_ids(name: str, split: str | None) -> None:
    loaded = load_source(name, split=split)
    assert loaded.problems == EXPECTED[name, split]
    assert loaded.source["dataset"] == name
    if name == "deepscaler":
        assert loaded.source["left_out"] == {"without_answer": 1, "duplicates": 1}
    assert load_source(name, split=split, limit=1).problems == EXPECTED[name, split][:1]
    first = split or next(iter(BENCHMARKS[name].splits))
    last = load_source(name, split=f"{first}[-1:]")
    assert last.problems == EXPECTED[name, split][-1:]
    assert last.source["split"] == f"{first}[-1:]"


@pytest.mark.usefixtures("hub")
def test_any_dataset_of_the_hub() -> None:
    columns = {"problem": ["question"]}
    loaded = load_source("openai/gsm8k", columns=columns, split="test", limit=1)
    key = text_key("1+1?")
    assert loaded.problems == [Problem(key, "1+1?", str(HUB_ROWS["openai/gsm8k"][0]["answer"]))]
    assert loaded.source == {"dataset": "openai/gsm8k", "split": "test"}
    with pytest.raises(ValueError, match=r"'org/absent' is no dataset that can be loaded"):
        load_source("org/absent")


@pytest.mark.parametrize("name", ["p.jsonl", "p.jsonl.gz", "p.parquet"])
def test_files_with_a_column_mapping(tmp_path: Path, name: str) -> None:
    rows = [{"key": "k1", "q": "1+1?", "a": 2, "kind": "sums"}, {"key": "k2", "q": "?", "a": 3}]
    path = write(tmp_path / name, rows)
    columns = {"id": ["key"], "problem": ["q"], "answer": ["a"], "family": ["kind"]}
    loaded = load_source(path, columns=columns)
    assert loaded.problems == [Problem("k1", "1+1?", "2", "sums"), Problem("k2", "?", "3")]
    assert loaded.source == {"dataset": path}
    assert load_source(path, columns=columns, limit=1).problems == loaded.problems[:1]
    with pytest.raises(ValueError, match=r"no column 'problem' .* the columns are 'key', 'q'"):
        load_source(path)


def test_rows_without_ids_are_named_by_their_text() -> None:
    """What rows are refused: tests/project/bad_inputs.txt."""
    rows: list[dict[str, Any]] = [
        {"problem": "1+1?", "answer": "2"},
        {"problem": "2+2?", "answer": 4},
    ]
    found = problems_from_rows(Dataset.from_list(rows[:1]))
    assert found == [Problem(text_key("1+1?"), "1+1?", "2")]
    assert problems_from_rows(rows[::-1])[1] == found[0], "the place in the file changes nothing"
    with pytest.raises(ValueError, match=r"row 2: the problem '1 \+ 1\?' stands there twice: drop"):
        problems_from_rows([*rows, {"problem": "1 + 1?", "answer": "2"}])


@pytest.mark.parametrize(
    "number", ["0.0000001", "1e-07", "10000000000000000.0", "1.50", "7", "-0.0"]
)
def test_numbers_are_what_json_wrote(number: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"problem": "1?", "answer": {number}}}\n', "utf-8")
    assert [problem.answer for problem in load_source(str(path)).problems] == [number]


def test_a_number_that_python_does_not_read_is_refused_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"problem": "1?", "answer": {"1" * 5000}}}\n', "utf-8")
    with pytest.raises(ValueError, match="p.jsonl, line 1: not JSON"):
        load_source(str(path))


def test_a_benchmark_from_a_file_in_the_dataset_s_own_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "train.parquet", HUB_ROWS["openai/gsm8k"])
    loaded = load_source("gsm8k", files=[path])
    assert [problem.answer for problem in loaded.problems] == ["2", "1234567"]
    assert [problem.id for problem in loaded.problems] == ["train/0", "train/1"]


def test_splits_that_are_none(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [{"problem": "1?", "answer": "1"}])
    with pytest.raises(ValueError, match=r"gsm8k has the splits \['train', 'test'\], .* not 'dev'"):
        load_source("gsm8k", split="dev")
    with pytest.raises(ValueError, match=r"splits .* or a slice such as 'train\[:100\]', not 'tr"):
        load_source("gsm8k", split="train[1%:]")
    with pytest.raises(ValueError, match=r"gsm8k has 1 problems, and none of split 'train\[1:\]'"):
        load_source("gsm8k", files=[path], split="train[1:]")
    with pytest.raises(ValueError, match="and none of split 'holdout'"):
        load_source("deepscaler", files=[path], split="holdout")


@pytest.mark.parametrize(
    ("name", "split", "files", "count"),
    [
        ("gsm8k", "train", ["gsm8k_train"], 7473),
        ("gsm8k", "test", ["gsm8k_test"], 1319),
        ("math500", "test", ["math500"], 500),
        ("aime", "test", ["aime24", "aime25"], 60),
        ("deepscaler", "holdout", ["deepscaler_train_partial"], 500),
        ("deepscaler", "train", ["deepscaler_train_partial"], 9261 - 500 - 2),
    ],
)
def test_real_benchmarks_from_files(
    shared_dir: Path, name: str, split: str, files: list[str], count: int
) -> None:
    paths = [shared_dir / "data" / f"{file}.jsonl.gz" for file in files]
    if absent := [path for path in paths if not path.is_file()]:
        pytest.skip(f"no {absent[0]}")
    loaded = load_source(name, split=split, files=paths)
    assert len(loaded.problems) == count
    assert all(problem.id.startswith(name[:4]) for problem in loaded.problems)
    assert all(problem.problem and problem.answer for problem in loaded.problems)


def test_the_held_out_problems_are_500_and_none_is_in_a_benchmark(shared_dir: Path) -> None:
    assert len(held_out_keys()) == 500
    paths = [shared_dir / "data" / f"{name}.jsonl.gz" for name in ("math500", "aime24", "aime25")]
    if absent := [path for path in paths if not path.is_file()]:
        pytest.skip(f"no {absent[0]}")
    for path in paths:
        problems = load_source(str(path)).problems
        assert not held_out_keys() & {text_key(problem.problem) for problem in problems}
        assert drop_overlaps(problems, problems)[0] == []
