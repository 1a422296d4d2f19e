"""The provenance record: complete, readable again, and free of one machine's folders."""

import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from ospruner import provenance as facts
from ospruner.durable import write_checked


def test_record_is_written_and_read_again(tmp_path: Path) -> None:
    said: dict[str, Any] = {"seed": 7, "base_model": "org/base", "base_revision": "abc123"}
    said |= {"data_hash": "00ff", "details": {"price": 5e-5, "stages": [1, 2]}}
    written = facts.provenance(tmp_path, **said)
    assert facts.read_provenance(tmp_path) == written
    assert [path.name for path in tmp_path.iterdir()] == ["provenance.json"]
    assert {name: vars(written)[name] for name in said} == said
    for package in ("torch", "ospruner"):
        assert written.packages[package] == metadata.version(package)
    made = datetime.fromisoformat(written.created_utc)
    assert made.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - made) < timedelta(minutes=5)


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, Path("x")])
def test_details_that_json_cannot_hold_are_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(ValueError, match="details=.*JSON values only"):
        facts.provenance(tmp_path, seed=None, details={"field": value})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="gone.*does not exist"):
        facts.provenance(tmp_path / "gone", seed=None)


def test_reading_names_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no provenance.json"):
        facts.read_provenance(tmp_path)
    write_checked(tmp_path / "provenance.json", {"seed": 1})
    with pytest.raises(ValueError, match="another version"):
        facts.read_provenance(tmp_path)
    facts.provenance(tmp_path, seed=17)
    text = (tmp_path / "provenance.json").read_text()
    (tmp_path / "provenance.json").write_text(text.replace("17", "18"))
    with pytest.raises(ValueError, match=r"provenance\.json is damaged, or was edited by hand"):
        facts.read_provenance(tmp_path)


@pytest.mark.parametrize(
    ("orig_argv", "command"),
    [
        (["/a/bin/python3", "/a/bin/ospruner", "demo", "--seed", "1"], "ospruner demo --seed 1"),
        (["/a/bin/python3", "-m", "ospruner.demo", "x y"], "python3 -m ospruner.demo 'x y'"),
        (["/a/bin/python3", "/b/benchmarks/train.py", "--quick"], "python3 train.py --quick"),
        (["python3", "benchmarks/train.py"], "python3 benchmarks/train.py"),
        (["python", "-c", "pass"], "python -c pass"),
        (["/a/bin/python3"], "python3"),
    ],
)
def test_command_is_as_anyone_would_type_it(orig_argv: list[str], command: str) -> None:
    assert facts._command(orig_argv) == command


def test_hash_depends_on_contents_and_order_alone(tmp_path: Path) -> None:
    def hashed(**contents: bytes) -> str:
        for name, content in contents.items():
            (tmp_path / name).write_bytes(content)
        return facts.hash_files([tmp_path / name for name in contents])

    assert hashed(one=b"ab", two=b"c") == hashed(copy=b"ab", two=b"c")
    assert len({hashed(a=a, b=b) for a, b in ((b"ab", b"c"), (b"c", b"ab"), (b"a", b"bc"))}) == 3


def record_from(package: Path, folder: Path) -> facts.Provenance:
    """The record made by a copy of `facts.py` that lies in `package`."""
    code = f"import facts; facts.provenance({str(folder)!r}, seed=None)"
    subprocess.run([sys.executable, "-c", code], cwd=package, check=True)
    return facts.read_provenance(folder)


def test_commit_is_that_of_the_code_and_not_of_the_folder_around(tmp_path: Path) -> None:
    package, out = tmp_path / "repo" / "package", tmp_path / "out"
    package.mkdir(parents=True)
    out.mkdir()
    shutil.copy(Path(facts.__file__), package / "facts.py")
    assert record_from(package, out).git_commit is None

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=T", "-c", "user.email=t@example.org"]
        command = ["git", "-C", str(package), *identity, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "somebody's repository")
    assert record_from(package, out).git_commit is None, "not tracked: not its commit"

    git("add", "facts.py")
    git("commit", "-q", "-m", "tracked")
    record = record_from(package, out)
    assert (record.git_commit, record.git_modified) == (git("rev-parse", "HEAD"), False)

    (package / "facts.py").write_text((package / "facts.py").read_text() + "\n")
    assert record_from(package, out).git_modified is True
