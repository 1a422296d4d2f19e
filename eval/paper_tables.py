"""The paper's tables from measured results: best-AES summary (Table 1), full tables per model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from .evaluation import Evaluation
from .grid_table import AVERAGE, GridTable, Line, Number, mark_best
from .metrics import AES_ABSOLUTE, AesVariant, Estimate
from .report import parameter_text
from .results import Result
from .summary import best_rows

__all__ = ["best_aes_table", "chosen_parameters", "full_table", "group"]


def group(evaluations: Sequence[Evaluation], answer: str) -> dict[str, dict[str, Evaluation]]:
    """Evaluations of one kind of answer: model -> benchmark -> evaluation."""
    found: dict[str, dict[str, Evaluation]] = {}
    for one in evaluations:
        if one.settings["answer"] == answer:
            name = one.settings["benchmark"]
            by_benchmark = found.setdefault(one.settings["model"], {})
            if name in by_benchmark:  # replay and online of the same
                name = f"{name} ({one.settings['mode']})"
            by_benchmark[name] = one
    return found


def chosen_parameters(
    validation: Sequence[Evaluation], variant: AesVariant = AES_ABSOLUTE
) -> dict[tuple[str, str], float | None]:
    """(model, method) -> the parameter of the highest AES on validation, averaged over sets."""
    scores: dict[tuple[str, str], dict[float | None, list[float]]] = {}
    for one in validation:
        for result in one.results(variant=variant)[0]:
            key = one.settings["model"], result.method
            scores.setdefault(key, {}).setdefault(result.parameter, []).append(result.aes.value)
    return {
        key: max(by_parameter, key=lambda p: sum(by_parameter[p]) / len(by_parameter[p]))
        for key, by_parameter in scores.items()
    }


def best_aes_table(
    evaluations: Sequence[Evaluation],
    answer: Literal["forced", "free"] = "forced",
    *,
    chosen: Mapping[tuple[str, str], float | None] | None = None,
    variant: AesVariant = AES_ABSOLUTE,
) -> GridTable:
    """Table 1: each method's best operating point on each benchmark.

    Args:
        evaluations: of any models and benchmarks.
        answer: which kind of answers; the two are never mixed.
        chosen: parameters chosen on validation (`chosen_parameters`); None chooses on the traces
            shown, for each benchmark by itself, as the paper did.
        variant: which AES.

    Raises:
        ValueError: no evaluation of that kind, or a method that validation lacks.
    """
    by_model = _of_kind(evaluations, answer)
    benchmarks = _benchmarks(by_model)
    sections = []
    for model, by_benchmark in by_model.items():
        picked: dict[str, dict[str, Result]] = {}
        for name, one in by_benchmark.items():
            results = one.results(variant=variant)[0]
            for method, number in _picked(results, model, chosen).items():
                picked.setdefault(method, {})[name] = results[number]
        lines = [
            Line(method, _cells(by, benchmarks, _summary_numbers)) for method, by in picked.items()
        ]
        sections.append((model, mark_best(lines)))
    how = "on these very traces, as in the paper" if chosen is None else "on validation"
    return GridTable(
        name=f"best-aes-{answer}",
        caption=(
            f"Each method at its best AES, chosen {how}; {answer} answers. AES {variant.label}. "
            + (f"{AVERAGE} is the mean over benchmarks. " if len(benchmarks) > 1 else "")
            + "95 % intervals by problem."
        ),
        corner="Model / Method",
        groups=_groups(benchmarks),
        columns=("Acc", "Len", "AES"),
        sections=tuple(sections),
    )


def full_table(
    evaluations: Sequence[Evaluation],
    model: str,
    answer: Literal["forced", "free"] = "forced",
    *,
    variant: AesVariant = AES_ABSOLUTE,
) -> GridTable:
    """The appendix' table of one model: every rule at every parameter.

    Raises:
        ValueError: no evaluation of that model and kind.
    """
    by_model = _of_kind(evaluations, answer)
    if model not in by_model:
        raise ValueError(f"no evaluation of {model!r} with {answer} answers; {list(by_model)} have")
    benchmarks = _benchmarks({model: by_model[model]})
    rows: dict[str, dict[str, dict[str, Result]]] = {}
    for name, one in by_model[model].items():
        for result in one.results(variant=variant)[0]:
            label = f"  {parameter_text(result) or 'N/A'}"
            rows.setdefault(result.method, {}).setdefault(label, {})[name] = result
    numbers = _free_numbers if answer == "free" else _forced_numbers
    lines = []
    for method, by_label in rows.items():
        lines.append(Line(method))
        lines += [Line(label, _cells(by, benchmarks, numbers)) for label, by in by_label.items()]
    length = "Len (CoT + Ans) (Red.)" if answer == "free" else "Length (Red.)"
    return GridTable(
        name=f"full-{model}-{answer}".replace("/", "-"),
        caption=f"Full results for {model}, {answer} answers. 95 % intervals by problem.",
        corner="Method / Param",
        groups=_groups(benchmarks),
        columns=("Acc", length),
        sections=((model, tuple(lines)),),
    )


def average(estimates: Sequence[Estimate]) -> Estimate:
    """The mean over benchmarks, whose problems are independent: half-widths add in squares."""
    count = len(estimates)
    value = sum(e.value for e in estimates) / count
    down = math.sqrt(sum((e.value - e.low) ** 2 for e in estimates)) / count
    up = math.sqrt(sum((e.high - e.value) ** 2 for e in estimates)) / count
    return Estimate(value, value - down, value + up)


def _of_kind(evaluations: Sequence[Evaluation], answer: str) -> dict[str, dict[str, Evaluation]]:
    by_model = group(evaluations, answer)
    if not by_model:
        raise ValueError(f"there is no evaluation with {answer} answers")
    return by_model


def _benchmarks(by_model: Mapping[str, Mapping[str, Evaluation]]) -> list[str]:
    return list(dict.fromkeys(name for by in by_model.values() for name in by))


def _picked(
    results: Sequence[Result], model: str, chosen: Mapping[tuple[str, str], float | None] | None
) -> dict[str, int]:
    if chosen is None:
        return best_rows(results)
    picked = {}
    for number, result in enumerate(results):
        if (model, result.method) not in chosen:
            raise ValueError(
                f"validation has no {result.method} of {model}: evaluate the same policies and "
                "rules there, under the same model name"
            )
        if result.parameter == chosen[model, result.method]:
            picked[result.method] = number
    return picked


def _summary_numbers(result: Result) -> tuple[Number, ...]:
    return (
        Number(result.accuracy, 100, 1, True),
        Number(result.tokens, 1, 0, False),
        Number(result.aes, 1, 2, True),
    )


def _forced_numbers(result: Result) -> tuple[Number, ...]:
    saved = f" ({100 * result.reduction.value + 0.0:.1f}%)"
    return (
        Number(result.accuracy, 100, 1, None),
        Number(result.tokens, 1, 0, None, suffix=saved),
    )


def _free_numbers(result: Result) -> tuple[Number, ...]:
    thinking, answer = result.tokens.value, result.answer_tokens.value
    saved = f" ({thinking:.0f}+{answer:.0f}) ({100 * result.total_reduction.value + 0.0:.1f}%)"
    total = Number(result.generated_tokens, 1, 0, None, suffix=saved)
    return (Number(result.accuracy, 100, 1, None), total)


def _groups(benchmarks: Sequence[str]) -> tuple[str, ...]:
    """The table's groups of columns: a mean only where there is more than one benchmark."""
    return (*benchmarks, AVERAGE) if len(benchmarks) > 1 else tuple(benchmarks)


def _cells(
    by_benchmark: Mapping[str, Result],
    benchmarks: Sequence[str],
    numbers: object,
) -> tuple[tuple[Number, ...] | None, ...]:
    assert callable(numbers)
    cells: list[tuple[Number, ...] | None] = [
        numbers(by_benchmark[name]) if name in by_benchmark else None for name in benchmarks
    ]
    if len(benchmarks) < 2:
        return tuple(cells)
    if None in cells:
        return (*cells, None)
    columns = zip(*[cell for cell in cells if cell is not None], strict=True)
    means = tuple(
        replace(column[0], estimate=average([n.estimate for n in column]), suffix="")
        for column in columns
    )
    return (*cells, means)
