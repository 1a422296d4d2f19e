"""Every page of the repository: links lead somewhere, commands exist and have their options."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import ospruner
from ospruner.cli import app

from ..pages import commands, whole_commands

REPO = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*REPO.glob("*.md"), *REPO.glob("docs/*.md"), *REPO.glob("ospruner/demo/*/README.md")]
)
# The changelog tells of what is gone.
TODAY = [page for page in PAGES if page.name != "CHANGELOG.md"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MODULES = re.compile(r"\b(?:modeling_ospruner|ospruner)(?:\.\w+)+(?<!\.py)\b")


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text("utf-8"))


def said_of(page: Path) -> list[str]:
    """The commands of a page, and what its prose says as code."""
    return [*commands(page), *re.findall(r"`([^`]+)`", prose(page))]


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}


COMMANDS = whole_commands(app)


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the words name, and its arguments."""
    for count in (2, 1):
        if (command := COMMANDS.get(" ".join(words[:count]))) is not None:
            return command, words[count:]
    raise AssertionError(f"no command: {' '.join(words)}")


def each(pages: list[Path]) -> pytest.MarkDecorator:
    names = [str(page.relative_to(REPO)) for page in pages]
    return pytest.mark.parametrize("page", pages, ids=names)


@each(PAGES)
def test_links_lead_somewhere(page: Path) -> None:
    pictures = re.findall(r'<(?:img|source) [^>]*src(?:set)?="([^"]+)"', prose(page))
    for target in [*re.findall(r"\]\(([^)]+)\)", prose(page)), *pictures]:
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), target


def test_every_page_of_docs_is_reached_from_readme() -> None:
    linked = set(re.findall(r"\]\((docs/[^)#]+\.md)", prose(REPO / "README.md")))
    assert linked == {f"docs/{page.name}" for page in REPO.glob("docs/*.md")}


@each(TODAY)
def test_commands_exist_and_have_their_options(page: Path) -> None:
    for line in commands(page):
        found = re.match(r"(?:.*-m ospruner.cli|ospruner) (.*)", line)
        if found is None:
            continue
        command, arguments = command_of(shlex.split(found[1], comments=True))
        if "..." not in arguments:
            assert command.make_context(command.name, list(arguments)).params
    for text in re.findall(r"`ospruner ([^`]+)`", prose(page)):
        words = shlex.split(text)
        if words[0].startswith("-") or words[:1] == words == ["labels"]:
            continue
        command, arguments = command_of(words)
        known = {option for one in command.params for option in one.opts} | {"--help"}
        given = {word.partition("=")[0] for word in arguments if word.startswith("--")}
        assert given <= known, text


@each(TODAY)
def test_modules_and_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    for name in set(MODULES.findall(text)):
        parts = name.split(".")
        public = parts[0] == "ospruner" and parts[1] in ospruner.__all__
        place = REPO.joinpath(*parts)
        module = place.with_suffix(".py").is_file() or place.parent.with_suffix(".py").is_file()
        assert module or place.is_dir() or public, name
    folders = "modeling_ospruner|train|eval|hub_cards|tests|benchmarks|docs"
    for name in set(re.findall(rf"`((?:{folders})/[\w./]*)`", text)):
        assert (REPO / name).exists(), name


def test_benchmarks_take_the_options_that_pages_give_them() -> None:
    asked: dict[str, set[str]] = {}
    for text in (text for page in TODAY for text in said_of(page)):
        if one := re.search(r"\bpython (benchmarks/\w+\.py)(.*)", text):
            asked.setdefault(one[1], set()).update(re.findall(r"--[\w-]+", one[2]))
    assert {"benchmarks/train.py", "benchmarks/frontier.py"} <= set(asked)
    shared = (REPO / "benchmarks/timing.py").read_text("utf-8")
    for script, options in asked.items():
        known = shared + (REPO / script).read_text("utf-8")
        for other in re.findall(r"^from (\w+) import", known, re.MULTILINE):
            beside = REPO / "benchmarks" / f"{other}.py"  # `tails` gives its options to others
            known += beside.read_text("utf-8") if beside.is_file() else ""
        assert all(f'"{option}"' in known for option in options), (script, options)


def test_make_targets_that_pages_name_exist() -> None:
    makefile = (REPO / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for page in PAGES:
        named = {one[1] for text in said_of(page) if (one := re.match(r"make ([a-z][\w-]*)", text))}
        assert named <= targets, page
