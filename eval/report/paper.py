"""The paper's own numbers (`paper.json`), its AES recomputed, and measured results beside them.

Table 1 prints an accuracy-efficiency score for each method at its best operating point; the
tables of the appendix print accuracy and length of every policy, with forced and with free answers.
docs/reproduce.md tells where the two, and the text, disagree.
"""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from rich.console import Console

from ..methods import FRONTIER, FULL
from ..metrics import AES_ABSOLUTE, AES_RELATIVE, AesVariant
from ..results import Results
from .tables import AVERAGE, BENCHMARK, MODEL, Column, Table

BASELINE = "Baseline"

_OURS = {
    FULL: BASELINE,
    FRONTIER: "OS-Pruner",
    "probe": "Classification Probe",
    "convergence": "Answer Convergence",
    "FlashThink": "FlashThink",
}
"""Our names of the paper's methods."""


@lru_cache
def published(table: Literal["table1", "full"]) -> pd.DataFrame:
    """What the paper prints, a row for each method, parameter and benchmark, AVERAGE included.

    Args:
        table: "table1", for each model and method the best AES on each benchmark, answers forced;
            or "full", the appendix: every policy, with forced and with free answers.

    Returns:
        model, method ("Baseline" is the full trace), answer, parameter (lambda or threshold; NaN
        for the baseline and in Table 1), benchmark, and as printed, NaN where it is not:
        accuracy_percent; length_tokens of thinking, with free answers of these, too; aes (Table
        1); of the appendix reduction_percent and, of free answers on single benchmarks, cot_tokens
        and answer_tokens.
    """
    content = json.loads(Path(__file__).with_name("paper.json").read_text("utf-8"))
    return pd.DataFrame(**content[table]).astype({"parameter": float})


def table_1_scores(variant: AesVariant) -> pd.DataFrame:
    """Table 1 with a column "recomputed": its AES from its own accuracies and lengths.

    AVERAGE is the mean of the benchmarks' scores, not the score of the means.
    """
    rows = published("table1")
    bases = rows[rows["method"] == BASELINE].set_index([MODEL, BENCHMARK])
    base = bases.loc[pd.MultiIndex.from_frame(rows[[MODEL, BENCHMARK]])]
    scores = variant(
        rows["accuracy_percent"] / 100,
        rows["length_tokens"],
        base["accuracy_percent"] / 100,
        base["length_tokens"],
    )
    single = pd.Series(scores).where(rows[BENCHMARK] != AVERAGE)
    means = single.groupby([rows[MODEL], rows["method"]]).transform("mean")
    return rows.assign(recomputed=single.fillna(means))


def with_published(results: Results) -> pd.DataFrame | None:
    """A comparison's rules with what the paper prints of the same method and parameter.

    Model and benchmark are the paper's where the names are, but for case and hyphens: math500 is
    MATH-500.

    Returns:
        As `Results.rules`, and the numbers of `published`, NaN where the paper has none; None where
        it has not this model, benchmark and kind of answers.
    """
    theirs = published("full")
    for name in (MODEL, BENCHMARK, "answer"):
        theirs = theirs[theirs[name].map(_plain) == _plain(str(results.settings[name]))]
    if theirs.empty:
        return None
    frame = results.rules
    keys = [frame["method"].replace(_OURS), frame["parameter"].map("{:.6g}".format)]
    numbers = theirs.loc[:, "accuracy_percent":].set_index(
        [theirs["method"], theirs["parameter"].map("{:.6g}".format)]
    )
    found = numbers.add_prefix("paper_").reindex(pd.MultiIndex.from_arrays(keys))
    return frame.join(found.set_axis(frame.index))


def _plain(name: str) -> str:
    return name.casefold().replace("-", "")


def print_table_1(console: Console) -> list[dict[str, Any]]:
    """Prints Table 1's AES as printed, and recomputed by both definitions; the same as cells."""
    frame = published("table1")[[MODEL, "method", BENCHMARK, "aes"]]
    frame = frame.rename(columns={"aes": "printed"})
    labels = frame[[MODEL, "method", BENCHMARK]].agg(", ".join, axis=1).tolist()
    columns, worst = [Column("printed", "printed", digits=2)], []
    for name, variant in (("absolute", AES_ABSOLUTE), ("relative", AES_RELATIVE)):
        frame[name] = table_1_scores(variant)["recomputed"]
        columns.append(Column(variant.label, name, digits=3))
        apart = (frame[name] - frame["printed"]).abs().max()
        worst.append(f"Largest deviation, {variant.label}: {apart:.4f}")
    title = "The paper's Table 1: AES as printed, and recomputed from its accuracies and lengths"
    console.print(Table.of(frame, columns, labels, title=title, corner=""), *worst, sep="\n")
    records: list[dict[str, Any]] = frame.to_dict("records")
    return records
