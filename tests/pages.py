"""What a page of docs/ tells its readers to run."""

import re
from pathlib import Path


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)


def commands(page: Path) -> list[str]:
    """The lines of its shell blocks, those that go on joined."""
    text = "".join(blocks(page, "bash")).replace("\\\n", " ")
    return [line for line in text.splitlines() if line]
