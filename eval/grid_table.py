"""A table of estimates, written as markdown, CSV or LaTeX (booktabs, in the paper's layout).

In each group of rows the best number is bold and the second best underlined; the full trace
competes with none.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from .metrics import Estimate

__all__ = ["AVERAGE", "GridTable", "Line", "Number", "mark_best"]

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
