"""An evaluation in the terminal and as a file; several side by side, or beside the paper."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console

from ospruner.durable import replace_file

from ..evaluation import Evaluation, find_evaluations
from ..intervals import bootstrap_interval
from ..methods import ORACLE
from ..metrics import AES_ABSOLUTE, AES_RELATIVE, AesVariant
from ..results import RESULTS_FILE, Estimate, Results, best_rows
from .paper import compare_with_paper, comparison_table, table_1_scores
from .tables import Column, Table, best_aes_table
from .terminal import costs_tables, differences_table, results_table

__all__ = [
    "never_right",
    "never_right_told",
    "of_probabilities",
    "parse_lambdas",
    "print_comparison",
    "print_results",
    "results_of",
    "save_evaluation",
]


def parse_lambdas(text: str) -> tuple[float, ...]:
    """Numbers separated by commas; none for "".

    Raises:
        ValueError: one is no number, or negative.
    """
    try:
        values = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        values = (-1.0,)
    if any(not (math.isfinite(value) and value >= 0) for value in values):
        raise ValueError(f"lambdas is {text!r}; give numbers >= 0 such as 1e-4,5e-5")
    return values


def print_results(results: Results, console: Console, *, differences: bool = False) -> None:
    """The results, their costs and, where asked for, the paired differences as tables."""
    title = f"{results.dataset}: {results.setting}"
    console.print(results_table(results.frame, title=title))
    for table in costs_tables(results):
        console.print(table)
    if differences and len(results.differences):
        console.print(differences_table(results.differences))
    natural = results.natural_accuracy
    if natural is not None:
        console.print(
            f"The model's own answers after its own end: {natural.text(100, 1)} % right (never "
            "mixed with forced ones)."
        )
    if told := never_right_told(results):
        console.print(told)


def results_of(
    evaluation: Evaluation,
    *,
    variant: AesVariant = AES_ABSOLUTE,
    prices: Sequence[float] = (),
) -> Results:
    """Every number of an evaluation with its interval."""
    settings = evaluation.settings
    return Results(
        dataset=settings["benchmark"],
        setting=", ".join(
            [
                settings["model"],
                f"{settings['answer']} answers",
                settings["mode"],
                *(["probabilities of right answers"] if of_probabilities(evaluation) else []),
            ]
        ),
        frame=evaluation.frame(variant, prices),
        differences=evaluation.differences(variant),
        natural_accuracy=_natural(evaluation),
        about={"settings": settings, **never_right(evaluation)},
    )


def of_probabilities(evaluation: Evaluation) -> bool:
    """Whether the labels are probabilities of right answers, so that accuracy is their mean."""
    labels = evaluation.settings.get("label_settings", {})
    return bool(labels.get("task", {}).get("labels") == "probability")


def never_right(evaluation: Evaluation) -> dict[str, Any]:
    """How much of what rules save is of traces that are right at no step, where that is known.

    Args:
        evaluation: with the hindsight oracle among its limits, which is right wherever a trace
            ever is.

    Returns:
        Under "never_right", or nothing: the share of such "traces", of the full traces' "tokens",
        and under "saved" of each rule's savings, None where it saves nothing.
    """
    oracle = next((rule.outcome for rule in evaluation.limits if rule.method == ORACLE), None)
    if oracle is None or of_probabilities(evaluation):
        return {}
    never = oracle.correct < 0.5
    full = evaluation.full.tokens
    saved = {rule.name: full - rule.outcome.tokens for rule in evaluation.rules[1:]}
    found = {
        "traces": float(never.mean()),
        "tokens": float(full[never].sum() / full.sum()),
        "saved": {
            name: float(one[never].sum() / one.sum()) if one.sum() > 0 else None
            for name, one in saved.items()
        },
    }
    return {"never_right": found}


def never_right_told(results: Results) -> str:
    """The same in a line, for the row of the best AES of each method; "" where it is not known."""
    found = results.about.get("never_right")
    if found is None:
        return ""
    best = best_rows(results.frame)
    names = (best["method"] + " " + best["setting"]).str.strip()
    shares = [
        f"{name} {100 * found['saved'][name]:.0f} %"
        for name in names
        if found["saved"].get(name) is not None
    ]
    return (
        f"{100 * found['traces']:.1f} % of the traces are right at no step; they are "
        f"{100 * found['tokens']:.0f} % of the thinking tokens"
        + (f", and of the tokens that are saved: {', '.join(shares)}" if shares else "")
        + "."
    )


def save_evaluation(
    evaluation: Evaluation,
    folder: str | Path,
    *,
    variant: AesVariant = AES_ABSOLUTE,
    prices: Sequence[float] = (),
) -> Results:
    """Saves the evaluation, and beside it every number with its interval, in `results.json`."""
    evaluation.save(folder)
    results = results_of(evaluation, variant=variant, prices=prices)
    results.save(Path(folder) / RESULTS_FILE)
    return results


def _natural(evaluation: Evaluation) -> Estimate | None:
    """Accuracy of the natural answers; one without a verdict counts as wrong."""
    if np.isnan(evaluation.natural_correct).all():
        return None
    return bootstrap_interval(np.nan_to_num(evaluation.natural_correct), evaluation.problem_index)


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
        json_file: where to write the numbers too: a list of `Results`, the published ones in
            `about`; of Table 1 alone a list of its cells.

    Raises:
        ValueError: nothing to compare, or the paper has no such model or benchmark.
    """
    found: list[Any]
    if folder is None:
        if not paper:
            raise ValueError("nothing to compare: give a folder of evaluations, or --paper")
        found = _print_table_1(console)
    elif paper:
        found = []
        for one in find_evaluations(folder):
            frame, cells = compare_with_paper(one, model=model, benchmark=benchmark)
            free = one.settings["answer"] == "free"
            caption = "– where the paper has no number"
            console.print(comparison_table(frame, cells, free, caption=caption).rich(one.name))
            published = [None if cell is None else vars(cell) for cell in cells]
            results = results_of(one)
            about = {**results.about, "published": published}
            found.append(replace(results, about=about).to_dict())
    else:
        evaluations = find_evaluations(folder)
        for answer in ("forced", "free"):
            if any(one.settings["answer"] == answer for one in evaluations):
                table = best_aes_table(evaluations, answer)
                console.print(table.markdown(), markup=False, soft_wrap=True)
        found = [results_of(one).to_dict() for one in evaluations]
    if json_file is not None:
        text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
        replace_file(json_file, text.encode())


def _print_table_1(console: Console) -> list[dict[str, Any]]:
    """Table 1's AES as printed, and recomputed by both definitions."""
    variants = {"absolute": AES_ABSOLUTE, "relative": AES_RELATIVE}
    scores = {name: table_1_scores(variant) for name, variant in variants.items()}
    frame = pd.DataFrame(
        {"model": row.model, "method": row.method, "benchmark": name, "printed": printed}
        for row, name, printed, _ in scores["absolute"]
    )
    for name, found in scores.items():
        frame[name] = [score for _, _, _, score in found]
    labels = frame[["model", "method", "benchmark"]].agg(", ".join, axis=1).tolist()
    columns = [Column("printed", "printed", digits=2)]
    columns += [Column(variants[name].label, name, digits=3) for name in variants]
    title = "The paper's Table 1: AES as printed, and recomputed from its accuracies and lengths"
    console.print(Table.of(frame, columns, labels).rich(title))
    for name, variant in variants.items():
        worst = (frame[name] - frame["printed"]).abs().max()
        console.print(f"Largest deviation, {variant.label}: {worst:.4f}")
    records: list[dict[str, Any]] = frame.to_dict("records")
    return records
