import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from ospruner.eval.problems.problem import Problem, problems_from_rows, text_key, text_key_1
from ospruner.eval.problems.sources import BENCHMARKS, drop_overlaps, load_source


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
        {"problem": "2+2?", "answer": "4", "subject": "Algebra", "unique_id": "test/algebra/7.json"}
    ],
    "HuggingFaceH4/aime_2024": [{"id": 60, "problem": "A?", "answer": "204", "year": "2024"}],
    "MathArena/aime_2025": [{"problem_idx": 1, "problem": "B?", "answer": 70}],
    "agentica-org/DeepScaleR-Preview-Dataset": [
        {"problem": problem, "answer": answer, "solution": "..."}
        for problem, answer in (("C?", "5"), ("$C$ ?", "5"), ("D?", ""), ("E?", "x^2"))
    ],
}
EXPECTED = {
    ("gsm8k", "test"): [
        Problem("gsm8k/test/0", "1+1?", "2"),
        Problem("gsm8k/test/1", "Much?", "1234567"),
    ],
    ("math500", None): [Problem("math500/algebra/7", "2+2?", "4", "Algebra")],
    ("aime", None): [Problem("aime24/60", "A?", "204", "2024"), Problem("aime25/1", "B?", "70")],
    ("deepscaler", None): [
        Problem(f"deepscaler/{text_key('C?')}", "C?", "5"),
        Problem(f"deepscaler/{text_key('E?')}", "E?", "x^2"),
    ],
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmarks' layouts as folders that `datasets` finds under their Hub ids."""
    for name in ("gsm8k", "math500", "aime", "deepscaler"):
        for hub_id, config, _ in BENCHMARKS[name].parts:
            (folder := tmp_path / hub_id).mkdir(parents=True)
            head = f"---\nconfigs:\n- config_name: {config or 'default'}\n  data_files:\n"
            for split in set(BENCHMARKS[name].splits.values()):
                write(folder / f"{split}.parquet", HUB_ROWS[hub_id])
                head += f"  - split: {split}\n    path: {split}.parquet\n"
            (folder / "README.md").write_text(f"{head}---\n")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(("name", "split"), EXPECTED)
def test_benchmarks_by_their_hub_ids(name: str, split: str | None) -> None:
    loaded = load_source(name, split=split)
    assert loaded.problems == EXPECTED[name, split]
    assert loaded.source["dataset"] == name
    if name == "deepscaler":
        assert loaded.source["left_out"] == {"without_answer": 1, "duplicates": 1}
    first = split or next(iter(BENCHMARKS[name].splits))
    last = load_source(name, split=f"{first}[-1:]")
    assert last.problems == EXPECTED[name, split][-1:]
    assert last.source["split"] == f"{first}[-1:]"


@pytest.mark.usefixtures("hub")
def test_any_dataset_of_the_hub() -> None:
    columns = {"problem": ["question"], "answer": ["question"]}
    loaded = load_source("openai/gsm8k", columns=columns, split="test", limit=1)
    assert loaded.problems == [Problem(text_key("1+1?"), "1+1?", "1+1?")]
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
    rows: list[dict[str, Any]] = [{"problem": f"{n}+{n}?", "answer": f"{2 * n}"} for n in (1, 2)]
    found = problems_from_rows(Dataset.from_list(rows[:1]))
    assert found == [Problem(text_key("1+1?"), "1+1?", "2")]
    assert problems_from_rows(rows[::-1])[1] == found[0], "the place in the file changes nothing"
    with pytest.raises(ValueError, match="row 2: the problem .* stands there twice"):
        problems_from_rows([*rows, {"problem": "1 + 1?", "answer": "2"}])


def test_numbers_are_what_json_wrote(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    numbers = ["0.0000001", "1e-07", "10000000000000000.0", "1.50", "7", "-0.0"]
    path.write_text("".join(f'{{"problem": "{n}?", "answer": {n}}}\n' for n in numbers), "utf-8")
    assert [problem.answer for problem in load_source(str(path)).problems] == numbers
    path.write_text(f'{{"problem": "1?", "answer": {"1" * 5000}}}\n', "utf-8")
    with pytest.raises(ValueError, match="p.jsonl, line 1: not JSON"):
        load_source(str(path))


def test_splits_that_are_none(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [{"question": "1?", "answer": "So\n#### 1"}])
    # In the dataset's own columns.
    assert load_source("gsm8k", files=[path]).problems == [Problem("p/0", "1?", "1")]
    with pytest.raises(ValueError, match="or a slice such as .*, not 'train.1%"):
        load_source("gsm8k", split="train[1%:]")
    with pytest.raises(ValueError, match=r"gsm8k has 1 problems, and none of split 'train\[1:\]'"):
        load_source("gsm8k", files=[path], split="train[1:]")


def test_copies_have_one_key_and_other_problems_another() -> None:
    copies = (
        *(("Find $x$.", "find x"), ("a,\n\\[b = c\\]", "a $b=c$"), ("ﬁve ½", "five 1⁄2")),
        *((r"$\overline{r_1}$", r"$\overline{r}_1$"), (r"$\left( 1, 2 \right)$", "$(1,2)$")),
        *((r"Is \(\dfrac{1}{2}\,x\) big?", r"is $\frac{1}{2}x$ big?"), ("x≤3", r"$x\leq 3$")),
        *((r"\frac12", r"\frac{1}{2}"), ("3 × 4 − 1", r"$3\times4-1$"), ("1,234 c", "1234 c")),
    )
    assert [one for one, other in copies if text_key(one) != text_key(other)] == []
    others = (
        *(("x + 2", "x - 2"), ("1.5 apples", "15 apples"), ("88 / (4 / 2)", "88 / 4 / 2")),
        *(("x^2", "x_2"), (r"\frac 1 2", "1 2"), ("3!", "3"), ("left 3", "3"), ("x ≤ 3", "x ≥ 3")),
        *(("6 ÷ 2", "6 × 2"), ("A ∪ B", "A ∩ B"), ("√2", "2"), ("1,2", "12"), ("a ∈ B", "a ∉ B")),
        *(("the ratio 3:4", "the ratio 34"), (r"\frac{1}{23}", r"\frac{12}{3}")),
        ("1 2 and 3", "12 and 3"),
    )
    assert [one for one, other in others if text_key(one) == text_key(other)] == []


def test_overlaps_are_dropped_and_named() -> None:
    problems = [Problem("a", "Find $x$.", "1"), Problem("b", "Find y", "2")]
    assert drop_overlaps(problems, [Problem("z", "find x", "1")]) == ([problems[1]], [("a", "z")])


def test_problems_that_differ_in_a_sign_are_two(tmp_path: Path) -> None:
    texts = ["Is x ≤ 3?", "Is x ≥ 3?", "Is $x ≤ 3$ ?", "6 ÷ 2", "6 × 2"]
    rows = [{"problem": text, "answer": "1"} for text in texts]
    loaded = load_source("deepscaler", files=[write(tmp_path / "problems.jsonl", rows)])
    assert [problem.problem for problem in loaded.problems] == [*texts[:2], *texts[3:]]
    first, second = (problem.id for problem in loaded.problems[:2])
    assert first == f"problems/{text_key_1(texts[0])}"  # as labels of old have it
    assert second == f"{first}-{text_key(texts[1])}"
    # The first key names the held-out problems, too: it must be as it was.
    assert text_key_1("x ≤ 3, $y$") == text_key_1("x 3 y") != text_key_1("x 2 y")
    assert text_key_1("What is $1 + 1$?") == "25238b47d8319a29"
