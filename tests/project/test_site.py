"""What docs/*.py make: the site, llms.txt, tables and pictures, which say what their files say."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ..conftest import LoadScript
from ..own_process import output_of

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(load_script: LoadScript) -> ModuleType:
    """docs/site.py, which mkdocs runs."""
    return load_script("docs/site.py")


def test_llms_txt_is_what_the_pages_say(site: ModuleType) -> None:
    """Written by `make docs`; the one in the repository is for readers of the repository."""
    assert (REPO / "llms.txt").read_text("utf-8") == site.llms_text(), "make docs"
    listed = set(re.findall(r"\]\(docs/([\w-]+\.md)\)", site.llms_text()))
    assert listed == {page.name for page in REPO.glob("docs/*.md")}


PICTURE = '<picture>\n<source srcset="p/d.svg">\n<img src="p/l.svg" alt="A">\n</picture>'


@pytest.mark.parametrize(
    ("text", "there"),
    [
        ("[a](labels.md#b)", "[a](labels.md#b)"),
        ("[a](../README.md#start)", "[a](index.md#start)"),
        ("[a](../CONTRIBUTING.md)", "[a](R/blob/main/CONTRIBUTING.md)"),
        ("`[a](../x.py)`", "`[a](../x.py)`"),
        ("```\n[a](../x.py)\n```", "```\n[a](../x.py)\n```"),
        ("[a](https://example.org) [b](#c)", "[a](https://example.org) [b](#c)"),
        (PICTURE, "![A](p/l.svg#only-light)![A](p/d.svg#only-dark)"),
    ],
)
def test_links_out_of_it_lead_to_the_repository(site: ModuleType, text: str, there: str) -> None:
    assert site.outside(text, "docs/eval.md", "R/") == there
    assert site.outside("[a](../x.py)", "docs/eval.md") == "a"


def test_every_page_has_its_place_in_the_menu() -> None:
    menu = (REPO / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[2]
    listed = set(re.findall(r"([\w-]+\.md)", menu))
    assert listed == {page.name for page in REPO.glob("docs/*.md")} | {"index.md", "api.md"}


@pytest.mark.slow
def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    for package in ("material", "mkdocstrings"):
        pytest.importorskip(package, reason=f"{package} is not installed: make docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    output_of(*command, cwd=REPO)
    pages = sorted(tmp_path.rglob("*.html"))
    assert len(pages) > 15
    for page in pages:
        text = page.read_text("utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)[^>]*\bsrc=\"?([^\s\">]+)", text)
        loaded += re.findall(r"<link[^>]*rel=\"?(?:stylesheet|preconnect)[^>]*>", text)
        assert not [one for one in loaded if "://" in one], page
    assert "generate_with_rule" in (tmp_path / "api/index.html").read_text("utf-8")
    assert (tmp_path / "search/search_index.json").is_file()
    assert (tmp_path / "results/index.html").is_file()
    assert (tmp_path / "llms.txt").read_text("utf-8").startswith("# OS-Pruner\n")


def test_every_number_is_what_its_files_give(load_script: LoadScript) -> None:
    check: Any = load_script("docs/check_numbers.py")
    assert [*check.pages(), *check.signals(check.DOCS)] == []
    assert all("<!-- table: " in page.read_text("utf-8") for page in check.PAGES)


def test_pictures_are_light_and_dark(load_script: LoadScript) -> None:
    """They differ in colours alone, and a page shows them."""
    pictures: Any = load_script("docs/pictures.py")
    stems = {path.stem.removesuffix("-dark") for path in pictures.FOLDER.glob("*.svg")}
    assert stems == set(pictures.PICTURES)
    pages = "".join(page.read_text("utf-8") for page in pictures.DOCS.glob("*.md"))
    for name in pictures.PICTURES:
        light = (pictures.FOLDER / f"{name}.svg").read_text("utf-8")
        dark = (pictures.FOLDER / f"{name}-dark.svg").read_text("utf-8")
        assert dark == pictures.darkened(light) != light
        assert f"pictures/{name}-dark.svg" in pages
