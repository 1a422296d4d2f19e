"""Tables of estimates as markdown, CSV or LaTeX (booktabs), and the paper's tables from ours.

In each group of rows the best number is bold and the second best underlined; the full trace
competes with none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pandas as pd

from ..metrics import AES_ABSOLUTE, AesVariant
from ..online.evaluation import Evaluation
from ..results import Estimate, Result, best_rows
from ..schema import MATH_TASK
from ..text import markdown_table

__all__ = [
    "AVERAGE",
    "GridTable",
    "Line",
    "Number",
    "best_aes_table",
    "chosen_parameters",
    "full_table",
    "group",
    "mark_best",
]


AVERAGE = "AVERAGE"
Mark = Literal["", "best", "second"]


@dataclass(frozen=True)
class Number:
    """One number of a table.

    Attributes:
        estimate: the value with its interval.
        scale: what it is multiplied by.
        digits: decimals.
        higher_is_better: for finding the best; None for numbers that do not compete.
        mark: whether it is the best or second best of its group.
        suffix: written after it, such as a reduction in parentheses.
    """

    estimate: Estimate
    scale: float
    digits: int
    higher_is_better: bool | None
    mark: Mark = ""
    suffix: str = ""

    def text(self, intervals: bool = False) -> str:
        """The number as tables write it; – where there is none."""
        value, low, high = self.estimate.texts(self.scale, self.digits)
        interval = f" [{low}, {high}]" if intervals else ""
        return f"{value}{interval}{self.suffix}"


@dataclass(frozen=True)
class Line:
    """A row of a table: a heading of the rows below it where `cells` is empty.

    Attributes:
        label: the first column.
        cells: for each group of columns its numbers; None where a benchmark lacks the row.
    """

    label: str
    cells: tuple[tuple[Number, ...] | None, ...] = ()


@dataclass(frozen=True)
class GridTable:
    """A table with groups of columns.

    Attributes:
        name: a file name without its ending.
        caption: what is shown, on what, and how points were chosen.
        corner: heading of the first column.
        groups: headings of the groups (benchmarks).
        columns: headings within each group.
        sections: rows that compete with each other, by heading (models); each ends with a rule.
    """

    name: str
    caption: str
    corner: str
    groups: tuple[str, ...]
    columns: tuple[str, ...]
    sections: tuple[tuple[str, tuple[Line, ...]], ...]

    @property
    def heads(self) -> list[str]:
        """Headings of all columns of numbers."""
        return [f"{g} {c}" for g in self.groups for c in self.columns]

    def flat(self) -> list[tuple[str, str, str, list[Number | None]]]:
        """Each rule's section, the line above it that heads it ("" for none), label, numbers."""
        found = []
        for heading, lines in self.sections:
            above = ""
            for line in lines:
                if line.cells:
                    found.append((heading, above, line.label, self._numbers(line)))
                else:
                    above = line.label
        return found

    def markdown(self, intervals: bool = True) -> str:
        """GitHub's markdown; the caption above."""
        rows = []
        for heading, lines in self.sections:
            rows.append([f"**{heading}**", *[""] * len(self.heads)])
            for line in lines:
                label = line.label if line.cells else f"*{line.label}*"
                cells = [_marked(n, "**{}**", "<u>{}</u>", intervals) for n in self._numbers(line)]
                rows.append([label, *cells])
        return f"{self.caption}\n\n{markdown_table([self.corner, *self.heads], rows)}\n"

    def csv(self) -> str:
        """Every number with the ends of its interval, one row a rule."""
        rows = []
        for heading, above, label, numbers in self.flat():
            row: dict[str, object] = {"section": heading}
            row[self.corner] = f"{above} {label.strip()}".strip()
            for head, number in zip(self.heads, numbers, strict=True):
                for end, name in (("", "value"), (" low", "low"), (" high", "high")):
                    value = getattr(number.estimate, name) * number.scale if number else math.nan
                    row[f"{head}{end}"] = value
            rows.append(row)
        text: str = pd.DataFrame(rows).to_csv(index=False, float_format="%.10g")
        return text

    def latex(self, intervals: bool = False) -> str:
        """A booktabs table in the paper's layout."""
        width, labels, rows = len(self.columns), [], []
        for number, (heading, lines) in enumerate(self.sections):
            labels.append("\\midrule\n" * bool(number) + rf"\textbf{{{_tex(heading)}}}")
            rows.append([""] * len(self.heads))
            for line in lines:
                label = _tex(line.label.strip())
                indent = r"\quad " if line.label.startswith(" ") else ""
                labels.append(indent + label if line.cells else rf"\textit{{{label}}}")
                cells = [
                    _marked(n, r"\textbf{{{}}}", r"\underline{{{}}}", intervals, _tex)
                    for n in self._numbers(line)
                ]
                rows.append(cells)
        groups = [rf"\textit{{{g}}}" if g == AVERAGE else _tex(g) for g in self.groups]
        rules = " ".join(
            rf"\cmidrule(lr){{{2 + width * i}-{1 + width * (i + 1)}}}" for i in range(len(groups))
        )
        # The rules between the two lines of headings stand where the second would be named.
        names = [rf"\multirow{{2}}{{*}}{{{_tex(self.corner)}}}", rules]
        columns = pd.MultiIndex.from_product([groups, [_tex(c) for c in self.columns]], names=names)
        body = pd.DataFrame(rows, labels, columns).style.to_latex(
            hrules=True, column_format="l" + "c" * len(self.heads), multicol_align="c"
        )
        return (
            "\\begin{table}\n\\centering\n\\resizebox{\\textwidth}{!}{%\n"
            f"{body.rstrip()}}}\n"
            rf"\caption{{{_tex(self.caption)}}}"
            f"\n\\label{{tab:{self.name}}}\n\\end{{table}}\n"
        )

    def _numbers(self, line: Line) -> list[Number | None]:
        """A line's numbers, None where a benchmark lacks the row; a heading has none at all."""
        return [n for cell in line.cells for n in (cell or (None,) * len(self.columns))] or (
            [None] * len(self.heads)
        )


