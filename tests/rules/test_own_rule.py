"""docs/own-rule.md: its rule is the example's, and runs in generate, replay and frontier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from typer.testing import CliRunner

import ospruner
from ospruner.cli import app
from ospruner.demo import REASONER
from ospruner.demo.problems import Split
from ospruner.demo.shipped import Reasoner, write_split
from ospruner.rules.live import generate_with_rule

EXAMPLE = "docs/examples/own_rule.py"


def test_the_page_shows_the_example(repo_dir: Path) -> None:
    page = (repo_dir / "docs/own-rule.md").read_text("utf-8")
    code = (repo_dir / EXAMPLE).read_text("utf-8").partition('"""\n\n')[2]
    assert code.strip() in page


def test_it_stops_where_two_equal_answers_are_sure(
    reasoner: Reasoner, load_script: Callable[[str], ModuleType]
) -> None:
    rule = load_script(EXAMPLE).SURE_TWICE(0.9)
    tokenizer: Any = reasoner.tokenizer
    text = "Solve 3x+54=102 for x.\n\n" + reasoner.token_format.format.user_instruction
    said = [{"role": "user", "content": text}]
    inputs = tokenizer.apply_chat_template(
        said, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    _, (record,) = generate_with_rule(reasoner.model, tokenizer, rule, **inputs, max_new_tokens=300)
    *before, last = record.signals
    assert record.reason == "policy"
    assert last is not None
    assert last >= 0.9
    assert not any(signal is not None and signal >= 0.9 for signal in before)


def test_compare_takes_it_with_a_threshold_and_as_a_whole_method(
    repo_dir: Path, tmp_path: Path
) -> None:
    own = f"{repo_dir / EXAMPLE}:SURE_TWICE"
    splits: tuple[Split, ...] = ("test", "validation")
    for split in splits:
        write_split(tmp_path, split, 16, 5)
        ospruner.label(
            REASONER, tmp_path / f"{split}.jsonl", out=tmp_path / split, max_thinking_tokens=200
        )
    report = ospruner.compare(tmp_path / "test", [f"{own}:0.9", "agreement:2"])
    tokens = report.frame.set_index("method")["tokens"]
    # It asks for more than agreement does.
    assert tokens["answer agreement"] <= tokens["sure twice"] < tokens["full trace"]
    report = ospruner.compare(
        tmp_path / "test", [own, "entropy"], choose_on=tmp_path / "validation"
    )
    assert set(report.frontiers["method"]) >= {"sure twice", "answer entropy"}
    report.save(tmp_path / "out")
    result = CliRunner().invoke(app, ["compare", str(tmp_path / "out")], catch_exceptions=False)
    assert "sure twice" in result.output
