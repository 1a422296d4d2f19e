"""Imports go down the floors, no circle anywhere, and the uploaded files load from the Hub.

A file may import its own floor and lower ones.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath

import pytest

REPO = Path(__file__).resolve().parents[2]

# The longest matching name decides. The fifth, ospruner.cli and what stands beside it, sees all.
FLOORS = {
    "ospruner": 5,
    "modeling_ospruner": 1,
    "ospruner.durable": 1,
    "ospruner.optional": 1,
    "ospruner.progress": 1,
    "ospruner.workers": 1,
    "ospruner.bases": 2,
    "ospruner.formats": 2,
    "ospruner.logits": 2,
    "ospruner.scoring": 2,
    "ospruner.engines": 2,
    "ospruner.rules": 2,
    "ospruner.serving": 2,
    "ospruner.provenance": 2,
    "ospruner.eval": 3,
    "ospruner.train.labels": 3,
    "ospruner.train": 4,
}
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


def floor_of(module: str) -> int | None:
    """The floor of a module of ours, None for code of others."""
    fits = [name for name in FLOORS if module == name or module.startswith(name + ".")]
    return FLOORS[max(fits, key=len)] if fits else None


def imports_of(
    tree: ast.AST, guarded: bool = False, types: bool = True
) -> Iterator[tuple[ast.AST, bool]]:
    """Every import statement, at any depth, and whether it stands in the body of a `try`.

    Without `types`, those `if TYPE_CHECKING` are left out.
    """
    for child in ast.iter_child_nodes(tree):
        in_try = isinstance(tree, ast.Try) and bool(tree.handlers) and child in tree.body
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, guarded or in_try
        elif isinstance(child, ast.expr):
            continue  # holds no statement
        elif types or not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)):
            yield from imports_of(child, guarded or in_try, types)


def targets_of(node: ast.AST, path: PurePosixPath) -> list[str]:
    """The absolute names that an import may load: modules, and modules named as attributes."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert isinstance(node, ast.ImportFrom)
    base = node.module or ""
    if node.level:
        package = module_name(path).split(".")
        package = package[: len(package) - node.level + (path.name == "__init__.py")]
        base = ".".join([*package, *([base] if base else [])])
    return [f"{base}.{alias.name}" for alias in node.names]


def floor_faults(node: ast.AST, path: PurePosixPath) -> Iterator[str]:
    """What is wrong with an import in `path`, by the floors and the names."""
    own = floor_of(module_name(path))
    for target in targets_of(node, path):
        other = floor_of(target)
        if target.split(".")[0] in MAPPED:
            yield f"bare import of {target}: say ospruner.{target}"
        if own is not None and target.split(".")[0] in {"tests", "benchmarks", "docs"}:
            yield f"a package imports {target}"
        if own is not None and other is not None and other > own:
            yield f"imports up: floor {own} imports {target} of floor {other}"


def flat_faults(node: ast.AST, guarded: bool, flat: set[str]) -> Iterator[str]:
    """What would break an uploaded file when transformers loads it from a Hub repository."""
    if isinstance(node, ast.ImportFrom) and node.level:
        if node.level > 1 or node.module is None or "." in node.module:
            yield "flat files import each other only as `from .x import y`"
        elif node.module not in flat:
            yield f"`from .{node.module} import ...` names no flat file: it is not uploaded"
        return
    names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
    for module in names or [getattr(node, "module", "") or ""]:
        top = module.split(".")[0]
        if top in {"modeling_ospruner", "ospruner"}:
            yield f"flat file imports {module} by name, which a Hub user may not have installed"
        elif top not in FLAT_THIRD_PARTY | sys.stdlib_module_names and not guarded:
            yield f"flat file imports {top} outside try: the Hub refuses users without it"


def faults(path: PurePosixPath, tree: ast.AST, flat: set[str]) -> list[str]:
    """Every broken rule in one file, as `line: what`."""
    found = []
    for node, guarded in imports_of(tree):
        what = list(floor_faults(node, path))
        if path.parts[0] == "modeling_ospruner" and path.name.endswith(FLAT_SUFFIX):
            what += flat_faults(node, guarded, flat)
        found += [f"{getattr(node, 'lineno', 0)}: {fault}" for fault in what]
    return found


def trees(*tops: str) -> dict[PurePosixPath, ast.AST]:
    """The Python files below some folders of the repository (links are not followed)."""
    files = [file for top in tops for file in (REPO / top).rglob("*.py")]
    real = {file.resolve(): PurePosixPath(file.resolve().relative_to(REPO)) for file in files}
    return {path: ast.parse(file.read_text("utf-8")) for file, path in real.items()}


PACKAGES = trees("modeling_ospruner", "ospruner", *MAPPED)
FLAT = {path.stem for path in PACKAGES if path.name.endswith(FLAT_SUFFIX)}


def test_every_file_keeps_the_floors() -> None:
    everything = PACKAGES | trees("tests", "benchmarks", "docs")
    found = {str(path): faults(path, tree, FLAT) for path, tree in everything.items()}
    assert {path: what for path, what in found.items() if what} == {}


def test_no_two_things_have_one_name() -> None:
    classes = [
        node.name
        for tree in PACKAGES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    files = [path.stem for path in PACKAGES if path.name != "__init__.py"]
    assert [name for name, count in Counter([*classes, *files]).items() if count > 1] == []


def test_no_circle_of_imports() -> None:
    modules = {module_name(path) for path in PACKAGES}
    graph: dict[str, set[str]] = {}
    for path, tree in PACKAGES.items():
        # What is imported for its type alone is not loaded.
        named = [t for node, _ in imports_of(tree, types=False) for t in targets_of(node, path)]
        found = {name for t in named for name in (t, t.rpartition(".")[0]) if name in modules}
        graph[module_name(path)] = found - {module_name(path)}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {error.args[1]}")


@pytest.mark.parametrize(
    ("path", "source", "fault"),
    [
        ("ospruner/engines/vllm.py", "import ospruner.train.trainer", "imports up"),
        ("ospruner/engines/vllm.py", "from ..eval import replay", "imports up"),
        ("train/labels/labelling.py", "def f():\n    from ..objective import g", "imports up"),
        ("eval/replay.py", "from eval.stopping import f", "bare import of eval"),
        ("eval/replay.py", "from tests.conftest import x", "a package imports tests"),
        ("modeling_ospruner/policy_ospruner.py", "from . import x", "only as `from .x import y`"),
        ("modeling_ospruner/policy_ospruner.py", "from .ghost import x", "names no flat file"),
        ("modeling_ospruner/policy_ospruner.py", "import peft", "outside try"),
        ("modeling_ospruner/policy_ospruner.py", "import ospruner.eval", "by name"),
        (
            "modeling_ospruner/policy_ospruner.py",
            "try:\n import peft\nexcept ImportError: pass",
            "",
        ),
        ("ospruner/engines/vllm.py", "import vllm", ""),
    ],
)
def test_faults_are_found(path: str, source: str, fault: str) -> None:
    found = faults(PurePosixPath(path), ast.parse(source), FLAT)
    assert any(fault in one for one in found) if fault else not found
