"""The Python blocks of docs/generate.md, run in order as they stand, on the embedded reasoner."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ospruner.demo import REASONER
from ospruner.demo.shipped import Reasoner
from ospruner.train.untrained import untrained

EVERY_PRICE = "org/ospruner-r1-7b"
POLICIES = ("org/ospruner-r1-7b-price5e-5", "org/ospruner-r1-7b-price2e-5")
BASE = "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"


@pytest.fixture(scope="module")
def policies(reasoner: Reasoner, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Policies of the reasoner that stop at about every third paragraph, by name."""
    folders = {}
    fields: list[dict[str, Any]] = [{"init_bias": -1.0}, {"init_bias": -0.5}]
    for name, more in zip(
        (*POLICIES, EVERY_PRICE), [*fields, {"price_range": (5e-5, 1e-2)}], strict=True
    ):
        folder = tmp_path_factory.mktemp("policies") / name.split("/")[1]
        model = untrained(reasoner.model, reasoner.tokenizer, tuning="layers", **more)
        model.save_pretrained(folder)
        folders[name] = str(folder)
    return folders


def blocks_of(page: Path) -> list[tuple[str, str]]:
    """Each Python block with the heading above it."""
    sections = re.split(r"^## (.*)\n", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    pairs = zip(sections[1::2], sections[2::2], strict=True)
    found = [
        (name, re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)) for name, text in pairs
    ]
    return [(name, block) for name, blocks in found for block in blocks]


def test_the_examples_of_generate_run_as_written(
    repo_dir: Path, policies: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = blocks_of(repo_dir / "docs" / "generate.md")
    assert len(blocks) >= 14
    names: dict[str, Any] = {}
    printed: dict[str, str] = {}
    torch.manual_seed(0)
    for heading, block in blocks:
        for name, folder in {**policies, BASE: str(REASONER)}.items():
            block = block.replace(f'"{name}"', repr(folder))
        # The reasoner is short of breath; 2,000 tokens of rambling would take minutes.
        block = block.replace("max_new_tokens=2000", "max_new_tokens=300")
        assert "org/ospruner" not in block
        exec(compile(block, f"docs/generate.md, {heading}", "exec"), names)
        printed[heading] = printed.get(heading, "") + capsys.readouterr().out
    assert "</think>\n\n\\boxed{" in printed["Stop"]
    assert re.match(r"(policy|natural) \d+ \[\d+", printed["What happened"])
    assert (
        len(re.findall(r"^(0|5e-05|0.001) \d+ \[", printed["One policy, every price"], re.M)) == 3
    )
    assert int(printed["Budgets"].split()[0]) >= 20
    assert "</think>" in printed["Streaming"]
    assert "tensor([[" in printed["Score a given text"]
    assert printed["A base that is loaded already"].strip() in {"policy", "natural"}
    assert printed["Pipeline"].count("\\boxed{") == 2
