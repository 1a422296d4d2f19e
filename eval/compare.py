"""Results side by side in the terminal: of several evaluations, or measured beside published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from .evaluation import find_evaluations
from .metrics import AES_ABSOLUTE, AES_RELATIVE
from .paper import compare_with_paper, comparison_table, table_1_scores
from .paper_tables import best_aes_table

__all__ = ["print_comparison"]


def print_comparison(
    folder: str | Path | None,
    console: Console,
    *,
    paper: bool = False,
    model: str | None = None,
    benchmark: str | None = None,
    json_file: Path | None = None,
) -> None:
    """Prints each evaluation's best rows, or with `paper` all rows beside the published ones.

    Args:
        folder: evaluations; None with `paper` prints Table 1 and its AES recomputed.
        console: where to print.
        paper: compare with the paper.
        model: the paper's name of the model, where ours is called otherwise.
        benchmark: the paper's name of the benchmark, likewise.
        json_file: where to write the numbers too.

    Raises:
        ValueError: nothing to compare, or the paper has no such model or benchmark.
    """
    found: list[dict[str, Any]]
    if folder is None:
        if not paper:
            raise ValueError("nothing to compare: give a folder of evaluations, or --paper")
        found = _print_table_1(console)
    elif paper:
        found = []
        for one in find_evaluations(folder):
            pairs = compare_with_paper(one, model=model, benchmark=benchmark)
            free = one.settings["answer"] == "free"
            console.print(comparison_table(pairs, one.name, free))
            for result, cell in pairs:
                published = None if cell is None else vars(cell)
                found.append(
                    {"evaluation": one.name, "measured": result.to_dict(), "published": published}
                )
    else:
        evaluations = find_evaluations(folder)
        for answer in ("forced", "free"):
            if any(one.settings["answer"] == answer for one in evaluations):
                table = best_aes_table(evaluations, answer)
                console.print(table.markdown(), markup=False, soft_wrap=True)
        found = [
            {"evaluation": one.name, "results": [r.to_dict() for r in one.results()[0]]}
            for one in evaluations
        ]
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")


def _print_table_1(console: Console) -> list[dict[str, Any]]:
    """Table 1's AES as printed, and recomputed by both definitions."""
    table = Table(
        title="The paper's Table 1: AES as printed, and recomputed from its accuracies and lengths",
        box=box.SIMPLE_HEAD,
    )
    for name in ("model", "method", "benchmark"):
        table.add_column(name)
    variants = (AES_ABSOLUTE, AES_RELATIVE)
    for name in ("printed", *(variant.label for variant in variants)):
        table.add_column(name, justify="right")
    found = []
    absolute, relative = (table_1_scores(variant) for variant in variants)
    for (row, name, printed, ours), (_, _, _, other) in zip(absolute, relative, strict=True):
        table.add_row(
            row.model, row.method, name, f"{printed:.2f}", f"{ours:.3f}", f"{other:.3f}",
            style="" if abs(other - printed) <= 0.0075 else "dim",
        )  # fmt: skip
        found.append(
            {
                "model": row.model,
                "method": row.method,
                "benchmark": name,
                "printed": printed,
                "absolute": ours,
                "relative": other,
            }
        )
    console.print(table)
    for variant, scores in zip(variants, (absolute, relative), strict=True):
        worst = max(abs(score - printed) for _, _, printed, score in scores)
        console.print(f"Largest deviation, {variant.label}: {worst:.4f}")
    return found
