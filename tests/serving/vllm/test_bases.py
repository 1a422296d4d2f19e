"""Each base inside vLLM, compiled and on two ranks: a process each, hence slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from ...own_process import needs_vllm, run_checks

NAMES = ("qwen2", "qwen3", "qwen3_moe", "llama", "mistral", "gemma3_text", "glm4", "gpt_oss")
MORE = (  # queries alone
    *("afmoe", "apertus", "ernie4_5", "gemma4_text", "granite", "granite_swa", "laguna"),
    *("ministral3", "phi3"),
)
CASES = [f"test_base[2-{base}]" for base in NAMES]
CASES += ["test_base[0-qwen2]", "test_base[3-llama]", "test_base[3-gpt_oss]"]
CASES += [f"test_queries[{base}]" for base in NAMES + MORE] + ["test_queries_compiled"]
CASES += [f"test_adapters[{one}]" for one in ("llama-layers", "qwen3_moe-layers", "qwen3-queries")]
CASES += ["test_compiled[qwen2]", "test_compiled[gemma3_text]", "test_two_tensor_parallel_ranks"]
CASES += ["test_a_hybrid", "test_refused[cohere2_moe]", "test_refused[mimo_v2_flash]"]
CASES += ["test_a_base_of_other_weights_is_refused"]


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_base_inside_vllm(case: str) -> None:
    run_checks(Path(__file__).with_name("bases_checks.py"), case=case)


@needs_vllm
@pytest.mark.slow
def test_quantised_bases_inside_vllm() -> None:
    checks = Path(__file__).with_name("quantised_checks.py")
    for layout in ("mxfp4", "fp8", "awq", "gptq"):
        run_checks(checks, case=f"test_the_base_is_packed_and_the_tail_is_not[{layout}]")
