"""The tables of docs/results.md and README are made from the JSON files; each command exists."""

from collections.abc import Callable
from types import ModuleType
from typing import Any


def test_every_number_is_what_its_files_give(load_script: Callable[[str], ModuleType]) -> None:
    check: Any = load_script("docs/check_numbers.py")
    assert [*check.pages(), *check.signals(check.DOCS)] == []
    assert all("<!-- table: " in page.read_text("utf-8") for page in check.PAGES)


def test_pictures_are_light_and_dark(load_script: Callable[[str], ModuleType]) -> None:
    """They differ in colours alone, and a page shows them."""
    pictures: Any = load_script("docs/pictures.py")
    stems = {path.stem.removesuffix("-dark") for path in pictures.FOLDER.glob("*.svg")}
    assert stems == set(pictures.PICTURES)
    for name in pictures.PICTURES:
        light = (pictures.FOLDER / f"{name}.svg").read_text("utf-8")
        dark = (pictures.FOLDER / f"{name}-dark.svg").read_text("utf-8")
        assert dark == pictures.darkened(light) != light
        assert f"pictures/{name}-dark.svg" in "".join(
            page.read_text("utf-8") for page in pictures.DOCS.glob("*.md")
        )
