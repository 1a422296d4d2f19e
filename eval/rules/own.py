"""Rules of one's own: a class in a Python file, or one that an installed package offers."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from modeling_ospruner.rules_ospruner import StopRule

__all__ = ["GROUP", "installed_rules", "make_own", "rule_class"]

GROUP = "ospruner_rules"
"""The entry-point group: a name for `--rules`, and the class that it stands for."""


def installed_rules() -> dict[str, Callable[[], Any]]:
    """What loads the rule of each name that installed packages offer."""
    return {point.name: point.load for point in entry_points(group=GROUP)}


def rule_class(path: str | Path, name: str) -> type[Any]:
    """A class of a Python file, which is run.

    Args:
        path: the file.
        name: of the class.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file cannot be run, or has no such class.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no rule at {path}: give a .py file with a class {name}")
    spec = importlib.util.spec_from_file_location(f"ospruner_rule_{path.stem}", path)
    assert spec is not None  # it ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a user's file may raise
        raise ValueError(
            f"the rule {path} cannot be run ({type(error).__name__}: {error}): mend the file"
        ) from error
    found = vars(module).get(name)
    if not inspect.isclass(found):
        classes = [key for key, value in vars(module).items() if inspect.isclass(value)]
        raise ValueError(f"{path} defines no class {name!r}; it has {', '.join(classes) or 'none'}")
    return found


def make_own(kind: Callable[[float], Any], value: float, where: str) -> StopRule:
    """A rule of a user's class, checked.

    Args:
        kind: the class; called with its number.
        value: the number.
        where: what errors call it.

    Raises:
        ValueError: it cannot be made with the number, or is no `StopRule`.
    """
    try:
        rule = kind(value)
    except Exception as error:  # whatever a user's class may raise
        raise ValueError(
            f"{where}({value:g}) cannot be made ({type(error).__name__}: {error}): a rule is made "
            "with one number"
        ) from error
    if not isinstance(rule, StopRule):
        raise ValueError(
            f"{where} is no stop rule: it must have reason, asks and for_row "
            "(modeling_ospruner.rules_ospruner.StopRule)"
        )
    return rule
