"""The toy problems: seven families of whole-number puzzles, generated and split by seed.

Every family has problems of its own difficulty: `single` is solved at once, `chain`, `equation`,
`remainder`, `pair` and `compare` need steps that can slip and be repaired, and `product` (two
three-digit factors) is beyond a model of this size however long it thinks. The generator knows
nothing of any stopping method: it writes problems and answers, nothing else.
"""

import hashlib
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal

from ospruner.eval.problems.problem import Problem

Split = Literal["reasoner", "train", "validation", "test"]

SPLIT_SHARES: dict[Split, float] = {"reasoner": 0.4, "train": 0.3, "validation": 0.1, "test": 0.2}
"""Share of all possible problems that belong to each split, decided by a hash of the text.

The reasoner is trained on `reasoner` only; policies are trained, chosen and tested on the rest.
"""

_NAMES = ("Ivy", "Tom", "Ana", "Ben", "Mia", "Leo")
_THINGS = ("coins", "cards", "books", "pens")


@dataclass(frozen=True)
class Step:
    """One operation of a plan: `left symbol right`; `left` None means the running total."""

    symbol: str
    right: int
    left: int | None = None


@dataclass(frozen=True)
class ToyProblem:
    """A generated problem."""

    problem: str  # the text shown to the model, without any instruction
    answer: int
    family: str  # one of `FAMILIES`
    start: int  # first number of the plan: the running total before its first step
    plan: tuple[Step, ...]  # what a flawless solver would do, in order; traces follow it

    def as_problem(self) -> Problem:
        """The problem as labelling and evaluation take it; equal texts have equal ids."""
        name = "toy-" + hashlib.sha256(self.problem.encode()).hexdigest()[:12]
        return Problem(name, self.problem, str(self.answer), self.family)

    @property
    def split(self) -> Split:
        """The split this problem belongs to, whatever seed generated it: a hash of the text."""
        digest = hashlib.sha256(b"split:" + self.problem.encode()).digest()
        point = int.from_bytes(digest[:8], "big") / 2**64
        for name, share in SPLIT_SHARES.items():
            if point < share:
                return name
            point -= share
        return "test"


_OPERATIONS = {
    **{"+": operator.add, "-": operator.sub, "*": operator.mul},
    **{"/": operator.floordiv, "%": operator.mod},
}


def apply(value: int, symbol: str, right: int) -> int:
    """`value symbol right` for `+`, `-`, `*`, `/` (exact) and `%`."""
    return int(_OPERATIONS[symbol](value, right))


def _next_step(rng: Random, total: int, hard: float) -> Step:
    """Draw a step that keeps the running total between 2 and 999."""
    if total <= 60 and rng.random() < hard:
        return Step("*", rng.randint(11, 19))
    if total <= 99 and rng.random() < 0.25:
        return Step("*", rng.randint(2, 9 if total <= 60 else 4))
    if total > 30 and rng.random() < 0.55:
        return Step("-", rng.randint(3, min(total - 2, 69)))
    return Step("+", rng.randint(3, 69))


def _chain(rng: Random, max_steps: int) -> ToyProblem:
    start = rng.randint(3, 60)
    hard = rng.choice((0.0, 0.0, 0.15, 0.4))
    plan: list[Step] = []
    total = start
    for _ in range(rng.randint(min(2, max_steps), max_steps)):
        step = _next_step(rng, total, hard)
        total = apply(total, step.symbol, step.right)
        plan.append(step)
    return ToyProblem(_chain_text(rng, start, plan), total, "chain", start, tuple(plan))


def _chain_text(rng: Random, start: int, plan: list[Step]) -> str:
    if rng.random() < 0.5:
        words = {"+": ("Add {}.", "Increase it by {}."), "-": ("Take away {}.", "Subtract {}.")}
        parts = [f"Start with {start}."]
        for step in plan:
            phrase = rng.choice(words.get(step.symbol, ("Multiply by {}.",)))
            parts.append(phrase.format(step.right))
        return " ".join([*parts, rng.choice(("What is the result?", "What number do you get?"))])
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    verbs = {"+": ("finds", "buys"), "-": ("loses", "gives away")}
    parts = [f"{name} has {start} {thing}."]
    for step in plan:
        if step.symbol == "*":
            parts.append(f"The total grows {step.right} times.")
        else:
            parts.append(f"{name} {rng.choice(verbs[step.symbol])} {step.right}.")
    return " ".join([*parts, f"How many {thing} does {name} have?"])


