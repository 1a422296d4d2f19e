"""What `ospruner doctor` found, and how it is printed."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

Level = Literal["ok", "note", "wrong"]
_MARKS = {"ok": "[green]✓[/green]", "note": "[yellow]•[/yellow]", "wrong": "[red]✗[/red]"}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: what.
        value: what was found.
        level: "ok"; "note" for what may surprise; "wrong" for what will not work.
        advice: what to do about it; "" for "ok".
    """

    name: str
    value: str
    level: Level = "ok"
    advice: str = ""


@dataclass
class Report:
    """Everything that was found.

    Attributes:
        subject: the base or policy looked at; None for the environment alone.
        kind: what the subject is.
        sections: findings by section title, in order.
        description: the text of `description.describe`, where there is a tokenizer.
    """

    subject: str | None = None
    kind: Literal["environment", "base", "policy", "unreachable"] = "environment"
    sections: dict[str, list[Finding]] = field(default_factory=dict)
    description: str = ""

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong (notes are no faults)."""
        return not any(one.level == "wrong" for found in self.sections.values() for one in found)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready values."""
        return {**asdict(self), "healthy": self.healthy}


def unreachable(where: str, revision: str | None, error: Exception) -> Finding:
    """The one line about a repository or folder that cannot be read."""
    at = "" if revision is None else f" at revision {revision}"
    if os.path.isdir(where):
        value = f"the folder {where} has no config.json that can be read"
        advice = "name the folder that holds the model's config.json, tokenizer and weights"
    else:
        value = f"cannot reach {where}{at}: neither a folder nor a repository that the Hub gives us"
        reason = " ".join(str(error).split("\n")[0].split())
        advice = (
            "check the name, the network (HF_ENDPOINT, HF_HUB_OFFLINE) and, for gated models, "
            f"`hf auth login` ({reason})"
        )
    return Finding("repository", value, "wrong", advice)


def print_report(report: Report, console: Console) -> None:
    """Prints the report, and how many things are wrong."""
    for title, found in report.sections.items():
        console.print(f"[bold]{escape(title)}[/bold]")
        table = Table.grid(padding=(0, 1))
        for one in found:
            value = escape(one.value) + (f"\n[dim]{escape(one.advice)}[/dim]" * bool(one.advice))
            table.add_row("", _MARKS[one.level], escape(one.name), value)
        console.print(table)
        console.print()
    if report.description:
        console.print(report.description, markup=False, highlight=False, soft_wrap=True)
        console.print()
    wrong = [o for found in report.sections.values() for o in found if o.level == "wrong"]
    if wrong:
        console.print(f"[red]{len(wrong)} thing{'s' * (len(wrong) > 1)} to mend, marked ✗[/red]")
    else:
        console.print("[green]Nothing is wrong[/green]")
