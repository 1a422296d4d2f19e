"""An evaluation in the terminal and as a file; several side by side, or beside the paper."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..methods import FRONTIER
from ..metrics import AES_ABSOLUTE, AES_RELATIVE, AesVariant, Estimate, bootstrap_interval
from ..online.evaluation import Evaluation, find_evaluations
from ..results import Result, best_rows, compare
from .paper import compare_with_paper, comparison_table, table_1_scores
from .tables import best_aes_table
from .terminal import differences_table, number_cell, parameter_text, results_table, save_results

__all__ = [
    "costs_tables",
    "differences_of",
    "parse_lambdas",
    "print_comparison",
    "print_evaluation",
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


def differences_of(
    evaluation: Evaluation, results: Sequence[Result], *, variant: AesVariant = AES_ABSOLUTE
) -> dict[str, dict[str, Estimate]]:
    """Paired differences of one method's best row to every other method's.

    The one is OS-Pruner where it is there, else the first after the full trace.
    """
    best = best_rows(results)
    methods = [method for method in best if method != results[0].method]
    if not methods:
        return {}
    ours = FRONTIER if FRONTIER in best else methods[0]
    found = {}
    for method, number in best.items():
        if method == ours:
            continue
        names = [_name(results[best[ours]]), _name(results[number])]
        found[" - ".join(names)] = compare(
            evaluation.rules[best[ours]].outcome,
            evaluation.rules[number].outcome,
            evaluation.full,
            evaluation.problem_index,
            variant=variant,
        )
    return found


def costs_tables(results: Sequence[Result]) -> tuple[Table, Table]:
    """What stands behind the main table, within 80 columns.

    Returns:
        Help and harm, answers, probes and caps; rewards at each lambda, and time where measured.
    """
    timed = any(not math.isnan(result.time_ratio.value) for result in results)
    costs = _method_table("What stands behind it", "[95 % interval by problem]")
    for name in ("wrong to\nright %", "right to\nwrong %", "answer\ntokens", "probe\ntokens"):
        costs.add_column(name, justify="right", no_wrap=True)
    costs.add_column("cut at\ncap %", justify="right", no_wrap=True)
    rewards = _method_table(
        "Rewards and time" if timed else "Rewards",
        "" if timed else "Wall-clock: not measured in this mode",
    )
    penalties = [penalty for penalty, _ in results[0].rewards]
    headings = ["all tokens\nsaved %", *(f"reward\nλ={penalty:g}" for penalty in penalties)]
    for name in headings + (["time over\nfull", "tokens/s"] if timed else []):
        rewards.add_column(name, justify="right", no_wrap=True)
    for result in results:
        costs.add_row(
            Text(_name(result)),
            number_cell(result.helped, 100, 1, stacked=True),
            number_cell(result.harmed, 100, 1, stacked=True),
            number_cell(result.answer_tokens, 1, 1, stacked=True),
            number_cell(result.probe_tokens, 1, 1, stacked=True),
            number_cell(result.truncated, 100, 1, stacked=True),
        )
        cells = [number_cell(result.total_reduction, 100, 1, stacked=True)]
        cells += [number_cell(value, 1, 3, stacked=True) for _, value in result.rewards]
        if timed:
            cells.append(number_cell(result.time_ratio, 1, 2, stacked=True))
            cells.append(number_cell(result.tokens_per_second, 1, 0, stacked=True))
        rewards.add_row(Text(_name(result)), *cells)
    return costs, rewards


def _method_table(title: str, caption: str) -> Table:
    table = Table(
        title=title,
        caption=caption or None,
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("method", min_width=12)
    return table


def print_evaluation(
    evaluation: Evaluation,
    console: Console,
    *,
    variant: AesVariant = AES_ABSOLUTE,
    length_penalties: Sequence[float] = (),
) -> None:
    """The results, their costs and the paired differences as tables."""
    results, limits = evaluation.results(variant=variant, length_penalties=length_penalties)
    narrow = console.width < 105
    console.print(results_table(results, limits, title=evaluation.name, stacked=narrow))
    for table in costs_tables(results):
        console.print(table)
    differences = differences_of(evaluation, results, variant=variant)
    if differences:
        title = "Paired differences, each method at its best AES on these traces"
        console.print(differences_table(differences, title=title))
    natural = _natural(evaluation)
    if natural is not None:
        console.print(
            f"The model's own answers after its own end: {100 * natural.value:.1f} % right "
            f"[{100 * natural.low:.1f}, {100 * natural.high:.1f}] (never mixed with forced ones)."
        )


def save_evaluation(
    evaluation: Evaluation,
    folder: str | Path,
    *,
    variant: AesVariant = AES_ABSOLUTE,
    length_penalties: Sequence[float] = (),
) -> Path:
    """Saves the evaluation, and beside it every number with its interval.

    `results.json` holds them all, `eval_results.yaml` those of OS-Pruner's policies as the Hub's
    model cards take them.

    Returns:
        The results file.
    """
    evaluation.save(folder)
    results, limits = evaluation.results(variant=variant, length_penalties=length_penalties)
    differences = differences_of(evaluation, results, variant=variant)
    natural = _natural(evaluation)
    about: dict[str, Any] = {
        "settings": evaluation.settings,
        "limits": [limit.to_dict() for limit in limits],
        "differences": {
            name: {key: value.to_dict() for key, value in one.items()}
            for name, one in differences.items()
        },
        "natural_accuracy": None if natural is None else natural.to_dict(),
    }
    path = Path(folder) / "results.json"
    save_results(path, results, about)
    from .hub_results import eval_results, eval_results_yaml  # the Hub's client is slow to import

    entries = {
        _name(r): eval_results(r, evaluation.settings) for r in results if r.method == FRONTIER
    }
    if entries:
        eval_results_yaml(entries, Path(folder) / "eval_results.yaml")
    return path


def _natural(evaluation: Evaluation) -> Estimate | None:
    """Accuracy of the natural answers; one without a verdict counts as wrong."""
    if np.isnan(evaluation.natural_correct).all():
        return None
    return bootstrap_interval(np.nan_to_num(evaluation.natural_correct), evaluation.problem_index)


def _name(result: Result) -> str:
    return " ".join([result.method, parameter_text(result)]).strip()


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
