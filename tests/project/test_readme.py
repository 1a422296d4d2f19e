"""The README's Python blocks, run as they stand but for the base: the embedded reasoner."""

import json
import re
from itertools import islice
from pathlib import Path

import pytest

from ospruner.demo import REASONER
from ospruner.demo.problems import Split, iterate_problems
from ospruner.demo.shipped import Reasoner


def test_the_three_uses_run_as_written(
    repo_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (repo_dir / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    load, make, compare = blocks
    monkeypatch.chdir(tmp_path)
    splits: tuple[Split, ...] = ("train", "validation")
    for split in splits:
        problems = [p.as_problem() for p in islice(iterate_problems(split, 5), 40)]
        lines = [json.dumps(vars(problem)) for problem in problems]
        Path(f"{split}.jsonl").write_text("\n".join(lines))

    names: dict[str, object] = {}
    base = '"deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"'
    assert base in make
    # The embedded reasoner rambles on now and then; 15,000 tokens of that would take minutes.
    toy = make.replace(base, repr(str(REASONER))).replace("15_000", "400")
    assert '"max_new_tokens": 400' in toy
    exec(toy, names)
    exec(compare, names)
    printed = capsys.readouterr().out
    assert printed.count("accuracy") == 4

    policy = "policies/lam1e-5"
    assert Path(policy, "model.safetensors").is_file()
    exec(load.replace("runs/demo/policy", policy), {})
    assert "</think>" in capsys.readouterr().out


def test_a_reasoner_loads_from_the_package() -> None:
    assert Reasoner().token_format.think_end_id == 4
