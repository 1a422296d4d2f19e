"""Wheel and sdist hold the tree, no less and nothing under a bare name, and install that way."""

import os
import shutil
import sys
import venv
import zipfile
from pathlib import Path, PurePosixPath

import pytest

from ..own_process import output_of

INSTALLED_AS = {name: f"ospruner/{name}" for name in ("train", "eval", "hub_cards")}
INSTALLED_AS |= {name: name for name in ("modeling_ospruner", "ospruner")}
SEEN_FROM_OUTSIDE = """
import importlib, importlib.util, sys
bare = [name for name in ("train", "eval", "hub_cards") if importlib.util.find_spec(name)]
assert not bare, f"importable under bare names: {bare}"
for name in ("train", "demo", "eval", "hub_cards", "engines", "cli", "serving.start"):
    print(importlib.util.find_spec(f"ospruner.{name}").origin)
"""


def run(*command: str | Path, cwd: Path, pythonpath: Path | None = None) -> str:
    """The output of a command that sees no package but those installed or on `pythonpath`."""
    env = {"PATH": "/usr/bin:/bin", "PIP_NO_INPUT": "1", "PIP_NO_INDEX": "1", "HOME": str(cwd)}
    if pythonpath:
        env["PYTHONPATH"] = str(pythonpath)
    return output_of(*command, cwd=cwd, env=env)


@pytest.fixture(scope="module")
def built(repo_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `python -m build` makes of a copy of the tree: the sdist, and the wheel from it.

    Of a copy: building writes into the tree, which other tests read.
    """
    out = tmp_path_factory.mktemp("built")
    copy = out / "tree"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repo_dir / name, copy / name)
    ignored = shutil.ignore_patterns("__pycache__")
    # `tests` is copied to see that it stays out.
    for name in (*INSTALLED_AS, "tests"):
        shutil.copytree(repo_dir / name, copy / name, symlinks=True, ignore=ignored)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, cwd=copy)
    shutil.rmtree(copy)
    return out


def files_of(folder: Path) -> set[PurePosixPath]:
    return {
        PurePosixPath(file.relative_to(folder).as_posix())
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and file.resolve() == file
    }


def test_wheel_holds_every_file_of_the_packages(built: Path, repo_dir: Path) -> None:
    (wheel,) = built.glob("*.whl")
    expected = set[str]()
    for folder, installed in INSTALLED_AS.items():
        assert (repo_dir / folder / "py.typed").is_file()
        expected |= {f"{installed}/{file}" for file in files_of(repo_dir / folder)}
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = {name for name in names if ".dist-info/" not in name}
    assert expected - shipped == set(), "in the tree, not in the wheel: see pyproject.toml"
    assert shipped - expected == set(), "in the wheel, not in the tree"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_package_does_the_whole_job_in_an_empty_environment(
    kind: str, built: Path, repo_dir: Path, tmp_path: Path
) -> None:
    """Installs all that it depends on, by pip as it is configured, and runs the demo."""
    (package,) = built.glob(kind)
    venv.create(tmp_path / "venv", with_pip=True)
    binaries = tmp_path / "venv" / "bin"
    cwd = tmp_path / "empty"
    cwd.mkdir()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pins = repo_dir / "constraints.txt"
    for program, *arguments in (
        ("pip", "install", "--quiet", "-c", pins, package),
        ("ospruner", "demo", "--quick", "--out", cwd / "run"),
        ("ospruner", "doctor"),
    ):
        output_of(binaries / str(program), *arguments, cwd=cwd, env=env)
    assert list((cwd / "run").rglob("results.json"))


def test_installed_wheel_takes_no_bare_name(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    target = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(target)  # as pip installs pure Python
    found = {path.name for path in target.iterdir() if path.suffix != ".dist-info"}
    assert found == {"modeling_ospruner", "ospruner"}
    origins = run(sys.executable, "-c", SEEN_FROM_OUTSIDE, cwd=tmp_path, pythonpath=target)
    assert all(Path(line).is_relative_to(target) for line in origins.splitlines()), origins


def test_present_install_takes_no_bare_name(tmp_path: Path, repo_dir: Path) -> None:
    """Under `make test` the present install is the editable one."""
    origins = run(sys.executable, "-c", SEEN_FROM_OUTSIDE, cwd=tmp_path).splitlines()
    assert len(origins) == 7
    elsewhere = [line for line in origins if not Path(line).is_relative_to(repo_dir)]
    assert elsewhere == [], "the tests would test another tree: pip install -e . in this one"
