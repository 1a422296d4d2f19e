from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from ospruner.eval.problems.problem import Problem, problems_from_rows, user_message
from ospruner.eval.problems.sources import load_source
from ospruner.formats import QWEN3

ROWS: list[dict[str, Any]] = [
    {"id": "a", "problem": "1+1?", "answer": "2", "subject": "sums"},
    {"id": "b", "problem": "2+2?", "answer": 4},
]
EXPECTED = [Problem("a", "1+1?", "2"), Problem("b", "2+2?", "4")]


def test_user_message() -> None:
    problem = EXPECTED[0]
    assert user_message(problem, replace(QWEN3, user_instruction="Box it.")) == "1+1?\n\nBox it."
    assert user_message(problem, replace(QWEN3, user_instruction="")) == "1+1?"


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_load_problems(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"problems{suffix}"
    text = "\n".join(json.dumps(row) for row in ROWS) + "\n\n"
    path.write_bytes(gzip.compress(text.encode()) if suffix.endswith("gz") else text.encode())
    assert load_source(str(path)).problems == EXPECTED
    assert load_source(str(path), limit=1).problems == EXPECTED[:1]
    assert load_source(str(path), columns={"family": ["subject"]}).problems[0].family == "sums"


def test_problems_of_a_dataset() -> None:
    dataset = Dataset.from_list([{"problem": "1+1?", "answer": "2"}])
    assert problems_from_rows(dataset) == [Problem("0", "1+1?", "2")]


def test_a_dataset_without_answers_is_refused_by_column() -> None:
    dataset = Dataset.from_list([{"id": "a", "problem": "1+1?", "solution": "2"}])
    with pytest.raises(
        ValueError,
        match=r"no column 'answer' .* the columns are 'id', 'problem', 'solution': rename",
    ):
        problems_from_rows(dataset, source="mine")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"id": "c", "answer": "1"}, "no column 'problem'"),
        ({"id": "c", "problem": "p", "answer": None}, "column 'answer' holds None"),
        ({"id": "c", "problem": "p", "answer": "  "}, "column 'answer' is empty"),
        ({"id": "c", "problem": "p", "answer": True}, "column 'answer' holds True"),
        ({"id": "a", "problem": "p", "answer": "1"}, "the id 'a' was used before"),
    ],
)
def test_bad_rows(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"mine, row 2: .*{message}"):
        problems_from_rows([*ROWS, row], source="mine")


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no rows at"):
        load_source(str(tmp_path / "absent.jsonl"))
    path = tmp_path / "problems.jsonl"
    path.write_text("")
    with pytest.raises(ValueError, match="holds no problems"):
        load_source(str(path))
    path.write_text('{"id": 1\n')
    with pytest.raises(ValueError, match="line 1: not JSON"):
        load_source(str(path))
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match="line 1: a list, not an object"):
        load_source(str(path))
    with pytest.raises(ValueError, match="limit is 0"):
        load_source(str(path), limit=0)


def test_shared_benchmarks_load(shared_dir: Path) -> None:
    folder = shared_dir / "data"
    counts = {"gsm8k_test": 1319, "math500": 500, "aime24": 30, "aime25": 30}
    for name, count in counts.items():
        path = folder / f"{name}.jsonl.gz"
        if not path.is_file():
            pytest.skip(f"no {path}")
        assert len(load_source(str(path)).problems) == count
