"""What `ospruner doctor` found, and how it is printed."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

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
    level: Literal["ok", "note", "wrong"] = "ok"
    advice: str = ""


@dataclass
class Diagnosis:
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
    def wrong(self) -> list[Finding]:
        """What will not work (notes are no faults)."""
        return [one for found in self.sections.values() for one in found if one.level == "wrong"]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready values."""
        return {**asdict(self), "healthy": not self.wrong}

    def show(self, console: Console) -> None:
        """Prints the report, and how many things are wrong."""
        for title, found in self.sections.items():
            table = Table.grid(padding=(0, 1))
            for one in found:
                value = Text.assemble(one.value, (f"\n{one.advice}" if one.advice else "", "dim"))
                mark = Text.from_markup(_MARKS[one.level])
                table.add_row("", mark, Text(one.name), value)
            console.print(Text(title, "bold"), table, "", sep="\n")
        if self.description:
            console.print(self.description, markup=False, highlight=False, soft_wrap=True)
            console.print()
        count, said = len(self.wrong), "[green]Nothing is wrong[/green]"
        if count:
            said = f"[red]{count} thing{'s' * (count > 1)} to mend, marked ✗[/red]"
        console.print(Text.from_markup(said))


def unreachable(where: str, revision: str | None, error: Exception) -> Finding:
    """The one line about a repository or folder that cannot be read."""
    if os.path.isdir(where):
        value = f"the folder {where} has no config.json that can be read"
        advice = "name the folder that holds the model's config.json, tokenizer and weights"
        return Finding("repository", value, "wrong", advice)
    at = "" if revision is None else f" at revision {revision}"
    reason = " ".join(str(error).split("\n")[0].split())
    return Finding(
        "repository",
        f"cannot reach {where}{at}: neither a folder nor a repository that the Hub gives us",
        "wrong",
        "check the name, the network (HF_ENDPOINT, HF_HUB_OFFLINE) and, for gated models, "
        f"`hf auth login` ({reason})",
    )
