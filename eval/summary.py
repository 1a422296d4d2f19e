"""An evaluation in the terminal and as a results file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .evaluation import Evaluation
from .metrics import AES_ABSOLUTE, AesVariant, Estimate, bootstrap_interval
from .picture import FRONTIER
from .report import differences_table, number_cell, parameter_text, results_table, save_results
from .results import Result, compare

__all__ = [
    "best_rows",
    "costs_tables",
    "differences_of",
    "parse_lambdas",
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


def best_rows(results: Sequence[Result]) -> dict[str, int]:
    """For each method the number of its row of the highest AES; of equals the first."""
    best: dict[str, int] = {}
    for number, result in enumerate(results):
        there = best.get(result.method)
        if there is None or result.aes.value > results[there].aes.value:
            best[result.method] = number
    return best


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
