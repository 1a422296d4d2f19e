"""The benchmark of replay ends with its keys; its numbers are not looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_it_prints_its_keys_on_the_last_line(repo_dir: Path) -> None:
    command = [sys.executable, str(repo_dir / "benchmarks" / "replay.py"), "--limit", "50"]
    done = subprocess.run(
        [*command, "--steps", "9"], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["traces"], result["steps"]) == (50, 9)
    assert all(result[f"{name}_seconds"] > 0 for name in ("exact", "thresholds", "intervals"))
