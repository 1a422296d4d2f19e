"""Stop rules without training, for generate, replay and comparisons: `ospruner.rules.Budget(400)`.

signals    what each rule measures at a step's end, with its source
families   the rules by name, and one of one's own
"""

from . import families
from .families import *  # noqa: F403
from .signals import StepEnd, TrialAnswer

__all__ = [*families.__all__, "StepEnd", "TrialAnswer"]
