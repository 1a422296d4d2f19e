"""Imports go down the floors, no circle anywhere, and the uploaded files load from the Hub.

A file may import its own floor and lower ones; docs/architecture.md says which room is on which.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath

import pytest

REPO = Path(__file__).resolve().parents[2]

MAPPED = ("train", "eval", "hub_cards")  # folders installed as ospruner.<folder>
FLAT_THIRD_PARTY = {"torch", "transformers", "safetensors"}
FLAT_SUFFIX = "_ospruner.py"  # of the files that are uploaded beside the weights


def module_name(path: PurePosixPath) -> str:
    """The installed name of a file given relative to the repository."""
    parts = list(path.with_suffix("").parts)
    if parts[0] in MAPPED:
        parts.insert(0, "ospruner")
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


MAP = (REPO / "docs/architecture.md").read_text("utf-8")
ROOMS = re.findall(r"^\| (\d+) \| `([\w/.]+)`", MAP, re.MULTILINE)
FLOORS = {module_name(PurePosixPath(room)): int(floor) for floor, room in ROOMS}


def floor_of(module: str) -> int | None:
    """The floor of a module of ours, by the longest name that fits; None for code of others."""
    fits = [name for name in FLOORS if module == name or module.startswith(name + ".")]
    return FLOORS[max(fits, key=len)] if fits else None


def imports_of(
    tree: ast.AST, inside: frozenset[str] = frozenset()
) -> Iterator[tuple[ast.Import | ast.ImportFrom, frozenset[str]]]:
    """Every import statement, at any depth, and whether it stands in a "try" or for "types"."""
    for child in ast.iter_child_nodes(tree):
        in_try = isinstance(tree, ast.Try) and bool(tree.handlers) and child in tree.body
        types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
        within = inside.union(["try"] * in_try, ["types"] * types)
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, within
        elif not isinstance(child, ast.expr):  # which holds no statement
            yield from imports_of(child, within)


def targets_of(node: ast.Import | ast.ImportFrom, path: PurePosixPath) -> list[str]:
    """The absolute names that an import may load: modules, and modules named as attributes."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        package = module_name(path).split(".")
        package = package[: len(package) - node.level + (path.name == "__init__.py")]
        base = ".".join([*package, *([base] if base else [])])
    return [f"{base}.{alias.name}" for alias in node.names]


def faults(path: PurePosixPath, tree: ast.AST, flat: set[str]) -> list[str]:
    """Every broken rule in one file, as `line: what`."""
    uploaded = path.parts[0] == "modeling_ospruner" and path.name.endswith(FLAT_SUFFIX)
    own, found = floor_of(module_name(path)), []
    for node, inside in imports_of(tree):
        for target in targets_of(node, path):
            other, top = floor_of(target), target.split(".")[0]
            up = bool(own and other and other > own)
            wrong = {
                f"bare import of {target}: say ospruner.{target}": top in MAPPED,
                f"a package imports {target}": own and top in {"tests", "benchmarks", "docs"},
                f"imports up: floor {own} imports {target} of floor {other}": up,
            }
            relative = isinstance(node, ast.ImportFrom) and node.level
            if uploaded and relative:
                file = target.split(".")[1:-1]
                wrong["flat files import each other only as `from .x import y`"] = len(file) != 1
                wrong[f"{target} is of no flat file: it is not uploaded"] = not flat & {*file}
            elif uploaded:  # what a Hub user may not have installed
                strange = top not in FLAT_THIRD_PARTY | sys.stdlib_module_names
                unguarded = strange and "try" not in inside
                wrong[f"{top} outside try: the Hub refuses users without it"] = unguarded
                wrong[f"flat file imports {target} by name"] = "ospruner" in top
            found += [f"{node.lineno}: {what}" for what, is_wrong in wrong.items() if is_wrong]
    return found


def trees(*tops: str) -> dict[PurePosixPath, ast.AST]:
    """The Python files below some folders of the repository (links are not followed)."""
    files = [file for top in tops for file in (REPO / top).rglob("*.py")]
    real = {file.resolve(): PurePosixPath(file.resolve().relative_to(REPO)) for file in files}
    return {path: ast.parse(file.read_text("utf-8")) for file, path in real.items()}


PACKAGES = trees("modeling_ospruner", "ospruner", *MAPPED)
FLAT = {path.stem for path in PACKAGES if path.name.endswith(FLAT_SUFFIX)}


def test_the_map_is_of_rooms_that_exist_and_of_every_uploaded_file() -> None:
    modules = {module_name(path) for path in PACKAGES}
    assert [room for room in FLOORS if not any(one.startswith(room) for one in modules)] == []
    assert set(re.findall(r"^\| `(\w+)\.py` \|", MAP, re.MULTILINE)) == FLAT


def test_every_file_keeps_the_floors() -> None:
    everything = PACKAGES | trees("tests", "benchmarks", "docs")
    found = {str(path): faults(path, tree, FLAT) for path, tree in everything.items()}
    assert {path: what for path, what in found.items() if what} == {}


def test_no_two_things_have_one_name() -> None:
    nodes = [node for tree in PACKAGES.values() for node in ast.walk(tree)]
    names = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
    public = [name for name in names if not name.startswith("_")]
    files = [path.stem for path in PACKAGES if path.name != "__init__.py"]
    assert [name for name, count in Counter([*public, *files]).items() if count > 1] == []


def test_no_circle_of_imports() -> None:
    modules = {module_name(path) for path in PACKAGES}
    graph: dict[str, set[str]] = {}
    for path, tree in PACKAGES.items():
        # What is imported for its type alone is not loaded.
        nodes = [node for node, inside in imports_of(tree) if "types" not in inside]
        named = [target for node in nodes for target in targets_of(node, path)]
        found = {name for t in named for name in (t, t.rpartition(".")[0])} & modules
        graph[module_name(path)] = found - {module_name(path)}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {error.args[1]}")


@pytest.mark.parametrize(
    ("path", "source", "fault"),
    [
        ("ospruner/engines/vllm.py", "import ospruner.train.trainer", "imports up"),
        ("train/labels/labelling.py", "def f():\n    from ..objective import g", "imports up"),
        ("eval/replay.py", "from eval.stopping import f", "bare import of eval"),
        ("eval/replay.py", "from tests.conftest import x", "a package imports tests"),
        ("modeling_ospruner/policy_ospruner.py", "from . import x", "only as `from .x import y`"),
        ("modeling_ospruner/policy_ospruner.py", "from .ghost import x", "of no flat file"),
        ("modeling_ospruner/policy_ospruner.py", "import peft", "outside try"),
        ("modeling_ospruner/policy_ospruner.py", "import ospruner.eval", "by name"),
        ("modeling_ospruner/policy_ospruner.py", "try:\n import peft\nexcept OSError: 0", ""),
        ("ospruner/engines/vllm.py", "import vllm", ""),
    ],
)
def test_faults_are_found(path: str, source: str, fault: str) -> None:
    found = faults(PurePosixPath(path), ast.parse(source), FLAT)
    assert any(fault in one for one in found) if fault else not found
