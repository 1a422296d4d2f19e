"""Results as a card shows them: a table for people, measurements for the Hub's own index.

They are kept as `results.json` beside a policy, so that a card can be written again under the
name of the repository where it is published.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from huggingface_hub import EvalResult

RESULTS_FILE = "results.json"

__all__ = ["RESULTS_FILE", "Measurement", "ResultsTable", "read_results", "save_results"]


@dataclass(frozen=True)
class Measurement:
    """One number about a policy, as the Hub indexes it.

    Attributes:
        dataset: What it was measured on, as people say it: "MATH-500".
        dataset_id: Its id on the Hub, or a short name where it is not there.
        metric: What was measured: "accuracy", in percent, or "thinking tokens".
        value: The number.

    Raises:
        ValueError: If the value is not finite.
    """

    dataset: str
    dataset_id: str
    metric: str
    value: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"value is {self.value!r} for {self.metric!r}; it must be finite")


@dataclass(frozen=True)
class ResultsTable:
    """Results as they shall stand in a card: text that its maker has formatted.

    Attributes:
        caption: What was measured, on what, how the intervals were made, and by which command.
        columns: Headings, the first for the method.
        rows: One sequence of cells a row, as many as there are columns.
        measurements: What of it concerns this very policy.

    Raises:
        ValueError: If the caption or the columns are empty, or a row has another length.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    measurements: Sequence[Measurement] = ()

    def __post_init__(self) -> None:
        if not self.caption.strip():
            raise ValueError("caption is empty: say setting, intervals and command of the results")
        if not self.columns:
            raise ValueError("columns is empty: name at least one")
        for number, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(
                    f"rows[{number}] has {len(row)} cells, expected {len(self.columns)}: "
                    f"one for each of {list(self.columns)}"
                )

    def markdown(self) -> str:
        """The table in GitHub's markdown, numbers aligned to the right."""
        return markdown_table(self.columns, self.rows)

    def index(self) -> list[EvalResult]:
        """The measurements as a card's model-index holds them."""
        return [
            EvalResult(
                task_type="text-generation",
                task_name="Reasoning, stopped by the policy",
                dataset_type=one.dataset_id,
                dataset_name=one.dataset,
                metric_type=one.metric.replace(" ", "_"),
                metric_name=one.metric,
                metric_value=float(one.value),  # YAML knows no numpy
            )
            for one in self.measurements
        ]


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in GitHub's markdown, all columns but the first aligned to the right."""
    rule = [":--", *["--:"] * (len(columns) - 1)]
    lines = [columns, rule, *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def save_results(folder: Path, results: ResultsTable) -> None:
    """Writes the results beside a policy, as `results.json`."""
    text = json.dumps(asdict(results), indent=2, ensure_ascii=False, allow_nan=False)
    (folder / RESULTS_FILE).write_text(text + "\n", encoding="utf-8")


def read_results(folder: Path) -> ResultsTable | None:
    """The results that were saved beside a policy; None where there are none.

    Raises:
        ValueError: If the file holds something else.
    """
    path = folder / RESULTS_FILE
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        values["measurements"] = [Measurement(**one) for one in values["measurements"]]
        return ResultsTable(**values)
    except (TypeError, KeyError) as error:
        raise ValueError(
            f"{path} holds no results of a card ({error}): it must have caption, columns, rows "
            "and measurements; move it elsewhere, or write the card with `write_policy_card`"
        ) from error


def _cell(text: str) -> str:
    """A table cell: a bar or a line break in the text must not end it."""
    return text.replace("|", "\\|").replace("\n", " ")
