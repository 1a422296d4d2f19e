"""docs/own-rule.md: its rule is the example's, and runs in generate, replay and frontier."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

import ospruner
from ospruner.cli import app
from ospruner.demo import REASONER
from ospruner.demo.problems import Split
from ospruner.demo.shipped import write_split

EXAMPLE = "docs/examples/own_rule.py"


def test_the_page_shows_the_example(repo_dir: Path) -> None:
    page = (repo_dir / "docs/own-rule.md").read_text("utf-8")
    code = (repo_dir / EXAMPLE).read_text("utf-8").partition('"""\n\n')[2]
    assert code.strip() in page


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
