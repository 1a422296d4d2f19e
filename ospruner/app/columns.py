"""What the page shows: two columns of thinking and answer, as plain values and as HTML."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Protocol

__all__ = ["Column", "Columns", "Paragraph", "Question", "Source", "columns_html"]

REASONS = {
    "policy": "stopped by the policy",
    "budget": "stopped by the budget",
    "natural": "ended by itself",
    "length": "cut by the limit on tokens",
}


@dataclass(frozen=True)
class Question:
    """What is asked, and how.

    Attributes:
        text: The question, without any instruction.
        stop_policy: Settings of the pruned column, by the fields of `StopPolicyConfig`.
        temperature: Of the thinking; 0 is greedy.
        seed: Of both columns' sampling and of the policy's draws.
        max_tokens: Cap on thinking and answer together.

    Raises:
        ValueError: It is empty or far too long; says what to do.
    """

    text: str
    stop_policy: dict[str, Any]
    temperature: float
    seed: int
    max_tokens: int

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise ValueError("The question is empty: write one, or take an example.")
        if len(self.text) > 20_000:
            raise ValueError(
                f"The question has {len(self.text):,} characters; 20,000 are allowed: shorten it."
            )


@dataclass(frozen=True)
class Paragraph:
    """A step of the thinking.

    Attributes:
        text: As written, with the blank lines after it.
        tokens: Thinking tokens through its end.
        probability: That the policy gave its end; None where it was not asked, NaN where it gave
            none.
    """

    text: str
    tokens: int
    probability: float | None = None


@dataclass(frozen=True)
class Column:
    """One column, at any moment.

    Attributes:
        thinking: What was thought so far; the last paragraph may be incomplete.
        answer: What was answered so far.
        tokens: Thinking tokens so far.
        seconds: Since its start, to its end.
        reason: What ended the thinking; None where it goes on.
        done: Whether it is complete.
    """

    thinking: Sequence[Paragraph] = field(default_factory=tuple)
    answer: str = ""
    tokens: int = 0
    seconds: float = 0.0
    reason: str | None = None
    done: bool = False


Columns = Generator[Column, None, None]
"""One column, again and again while it grows; closing it ends its generation."""


class Source(Protocol):
    """Where texts come from: a policy in this process, or a server.

    Attributes:
        policy: Name of the policy.
        positions: The longest text in tokens; None where that is not known.
        prices: Lowest and highest price of a token that it takes; None for a fixed policy.
    """

    policy: str
    positions: int | None
    prices: tuple[float, float] | None

    def ask(self, question: Question, pruned: bool) -> Columns:
        """A column, with the policy or without.

        Raises:
            ValueError: The question cannot be asked; says what to do.
            ConnectionError: A server is gone; says what to do.
        """


def columns_html(plain: Column, pruned: Column) -> str:
    """The two columns with what was saved, as HTML; every text in it is escaped."""
    after = pruned.tokens if pruned.done else None
    left = [
        _step_html(one, "osp-spared" * (after is not None and one.tokens > after))
        for one in plain.thinking
    ]
    stopped = len(pruned.thinking) if pruned.reason in ("policy", "budget") else 0
    right = [
        _step_html(one, "osp-stopped" * (number == stopped), REASONS.get(pruned.reason or "", ""))
        for number, one in enumerate(pruned.thinking, 1)
    ]
    return (
        f'<div class="osp">{_summary_html(plain, pruned)}<div class="osp-columns">'
        f"{_column_html('As it is', 'plain', plain, left)}"
        f"{_column_html('Pruned', 'pruned', pruned, right)}</div></div>"
    )


def _summary_html(plain: Column, pruned: Column) -> str:
    """Tokens and seconds of both, and the share that was saved once both are complete."""
    if plain == pruned == Column():
        return '<p class="osp-note">Ask a question: its thinking appears here.</p>'
    rows = []
    for name, before, after, digits in (
        ("thinking tokens", plain.tokens, pruned.tokens, 0),
        ("seconds", plain.seconds, pruned.seconds, 1),
    ):
        saved = "…"
        if plain.done and pruned.done:
            share = 1 - after / before if before else 0.0
            saved = f"{share:.0%} saved" if share >= 0 else f"{-share:.0%} more"
        rows.append(
            f'<div class="osp-number"><span class="osp-big">{saved}</span>'
            f"<span>{before:,.{digits}f} → {after:,.{digits}f} {name}</span></div>"
        )
    return f'<div class="osp-summary" role="status">{"".join(rows)}</div>'


def _column_html(title: str, kind: str, column: Column, steps: list[str]) -> str:
    said = answer = ""
    if column != Column():
        state = REASONS.get(column.reason or "", "complete" if column.done else "thinking…")
        said = f"{column.tokens:,} thinking tokens, {state}"
    if column.answer:
        answer = f'<div class="osp-answer"><b>Answer</b> {escape(column.answer)}</div>'
    return (
        f'<section class="osp-column osp-{kind}" aria-label="{title}">'
        f"<h3>{title} <small>{said}</small></h3>"
        f'<div class="osp-scroll"><div>{"".join(steps)}</div></div>{answer}</section>'
    )


def _step_html(one: Paragraph, mark: str, said: str = "") -> str:
    """A paragraph; it lights up with its stop probability, and one that was stopped at says so."""
    chip = style = ""
    if one.probability is not None:
        known = not math.isnan(one.probability)
        shown = f"{one.probability:.0%}" if known else "no probability"
        style = f' style="--p:{one.probability if known else 0:.3f}"'
        chip = f'<span class="osp-chip" title="stop probability">{shown}</span>'
    stop = f'<b class="osp-stop">{said}</b>' if mark == "osp-stopped" else ""
    return f'<p class="osp-step {mark}"{style}>{chip}{escape(one.text.strip())}{stop}</p>'
