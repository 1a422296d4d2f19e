"""The README's Python blocks, run as they stand but for the base: the embedded reasoner."""

import json
import re
from pathlib import Path

import pytest

from ospruner.demo import REASONER
from ospruner.demo.shipped import draw_split


def test_the_three_uses_run_as_written(
    repo_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (repo_dir / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    load, make, compare = blocks
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps(vars(one)) for one in draw_split("train", 60, 5)]
    Path("toy.jsonl").write_text("\n".join(lines))
    names: dict[str, object] = {}
    # The embedded reasoner rambles on now and then; 15,000 tokens of that would take minutes.
    small = {
        '"deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"': repr(str(REASONER)),
        '"deepscaler"': '"toy.jsonl"',
        "15_000": "400",
        'StopConfig("policy"': 'StopConfig("policy", num_train_epochs=2',
    }
    for old, new in small.items():
        assert old in make
        make = make.replace(old, new)
    exec(make, names)
    exec(compare, names)
    printed = capsys.readouterr().out
    for method in ("full trace", "OS-Pruner", "fixed budget"):
        assert method in printed
    assert Path("pareto.png").is_file()
    exec(load.replace("runs/demo/policy", "policy"), {})
    assert "</think>" in capsys.readouterr().out
