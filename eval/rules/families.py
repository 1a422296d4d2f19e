"""Rules by name, such as "budget:200"."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

from modeling_ospruner.rules_ospruner import (
    Agreement,
    AnswerEntropy,
    Ask,
    Budget,
    RowRule,
    StepEnd,
    StopRule,
    TrialConfidence,
    Verdict,
)

from .own import installed_rules, make_own, rule_class
from .rivals import (
    Deer,
    Dynasor,
    HaltCot,
    Puma,
    Refrain,
    RunJump,
    ThinkJustEnough,
    same_answer,
)

__all__ = ["FAMILIES", "AtStep", "NamedRule", "RuleFamily", "parse_rule"]


@dataclass(frozen=True)
class AtStep:
    """Stops at the end of a given step, whatever it says.

    Attributes:
        step: 1 is the first.
    """

    step: int
    reason: ClassVar[Literal["budget"]] = "budget"

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"step is {self.step}; the first step is 1")

    @property
    def asks(self) -> frozenset[Ask]:
        """Nothing."""
        return frozenset()

    def for_row(self) -> RowRule:
        """Itself: it remembers nothing."""
        return self

    def at_step_end(self, end: StepEnd) -> Verdict:
        """Counts."""
        return Verdict(end.step + 1 >= self.step, float(end.step + 1))


@dataclass(frozen=True)
class NamedRule:
    """A rule, and what tables and pictures call it.

    Attributes:
        method: the name of its family.
        parameter: what picks it from the family.
        parameter_name: what that is: "tokens", "step", "threshold", "answers".
        rule: what generate is given.
    """

    method: str
    parameter: float
    parameter_name: str
    rule: StopRule


class RuleFamily(NamedTuple):
    """Rules that differ in one number.

    Attributes:
        method: what tables call them.
        parameter_name: what the number is.
        make: the rule of a number.
        whole: whether only whole numbers are allowed.
        at_once: the number that stops wherever the rule may.
        never: the number that stops nothing, or next to nothing.
    """

    method: str
    parameter_name: str
    make: Callable[[float], StopRule]
    whole: bool
    at_once: float
    never: float


_MANY = 2.0**31 - 1

FAMILIES: dict[str, RuleFamily] = {
    "budget": RuleFamily("fixed budget", "tokens", lambda x: Budget(int(x)), True, 1, _MANY),
    "step": RuleFamily("fixed step", "step", lambda x: AtStep(int(x)), True, 1, _MANY),
    "entropy": RuleFamily(
        "answer entropy", "nats", lambda x: AnswerEntropy(x), False, math.log(20), 0.0
    ),
    "confidence": RuleFamily(
        "trial confidence", "threshold", lambda x: TrialConfidence(x), False, 1e-9, 1.0
    ),
    "agreement": RuleFamily(
        "answer agreement",
        "answers",
        lambda x: Agreement(int(x), equal=same_answer),
        True,
        2,
        _MANY,
    ),
    "dynasor": RuleFamily("Dynasor", "answers", lambda x: Dynasor(int(x)), True, 2, _MANY),
    "es-cot": RuleFamily("ES-CoT", "jump", lambda x: RunJump(int(x)), True, 1, _MANY),
    "halt-cot": RuleFamily("HALT-CoT", "bits", lambda x: HaltCot(x), False, 1e3, 0.0),
    "deer": RuleFamily("DEER", "threshold", lambda x: Deer(x), False, 1e-9, 1.0),
    "just-enough": RuleFamily(
        "Think Just Enough", "bits", lambda x: ThinkJustEnough(x), False, 5.0, 0.0
    ),
    "refrain": RuleFamily("REFRAIN", "threshold", lambda x: Refrain(x), False, 0.0, 1.0),
    "puma": RuleFamily("PUMA-like", "threshold", lambda x: Puma(confidence=x), False, 0.0, 1.0),
}

LEFT_OUT = {
    "neat": (
        "NEAT (arXiv 2602.02010) reads the activations of chosen neurons in every layer at every "
        "token, which labels do not keep and generate's hook does not see"
    ),
}
"""Rules that are asked for, and why they are not here."""


def parse_rule(text: str, same: Callable[[str, str], bool] | None = None) -> NamedRule:
    """The rule that a user named.

    Args:
        text: a name of `FAMILIES` with its number, such as "budget:200" (tokens), "entropy:0.4"
            (nats of the answer's first token), "agreement:3" (trial answers) or "deer:0.95".
            "my_rules.py:MyRule:0.5" is a class of one's own, made with
            the number; a package offers one by name in the entry-point group `own.GROUP`.
        same: whether two answers mean the same (`Task.same`), for agreement; None for mathematics.

    Raises:
        FileNotFoundError: the file of a rule of one's own is missing.
        ValueError: another name, no number, or one out of range; or see `own.make_own`.
    """
    name, colon, number = text.rpartition(":")
    examples = (
        "budget:200, step:5, entropy:0.4, confidence:0.95, agreement:3, dynasor:3, es-cot:10, "
        "halt-cot:0.6, deer:0.95, just-enough:0.5, refrain:0.7, puma:0.98"
    )
    if name in LEFT_OUT:
        raise ValueError(f"rule {text!r} cannot be had: {LEFT_OUT[name]}")
    path, _, class_name = name.rpartition(":")
    installed = {} if name in FAMILIES or path.endswith(".py") else installed_rules()
    if not (colon and (name in FAMILIES or path.endswith(".py") or name in installed)):
        offered = f"; installed: {', '.join(installed)}" if installed else ""
        raise ValueError(
            f"rule {text!r} is not known; rules are written as {examples}, or "
            f"my_rules.py:MyRule:0.5 for a class of your own{offered}"
        )
    try:
        value = float(number)
    except ValueError:
        raise ValueError(
            f"rule {text!r}: {number!r} is no number; write it as {examples}"
        ) from None
    if path.endswith(".py"):
        return NamedRule(class_name, value, "", make_own(rule_class(path, class_name), value, name))
    if name in installed:
        return NamedRule(name, value, "", make_own(installed[name](), value, name))
    family = FAMILIES[name]
    if family.whole and not value.is_integer():
        raise ValueError(f"rule {text!r}: {name} takes a whole number, not {number}")
    rule = family.make(value)
    if same is not None and isinstance(rule, Agreement):
        rule = replace(rule, equal=same)
    return NamedRule(family.method, value, family.parameter_name, rule)
