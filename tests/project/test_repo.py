"""The files around the code: make targets, pins, changelog, nothing of one machine's own."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

import modeling_ospruner

# Files a machine's own settings could slip into are read; these hold other people's text.
NOT_READ = {".safetensors", ".png", ".gz", ".parquet"}
INDEX = re.compile(
    r"https?://[^\s\"'<>)]*(?:pypi|/simple\b|/whl\b|/wheels?\b)"
    r"|file:///"
    r"|--(?:extra-)?index-url[ =]\S*:|--find-links[ =]|--trusted-host[ =]"
)
HOME = re.compile(
    r"(?<![\w.~$}/-])/(?:home|Users|root|opt|mnt|srv|scratch|work|workspace)/[\w.]"
    r"|\b[A-Z]:\\Users\\"
)


@pytest.fixture(scope="module")
def project(repo_dir: Path) -> dict[str, Any]:
    return tomllib.loads((repo_dir / "pyproject.toml").read_text(encoding="utf-8"))


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command as from a fresh shell: under `make test`, make's own variables are set."""
    env = {"PATH": os.environ["PATH"]}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def test_each_dependency_is_pinned_to_no_one_build(repo_dir: Path, project: dict[str, Any]) -> None:
    lines = (repo_dir / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = [line for line in lines if line and not line.startswith("#")]
    pins = {normalised(re.split(r"[^\w.-]", line)[0]): line for line in pinned}
    assert len(pins) == len(pinned), "a package is pinned twice"
    loose = [p for p in pins.values() if not re.fullmatch(r"[\w.-]+==\d[\w.]*", p)]
    assert loose == [], "name==version, without a local part such as +cpu"
    assert (pins["torch"], pins["transformers"]) == ("torch==2.13.0", "transformers==5.19.0")
    extras = project["project"]["optional-dependencies"]
    wanted = project["project"]["dependencies"] + extras["test"] + extras["docs"] + extras["dev"]
    names = {normalised(re.match(r"[\w.-]+", spec)[0]) for spec in wanted}  # type: ignore[index]
    assert names - set(pins) - {"ospruner"} == set()


@pytest.mark.parametrize("target", ["demo", "test", "test-slow", "lint", "format", "docs"])
def test_targets_make_their_environment(repo_dir: Path, tmp_path: Path, target: str) -> None:
    """In a checkout without `.venv`, as far as make is concerned."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(repo_dir / name, tmp_path / name)
    plan = run("make", "-n", target, cwd=tmp_path).stdout
    created, installed = plan.index("-m venv .venv"), plan.index("-c constraints.txt -e")
    assert created < installed < plan.index(".venv/bin/", installed + len("-c constraints.txt -e"))


def test_ci_entry_fails_where_lint_or_tests_fail(repo_dir: Path, tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    entry = shutil.copy(repo_dir / ".ci" / "run", tmp_path / ".ci" / "run")
    for lint, test in ((0, 0), (3, 0), (0, 4), (3, 4)):
        targets = f"lint:\n\t@exit {lint}\ntest:\n\t@echo closing line; exit {test}\n"
        (tmp_path / "Makefile").write_text(targets)
        done = run(entry, cwd=tmp_path)
        assert (done.returncode == 0) == (lint == 0 and test == 0)
        assert done.stdout.splitlines()[-1] == "closing line"


def test_workflow_calls_real_make_targets_on_the_tested_python(repo_dir: Path) -> None:
    workflow = yaml.safe_load((repo_dir / ".github/workflows/ci.yml").read_text("utf-8"))
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    called = [line for step in steps for line in step.get("run", "").splitlines()]
    targets = [re.fullmatch(r"make ([a-z-]+)", line) for line in called]
    assert all(targets), f"only make targets, which one can run at home: {called}"
    names = {target[1] for target in targets if target}
    makefile = (repo_dir / "Makefile").read_text("utf-8")
    assert names <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    entry = (repo_dir / ".ci" / "run").read_text("utf-8")
    assert names == set(re.findall(r"^make ([a-z-]+)", entry, re.MULTILINE)), ".ci/run and ci.yml"
    (python,) = {s["with"]["python-version"] for s in steps if "setup-python" in s.get("uses", "")}
    assert f"PYTHON ?= python{python}" in makefile


def test_links_point_at_the_mapped_packages(repo_dir: Path, project: dict[str, Any]) -> None:
    for name, folder in project["tool"]["setuptools"]["package-dir"].items():
        link = repo_dir / name.replace(".", "/")
        assert not link.readlink().is_absolute()
        assert link.resolve() == repo_dir / folder


def test_version_is_the_same_everywhere(repo_dir: Path, project: dict[str, Any]) -> None:
    version = modeling_ospruner.__version__
    assert importlib.metadata.version("ospruner") == version, "install again: pip install -e ."
    assert "version" not in project["project"], "it stands in configuration_ospruner.py alone"
    changelog = (repo_dir / "CHANGELOG.md").read_text(encoding="utf-8")
    first, *_ = re.findall(r"^## \[([^\]]+)\]", changelog, re.MULTILINE)
    assert first in (version, "Unreleased")


def test_tracked_files_name_no_machine(repo_dir: Path) -> None:
    """Neither package indexes nor absolute paths of one machine."""
    if not (repo_dir / ".git").exists():
        pytest.skip("not a git checkout: no list of tracked files")
    listed = run("git", "ls-files", "-z", cwd=repo_dir).stdout.split("\0")
    assert "README.md" in listed
    found = []
    for path in (repo_dir / name for name in listed if name):
        if path.is_file() and path.suffix not in NOT_READ and path != Path(__file__):
            text = path.read_text(encoding="utf-8")
            found += [(path, hit[0]) for rule in (INDEX, HOME) for hit in rule.finditer(text)]
    assert found == []
