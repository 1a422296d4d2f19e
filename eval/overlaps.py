"""The same problem in two sets: found by its normalised text, whatever its id."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Sequence

from .benchmarks import Problem

__all__ = ["drop_overlaps", "hold_out", "normalised_text", "text_key"]

# LaTeX commands that change how a formula looks, not what it says.
_LOOKS = re.compile(r"\\(?:left|right|displaystyle|quad|qquad)(?![a-z])|\\[,;:!()]")
_SAID = re.compile(r"[^\W_]|(?<=\d)\.(?=\d)|[-+*/^_=<>|!%()]")


def normalised_text(text: str) -> str:
    r"""What a problem says: its letters, digits, decimal points and operators, in lower case.

    Copies of a problem differ in spacing, `$` and `\[`, braces, punctuation and `\dfrac`.
    """
    text = _LOOKS.sub("", unicodedata.normalize("NFKC", text).lower())
    return "".join(_SAID.findall(re.sub(r"\\[dt]frac(?![a-z])", r"\\frac", text)))


def text_key(text: str) -> str:
    """A short name (16 hex digits) of a problem's normalised text: equal in all its copies."""
    return hashlib.blake2b(normalised_text(text).encode(), digest_size=8).hexdigest()


def drop_overlaps(
    problems: Sequence[Problem], others: Iterable[Problem]
) -> tuple[list[Problem], list[tuple[str, str]]]:
    """Drops the problems that another set holds too.

    Args:
        problems: such as a training set.
        others: such as the problems that the result will be evaluated on.

    Returns:
        The problems left, and (dropped id, the other's id) of the rest.
    """
    known = {text_key(other.problem): other.id for other in others}
    kept, dropped = [], []
    for problem in problems:
        other = known.get(text_key(problem.problem))
        if other is None:
            kept.append(problem)
        else:
            dropped.append((problem.id, other))
    return kept, dropped


def hold_out(problems: Sequence[Problem], count: int, seed: int = 0) -> list[Problem]:
    """A seeded choice of problems by their text: the same in any order and beside any others.

    Raises:
        ValueError: `count` is below 1 or leaves nothing.
    """
    if not 1 <= count < len(problems):
        raise ValueError(
            f"count is {count}; it must lie in 1..{len(problems) - 1}, which leaves problems"
        )

    def draw(problem: Problem) -> bytes:
        name = f"{seed}\x00{text_key(problem.problem)}".encode()
        return hashlib.blake2b(name, digest_size=8).digest()

    return sorted(problems, key=draw)[:count]
