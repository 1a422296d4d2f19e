"""The embedded reasoner: problems, a fallible solver to imitate, recipe, gates, weights, demo."""

from pathlib import Path

__all__ = ["REASONER"]

REASONER = Path(__file__).with_name("reasoner")
"""The folder of the shipped reasoner, a tiny model that really reasons (and overthinks)."""
