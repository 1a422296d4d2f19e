"""The embedded reasoner: problems, a fallible solver to imitate, recipe, gates, weights, demo.

`ospruner.demo.REASONER` is its folder, which stands wherever a base does.
"""

from pathlib import Path

__all__ = ["REASONER"]

REASONER = Path(__file__).with_name("reasoner")
"""The folder of the shipped reasoner, a tiny model that really reasons (and overthinks)."""