def _single(rng: Random, max_steps: int) -> ToyProblem:
    start = rng.randint(3, 60)
    step = Step("*", rng.randint(2, 9)) if rng.random() < 0.3 else _next_step(rng, start, 0.0)
    text = rng.choice(("What is {}{}{}?", "Compute {}{}{}."))
    value = apply(start, step.symbol, step.right)
    return ToyProblem(text.format(start, step.symbol, step.right), value, "single", start, (step,))


def _equation(rng: Random, max_steps: int) -> ToyProblem:
    x, a, b = rng.randint(2, 40), rng.randint(2, 9), rng.randint(2, 60)
    if rng.random() < 0.5 and a * x - b > 1:
        c, sign, inverse = a * x - b, "-", "+"
    else:
        c, sign, inverse = a * x + b, "+", "-"
    text = rng.choice(("Solve {}x{}{}={} for x.", "If {}x{}{}={}, what is x?"))
    plan = (Step(inverse, b), Step("/", a))
    return ToyProblem(text.format(a, sign, b, c), x, "equation", c, plan)


def _remainder(rng: Random, max_steps: int) -> ToyProblem:
    divisor, quotient = rng.randint(7, 29), rng.randint(3, 19)
    number = divisor * quotient + rng.randrange(divisor)
    texts = ("What is the remainder when {} is divided by {}?", "Find {} modulo {}.")
    text = rng.choice(texts).format(number, divisor)
    return ToyProblem(text, number % divisor, "remainder", number, (Step("%", divisor),))


def _pair(rng: Random, max_steps: int) -> ToyProblem:
    small, gap = rng.randint(2, 12), rng.randint(0, 9)
    large = small + gap
    texts = (
        "Find x and y with x+y={} and x*y={}. Give the larger number.",
        "Two whole numbers add up to {} and multiply to {}. What is the larger one?",
    )
    text = rng.choice(texts).format(small + large, small * large)
    return ToyProblem(text, large, "pair", small + large, (Step("*", small * large),))


def _compare(rng: Random, max_steps: int) -> ToyProblem:
    a, b = rng.randint(6, 30), rng.randint(3, 9)
    c = max(2, a * b + rng.randint(-30, 30) - (d := rng.randint(3, 60)))
    texts = (
        "Which is larger, {}*{} or {}+{}? Give its value.",
        "Give the larger of {}*{} and {}+{}.",
    )
    text = rng.choice(texts).format(a, b, c, d)
    plan = (Step("*", b, a), Step("+", d, c))
    return ToyProblem(text, max(a * b, c + d), "compare", 0, plan)


def _product(rng: Random, max_steps: int) -> ToyProblem:
    a, b = rng.randint(112, 989), rng.randint(112, 989)
    text = rng.choice(("What is {}*{}?", "Compute {}*{}.")).format(a, b)
    return ToyProblem(text, a * b, "product", a, (Step("*", b),))


FAMILIES: dict[str, tuple[float, Callable[[Random, int], ToyProblem]]] = {
    "single": (0.09, _single),
    "chain": (0.42, _chain),
    "equation": (0.11, _equation),
    "remainder": (0.09, _remainder),
    "pair": (0.08, _pair),
    "compare": (0.06, _compare),
    "product": (0.15, _product),
}
"""Of each family, its share of the problems and what draws one."""


def draw_problem(rng: Random, max_steps: int = 7, with_product: bool = True) -> ToyProblem:
    """Draw one problem of any split; the recipe's curriculum starts with short chains."""
    drawn = [one for name, one in FAMILIES.items() if with_product or name != "product"]
    _, make = rng.choices(drawn, weights=[share for share, _ in drawn])[0]
    return make(rng, max_steps)


def iterate_problems(split: Split, seed: int) -> Iterator[ToyProblem]:
    """Yield distinct problems of one split, for ever, in an order fixed by `seed`.

    Raises:
        ValueError: `split` is unknown.
    """
    if split not in SPLIT_SHARES:
        raise ValueError(f"split={split!r} is unknown; choose one of {sorted(SPLIT_SHARES)}.")
    rng = Random(f"{split}/{seed}")
    seen: set[str] = set()
    while True:
        problem = draw_problem(rng)
        if problem.split == split and problem.problem not in seen:
            seen.add(problem.problem)
            yield problem
