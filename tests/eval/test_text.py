from __future__ import annotations

import pytest

from ospruner.eval.text import markdown_table, penalty_name


@pytest.mark.parametrize(
    ("penalty", "name"),
    [
        *((0.0, "0"), (5e-5, "5e-5"), (1e-4, "1e-4"), (2.5e-4, "2.5e-4"), (0.05, "5e-2")),
        *((9.9999e-5, "9.9999e-5"), (9.99999999e-5, "1e-4"), (1.0, "1e0"), (10.0, "1e1")),
    ],
)
def test_penalty_names(penalty: float, name: str) -> None:
    assert penalty_name(penalty) == name


def test_markdown_cells_end_where_they_should() -> None:
    lines = markdown_table(["method", "accuracy"], [["P(stop|h)", "77.0\n(half)"]]).splitlines()
    assert lines == ["| method | accuracy |", "| :-- | --: |", "| P(stop\\|h) | 77.0 (half) |"]
