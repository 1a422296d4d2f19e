"""The domains of the mixed reasoner: its whole numbers, choices, and chain_sum of reasoning-gym.

A domain is named by its task. Choices are written as the task `choice` writes them: the options
below the question, each behind a letter. The training text of `generated` is made here, in
reasoning-gym's own words, so that training needs no package; what is labelled, it makes itself.
"""

import re
from collections.abc import Mapping
from itertools import islice
from random import Random
from typing import Any

from ospruner.eval.problems.domains import Choice
from ospruner.eval.problems.generated import GYM, Generated, gym_rows
from ospruner.eval.problems.problem import Problem, problems_from_rows
from ospruner.eval.problems.task import Math, Task

from .problems import (
    MAKERS,
    Split,
    Step,
    ToyProblem,
    apply,
    draw_problem,
    iterate_problems,
    split_of,
)

DOMAINS: dict[str, Task] = {task.name: task for task in (Math(), Choice(), Generated())}
"""What the mixed reasoner knows; the shipped one knows `math`."""

MIX = {"math": 0.3, "choice": 0.4, "generated": 0.3}
"""Share of each domain in the mixed reasoner's training."""

CHOICE_SHARES = {"largest": 0.6, "limit": 0.4}

GYM_FAMILY = "chain_sum"
_GYM_QUESTION = "State the final answer to the following arithmetic problem: {} ="
_GYM_ROWS = 100_000
_DIGITS = (1, 2)


def domain_of(problem: ToyProblem) -> str:
    """The domain of a problem."""
    return "choice" if problem.options else "generated" if problem.family == GYM_FAMILY else "math"


def draw_mixed(rng: Random) -> ToyProblem:
    """Draw one problem of any split and domain."""
    domain = rng.choices(list(MIX), weights=list(MIX.values()))[0]
    draw = {"math": draw_problem, "choice": draw_choice, "generated": draw_chain_sum}[domain]
    return draw(rng)


def draw_chain_sum(rng: Random) -> ToyProblem:
    """Draw what reasoning-gym's chain_sum makes, where `_within_reach`."""
    digits = rng.choice(_DIGITS)
    low = 10 ** (digits - 1) if digits > 1 else 0
    start, *rest = (rng.randint(low, 10**digits - 1) for _ in range(rng.randint(2, 6)))
    plan = tuple(Step(rng.choice("+-"), right) for right in rest)
    total = start
    for step in plan:
        total = apply(total, step.symbol, step.right)
    text = " ".join([str(start), *(f"{step.symbol} {step.right}" for step in plan)])
    return ToyProblem(_GYM_QUESTION.format(text), total, GYM_FAMILY, start, plan)


def _within_reach(question: str) -> bool:
    """Whether a reasoner of this size can learn a sum: terms of at most two digits."""
    return all(len(number) in _DIGITS for number in re.findall(r"\d+", question))


def draw_choice(rng: Random) -> ToyProblem:
    """Draw a choice of two to four options."""
    family = rng.choices(list(CHOICE_SHARES), weights=list(CHOICE_SHARES.values()))[0]
    return _largest(rng) if family == "largest" else _limit(rng)


def _largest(rng: Random) -> ToyProblem:
    """Which of some terms is the largest."""
    centre, count = rng.randint(30, 150), rng.choice((2, 2, 3, 4))
    terms: dict[int, Step] = {}
    while len(terms) < count:
        step = _term(rng, centre)
        terms.setdefault(apply(step.left or 0, step.symbol, step.right), step)
    right, plan = list(terms).index(max(terms)), tuple(terms.values())
    question = rng.choice(("Which is the largest?", "Which of these is the largest?"))
    options = tuple(f"{step.left}{step.symbol}{step.right}" for step in plan)
    return _written(question, right, "largest", 0, plan, options)


def _term(rng: Random, centre: int) -> Step:
    """A sum, difference or product whose value lies near `centre`."""
    value = max(12, centre + rng.randint(-10, 10))
    symbol = rng.choice("+-**")
    if symbol == "*":
        right = rng.randint(3, 9)
        return Step("*", right, left=max(3, value // right))
    right = rng.randint(3, min(69, value - 2))
    return Step(symbol, right, left=value - right if symbol == "+" else value + right)


def _limit(rng: Random) -> ToyProblem:
    """Whether the answer of a problem is above a limit, which a slip may cross."""
    inner = MAKERS[rng.choice(("chain", "chain", "equation"))](rng, 4)
    limit = max(1, inner.answer + rng.choice((-9, -5, -1, 0, 4, 8)))
    options = (f"at most {limit}", f"more than {limit}")
    right = int(inner.answer > limit)
    return _written(inner.problem, right, "limit", inner.start, inner.plan, options)


def _written(
    question: str,
    right: int,
    family: str,
    start: int,
    plan: tuple[Step, ...],
    options: tuple[str, ...],
) -> ToyProblem:
    row = Choice().read_row({"question": question, "choices": list(options), "answer": right})
    return ToyProblem(row["problem"], right, family, start, plan, options)


def draw_domain(domain: str, split: Split, count: int, seed: int) -> list[Problem]:
    """Distinct problems of a domain and split, as labelling takes them.

    Args:
        domain: one of `DOMAINS`.
        split: never `reasoner`, if the reasoner is to be measured.
        count: how many.
        seed: of their order.

    Raises:
        MissingPackageError: `generated` needs reasoning-gym.
    """
    if domain == "generated":
        return _gym_problems(split, count, seed)
    draw = draw_problem if domain == "math" else draw_choice
    return [one.as_problem() for one in islice(iterate_problems(split, seed, draw), count)]


def _gym_problems(split: Split, count: int, seed: int) -> list[Problem]:
    # reasoning-gym makes item i of seed s as item i+1 of seed s-1: seeds lie a set's size apart.
    rows = gym_rows(f"{GYM}{GYM_FAMILY}:{_GYM_ROWS}:{seed * _GYM_ROWS}")
    found: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        if split_of(row["problem"]) == split and _within_reach(row["problem"]):
            found.setdefault(row["problem"], row)
        if len(found) == count:
            break
    return problems_from_rows(found.values())