def mark_best(lines: Sequence[Line]) -> tuple[Line, ...]:
    """Marks the best and second best of each column; the first line is the full trace."""
    grids = [[None if c is None else list(c) for c in line.cells] for line in lines]
    for g in range(len(grids[0])):
        for c in range(max(len(grid[g] or ()) for grid in grids)):
            cells = [grid[g] for grid in grids]
            column = [(row, cell[c]) for row, cell in enumerate(cells) if row and cell]
            shown = {row: float(n.text().replace("–", "nan").replace(",", "")) for row, n in column}
            sign = -1.0 if column and column[0][1].higher_is_better is False else 1.0
            ranks = sorted({sign * x for x in shown.values() if not math.isnan(x)}, reverse=True)
            for row, number in column:
                if sign * shown[row] in ranks[:2]:
                    best = sign * shown[row] == ranks[0]
                    cell = cells[row] or []
                    cell[c] = replace(number, mark="best" if best else "second")
    return tuple(
        Line(line.label, tuple(None if c is None else tuple(c) for c in grid))
        for line, grid in zip(lines, grids, strict=True)
    )


def _marked(
    number: Number | None,
    best: str,
    second: str,
    intervals: bool,
    escape: Callable[[str], str] = str,
) -> str:
    if number is None:
        return ""
    text = escape(number.text(intervals))
    return {"best": best, "second": second, "": "{}"}[number.mark].format(text)


# Styler's own escaping knows no Greek.
_TEX = str.maketrans(
    {"%": r"\%", "_": r"\_", "&": r"\&", "#": r"\#", "λ": r"$\lambda$", "≥": r"$\geq$", "–": "--"}
    | {"≤": r"$\leq$", "α": r"$\alpha$", "β": r"$\beta$", "γ": r"$\gamma$"}
)


def _tex(text: str) -> str:
    return text.translate(_TEX)


def by_domain(evaluations: Sequence[Evaluation]) -> list[tuple[str, Evaluation]]:
    """Evaluations with their tasks' names, those of one task together, in order of appearance."""
    named = [(_domain(one), one) for one in evaluations]
    order = list(dict.fromkeys(name for name, _ in named))
    return sorted(named, key=lambda pair: order.index(pair[0]))


