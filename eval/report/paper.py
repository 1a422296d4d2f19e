"""The paper's own numbers (`paper.json`), its AES recomputed, and measured results beside them.

Table 1 prints an accuracy-efficiency score for each method at its best operating point; the
tables of the appendix print accuracy and length of every policy, with forced and with free answers.
docs/paper-notes.md tells where the two, and the text, disagree.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from ..evaluation import Evaluation
from ..methods import FRONTIER, FULL
from ..metrics import AES_ABSOLUTE, AesVariant
from .tables import AVERAGE, Column, Table

__all__ = [
    "AVERAGE",
    "BENCHMARKS",
    "MODELS",
    "PaperCell",
    "PaperRow",
    "compare_with_paper",
    "full_tables",
    "table_1",
    "table_1_scores",
]

BENCHMARKS = ("GSM8K", "MATH-500", "AIME")
MODELS = ("DeepSeek-R1-Distill-Qwen-7B", "GPT-OSS-20B", "DRPO-7B")
BASELINE = "Baseline"

_OURS = {
    FULL: BASELINE,
    FRONTIER: "OS-Pruner",
    "probe": "Classification Probe",
    "convergence": "Answer Convergence",
    "FlashThink": "FlashThink",
}
"""Our names of the paper's methods."""


@dataclass(frozen=True)
class PaperCell:
    """One method on one benchmark, as printed.

    Attributes:
        accuracy_percent: accuracy.
        length_tokens: thinking tokens; in the tables of free answers the answer's tokens too.
        aes: of Table 1 only.
        reduction_percent: of the appendix only.
        cot_tokens: thinking tokens, of free answers on single benchmarks only.
        answer_tokens: answer tokens, likewise.
    """

    accuracy_percent: float
    length_tokens: float
    aes: float | None = None
    reduction_percent: float | None = None
    cot_tokens: float | None = None
    answer_tokens: float | None = None


@dataclass(frozen=True)
class PaperRow:
    """One row of a table.

    Attributes:
        model: the base.
        method: as the paper calls it; "Baseline" is the full trace.
        answer: "forced" or "free".
        parameter: lambda or threshold; None for the baseline and in Table 1.
        cells: by benchmark, "AVERAGE" included.
    """

    model: str
    method: str
    answer: Literal["forced", "free"]
    parameter: float | None
    cells: dict[str, PaperCell]


@lru_cache(maxsize=1)
def _paper() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(__file__).with_name("paper.json").read_text("utf-8"))
    return content


def _rows(table: str) -> list[PaperRow]:
    content = _paper()[table]
    rows = []
    for row in content["rows"]:
        cells = {
            name: PaperCell(**dict(zip(content["columns"], row[name], strict=True)))
            for name in (*BENCHMARKS, AVERAGE)
        }
        parameter = next(iter((row.get("param") or {}).values()), None)
        rows.append(
            PaperRow(row["model"], row["method"], row.get("answer", "forced"), parameter, cells)
        )
    return rows


def table_1() -> list[PaperRow]:
    """Table 1: for each model and method the best AES on each benchmark, answers forced."""
    return _rows("table1")


def full_tables() -> list[PaperRow]:
    """The appendix: every policy of each model, with forced and with free answers."""
    return _rows("full")


def table_1_scores(variant: AesVariant) -> list[tuple[PaperRow, str, float, float]]:
    """Table 1's AES recomputed from its own accuracies and lengths.

    AVERAGE is the mean of the benchmarks' scores, not the score of the means.

    Returns:
        (row, benchmark, printed, recomputed) of each cell, the averages included.
    """
    rows = table_1()
    bases = {row.model: row for row in rows if row.method == BASELINE}
    found = []
    for row in rows:
        scores = []
        for name in BENCHMARKS:
            cell, base = row.cells[name], bases[row.model].cells[name]
            score = float(
                variant(
                    cell.accuracy_percent / 100,
                    cell.length_tokens,
                    base.accuracy_percent / 100,
                    base.length_tokens,
                )
            )
            scores.append(score)
            found.append((row, name, cell.aes or 0.0, score))
        found.append((row, AVERAGE, row.cells[AVERAGE].aes or 0.0, float(np.mean(scores))))
    return found


def find_published(model: str, benchmark: str, answer: str) -> list[PaperRow]:
    """The appendix' rows of one model and kind of answer.

    Raises:
        ValueError: the paper has no such model or benchmark.
    """
    for name, value, known in (
        ("model", model, MODELS),
        ("benchmark", benchmark, BENCHMARKS),
    ):
        if value not in known:
            raise ValueError(
                f"the paper has no {name} {value!r}; it has {', '.join(known)}: name yours so "
                f"where it is the same (--{'model' if name == 'model' else 'name'})"
            )
    return [row for row in full_tables() if row.model == model and row.answer == answer]


def compare_with_paper(
    evaluation: Evaluation,
    *,
    model: str | None = None,
    benchmark: str | None = None,
    variant: AesVariant = AES_ABSOLUTE,
) -> tuple[pd.DataFrame, list[PaperCell | None]]:
    """Measured results beside the published ones of the same method and parameter.

    Args:
        evaluation: what was measured.
        model: the paper's name of the model, where ours is called otherwise.
        benchmark: the paper's name of the benchmark, likewise.
        variant: which AES.

    Returns:
        The measured rules (`Results.rules`) and the published cell of each; None where the paper
        has none.

    Raises:
        ValueError: the paper has no such model or benchmark.
    """
    settings = evaluation.settings
    name = benchmark or settings["benchmark"]
    published = find_published(model or settings["model"], name, settings["answer"])
    frame = evaluation.frame(variant)
    frame = frame[frame["kind"] == "rule"]
    cells = []
    for method, parameter in zip(frame["method"], frame["parameter"], strict=True):
        wanted = _OURS.get(method, method), None if math.isnan(parameter) else parameter
        cells.append(
            next(
                (
                    row.cells[name]
                    for row in published
                    if row.method == wanted[0] and _same(row.parameter, wanted[1])
                ),
                None,
            )
        )
    return frame, cells


def comparison_table(
    frame: pd.DataFrame, cells: Sequence[PaperCell | None], free: bool = False, **more: Any
) -> Table:
    """Measured beside published, one row a rule; a published number has no interval.

    Args:
        frame: of `compare_with_paper`.
        cells: of the same.
        free: lengths are of thinking and answer together.
        more: of `Table`.
    """
    published = {
        name: [math.nan if cell is None else vars(cell)[name] for cell in cells]
        for name in ("accuracy_percent", "length_tokens", "reduction_percent")
    }
    frame = frame.assign(**published).astype(dict.fromkeys(published, float))
    length, saved = ("generated_tokens", "total_reduction") if free else ("tokens", "reduction")
    columns = (
        Column("accuracy %", "accuracy", 100, 1),
        Column("paper's", "accuracy_percent", digits=1),
        Column("tokens", length),
        Column("paper's", "length_tokens"),
        Column("saved %", saved, 100, 1),
        Column("paper's", "reduction_percent", digits=1),
    )
    return Table.of(frame, columns, corner="method", **more)


def _same(published: float | None, measured: float | None) -> bool:
    if published is None or measured is None:
        return published is measured
    return math.isclose(published, measured, rel_tol=1e-6, abs_tol=1e-12)
