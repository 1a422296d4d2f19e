"""Writes the traces the reasoner learns from: a solver that slips, corrects and over-checks.

A trace is a list of paragraphs. The writer works through the plan of a problem, slipping at rates
that grow with the difficulty of each operation, sometimes notices, then checks again (forwards,
backwards or by substitution, more carefully than at first), settles disagreements by votes and
often goes on checking what is settled already. Phrases of conclusion are optional and stand in the
middle of traces too. A slip always gives one particular wrong value, so that sampling at a
temperature below one does not remove it.
"""

from collections import Counter
from dataclasses import dataclass, field
from random import Random

from ospruner.demo.problems import Step, ToyProblem, apply

RECHECK_CARE = 0.5
"""Factor on the slip rates while rechecking."""

MAX_ATTEMPTS = {"product": 4}
"""Attempts after which the reasoner gives up and keeps what it believes, where it is not 5."""


@dataclass(frozen=True)
class Habits:
    """What changes between the cycles of the recipe."""

    content: float = 0.3  # chance to be content before any check agreed; each that does adds .35
    part_slip: float = 0.5  # that a partial product of three-digit factors is wrong
    sum_slip: float = 0.6  # that a sum of partial products is wrong
    plan: float = 0.0  # to list the operations before the first attempt


FIRST_CYCLE = Habits()
SECOND_CYCLE = Habits(content=0.45, part_slip=0.75, sum_slip=0.8, plan=0.75)
"""The second cycle checks less, plans, and finds products beyond it even below temperature one."""


FILLERS = ("Hmm.", "Wait.", "Okay.", "Let me think.", "Let me see.")
RECHECKS = ("Let me check.", "Let me double check.", "Check it again.", "Once more from the start.")
BACKWARDS = ("Check it backwards.", "Go back from the result.")
AGREEMENTS = ("Same as before.", "It matches.", "Good.", "That fits.")
DISAGREEMENTS = ("That is different.", "That does not match.", "Something is wrong.")
CONCLUSIONS = ("So {}.", "That gives {}.", "I get {}.", "The answer is {}.", "It is {}.")


@dataclass
class Trace:
    """A written trace: its paragraphs, without the blank lines between, and the beliefs.

    After each paragraph the reasoner holds an answer; None before the first attempt is complete.
    """

    paragraphs: list[str] = field(default_factory=list)
    beliefs: list[int | None] = field(default_factory=list)


def slip_rate(a: int, symbol: str, b: int) -> float:
    """Probability that a first pass gets `a symbol b` wrong, by the work it takes."""
    match symbol:
        case "+":
            return 0.20 if a % 10 + b % 10 >= 10 else 0.03
        case "-":
            return 0.25 if a % 10 < b % 10 else 0.03
        case "*" if b > 9 or (a > 9 and b > 5):
            return 0.38
        case "*":
            return 0.22 if a % 10 * b >= 10 and a > 9 else 0.05
        case _:
            return 0.12


def slipped(a: int, symbol: str, b: int) -> int:
    """The one wrong value that a slip gives: a forgotten carry, else a miscount by one."""
    value = apply(a, symbol, b)
    match symbol:
        case "+":
            return value - 10 if a % 10 + b % 10 >= 10 else value + 1
        case "-":
            return value + 10 if a % 10 < b % 10 else value + 1
        case "*":
            return value - 10 if value > 20 else value + 1
        case _:
            return value + 1


