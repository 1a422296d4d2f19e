"""The columns as HTML: escaped, lit by probability, with what was spared and saved."""

import re

import pytest

from ospruner.app.columns import AppColumn, Paragraph, columns_html

THINKING = [Paragraph("a\n\n", 10), Paragraph("b\n\n", 20), Paragraph("c\n\n", 40)]
PLAIN = AppColumn(THINKING, "3", 40, 8.0, "natural", True)
LIT = [Paragraph("a\n\n", 10, 0.1), Paragraph("b\n\n", 20, 0.75)]
PRUNED = AppColumn(LIT, "3", 20, 5.0, "policy", True)


def steps(html: str, kind: str) -> list[str]:
    """The paragraphs of a column."""
    column = html.partition(f"osp-{kind}")[2].partition("</section>")[0]
    return re.findall(r"<p .*?</p>", column, re.DOTALL)


def test_what_the_policy_spared_is_marked_and_counted() -> None:
    html = columns_html(PLAIN, PRUNED)
    assert ["osp-spared" in one for one in steps(html, "plain")] == [False, False, True]
    first, second = steps(html, "pruned")
    assert [re.findall(r"--p:([\d.]+)", one) for one in (first, second)] == [["0.100"], ["0.750"]]
    for said in ("75%", "stopped by the policy"):
        assert said in second
    for said in ("50% saved", "40 → 20 thinking tok", "38% saved", "8.0 → 5.0 seconds"):
        assert said in html
    assert "100% more" in columns_html(PRUNED, PLAIN)


def test_nothing_is_claimed_before_both_are_complete() -> None:
    html = columns_html(AppColumn([Paragraph("a", 10)], tokens=10, seconds=1.0), PRUNED)
    assert "saved" not in html
    assert "thinking…" in html
    assert "osp-spared" not in columns_html(PLAIN, AppColumn(LIT[:1], tokens=10, seconds=1.0))


@pytest.mark.parametrize("hostile", ["<script>x()</script>", '"><img src=x onerror=y()>', "a & b"])
def test_texts_are_escaped(hostile: str) -> None:
    column = AppColumn([Paragraph(hostile, 3, 0.5)], hostile, 3, 1.0, "natural", True)
    html = columns_html(column, column)
    for raw in (hostile, "<script", "<img"):
        assert raw not in html


def test_a_policy_that_gave_nan_shows_no_number() -> None:
    html = columns_html(PLAIN, AppColumn([Paragraph("a", 3, float("nan"))], tokens=3))
    assert "no probability" in html
    assert "nan" not in html
