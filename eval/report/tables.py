"""Tables of estimates as markdown, CSV or LaTeX (booktabs), and the paper's tables from ours.

In each group of rows the best number is bold and the second best underlined; the full trace
competes with none.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..metrics import AES_ABSOLUTE, AesVariant, Estimate
from ..online.evaluation import Evaluation
from ..results import Result, best_rows
from .terminal import parameter_text

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
        shown = [self.estimate.value]
        if intervals:
            shown += [self.estimate.low, self.estimate.high]
        parts = [
            "–" if math.isnan(x) else f"{round(x * self.scale, self.digits) + 0.0:.{self.digits}f}"
            for x in shown
        ]
        interval = f" [{parts[1]}, {parts[2]}]" if intervals else ""
        return f"{parts[0]}{interval}{self.suffix}"


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

    def markdown(self, intervals: bool = True) -> str:
        """GitHub's markdown; the caption above."""
        heads = [f"{g} {c}" for g in self.groups for c in self.columns]
        lines = [self.caption, "", _row([self.corner, *heads])]
        lines.append(_row([":--", *["--:"] * len(heads)]))
        for heading, rows in self.sections:
            lines.append(_row([f"**{heading}**", *[""] * len(heads)]))
            for line in rows:
                label = line.label if line.cells else f"*{line.label}*"
                cells = [_marked(c, "**{}**", "<u>{}</u>", intervals) for c in self._flat(line)]
                lines.append(_row([label, *cells]))
        return "\n".join(lines) + "\n"

    def csv(self) -> str:
        """Every number with the ends of its interval, one row a rule."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        ends = ("", " low", " high")
        heads = [f"{g} {c}{e}" for g in self.groups for c in self.columns for e in ends]
        writer.writerow(["section", self.corner, *heads])
        for heading, rows in self.sections:
            above = ""
            for line in rows:
                if not line.cells:
                    above = f"{line.label} "
                    continue
                values = []
                for cell in self._flat(line):
                    if cell is None:
                        values += ["", "", ""]
                        continue
                    shown = (cell.estimate.value, cell.estimate.low, cell.estimate.high)
                    values += ["" if math.isnan(x) else f"{x * cell.scale:.10g}" for x in shown]
                writer.writerow([heading, f"{above}{line.label.strip()}", *values])
        return out.getvalue()

    def latex(self, intervals: bool = False) -> str:
        """A booktabs table in the paper's layout."""
        width = len(self.columns)
        total = 1 + width * len(self.groups)
        heads = " & ".join(
            rf"\multicolumn{{{width}}}{{c}}{{{_tex(g)}}}"
            if g != AVERAGE
            else rf"\multicolumn{{{width}}}{{c}}{{\textit{{{g}}}}}"
            for g in self.groups
        )
        rules = " ".join(
            rf"\cmidrule(lr){{{2 + width * i}-{1 + width * (i + 1)}}}"
            for i in range(len(self.groups))
        )
        inner = " & ".join(_tex(c) for _ in self.groups for c in self.columns)
        lines = [
            r"\begin{table}",
            r"  \centering",
            r"  \resizebox{\textwidth}{!}{%",
            rf"  \begin{{tabular}}{{l{'c' * (total - 1)}}}",
            r"  \toprule",
            rf"  \multirow{{2}}{{*}}{{{_tex(self.corner)}}} & {heads} \\",
            f"  {rules}",
            rf"   & {inner} \\",
        ]
        for heading, rows in self.sections:
            lines.append(r"  \midrule")
            lines.append(rf"  \multicolumn{{{total}}}{{l}}{{\textbf{{{_tex(heading)}}}}} \\")
            for line in rows:
                label = _tex(line.label.strip())
                if not line.cells:
                    lines.append(rf"  \textit{{{label}}} \\")
                    continue
                indent = r"\quad " if line.label.startswith(" ") else ""
                cells = [
                    _tex_marks(_marked(c, "<b>{}</b>", "<u>{}</u>", intervals))
                    for c in self._flat(line)
                ]
                lines.append(rf"  {indent}{label} & {' & '.join(cells)} \\")
        lines += [
            r"  \bottomrule",
            r"  \end{tabular}}",
            rf"  \caption{{{_tex(self.caption)}}}",
            rf"  \label{{tab:{self.name}}}",
            r"\end{table}",
        ]
        return "\n".join(lines) + "\n"

    def _flat(self, line: Line) -> list[Number | None]:
        if not line.cells:
            return []
        return [
            number
            for cell in line.cells
            for number in (cell if cell is not None else (None,) * len(self.columns))
        ]


def mark_best(lines: Sequence[Line]) -> tuple[Line, ...]:
    """Marks the best and second best of each column; the first line is the full trace."""
    grids = [[None if c is None else list(c) for c in line.cells] for line in lines]
    for g in range(len(grids[0])):
        for c in range(max(len(grid[g] or ()) for grid in grids)):
            cells = [grid[g] for grid in grids]
            column = [(row, cell[c]) for row, cell in enumerate(cells) if row and cell]
            shown = {row: float(n.text().replace("–", "nan")) for row, n in column}
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


def _marked(number: Number | None, best: str, second: str, intervals: bool) -> str:
    if number is None:
        return ""
    text = number.text(intervals)
    if number.mark == "best":
        return best.format(text)
    return second.format(text) if number.mark == "second" else text


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _tex(text: str) -> str:
    special = {"%": r"\%", "_": r"\_", "&": r"\&", "#": r"\#", "λ": r"$\lambda$", "≥": r"$\geq$"}
    special |= {"≤": r"$\leq$", "α": r"$\alpha$", "β": r"$\beta$", "γ": r"$\gamma$", "–": "--"}
    return "".join(special.get(character, character) for character in text)


def _tex_marks(text: str) -> str:
    escaped = _tex(text)
    for tag, command in (("b", "textbf"), ("u", "underline")):
        escaped = escaped.replace(f"<{tag}>", f"\\{command}{{").replace(f"</{tag}>", "}")
    return escaped


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
