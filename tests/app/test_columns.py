"""The columns as HTML: escaped, lit by probability, with what was spared and saved."""

import re

import pytest

from ospruner.app.columns import AppColumn, Paragraph, columns_html

PLAIN = AppColumn(
    [Paragraph("a\n\n", 10), Paragraph("b\n\n", 20), Paragraph("c\n\n", 40)],
    "3",
    40,
    8.0,
    "natural",
    True,
)
PRUNED = AppColumn(
    [Paragraph("a\n\n", 10, 0.1), Paragraph("b\n\n", 20, 0.75)], "3", 20, 5.0, "policy", True
)


def steps(html: str, kind: str) -> list[str]:
    """The paragraphs of a column."""
    column = html.partition(f"osp-{kind}")[2].partition("</section>")[0]
    return re.findall(r"<p .*?</p>", column, re.DOTALL)


def test_what_the_policy_spared_is_marked_and_counted() -> None:
    html = columns_html(PLAIN, PRUNED)
    assert ["osp-spared" in one for one in steps(html, "plain")] == [False, False, True]
    assert [re.findall(r"--p:([\d.]+)", one) for one in steps(html, "pruned")] == [
        ["0.100"],
        ["0.750"],
    ]
    assert "75%" in steps(html, "pruned")[1]
    assert "stopped by the policy" in steps(html, "pruned")[1]
    assert "50% saved" in html
    assert "40 → 20 thinking tokens" in html
    assert "38% saved" in html
    assert "8.0 → 5.0 seconds" in html


def test_nothing_is_claimed_before_both_are_complete() -> None:
    growing = AppColumn([Paragraph("a", 10)], "", 10, 1.0, None, False)
    html = columns_html(growing, PRUNED)
    assert "saved" not in html
    assert "thinking…" in html
    later = columns_html(PLAIN, AppColumn([Paragraph("a\n\n", 10, 0.1)], "", 10, 1.0, None, False))
    assert "osp-spared" not in later


def test_more_tokens_than_the_base_are_said_to_be_more() -> None:
    assert "100% more" in columns_html(PRUNED, PLAIN)


@pytest.mark.parametrize("hostile", ["<script>x()</script>", '"><img src=x onerror=y()>', "a & b"])
def test_texts_are_escaped(hostile: str) -> None:
    column = AppColumn([Paragraph(hostile, 3, 0.5)], hostile, 3, 1.0, "natural", True)
    html = columns_html(column, column)
    assert hostile not in html
    assert "<script" not in html
    assert "<img" not in html


def test_a_policy_that_gave_nan_shows_no_number() -> None:
    broken = AppColumn([Paragraph("a", 3, float("nan"))], "", 3, 1.0, None, False)
    assert "no probability" in columns_html(PLAIN, broken)
    assert "nan" not in columns_html(PLAIN, broken)
