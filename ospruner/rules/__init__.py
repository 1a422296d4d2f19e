"""Stop rules without training, for generate, replay and comparisons: `ospruner.rules.Budget(400)`.

signals    what each rule measures at a step's end, with its source
families   the rules by name, and one of one's own
"""

from .families import (
    FAMILIES,
    Agreement,
    AnswerEntropy,
    Budget,
    Deer,
    Dynasor,
    Family,
    HaltCot,
    Puma,
    Refrain,
    RunJump,
    Step,
    StopRule,
    ThinkJustEnough,
    TrialConfidence,
    Verdict,
    parse_rule,
)
from .signals import StepEnd, TrialAnswer

__all__ = [
    "FAMILIES",
    "Agreement",
    "AnswerEntropy",
    "Budget",
    "Deer",
    "Dynasor",
    "Family",
    "HaltCot",
    "Puma",
    "Refrain",
    "RunJump",
    "Step",
    "StepEnd",
    "StopRule",
    "ThinkJustEnough",
    "TrialAnswer",
    "TrialConfidence",
    "Verdict",
    "parse_rule",
]