class _Writer:
    """State of one trace while it is written."""

    def __init__(self, problem: ToyProblem, rng: Random, habits: Habits) -> None:
        self.problem = problem
        self.habits = habits
        self.rng = rng
        self.trace = Trace()
        self.votes: list[int] = []

    @property
    def belief(self) -> int | None:
        """Majority of the finished attempts; the latest of them where they tie."""
        if not self.votes:
            return None
        counts = Counter(self.votes)
        best = max(counts.values())
        return next(v for v in reversed(self.votes) if counts[v] == best)

    def say(self, text: str) -> None:
        self.trace.paragraphs.append(text)
        self.trace.beliefs.append(self.belief)

    def maybe(self, chance: float, phrases: tuple[str, ...], *values: int | str) -> None:
        if self.rng.random() < chance:
            self.say(self.rng.choice(phrases).format(*values))

    def conclude(self, chance: float) -> None:
        """Perhaps say what the answer is."""
        self.maybe(chance, CONCLUSIONS, self.belief or 0)

    def vote(self, value: int) -> None:
        """Record a finished attempt; the belief changes with the paragraph that ended it."""
        self.votes.append(value)
        self.trace.beliefs[-1] = self.belief

    def compute(self, a: int, symbol: str, b: int, care: float) -> int:
        """Write one operation and return what the reasoner takes its value to be.

        `care` is a factor on the slip rate.
        """
        right = apply(a, symbol, b)
        wrong = self.rng.random() < slip_rate(a, symbol, b) * care
        value = slipped(a, symbol, b) if wrong else right
        middle = ""
        if symbol == "*" and a > 9 and b > 9:
            middle = f"{a * 10}+{a * (b - 10)}="
        self.say(f"{a}{symbol}{b}={middle}{value}.")
        if self.rng.random() < (0.25 if wrong else 0.02):
            self.say(f"Wait, {a}{symbol}{b} is {right}.")
            return right
        return value

    def plan(self) -> None:
        """List the operations to be done, in one paragraph."""
        steps = self.problem.plan
        first = "" if steps[0].left is not None else f"{self.problem.start}: "
        parts = [f"{'' if s.left is None else s.left}{s.symbol}{s.right}" for s in steps]
        self.say(first + ", ".join(parts) + ".")

    def attempt(self, care: float) -> None:
        """Work through the problem once and vote for the outcome."""
        solve = {
            "remainder": self._attempt_remainder,
            "pair": self._attempt_pair,
            "compare": self._attempt_compare,
            "product": self._attempt_product,
        }.get(self.problem.family, self._attempt_plan)
        self.vote(solve(care))

    def _attempt_plan(self, care: float) -> int:
        value = self.problem.start
        last = len(self.problem.plan) - 1
        for index, step in enumerate(self.problem.plan):
            if step.symbol == "/" and value % step.right:
                self.say(f"{value}/{step.right} is not whole.")
                value -= value % step.right
            value = self.compute(value, step.symbol, step.right, care)
            if index < last:
                self.maybe(0.06, CONCLUSIONS, value)
                self.maybe(0.04, FILLERS)
        return value

    def _attempt_remainder(self, care: float) -> int:
        value, divisor = self.problem.start, self.problem.plan[0].right
        if value >= 10 * divisor:
            value = self.compute(value, "-", 10 * divisor, care)
        while value >= divisor:
            times = min(value // divisor, 9 if value < 5 * divisor else 5)
            value = self.compute(value, "-", self.compute(divisor, "*", times, care), care)
        return max(value, 0)

    def _attempt_pair(self, care: float) -> int:
        total, product = self.problem.start, self.problem.plan[0].right
        for larger in range((total + 1) // 2, total):
            found = self.compute(larger, "*", total - larger, care * 0.6)
            if found == product:
                return larger
            if found < product - 20:
                break
        self.say("I missed it.")
        return (total + 1) // 2

    def _attempt_compare(self, care: float) -> int:
        return max(
            self.compute(step.left or 0, step.symbol, step.right, care)
            for step in self.problem.plan
        )

    def _attempt_product(self, care: float) -> int:
        a, b = self.problem.start, self.problem.plan[0].right
        parts = []
        for factor in (b // 100 * 100, b // 10 % 10 * 10, b % 10):
            part = a * factor
            if factor and self.rng.random() < self.habits.part_slip:
                part += self.rng.choice((-1, 1)) * 10 ** self.rng.randint(1, 3)
            self.say(f"{a}*{factor}={part}.")
            parts.append(part)
        total = parts[0]
        for part in parts[1:]:
            value = total + part
            if self.rng.random() < self.habits.sum_slip:
                value += self.rng.choice((-1, 1)) * 10 ** self.rng.randint(1, 4)
            self.say(f"{total}+{part}={value}.")
            total = value
        return total

    def check_backwards(self) -> bool:
        """Undo the plan from the belief; return whether the start comes out."""
        value = self.belief or 0
        inverse = {"+": "-", "-": "+", "*": "/", "/": "*"}
        self.maybe(0.7, BACKWARDS)
        for step in reversed(self.problem.plan):
            undo = Step(inverse[step.symbol], step.right)
            if undo.symbol == "/" and value % undo.right:
                self.say(f"{value}/{undo.right} is not whole.")
                return False
            value = self.compute(value, undo.symbol, undo.right, RECHECK_CARE * 0.5)
        return value == self.problem.start

    def settle(self) -> None:
        """Check, and go on checking, until the reasoner is content (or gives up)."""
        family = self.problem.family
        content = self.habits.content
        while len(self.votes) < MAX_ATTEMPTS.get(family, 5):
            before = self.belief
            reversible = family in ("chain", "single", "equation")
            if reversible and self.rng.random() < (0.7 if family == "equation" else 0.3):
                agrees = self.check_backwards()
                if not agrees:
                    self.say(self.rng.choice(DISAGREEMENTS))
                    self.attempt(RECHECK_CARE)
            else:
                self.maybe(0.8, RECHECKS)
                self.attempt(RECHECK_CARE)
                agrees = self.votes[-1] == before
                if not agrees:
                    self.maybe(0.7, DISAGREEMENTS)
            if agrees:
                self.maybe(0.4, AGREEMENTS)
            self.conclude(0.25)
            self.maybe(0.25, FILLERS)
            if agrees:
                content += 0.35
                if self.rng.random() < content:
                    return


def write_trace(problem: ToyProblem, rng: Random, habits: Habits = SECOND_CYCLE) -> Trace:
    """Write the thinking of a fallible reasoner, whose last belief is the answer that it gives."""
    writer = _Writer(problem, rng, habits)
    writer.maybe(0.3, FILLERS)
    if habits.plan and rng.random() < habits.plan:
        writer.plan()
    writer.attempt(1.0)
    writer.conclude(0.35)
    writer.maybe(0.25, FILLERS)
    if rng.random() < 0.97:
        writer.settle()
    writer.conclude(0.4)
    return writer.trace
