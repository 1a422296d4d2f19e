from __future__ import annotations

import json
from pathlib import Path

import pytest

from ospruner.eval.problems.problem import Problem, normalised_text, text_key, text_key_1
from ospruner.eval.problems.sources import drop_overlaps, load_source


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Find $x$.", "find x"),
        (r"Is \(\dfrac{1}{2}\,x\) big?", r"is $\frac{1}{2}x$ big?"),
        ("a,\n\\[b = c\\]", "a $b=c$"),
        (r"$\overline{r_1}$", r"$\overline{r}_1$"),
        (r"$\left( 1, 2 \right)$", "$(1,2)$"),
        ("ﬁve ½", "five 1⁄2"),
        ("x≤3", r"$x\leq 3$"),
        ("1,234 cats", "1234 cats"),
        (r"\frac12", r"\frac{1}{2}"),
        ("3 × 4 − 1", r"$3\times4-1$"),
    ],
)
def test_copies_have_one_text(one: str, other: str) -> None:
    assert normalised_text(one) == normalised_text(other)
    assert text_key(one) == text_key(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x + 2", "x - 2"),
        ("1.5 apples", "15 apples"),
        ("88 / (4 / 2)", "88 / 4 / 2"),
        ("x^2", "x_2"),
        (r"\frac 1 2", "1 2"),
        ("3!", "3"),
        ("left 3", "3"),
        ("x ≤ 3", "x ≥ 3"),
        ("6 ÷ 2", "6 × 2"),
        ("A ∪ B", "A ∩ B"),
        ("√2", "2"),
        ("1,2", "12"),
        ("the ratio 3:4", "the ratio 34"),
        ("1 2 and 3", "12 and 3"),
        (r"\frac{1}{23}", r"\frac{12}{3}"),
        ("a ∈ B", "a ∉ B"),
    ],
)
def test_other_problems_have_other_texts(one: str, other: str) -> None:
    assert text_key(one) != text_key(other)


def test_overlaps_are_dropped_and_named() -> None:
    problems = [Problem("a", "Find $x$.", "1"), Problem("b", "Find y", "2")]
    assert drop_overlaps(problems, [Problem("z", "find x", "1")]) == ([problems[1]], [("a", "z")])
    assert drop_overlaps(problems, []) == (problems, [])


def test_the_first_key_is_as_it_was() -> None:
    """It names the held-out problems, and the ids of labels that were made with it."""
    assert text_key_1("x ≤ 3, $y$") == text_key_1("x 3 y") != text_key_1("x 2 y")
    assert text_key_1("What is $1 + 1$?") == "25238b47d8319a29"


def test_problems_that_differ_in_a_sign_are_two(tmp_path: Path) -> None:
    texts = ["Is x ≤ 3?", "Is x ≥ 3?", "Is $x ≤ 3$ ?", "6 ÷ 2", "6 × 2"]
    path = tmp_path / "problems.jsonl"
    rows = [json.dumps({"problem": text, "answer": "1"}) for text in texts]
    path.write_text("\n".join(rows))
    loaded = load_source("deepscaler", files=[path])
    assert [problem.problem for problem in loaded.problems] == [*texts[:2], *texts[3:]]
    first, second = (problem.id for problem in loaded.problems[:2])
    assert first == f"problems/{text_key_1(texts[0])}"  # as labels of old have it
    assert second == f"{first}-{text_key(texts[1])}"
