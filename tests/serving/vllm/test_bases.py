"""Each base inside vLLM, compiled and on two ranks: a process each, hence slow."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ...own_process import needs_vllm, run_checks

STAND_INS = Path(__file__).parents[2] / "stand_ins"
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
CASES += ["test_refused[cohere2_moe]", "test_refused[mimo_v2_flash]"]
CASES += [f"test_a_hybrid[{one}]" for one in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")]
CASES += ["test_a_base_of_other_weights_is_refused"]


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_base_inside_vllm(case: str) -> None:
    # In the place of torchvision, which vLLM's Qwen3.5 imports and its build for CPUs has not.
    path = f"{STAND_INS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    run_checks(
        Path(__file__).with_name("bases_checks.py"),
        case=case,
        environment={"PYTHONPATH": path} if "qwen3_5" in case else {},
    )


@needs_vllm
@pytest.mark.slow
def test_quantised_bases_inside_vllm() -> None:
    checks = Path(__file__).with_name("quantised_checks.py")
    for layout in ("mxfp4", "fp8", "awq", "gptq"):
        run_checks(checks, case=f"test_the_base_is_packed_and_the_tail_is_not[{layout}]")
