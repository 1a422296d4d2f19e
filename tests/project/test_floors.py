"""Imports go down only, no circle anywhere, and the flat model files stay loadable from the Hub.

A file may import its own room and rooms on lower floors. Uploaded files import each other alone.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

import pytest
from transformers.dynamic_module_utils import get_imports, get_relative_imports

REPO = Path(__file__).resolve().parents[2]

# The longest matching name decides.
FLOORS = {
    "ospruner_sglang": 0,
    "ospruner_vllm": 0,
    "modeling_ospruner.common": 0,
    "modeling_ospruner": 1,  # the uploaded files
    "modeling_ospruner.engines": 2,
    "modeling_ospruner.serving": 2,
    "ospruner.hub_cards": 2,
    "modeling_ospruner.sglang_plugin": 3,
    "modeling_ospruner.vllm_plugin": 3,
    "modeling_ospruner.doctor": 3,
    "ospruner.eval.grading": 3,
    "modeling_ospruner.app": 4,
    "ospruner.eval.problems": 4,
    "ospruner.eval": 4,
    "ospruner.eval.rules": 5,
    "ospruner.eval.frontier": 6,
    "ospruner.eval.harness": 6,
    "ospruner.eval.online": 6,
    "ospruner.eval.report": 7,
    "ospruner.train.labels": 8,
    "ospruner.train.trunk": 8,
    "ospruner.train": 9,
    "ospruner.train.comparing": 10,
    "ospruner.train.toy": 10,
    "ospruner_cli": 11,
}
MAPPED = ("train", "eval", "hub_cards")  # folders installed as ospruner.<folder>
FLAT_THIRD_PARTY = {"torch", "transformers", "safetensors"}
FLAT_SUFFIX = "_ospruner.py"  # of the files that are uploaded beside the weights
NOT_PACKAGES = {"tests", "benchmarks", "docs", "typings"}


def module_name(path: PurePosixPath) -> str:
    """The installed name of a file given relative to the repository."""
    parts = list(path.with_suffix("").parts)
    if parts[0] in MAPPED:
        parts.insert(0, "ospruner")
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def package_of(module: str) -> str | None:
    """The entry of FLOORS that `module` belongs to, None for code of others."""
    fits = [name for name in FLOORS if module == name or module.startswith(name + ".")]
    return max(fits, key=len, default=None)


def is_flat(path: PurePosixPath) -> bool:
    """Whether the file is uploaded to the Hub beside the weights."""
    return path.parent == PurePosixPath("modeling_ospruner") and path.name.endswith(FLAT_SUFFIX)


def imports_of(tree: ast.Module) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Every import statement, at any depth, and whether it stands in the body of a `try`."""

    def walk(node: ast.AST, guarded: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
        for child in ast.iter_child_nodes(node):
            in_try = isinstance(node, ast.Try) and bool(node.handlers) and child in node.body
            if isinstance(child, ast.Import | ast.ImportFrom):
                yield child, guarded or in_try
            yield from walk(child, guarded or in_try)

    yield from walk(tree, False)


def targets_of(node: ast.Import | ast.ImportFrom, path: PurePosixPath) -> list[str]:
    """The absolute names that an import may load: modules, and modules named as attributes."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if node.level == 0:
        base = node.module or ""
    else:
        package = module_name(path).split(".")
        if path.name != "__init__.py":
            package.pop()
        package = package[: len(package) - (node.level - 1)]
        base = ".".join(package + (node.module or "").split(".")).rstrip(".")
    return [f"{base}.{alias.name}" for alias in node.names]


def floor_faults(path: PurePosixPath, target: str, relative: bool) -> Iterator[str]:
    """What is wrong with `path` importing `target`, by the floors and the names."""
    if not relative and target.split(".")[0] in MAPPED:
        yield f"bare import of {target}: say ospruner.{target}"
    own, other = package_of(module_name(path)), package_of(target)
    if own is None or other is None:
        if own is not None and target.split(".")[0] in NOT_PACKAGES:
            yield f"a package imports {target}"
        return
    if own.startswith("ospruner.") and own.split(".")[:2] == other.split(".")[:2] and not relative:
        yield f"{target} imported by its full name inside its own package: make it relative"
    if other != own and FLOORS[other] >= FLOORS[own]:
        yield f"imports up: {own} is floor {FLOORS[own]}, {target} is floor {FLOORS[other]}"


def flat_faults(node: ast.Import | ast.ImportFrom, guarded: bool, flat: set[str]) -> Iterator[str]:
    """What would break a flat file when transformers loads it from a Hub repository."""
    if isinstance(node, ast.ImportFrom) and node.level > 0:
        if node.level > 1 or node.module is None or "." in node.module:
            yield "flat files import each other only as `from .x import y`"
        elif node.module not in flat:
            yield f"`from .{node.module} import ...` names no flat file: it is not uploaded"
        return
    modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    for module in modules:
        top = module.split(".")[0]
        if top in {
            "modeling_ospruner",
            "ospruner",
            "ospruner_cli",
            "ospruner_sglang",
            "ospruner_vllm",
        }:
            yield f"flat file imports {module} by name, which a Hub user may not have installed"
        elif top not in FLAT_THIRD_PARTY | sys.stdlib_module_names and not guarded:
            yield f"flat file imports {top} outside try: the Hub refuses users without it"


def faults(path: PurePosixPath, source: str, flat: set[str]) -> list[str]:
    """Every broken rule in one file, as `line: what`."""
    found = []
    for node, guarded in imports_of(ast.parse(source)):
        relative = isinstance(node, ast.ImportFrom) and node.level > 0
        for target in targets_of(node, path):
            found += [f"{node.lineno}: {fault}" for fault in floor_faults(path, target, relative)]
        if is_flat(path):
            found += [f"{node.lineno}: {fault}" for fault in flat_faults(node, guarded, flat)]
    return found


def python_files() -> list[PurePosixPath]:
    """The repository's own Python files."""
    tops = [
        top
        for top in REPO.iterdir()
        if not top.name.startswith(".")
        and top.name not in {"build", "dist", "runs", "typings"}
        and not (top / "pyvenv.cfg").exists()
    ]
    files = [top for top in tops if top.suffix == ".py"]
    files += [file for top in tops if top.is_dir() for file in top.rglob("*.py")]
    return sorted(PurePosixPath(file.relative_to(REPO).as_posix()) for file in files)


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The circles of an import graph: modules that reach each other, each group once."""
    order = {name: number for number, name in enumerate(graph)}

    def reached(start: str) -> set[str]:
        seen, waiting = set[str](), [start]
        while waiting:
            for name in graph[waiting.pop()] - seen:
                seen.add(name)
                waiting.append(name)
        return seen

    reach = {name: reached(name) for name in graph}
    groups = {
        tuple(sorted((b for b in reach[a] if a in reach[b]), key=order.__getitem__))
        for a in graph
        if a in reach[a]
    }
    return sorted([list(group) for group in groups])


def import_graph(files: Mapping[PurePosixPath, str]) -> dict[str, set[str]]:
    """For each module of the packages the modules that it imports, at any depth of its code."""
    modules = {module_name(path) for path in files}
    graph: dict[str, set[str]] = {}
    for path, source in files.items():
        found = set()
        for node, _ in imports_of(ast.parse(source)):
            for target in targets_of(node, path):
                found |= {name for name in (target, target.rpartition(".")[0]) if name in modules}
        graph[module_name(path)] = found - {module_name(path)}
    return graph


FILES = python_files()
IN_PACKAGES = [path for path in FILES if path.parts[0] not in NOT_PACKAGES]
FLAT = {path.stem for path in FILES if is_flat(path)}


def test_every_file_keeps_the_floors() -> None:
    found = {
        str(path): faults(path, (REPO / path).read_text(encoding="utf-8"), FLAT) for path in FILES
    }
    assert {path: what for path, what in found.items() if what} == {}


def test_every_room_lies_on_a_floor() -> None:
    """A new folder is a room, and has to be given a floor; engines/ and its folder are one."""
    rooms = {module_name(path.parent / "__init__.py") for path in IN_PACKAGES if path.parts[1:]}
    assert rooms - set(FLOORS) == {"modeling_ospruner.engines.transformers"}
    assert {package_of(module_name(path)) for path in IN_PACKAGES} == set(FLOORS)


def test_no_circle_of_imports() -> None:
    sources = {path: (REPO / path).read_text(encoding="utf-8") for path in IN_PACKAGES}
    assert circles(import_graph(sources)) == []


def test_a_circle_is_found() -> None:
    files = {
        PurePosixPath("train/run.py"): "from .loop import f",
        PurePosixPath("train/loop.py"): "def f():\n    from . import tail",
        PurePosixPath("train/tail.py"): "from ospruner.train.run import g",
        PurePosixPath("train/trunk/traces.py"): "from .tail import h",
    }
    named = ["ospruner.train.run", "ospruner.train.loop", "ospruner.train.tail"]
    assert circles(import_graph(files)) == [named]
    assert circles({"a": {"b"}, "b": {"a"}, "c": {"d"}, "d": {"c", "a"}}) == [
        ["a", "b"],
        ["c", "d"],
    ]
    assert circles({"a": {"b"}, "b": set()}) == []


def test_no_two_modules_of_a_tree_share_a_name() -> None:
    for tree in ("modeling_ospruner", *MAPPED):
        names = [path.stem for path in IN_PACKAGES if path.parts[0] == tree]
        assert {name for name in names if names.count(name) > 1} <= {"__init__"}, tree


def test_folders_and_uploaded_files_stay_few() -> None:
    counts = Counter(path.parent for path in IN_PACKAGES if path.name != "__init__.py")
    assert {str(folder): n for folder, n in counts.items() if n > 12} == {}
    assert len(FLAT) <= 10  # and generate.py, a copy of one: eleven Python files to audit


def test_hub_loader_finds_the_same_imports() -> None:
    """transformers finds imports by regex, in docstrings too: they must name nothing else."""
    for path in (path for path in FILES if is_flat(path)):
        found = set(get_imports(str(REPO / path)))
        assert found <= FLAT_THIRD_PARTY | sys.stdlib_module_names, path
        assert set(get_relative_imports(str(REPO / path))) <= FLAT, path


FLAT_FILE = "modeling_ospruner/policy_ospruner.py"
KNOWN_FLAT = {"policy_ospruner", "formats_ospruner"}


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        (FLAT_FILE, "from . import formats_ospruner", "only as `from .x import y`"),
        (FLAT_FILE, "from .engines.interface import Engine", "only as `from .x import y`"),
        (FLAT_FILE, "from .engines.interface import Engine", "imports up"),
        (FLAT_FILE, "from ..eval import schema", "only as `from .x import y`"),
        (FLAT_FILE, "from .ghost import y", "names no flat file"),
        (FLAT_FILE, "from modeling_ospruner.formats_ospruner import f", "by name"),
        (FLAT_FILE, "def f():\n    import modeling_ospruner", "by name"),
        (FLAT_FILE, "import numpy as np", "numpy outside try"),
        (FLAT_FILE, "def f():\n    from peft import LoraConfig", "peft outside try"),
        (FLAT_FILE, "try:\n    x = 1\nexcept ValueError:\n    import peft", "peft outside try"),
        (FLAT_FILE, "try:\n    import peft\nfinally:\n    x = 1", "peft outside try"),
        (FLAT_FILE, "from ospruner.eval.stopping import f", "imports up"),
        ("modeling_ospruner/__init__.py", "from .engines import interface", "imports up"),
        ("modeling_ospruner/__init__.py", "from . import engines", "imports up"),
        (
            "modeling_ospruner/engines/interface.py",
            "from ospruner.eval import schema",
            "imports up",
        ),
        ("modeling_ospruner/engines/interface.py", "import ospruner.hub_cards.facts", "imports up"),
        ("hub_cards/facts.py", "from ..eval.metrics import aes", "imports up"),
        ("hub_cards/facts.py", "from modeling_ospruner.engines import interface", "imports up"),
        ("eval/replay.py", "from ospruner import train", "imports up"),
        ("eval/grading/boxed.py", "from ..schema import FEATURES", "imports up"),
        ("eval/online/runners.py", "from ..report.terminal import f", "imports up"),
        ("train/labels/rows.py", "from ..loop import train", "imports up"),
        ("train/loop.py", "from .toy import recipe", "imports up"),
        (FLAT_FILE, "from .common.durable import f", "only as `from .x import y`"),
        (
            "eval/replay.py",
            "def f():\n    from ospruner.train.labels.making import label",
            "imports up",
        ),
        ("eval/replay.py", "from ospruner.eval.schema import FEATURES", "make it relative"),
        ("train/loop.py", "import ospruner_cli", "imports up"),
        ("train/loop.py", "from .. import train, eval\nimport ospruner_cli", "imports up"),
        ("train/loop.py", "from eval.stopping import f", "bare import of eval"),
        ("train/loop.py", "import train.traces", "bare import of train"),
        ("train/loop.py", "from tests.conftest import x", "a package imports tests"),
        ("tests/eval/test_x.py", "import eval", "bare import of eval"),
        ("benchmarks/train.py", "from hub_cards import facts", "bare import of hub_cards"),
    ],
)
def test_broken_rule_is_found(path: str, source: str, complaint: str) -> None:
    assert any(complaint in fault for fault in faults(PurePosixPath(path), source, KNOWN_FLAT))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (FLAT_FILE, "import torch.nn as nn\nfrom transformers.cache_utils import DynamicCache"),
        (FLAT_FILE, "import math\nfrom .formats_ospruner import ReasoningFormat"),
        (FLAT_FILE, "try:\n    import peft\nexcept ImportError:\n    peft = None"),
        (FLAT_FILE, "def f():\n    try:\n        import peft.x\n    except ImportError: raise"),
        ("modeling_ospruner/__init__.py", "from .policy_ospruner import StoppingPolicy"),
        (
            "modeling_ospruner/engines/interface.py",
            "from ..formats_ospruner import ReasoningFormat",
        ),
        ("modeling_ospruner/engines/vllm.py", "import vllm"),
        ("eval/replay.py", "from .schema import FEATURES\nimport math_verify"),
        ("eval/replay.py", "from modeling_ospruner.engines.interface import Engine"),
        (
            "train/labels/making.py",
            "from ospruner.eval.schema import FEATURES\nfrom . import rows",
        ),
        ("train/toy/recipe.py", "from ..loop import train\nfrom . import problems"),
        (
            "ospruner_cli/toy.py",
            "from ospruner.train.toy import recipe\nimport ospruner.eval.report.terminal",
        ),
        ("tests/train/test_x.py", "from ospruner.train.labels.making import label"),
    ],
)
def test_kept_rules_are_not_complained_of(path: str, source: str) -> None:
    assert faults(PurePosixPath(path), source, KNOWN_FLAT) == []


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("train/toy/recipe.py", "ospruner.train.toy.recipe"),
        ("eval/__init__.py", "ospruner.eval"),
        ("modeling_ospruner/engines/interface.py", "modeling_ospruner.engines.interface"),
        ("ospruner_cli/__init__.py", "ospruner_cli"),
    ],
)
def test_module_names_are_the_installed_ones(path: str, name: str) -> None:
    assert module_name(PurePosixPath(path)) == name
