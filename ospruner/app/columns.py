"""What the page shows: two columns of thinking and answer, as plain values and as HTML."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jinja2 import Environment, FileSystemLoader, StrictUndefined

__all__ = ["AppColumn", "Columns", "Paragraph", "Question", "Source", "columns_html"]

REASONS = {
    "policy": "stopped by the policy",
    "budget": "stopped by the budget",
    "natural": "ended by itself",
    "request": "ended because you asked",
    "length": "cut by the limit on tokens",
}
_TEMPLATE = Environment(
    loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
).get_template("columns.html.jinja")


@dataclass(frozen=True)
class Question:
    """What is asked, and how; ValueError where it is empty or far too long."""

    text: str  # without any instruction
    stop_policy: dict[str, Any]  # of the pruned column, by the fields of `StopPolicyConfig`
    temperature: float  # of the thinking; 0 is greedy
    seed: int  # of both columns' sampling and of the policy's draws
    max_tokens: int  # cap on thinking and answer together

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise ValueError("The question is empty: write one, or take an example.")
        if len(self.text) > 20_000:
            raise ValueError(
                f"The question has {len(self.text):,} characters; 20,000 are allowed: shorten it."
            )


@dataclass(frozen=True)
class Paragraph:
    """A step of the thinking, with the blank lines after it."""

    text: str
    tokens: int  # of the thinking through its end
    probability: float | None = None  # None where the policy was not asked, NaN where it gave none

    @property
    def known(self) -> float | None:
        """The probability, where there is one."""
        return None if math.isnan(self.probability or 0) else self.probability


@dataclass(frozen=True)
class AppColumn:
    """One column, at any moment; the last paragraph may be incomplete."""

    thinking: Sequence[Paragraph] = ()
    answer: str = ""
    tokens: int = 0  # of the thinking so far
    seconds: float = 0.0  # since its start, to its end
    reason: str | None = None  # what ended the thinking; None where it goes on
    done: bool = False


Columns = Generator[AppColumn, None, None]
"""One column, again and again while it grows; closing it ends its generation."""


class Source(Protocol):
    """Where texts come from: a policy in this process, or a server."""

    policy: str  # its name
    positions: int | None  # the longest text in tokens; None where that is not known
    prices: tuple[float, float] | None  # lowest and highest that it takes; None: a fixed policy

    def ask(self, question: Question, pruned: bool) -> Columns:
        """A column, with the policy or without.

        Raises:
            ValueError: The question cannot be asked; says what to do.
            ConnectionError: A server is gone; says what to do.
        """

    def answer_now(self) -> None:
        """Ends the thinking of the pruned column that grows; nothing where none does."""


def columns_html(plain: AppColumn, pruned: AppColumn) -> str:
    """The two columns with what was saved, as HTML; every text in it is escaped."""
    numbers = []
    for name, before, after, digits in (
        ("thinking tokens", plain.tokens, pruned.tokens, 0),
        ("seconds", plain.seconds, pruned.seconds, 1),
    ):
        share = 1 - after / before if before else 0.0
        saved = f"{share:.0%} saved" if share >= 0 else f"{-share:.0%} more"
        change = f"{before:,.{digits}f} → {after:,.{digits}f} {name}"
        numbers.append((saved if plain.done and pruned.done else "…", change))
    if plain == pruned == AppColumn():
        numbers = []
    return _TEMPLATE.render(
        plain=plain, pruned=pruned, numbers=numbers, reasons=REASONS, empty=AppColumn()
    )
