"""The embedded reasoner: problems, a fallible solver to imitate, recipe, weights, demo.

`ospruner.demo.REASONER` is its folder, which stands wherever a base does; `ospruner.demo.POLICY`
that of a small policy for it, which stands wherever a policy does.
"""

from pathlib import Path
from typing import Any

__all__ = ["POLICY", "REASONER"]

REASONER = Path(__file__).with_name("reasoner")
"""The folder of the shipped reasoner, a tiny model that really reasons (and overthinks)."""
_POLICY = Path(__file__).with_name("policy")


def __getattr__(name: str) -> Any:
    """`POLICY`: the folder of a small policy for the reasoner, which transformers then loads."""
    if name != "POLICY":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import modeling_ospruner  # noqa: F401  # tells transformers of its classes

    return _POLICY
