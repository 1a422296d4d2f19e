"""The tables of the benchmark of domains; its run takes minutes, and a reasoner of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PRICES = (2e-4, 1e-3, 5e-3)
DOMAINS = ("math", "choice", "generated")


def test_tables_of_a_finished_run(repo_dir: Path, tmp_path: Path) -> None:
    crossed = [
        {
            "trained_on": trained,
            "tested_on": tested,
            "price": price,
            "reward_points": 40 + 10 * (trained == tested) - 1000 * price,
            "accuracy": 0.5,
            "tokens": 100.4,
            "less_own": [-10.0 * (trained != tested), -12.0, -8.0],
        }
        for tested in DOMAINS
        for trained in ("full trace", *DOMAINS)
        for price in PRICES
    ]
    rules = [
        {"tested_on": "choice", "method": "OS-Pruner", "area": [50.0, 49.0, 51.0], "lead": None,
         "gap_closed": [60.0, 55.0, 65.0]},
        {"tested_on": "choice", "method": "LearnStop", "area": [48.0, 47.0, 49.0],
         "lead": [2.0, 1.0, 3.0], "gap_closed": [50.0, 45.0, 55.0]},
    ]  # fmt: skip
    file = tmp_path / "domains.json"
    file.write_text(json.dumps({"crossed": crossed, "rules": rules}))
    command = [sys.executable, str(repo_dir / "benchmarks" / "domains.py"), "--show", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    (line,) = [one for one in lines if one.startswith("| 1e-3 | choice |")]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[2] == "39.0, 100 tokens; -10.0 [-12.0, -8.0]"
    assert cells[3] == "49.0, 100 tokens"
    assert len([one for one in lines if one.startswith(("| 2e-4", "| 1e-3", "| 5e-3"))]) == 12
    assert "| choice | OS-Pruner | 50.00 [49.00, 51.00] | – | 60.0 [55.0, 65.0] |" in lines
    assert (
        "| choice | LearnStop | 48.00 [47.00, 49.00] | +2.00 [+1.00, +3.00] | 50.0 [45.0, 55.0] |"
        in lines
    )


def test_the_page_shows_what_the_file_holds(repo_dir: Path) -> None:
    file = repo_dir / "docs" / "domains.json"
    command = [sys.executable, str(repo_dir / "benchmarks" / "domains.py"), "--show", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    page = (repo_dir / "docs" / "results.md").read_text("utf-8")
    tables = [table.strip() for table in done.stdout.strip().split("\n\n")]
    assert len(tables) == 2
    assert all(table in page for table in tables)
