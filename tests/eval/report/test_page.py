from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from ospruner.eval.report.summary import told, write_report

from ..evaluations import make_evaluation, save_comparison
from .test_pictures import finished_run


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("evaluations")
    save_comparison(folder / "gsm8k", prices=[1e-4])
    save_comparison(folder / "math", benchmark="MATH-500", seed=1, prices=[1e-4])
    run = folder / "run"
    run.mkdir()
    finished_run(run, [1e-4, 5e-5, 0.0])
    paths = write_report(folder)
    return {path.name: path for path in paths}


def test_the_page_shows_what_stands_beside_it(written: dict[str, Path]) -> None:
    text = written["report.md"].read_text("utf-8")
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    model = "DeepSeek-R1-Distill-Qwen-7B"
    assert pictures == [f"pareto-{model}-forced.png", "dynamics-1.png"]
    for name in pictures:
        assert written[name].read_bytes().startswith(b"\x89PNG")
    for stem in ("best-aes-forced", f"full-{model}-forced"):
        assert written[f"{stem}.tex"].stat().st_size > 200
    rows = re.findall(r"^\| OS-Pruner price=5e-5 \| (.*) \|$", text, re.MULTILINE)
    assert rows
    for cells in (row.split(" | ") for row in rows):
        if len(cells) in (2, 4):  # rewards, main numbers
            assert all(re.fullmatch(r"\S+ \[-?[\d.]+, -?[\d.]+\]", cell) for cell in cells)
    assert "Measured beside published" in text
    assert "### Changed answers and further tokens" in text
    assert "| 59.3 |" in text  # the paper's reduction at lambda 5e-5 on GSM8K


def test_nothing_to_report_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no comparison: make one with `ospruner comp"):
        write_report(tmp_path)


def test_what_is_saved_on_traces_that_are_never_right_is_told(written: dict[str, Path]) -> None:
    evaluation = make_evaluation()
    ever = evaluation.limits[0].outcome.correct >= 0.5
    found = evaluation.results().about["never_right"]
    assert found["traces"] == pytest.approx(1 - ever.mean())
    full = evaluation.full.tokens
    assert found["tokens"] == pytest.approx(full[~ever].sum() / full.sum())
    rule = evaluation.rules[1]
    saved = full - rule.outcome.tokens
    assert found["saved"][rule.name] == pytest.approx(saved[~ever].sum() / saved.sum())
    results = evaluation.results()
    line = next(line for line in told(results) if "right at no step" in line)
    assert line.startswith(f"{100 * (1 - ever.mean()):.1f} % of the traces are right at no step")
    assert f"probe ≥.70 {100 * found['saved']['probe ≥.70']:.0f} %" in line or "probe ≥.90" in line
    assert line.partition(";")[0] in written["report.md"].read_text("utf-8")
    capped = evaluation.full.truncated > 0
    assert capped.any() == ("at_cap" in results.about)
    cut = dataclasses.replace(
        evaluation.full, truncated=(np.arange(len(full)) % 2).astype(np.float64)
    )
    first = dataclasses.replace(evaluation.rules[0], outcome=cut)
    looped = dataclasses.replace(evaluation, rules=[first, *evaluation.rules[1:]]).results()
    found = looped.about["at_cap"]
    assert found["saved"][rule.name] == pytest.approx(saved[1::2].sum() / saved.sum())
    assert any(
        line.startswith("50.0 % of the traces are cut at their cap") for line in told(looped)
    )
    without = dataclasses.replace(evaluation, limits=[])
    assert "never_right" not in without.results().about
    assert not any("at no step" in one for one in told(dataclasses.replace(results, about={})))
