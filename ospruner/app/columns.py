"""What the page shows: two columns of thinking and answer, as plain values and as HTML."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Protocol

__all__ = ["Column", "Paragraph", "Question", "Source", "columns_html"]

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
        seed: Of both columns' sampling and of the policy's draws; None leaves it to the server.
        max_tokens: Cap on thinking and answer together.
    """

    text: str
    stop_policy: dict[str, Any]
    temperature: float
    seed: int | None
    max_tokens: int


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
        seconds: That its tokens took so far.
        reason: What ended the thinking; None where it goes on, or where nobody says.
        done: Whether it is complete.
    """

    thinking: Sequence[Paragraph] = field(default_factory=tuple)
    answer: str = ""
    tokens: int = 0
    seconds: float = 0.0
    reason: str | None = None
    done: bool = False


class Source(Protocol):
    """Where texts come from: a policy in this process, or a server.

    Attributes:
        base: Name of the base.
        policy: Name of the policy.
        mode: The policy's own.
        threshold: The policy's own.
        positions: The longest text in tokens; None where that is not known.
        prices: Lowest and highest length penalty that the policy takes; None for a fixed policy.
        seconds_note: What the seconds of a column are.
        seeded: Whether both columns can be drawn from one seed, and then are one text up to the
            stop, without asking for it.
    """

    base: str
    policy: str
    mode: str
    threshold: float
    positions: int | None
    prices: tuple[float, float] | None
    seconds_note: str
    seeded: bool

    def ask(self, question: Question) -> Iterator[tuple[Column, Column]]:
        """Both columns, as it is and pruned, again and again while they grow.

        Closing the iterator ends both.

        Raises:
            ValueError: The question cannot be asked; says what to do.
            ConnectionError: A server is gone; says what to do.
        """


def columns_html(plain: Column, pruned: Column, note: str = "") -> str:
    """The two columns with what was saved, as HTML; every text in it is escaped.

    Args:
        plain: The base as it is.
        pruned: With the policy.
        note: What the seconds are.
    """
    if plain == pruned == Column():
        note = "Ask a question: its thinking appears here."
    over = pruned.reason is not None or pruned.done
    after = pruned.tokens if over else None
    return (
        f'<div class="osp">{_summary_html(plain, pruned, note)}<div class="osp-columns">'
        f"{_column_html('As it is', 'plain', plain, _plain_parts(plain, after))}"
        f"{_column_html('Pruned', 'pruned', pruned, _pruned_parts(pruned))}"
        "</div></div>"
    )


def _summary_html(plain: Column, pruned: Column, note: str) -> str:
    """Tokens and seconds of both, and the share that was saved once both are complete."""
    rows: list[str] = []
    for name, of, digits in (("thinking tokens", "tokens", 0), ("seconds", "seconds", 1)):
        before, after = getattr(plain, of), getattr(pruned, of)
        if plain == pruned == Column():
            break
        saved = "…"
        if plain.done and pruned.done:
            share = 1 - after / before if before else 0.0
            saved = f"{share:.0%} saved" if share >= 0 else f"{-share:.0%} more"
        rows.append(
            f'<div class="osp-number"><span class="osp-big">{saved}</span>'
            f"<span>{before:,.{digits}f} → {after:,.{digits}f} {name}</span></div>"
        )
    small = f'<p class="osp-note">{escape(note)}</p>' if note else ""
    return f'<div class="osp-summary" role="status">{"".join(rows)}</div>{small}'


def _column_html(title: str, kind: str, column: Column, parts: str) -> str:
    said = f"{column.tokens:,} thinking tokens, {_state(column)}" if column != Column() else ""
    answer = ""
    if column.answer:
        answer = f'<div class="osp-answer"><b>Answer</b> {escape(column.answer)}</div>'
    return (
        f'<section class="osp-column osp-{kind}" aria-label="{title}">'
        f"<h3>{title} <small>{said}</small></h3>"
        f'<div class="osp-scroll"><div>{parts}</div></div>{answer}</section>'
    )


def _state(column: Column) -> str:
    return REASONS.get(column.reason or "", "complete" if column.done else "thinking…")


def _plain_parts(column: Column, after: int | None) -> str:
    """The base's paragraphs; those that the pruned column did without are marked."""
    parts = []
    for one in column.thinking:
        spared = after is not None and one.tokens > after
        parts.append(f'<p class="osp-step{" osp-spared" * spared}">{escape(one.text.strip())}</p>')
    return "".join(parts)


def _pruned_parts(column: Column) -> str:
    """Paragraphs that light up with their stop probability; the one that was stopped at says so."""
    parts = []
    for index, one in enumerate(column.thinking):
        last = index == len(column.thinking) - 1
        stopped = last and column.reason in ("policy", "budget")
        chip, style = "", ""
        if one.probability is not None:
            known = not math.isnan(one.probability)
            shown = f"{one.probability:.0%}" if known else "no probability"
            style = f' style="--p:{one.probability if known else 0:.3f}"'
            chip = f'<span class="osp-chip" title="stop probability">{shown}</span>'
        mark = f'<b class="osp-stop">{REASONS[column.reason or ""]}</b>' if stopped else ""
        parts.append(
            f'<p class="osp-step{" osp-stopped" * stopped}"{style}>{chip}'
            f"{escape(one.text.strip())}{mark}</p>"
        )
    return "".join(parts)
