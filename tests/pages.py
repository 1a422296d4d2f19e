"""What a page of docs/ tells its readers to run, and the commands that there are."""

import re
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)


def commands(page: Path) -> list[str]:
    """The lines of its shell blocks, those that go on joined."""
    text = "".join(blocks(page, "bash")).replace("\\\n", " ")
    return [line for line in text.splitlines() if line]


def whole_commands(app: typer.Typer) -> dict[str, Any]:
    """Every command of an app with all of its options, by its words."""
    found: dict[str, Any] = {}

    def walk(command: Any, name: str) -> None:
        if isinstance(command, TyperGroup):
            for word in command.commands:
                _, below, _ = command.resolve_command(typer.Context(command), [word])
                walk(below, f"{name} {word}".strip())
        else:
            found[name] = command

    walk(typer.main.get_command(app), "")
    return found
