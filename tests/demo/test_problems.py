from collections.abc import Callable
from itertools import islice
from random import Random
from types import ModuleType

import pytest

from ospruner.demo.problems import FAMILIES, SPLIT_SHARES, apply, draw_problem, iterate_problems


def test_generator_is_seeded_and_splits_are_disjoint() -> None:
    splits = {
        name: [p.problem for p in islice(iterate_problems(name, seed=3), 400)]
        for name in SPLIT_SHARES
    }
    again = [p.problem for p in islice(iterate_problems("test", seed=3), 400)]
    assert again == splits["test"]
    assert [p.problem for p in islice(iterate_problems("test", seed=4), 400)] != again
    seen = [text for texts in splits.values() for text in texts]
    assert len(seen) == len(set(seen)), "a problem stands in two splits, or twice in one"


def test_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="split='dev' is unknown"):
        next(iterate_problems("dev", seed=0))  # type: ignore[arg-type]


def test_answers_follow_from_the_plan() -> None:
    rng = Random(0)
    families = set()
    for _ in range(2000):
        problem = draw_problem(rng)
        families.add(problem.family)
        if problem.family in ("single", "chain", "equation", "remainder", "product"):
            value = problem.start
            for step in problem.plan:
                value = apply(value, step.symbol, step.right)
            assert value == problem.answer
        elif problem.family == "pair":
            total, product = problem.start, problem.plan[0].right
            assert problem.answer * (total - problem.answer) == product
            assert problem.answer >= total - problem.answer
        else:
            values = [apply(s.left or 0, s.symbol, s.right) for s in problem.plan]
            assert max(values) == problem.answer
    assert families == set(FAMILIES)


def test_a_slip_is_one_particular_wrong_value(load_script: Callable[[str], ModuleType]) -> None:
    writer = load_script("docs/examples/reasoner/fallible_reasoner.py")
    rng = Random(1)
    for _ in range(500):
        a, b, symbol = rng.randint(2, 99), rng.randint(2, 99), rng.choice("+-*/%")
        assert writer.slipped(a, symbol, b) != apply(a, symbol, b)
        assert 0 < writer.slip_rate(a, symbol, b) < 0.5
