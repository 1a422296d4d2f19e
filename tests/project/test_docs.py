"""The Python blocks of docs/generate.md, run in order as they stand, on the embedded reasoner."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ospruner.demo import REASONER
from ospruner.demo.shipped import Reasoner
from ospruner.train.untrained import untrained

from ..pages import blocks

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


def test_the_examples_of_generate_run_as_written(
    repo_dir: Path, policies: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = blocks(repo_dir / "docs" / "generate.md", "python")
    assert len(found) >= 14
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    for block in found:
        for name, folder in {**policies, BASE: str(REASONER)}.items():
            block = block.replace(f'"{name}"', repr(folder))
        # The reasoner is short of breath; 2,000 tokens of rambling would take minutes.
        block = block.replace("max_new_tokens=2000", "max_new_tokens=300")
        assert "org/ospruner" not in block
        exec(compile(block, "docs/generate.md", "exec"), names)
    printed = capsys.readouterr().out
    for wanted, count in (
        (r"</think>\n\n\\boxed\{", 1),  # a stop
        (r"^(policy|natural) \d+ \[\d+", 1),  # what happened
        (r"^(0|5e-05|0.001) \d+ \[", 3),  # one policy, every price
        (r"^(?:[2-9]\d|\d{3,}) ", 1),  # a budget
        (r"tensor\(\[\[", 1),  # the score of a given text
        (r"^(policy|natural)$", 1),  # a base that is loaded already
        (r"\\boxed\{", 3),  # the pipeline's, too
    ):
        assert len(re.findall(wanted, printed, re.M)) >= count, (wanted, printed)
