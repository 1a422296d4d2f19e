"""The domains of the mixed reasoner: its whole numbers, choices, and chain_sum of reasoning-gym.

A domain is named by its task. Choices are written as the task `choice` writes them: the options
below the question, each behind a letter. The training text of `generated` is made here, in
reasoning-gym's own words, so that training needs no package; what is labelled, it makes itself.
"""

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

MIX = {"math": 0.3, "choice": 0.35, "generated": 0.35}
"""Share of each domain in the mixed reasoner's training."""

CHOICE_SHARES = {"equal": 0.35, "option": 0.5, "product option": 0.15}

GYM_FAMILY = "chain_sum"
_GYM_QUESTION = "State the final answer to the following arithmetic problem: {} ="
_GYM_ROWS = 100_000
_OPTIONS = 4


def domain_of(problem: ToyProblem) -> str:
    """The domain of a problem."""
    return "choice" if problem.options else "generated" if problem.family == GYM_FAMILY else "math"


def draw_mixed(rng: Random) -> ToyProblem:
    """Draw one problem of any split and domain."""
    domain = rng.choices(list(MIX), weights=list(MIX.values()))[0]
    draw = {"math": draw_problem, "choice": draw_choice, "generated": draw_chain_sum}[domain]
    return draw(rng)


def draw_chain_sum(rng: Random) -> ToyProblem:
    """Draw what reasoning-gym's chain_sum makes by default: 2 to 6 terms of 1 to 4 digits each."""
    terms, digits = rng.randint(2, 6), rng.randint(1, 4)
    low = 10 ** (digits - 1) if digits > 1 else 0
    start, *rest = (rng.randint(low, 10**digits - 1) for _ in range(terms))
    plan = tuple(Step(rng.choice("+-"), right) for right in rest)
    total = start
    for step in plan:
        total = apply(total, step.symbol, step.right)
    text = " ".join([str(start), *(f"{step.symbol} {step.right}" for step in plan)])
    return ToyProblem(_GYM_QUESTION.format(text), total, GYM_FAMILY, start, plan)


def draw_choice(rng: Random) -> ToyProblem:
    """Draw a choice of four options."""
    family = rng.choices(list(CHOICE_SHARES), weights=list(CHOICE_SHARES.values()))[0]
    if family == "equal":
        return _equal_term(rng)
    inner = "product" if family == "product option" else rng.choice(("chain", "chain", "equation"))
    return _with_options(rng, family, MAKERS[inner](rng, 4))


def _equal_term(rng: Random) -> ToyProblem:
    """Which of four terms has a given value."""
    centre = rng.randint(30, 200)
    terms: dict[int, Step] = {}
    while len(terms) < _OPTIONS:
        step = _term(rng, centre)
        terms.setdefault(apply(step.left or 0, step.symbol, step.right), step)
    right = rng.randrange(_OPTIONS)
    value, plan = list(terms)[right], tuple(terms.values())
    question = rng.choice(("Which is equal to {}?", "Which of these gives {}?")).format(value)
    options = tuple(f"{step.left}{step.symbol}{step.right}" for step in plan)
    return _written(question, right, "equal", value, plan, options)


def _term(rng: Random, centre: int) -> Step:
    """A sum, difference or product whose value lies near `centre`."""
    value = max(12, centre + rng.randint(-12, 12))
    symbol = rng.choice("+-**")
    if symbol == "*":
        right = rng.randint(3, 9)
        return Step("*", right, left=max(3, value // right))
    right = rng.randint(3, min(69, value - 2))
    return Step(symbol, right, left=value - right if symbol == "+" else value + right)


def _with_options(rng: Random, family: str, inner: ToyProblem) -> ToyProblem:
    """A problem with a number as its answer, put as a choice; slips are among the options."""
    steps = (10, 100, 1000) if family == "product option" else (1, 1, 2, 10, 10, 20)
    values = {inner.answer}
    while len(values) < _OPTIONS:
        near = rng.choice(list(values)) + rng.choice((-1, 1)) * rng.choice(steps)
        if near >= 0:
            values.add(near)
    shown = rng.sample(sorted(values), _OPTIONS)
    right, options = shown.index(inner.answer), tuple(map(str, shown))
    return _written(inner.problem, right, family, inner.start, inner.plan, options)


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
        if split_of(row["problem"]) == split:
            found.setdefault(row["problem"], row)
        if len(found) == count:
            break
    return problems_from_rows(found.values())
