from __future__ import annotations

import base64
import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ospruner.eval.report.page import write_report
from ospruner.eval.report.summary import told

from ..evaluations import make_evaluation, save_comparison
from .test_pictures import finished_run


class Page(HTMLParser):
    """Collects what a page refers to, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids.add(values.get("id") or "")
        self.links += [v for k in ("src", "href", "action") if (v := values.get(k))]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("evaluations")
    save_comparison(folder / "gsm8k", prices=[1e-4])
    save_comparison(folder / "math", benchmark="MATH-500", seed=1, prices=[1e-4])
    run = folder / "run"
    run.mkdir()
    finished_run(run, [1e-4, 5e-5, 0.0])
    paths = write_report(folder, title="A <test> & more")
    return {path.name: path for path in paths}


def test_the_page_needs_nothing_else(written: dict[str, Path]) -> None:
    text = written["report.html"].read_text("utf-8")
    page = Page(text)
    assert page.links
    for link in page.links:
        own = link.startswith("#") and link[1:] in page.ids
        assert own or link.startswith("data:image/svg+xml;base64,"), link[:80]
    assert "default-src 'none'" in text
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest", text)
    images = [link for link in page.links if link.startswith("data:")]
    assert len(images) == 1 + 1  # one panel picture, one training run
    for image in images:
        svg = base64.b64decode(image.partition(",")[2]).decode()
        assert svg.rstrip().endswith("</svg>")


def test_hostile_text_stays_text(written: dict[str, Path]) -> None:
    text = written["report.html"].read_text("utf-8")
    assert "<title>A &lt;test&gt; &amp; more</title>" in text
    assert "<script" not in text


def test_the_papers_tables_and_pictures_stand_beside_it(written: dict[str, Path]) -> None:
    model = "DeepSeek-R1-Distill-Qwen-7B"
    for stem in ("best-aes-forced", f"full-{model}-forced"):
        for ending in ("md", "csv", "tex"):
            assert written[f"{stem}.{ending}"].stat().st_size > 200
    for name in (f"pareto-{model}-forced", "dynamics-1"):
        assert written[f"{name}.png"].read_bytes().startswith(b"\x89PNG")


def test_every_number_of_the_tables_has_its_interval(written: dict[str, Path]) -> None:
    text = written["report.html"].read_text("utf-8")
    rows = re.findall(r">OS-Pruner price=5e-5</th>(.*?)</tr>", text, re.DOTALL)
    assert rows
    for row in (row for row in rows if row.count("<td") in (2, 4)):  # rewards, main numbers
        cells = re.findall(r"<td[^>]*>([^<]*)</td>", row)
        assert all(re.fullmatch(r"\S+ \[-?[\d.]+, -?[\d.]+\]", cell) for cell in cells)


def test_measured_stands_beside_published(written: dict[str, Path]) -> None:
    text = written["report.html"].read_text("utf-8")
    assert "Measured beside published" in text
    assert "<caption>Changed answers and further tokens</caption>" in text
    assert ">59.3</td>" in text  # the paper's reduction at lambda 5e-5 on GSM8K


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
    assert line.partition(";")[0] in written["report.html"].read_text("utf-8")
    without = dataclasses.replace(evaluation, limits=[])
    assert "never_right" not in without.results().about
    assert not any("at no step" in one for one in told(dataclasses.replace(results, about={})))
