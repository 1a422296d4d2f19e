"""The run on a pretrained model, as small as it goes, on SmolLM2-135M-Instruct."""

import gzip
import json
import os
from pathlib import Path

import pytest

from ospruner.eval.results import Results
from ospruner.train.labels.loading import load_labels

from .conftest import RunScript

FOLDER = os.environ.get("OSPRUNER_SMOLLM2")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        FOLDER is None, reason="OSPRUNER_SMOLLM2 names no folder of SmolLM2-135M-Instruct"
    ),
]
COUNTS = {"gsm8k_train": 6030, "gsm8k_test": 20, "math500": 20}


def test_from_labels_to_seconds_and_nothing_twice(run_script: RunScript, tmp_path: Path) -> None:
    """Sums as problems: what is right does not matter here."""
    files = tmp_path / "files"
    files.mkdir()
    for place, (name, count) in enumerate(COUNTS.items()):
        rows = [
            {"problem": f"What is {n} + {7 + place}?", "answer": str(n + 7 + place)}
            for n in range(count)
        ]
        with gzip.open(files / f"{name}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    arguments = ["--base", str(FOLDER), "--out", str(tmp_path / "run"), "--files", str(files)]
    learnt = tmp_path / "learnt.jsonl"
    learnt.write_text(json.dumps({"problem": "What is 0 + 8?", "answer": "8"}) + "\n")
    arguments += ["--max-tokens", "250", "--problems", "32", "8", "12", "2"]
    arguments += ["--exclude", str(learnt), "--beside", "concise"]
    found, printed = run_script("real_model.py", *arguments)
    assert {name: stats["traces"] for name, stats in found["problems"].items()} == {
        "train": 32,
        "validation": 8,
        "gsm8k": 12,
        "math500": 2,
    }
    asked = load_labels(tmp_path / "run" / "labels" / "gsm8k").traces["problem"]
    assert "What is 1 + 8?" in asked
    assert "What is 0 + 8?" not in asked
    for name in ("gsm8k", "math500"):
        names = {one.method for one in Results.from_dict(found["frontier"][name]).frontiers}
        assert {"OS-Pruner, one policy", "probe", "answer agreement", "fixed budget"} <= names
        first = Results.from_dict(found["replay"][name]).frame["method"][:2]
        assert list(first) == ["full trace", "full trace, prompt concise"]
    assert Results.from_dict(found["online"]["gsm8k"]).frame["time_ratio"][0] == 1
    assert all(arm["thinking_tokens_per_second"] > 0 for arm in found["engines"]["arms"].values())
    assert "$ ospruner train" in printed
    again, printed = run_script("real_model.py", *arguments)
    assert "$ ospruner train" not in printed
    assert "$ ospruner compare" not in printed
    assert again["frontier"] == found["frontier"]
