"""The benchmark of labels does what it says; vLLM's part of it is tested in tests/engines."""

from __future__ import annotations

import gzip
import importlib.util
import json
import math
import runpy
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from modeling_ospruner import TokenFormat
from ospruner.formats import DEEPSEEK_R1


def test_it_prints_its_keys_on_the_last_line(
    repo_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script, file = repo_dir / "benchmarks" / "labels.py", tmp_path / "labels.json"
    monkeypatch.syspath_prepend(script.parent)
    arguments = ["--limit", "1", "--problems", "2", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, package=None: None if name == "vllm" else find_spec(name, package),
    )
    runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr().out
    found = json.loads(printed.splitlines()[-1])
    assert found == json.loads(file.read_text())
    assert (found["traces"], found["trace_tokens"], found["forks"]) == (1, 202, 11)
    assert 1 <= found["computed_over_unique_transformers"] <= 1.02
    assert found["computed_over_unique_vllm"] is None
    assert found["reencoded_over_unique"] > 2
    assert found["same_answers"] >= 0.95
    assert math.isfinite(found["speedup_over_reencode"])
    assert sum(found["share_of_time"].values()) == pytest.approx(1)
    assert "computed_over_unique_vllm           not installed" in printed


def test_the_lengths_and_steps_are_those_of_real_traces(repo_dir: Path, shared_dir: Path) -> None:
    shapes = json.loads((repo_dir / "benchmarks" / "trace_shapes.json").read_text("utf-8"))[
        "traces"
    ]
    tokenizer = AutoTokenizer.from_pretrained(
        shared_dir / "data/tokenizers/deepseek-r1-distill-qwen"
    )
    fmt = TokenFormat.compile(DEEPSEEK_R1, tokenizer)
    with gzip.open(shared_dir / "data/traces/traces_mit.jsonl.gz", "rt", encoding="utf-8") as lines:
        reasoning = {row["id"]: row["reasoning"] for row in map(json.loads, lines)}
    assert len(shapes) == 10
    for shape in shapes:
        ids = tokenizer.encode(reasoning[shape["id"]], add_special_tokens=False)
        assert (len(ids), fmt.step_ends(ids)) == (shape["tokens"], shape["step_ends"])
