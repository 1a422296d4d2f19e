from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from ospruner.eval.problems.problem import Problem, load_problems
from ospruner.eval.problems.sources import drop_overlaps, hold_out, normalised_text, text_key


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Find $x$.", "find x"),
        (r"Is \(\dfrac{1}{2}\,x\) big?", r"is $\frac{1}{2}x$ big?"),
        ("a,\n\\[b = c\\]", "a $b=c$"),
        (r"$\overline{r_1}$", r"$\overline{r}_1$"),
        (r"$\left( 1, 2 \right)$", "$(1,2)$"),
        ("ﬁve ½", "five 1⁄2"),
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
    ],
)
def test_other_problems_have_other_texts(one: str, other: str) -> None:
    assert text_key(one) != text_key(other)


def test_overlaps_are_dropped_and_named() -> None:
    problems = [Problem("a", "Find $x$.", "1"), Problem("b", "Find y", "2")]
    assert drop_overlaps(problems, [Problem("z", "find x", "1")]) == ([problems[1]], [("a", "z")])
    assert drop_overlaps(problems, []) == (problems, [])


def test_hold_out_depends_on_texts_and_seed_only() -> None:
    problems = [Problem(f"p{n}", f"What is {n} + 1?", "1") for n in range(50)]
    chosen = hold_out(problems, 10)
    assert len({problem.id for problem in chosen}) == 10
    shuffled = random.Random(0).sample(problems, 50)
    assert hold_out(shuffled, 10) == chosen
    assert {p.id for p in hold_out(problems[:40], 10)} >= {p.id for p in chosen} & {
        p.id for p in problems[:40]
    }
    assert hold_out(problems, 10, seed=1) != chosen
    with pytest.raises(ValueError, match=r"count is 50; it must lie in 1\.\.49"):
        hold_out(problems, 50)


def test_the_known_overlaps_of_deepscaler_are_found(shared_dir: Path) -> None:
    folder = shared_dir / "data"
    path = folder / "deepscaler_train_partial.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"no {path}")
    import gzip

    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    known = {(row["id"], row["overlaps"]) for row in rows if row.get("overlaps")}
    others = [
        problem
        for name in ("math500", "aime24", "aime25", "gsm8k_test")
        for problem in load_problems(folder / f"{name}.jsonl.gz")
    ]
    kept, dropped = drop_overlaps(load_problems(path), others)
    assert set(dropped) == known
    assert (len(kept), len(known)) == (len(rows) - 6, 6)