def _domain(one: Evaluation) -> str:
    of_labels = one.settings.get("label_settings") or {}
    return str((one.settings.get("task") or of_labels.get("task") or MATH_TASK)["name"])


def group(evaluations: Sequence[Evaluation], answer: str) -> dict[str, dict[str, Evaluation]]:
    """Evaluations of one kind of answer: model -> benchmark -> evaluation.

    Where they are of several tasks, benchmarks stand by their task, and say it.
    """
    found: dict[str, dict[str, Evaluation]] = {}
    pairs = by_domain(evaluations)
    for domain, one in pairs:
        if one.settings["answer"] == answer:
            name = one.settings["benchmark"]
            if len({name for name, _ in pairs}) > 1:
                name = f"{domain}: {name}"
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
    sections: list[tuple[str, dict[str, dict[str, Result]]]] = []
    for model, by_benchmark in by_model.items():
        picked: dict[str, dict[str, Result]] = {}
        for name, one in by_benchmark.items():
            results = one.results(variant=variant)[0]
            for method, number in _picked(results, model, chosen).items():
                picked.setdefault(method, {})[name] = results[number]
        sections.append((model, picked))
    charged = _counted(r for _, picked in sections for by in picked.values() for r in by.values())
    numbers = _with_compute(_summary_numbers) if charged else _summary_numbers
    marked = [
        (model, mark_best([Line(m, _cells(by, benchmarks, numbers)) for m, by in picked.items()]))
        for model, picked in sections
    ]
    how = "on these very traces, as in the paper" if chosen is None else "on validation"
    return GridTable(
        name=f"best-aes-{answer}",
        caption=(
            f"Each method at its best AES, chosen {how}; {answer} answers. AES {variant.label}. "
            + (f"{AVERAGE} is the mean over benchmarks. " if len(benchmarks) > 1 else "")
            + (_COMPUTE_CAPTION if charged else "")
            + "95 % intervals by problem."
        ),
        corner="Model / Method",
        groups=_groups(benchmarks),
        columns=("Acc", "Len", "AES", *([_COMPUTE] if charged else [])),
        sections=tuple(marked),
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
            label = f"  {result.parameter_text or 'N/A'}"
            rows.setdefault(result.method, {}).setdefault(label, {})[name] = result
    numbers: Callable[[Result], tuple[Number, ...]]
    numbers = _free_numbers if answer == "free" else _forced_numbers
    charged = _counted(r for by in rows.values() for of in by.values() for r in of.values())
    numbers = _with_compute(numbers) if charged else numbers
    lines = []
    for method, by_label in rows.items():
        lines.append(Line(method))
        lines += [Line(label, _cells(by, benchmarks, numbers)) for label, by in by_label.items()]
    length = "Len (CoT + Ans) (Red.)" if answer == "free" else "Length (Red.)"
    return GridTable(
        name=f"full-{model}-{answer}".replace("/", "-"),
        caption=(
            f"Full results for {model}, {answer} answers. {_COMPUTE_CAPTION if charged else ''}"
            "95 % intervals by problem."
        ),
        corner="Method / Param",
        groups=_groups(benchmarks),
        columns=("Acc", length, *([_COMPUTE] if charged else [])),
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


_COMPUTE = "Comp"
_COMPUTE_CAPTION = "Comp: all that was computed, in % of the full trace's operations. "


def _counted(results: Iterable[Result]) -> bool:
    """Whether operations were counted for any of the results."""
    return any(not math.isnan(result.flops_ratio.value) for result in results)


def _with_compute(
    numbers: Callable[[Result], tuple[Number, ...]],
) -> Callable[[Result], tuple[Number, ...]]:
    """The same numbers, and what was computed against the full trace, in percent."""
    return lambda result: (*numbers(result), Number(result.flops_ratio, 100, 0, None))


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
    numbers: Callable[[Result], tuple[Number, ...]],
) -> tuple[tuple[Number, ...] | None, ...]:
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
