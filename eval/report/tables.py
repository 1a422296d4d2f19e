"""Tables: numbers of a frame with their intervals, for terminal, Markdown, CSV, LaTeX and HTML.

`Table` is the one maker. Frames are those of `Results`: a number x with its interval stands in the
columns x, x_low and x_high. The paper's tables are made of the frames of several evaluations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pandas as pd
from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from ..compute import flops_scale
from ..evaluation import Evaluation
from ..methods import FULL
from ..metrics import AES_ABSOLUTE, AesVariant
from ..results import ENDS, Estimate, prices_of
from ..schema import MATH_TASK
from ..text import markdown_table, number_text

__all__ = [
    "AVERAGE",
    "BENCHMARK",
    "MODEL",
    "Column",
    "Table",
    "best_aes_table",
    "by_domain",
    "chosen_parameters",
    "compute_column",
    "full_table",
    "grid_frame",
    "price_columns",
]

AVERAGE = "AVERAGE"
MODEL, BENCHMARK = "model", "benchmark"
Interval = Literal["brackets", "half", "none"]


@dataclass(frozen=True)
class Column:
    """A column of numbers.

    Attributes:
        head: its heading; terminals break it at a line break.
        name: of the frame's column.
        scale: what numbers are multiplied by, such as 100 for percent.
        digits: decimals.
        best: which number is best; "" where they do not compete.
        signed: numbers have a + where they are positive.
    """

    head: str
    name: str
    scale: float = 1
    digits: int = 0
    best: Literal["", "high", "low"] = ""
    signed: bool = False


ACCURACY = Column("Acc", "accuracy", 100, 1, "high")
LENGTH = Column("Len", "tokens", best="low")
AES = Column("AES", "aes", digits=2, best="high")
COMPUTE = Column("Comp", "flops_ratio", 100)
COMPUTE_CAPTION = "Comp: all that was computed, in % of the full trace's operations. "


def price_columns(frame: pd.DataFrame, kind: str, scale: float, digits: int) -> list[Column]:
    """A column for each price at which a frame has numbers: "reward" or "gap"."""
    before = "reward\n" if kind == "reward" else ""
    names = prices_of(frame, kind).values()
    return [Column(f"{before}λ={one.partition('@')[2]}", one, scale, digits) for one in names]


def compute_column(frame: pd.DataFrame) -> list[Column]:
    """The column of operations, in a unit that suits them; none where none were counted."""
    if frame["flops"].isna().all():
        return []
    scale, unit = flops_scale(float(frame["flops"].max()))
    return [Column(f"compute\n{unit}", "flops", 1 / scale, 1)]


@dataclass(frozen=True, eq=False)
class Table:
    """A table of numbers with intervals.

    Attributes:
        numbers: a row for each row shown; columns (group, name), where each number has its low and
            high end beside it. The group is "" in a table without groups.
        columns: how to show the numbers of each group.
        caption: what is shown, on what, and how points were chosen.
        corner: heading of the rows' labels.
        name: a file name without its ending.
    """

    numbers: pd.DataFrame
    columns: tuple[Column, ...]
    caption: str = ""
    corner: str = ""
    name: str = "table"

    @classmethod
    def of(
        cls,
        frame: pd.DataFrame,
        columns: Sequence[Column],
        labels: Sequence[str] | None = None,
        **more: Any,
    ) -> Table:
        """A table of a frame's rows; by default each is called as its method and setting."""
        if labels is None:
            labels = (frame["method"] + " " + frame["setting"]).str.strip().tolist()
        names = [one.name + end for one in columns for end in ENDS]
        numbers = frame.reindex(columns=names).set_axis(pd.Index(labels), axis=0)
        numbers.columns = pd.MultiIndex.from_product([[""], names])
        return cls(numbers.astype(float), tuple(columns), **more)

    @property
    def _shown(self) -> list[tuple[str, Column]]:
        groups = dict.fromkeys(self.numbers.columns.get_level_values(0))
        return [(group, column) for group in groups for column in self.columns]

    @property
    def heads(self) -> list[str]:
        """Headings of the columns of numbers, on one line."""
        return [f"{group} {one.head}".strip().replace("\n", " ") for group, one in self._shown]

    @property
    def labels(self) -> list[str]:
        """The rows' labels, on one line."""
        rows = [one if isinstance(one, tuple) else (one,) for one in self.numbers.index]
        return [" ".join(filter(None, row)) for row in rows]

    def texts(self, interval: Interval = "brackets") -> pd.DataFrame:
        """The numbers as text: "71.2 [70.1, 72.3]", "71.2 ±1.2" or "71.2"; – where there is none.

        Half an interval is the wider one, so that ± spans all of it.
        """
        found = {}
        for group, one in self._shown:
            ends = [self.numbers[group, one.name + end] * one.scale for end in ENDS]
            found[group, one.name] = [
                _text(Estimate(*number), one, interval) for number in zip(*ends, strict=True)
            ]
        texts = pd.DataFrame(found, index=self.numbers.index)
        texts.columns = pd.MultiIndex.from_tuples(list(found))
        return texts

    def marks(self) -> pd.DataFrame:
        """The best and second of each competing column and section, as shown.

        A section is what shares the first level of the rows' labels. The full trace competes with
        none.

        Returns:
            "best", "second" or "" for each number.
        """
        shown = self.texts("none")
        marks = shown.map(lambda _: "")
        levels = self.numbers.index.nlevels
        sections = self.numbers.index.get_level_values(0) if levels > 1 else [""] * len(shown)
        full = np.array([FULL in (row if levels > 1 else (row,)) for row in self.numbers.index])
        for (_, one), column in zip(self._shown, shown, strict=True):
            values = pd.to_numeric(shown[column].str.replace(",", ""), errors="coerce")
            for section in dict.fromkeys(sections) if one.best else ():
                rivals = (np.asarray(sections) == section) & ~full & values.notna().to_numpy()
                ranked = sorted(set(values[rivals]), reverse=one.best == "high")
                for place, mark in zip(ranked, ("best", "second"), strict=False):
                    marks.loc[rivals & (values == place).to_numpy(), [column]] = mark
        return marks

    def markdown(self, interval: Interval = "brackets") -> str:
        """GitHub's Markdown, the caption above; the best bold, the second best underlined."""
        ways = {"best": "**{}**", "second": "<u>{}</u>", "": "{}"}
        cells = self._marked(self.texts(interval), ways)
        rows = [[label, *row] for label, row in zip(self.labels, cells, strict=True)]
        above = f"{self.caption}\n\n" if self.caption else ""
        return f"{above}{markdown_table([self.corner, *self.heads], rows)}\n"

    def csv(self) -> str:
        """Every number with the ends of its interval, one row a rule."""
        scaled = {}
        for group, one in self._shown:
            for end in ENDS:
                head = f"{group} {one.head}{end.replace('_', ' ')}".strip().replace("\n", " ")
                scaled[head] = (self.numbers[group, one.name + end] * one.scale).to_numpy()
        frame = pd.DataFrame(scaled, index=pd.Index(self.labels, name=self.corner))
        return str(frame.to_csv(float_format="%.10g"))

    def latex(self, interval: Interval = "none") -> str:
        """A booktabs table."""
        ways = {"best": r"\textbf{{{}}}", "second": r"\underline{{{}}}", "": "{}"}
        # Styler's own escaping knows no Greek.
        texts = self.texts(interval).map(_tex).rename(index=_tex)
        body = pd.DataFrame(self._marked(texts, ways), texts.index, texts.columns)
        heads = [(_tex(group), _tex(one.head.replace("\n", " "))) for group, one in self._shown]
        body.columns = pd.MultiIndex.from_tuples(heads)
        body.index.names = [None] * body.index.nlevels
        if not any(group for group, _ in heads):
            body = body.droplevel(0, axis=1)
        return str(
            body.style.to_latex(
                hrules=True,
                column_format="l" * body.index.nlevels + "c" * body.shape[1],
                multicol_align="c",
                clines="skip-last;data" if body.index.nlevels > 1 else None,
                position_float="centering",
                caption=_tex(self.caption) or None,
                label=f"tab:{self.name}",
            )
        )

    def html(self) -> str:
        """A table whose cells have the classes "best" and "second"; all text is escaped."""
        texts, marks = self.texts(), self.marks()
        plain = [pd.RangeIndex(count) for count in texts.shape]  # heads may stand twice
        for frame in (texts, marks):
            frame.index, frame.columns = plain
        style = texts.style.format(escape="html").set_td_classes(marks)
        style = style.set_caption(_escaped(self.caption))
        style = style.relabel_index([_escaped(one) for one in self.labels])
        style = style.relabel_index([_escaped(one) for one in self.heads], axis=1)
        return str(style.to_html(table_attributes='class="sortable"'))

    def rich(self, title: str = "", bold: int | None = None, line_after: int = -1) -> RichTable:
        """The table of a terminal, one rule a row, each number with half of its interval.

        Args:
            title: above it.
            bold: number of the row to make bold.
            line_after: number of the row below which a line stands.
        """
        table = RichTable(
            title=title or None,
            caption=self.caption or None,
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            title_justify="left",
            caption_justify="left",
        )
        table.add_column(self.corner, min_width=14)
        for _, one in self._shown:
            table.add_column(one.head, justify="right", no_wrap=True)
        rows = self.texts("half").to_numpy()
        for number, (label, cells) in enumerate(zip(self.labels, rows, strict=True)):
            parts = [cell.partition(" ±") for cell in cells]
            table.add_row(
                Text(label),
                *(Text.assemble(value, (mark + half, "dim")) for value, mark, half in parts),
                style="bold" if number == bold else "",
                end_section=number == line_after,
            )
        return table

    def _marked(self, texts: pd.DataFrame, ways: Mapping[str, str]) -> list[list[str]]:
        """Cells as text, marked by the way of their mark."""
        pairs = zip(texts.to_numpy(), self.marks().to_numpy(), strict=True)
        return [[ways[mark].format(text) for text, mark in zip(*row, strict=True)] for row in pairs]


def _text(number: Estimate, column: Column, interval: Interval) -> str:
    """A scaled number with its interval, where it has one."""
    if interval == "none" or math.isnan(number.value) or np.isnan([number.low, number.high]).all():
        return number_text(number.value, column.digits, signed=column.signed)
    if interval == "half":
        return number.short_text(1, column.digits, signed=column.signed)
    return number.text(1, column.digits, signed=column.signed)


_TEX = str.maketrans(
    {"%": r"\%", "_": r"\_", "&": r"\&", "#": r"\#", "λ": r"$\lambda$", "≥": r"$\geq$", "–": "--"}
    | {"≤": r"$\leq$", "α": r"$\alpha$", "β": r"$\beta$", "γ": r"$\gamma$", "±": r"$\pm$"}
)


def _tex(text: str) -> str:
    return text.translate(_TEX)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def by_domain(evaluations: Sequence[Evaluation]) -> list[tuple[str, Evaluation]]:
    """Evaluations with their tasks' names, those of one task together, in order of appearance."""
    named = []
    for one in evaluations:
        of_labels = one.settings.get("label_settings") or {}
        task = one.settings.get("task") or of_labels.get("task") or MATH_TASK
        named.append((str(task["name"]), one))
    order = list(dict.fromkeys(name for name, _ in named))
    return sorted(named, key=lambda pair: order.index(pair[0]))


def grid_frame(
    evaluations: Sequence[Evaluation], answer: str, variant: AesVariant = AES_ABSOLUTE
) -> pd.DataFrame:
    """All evaluations of one kind of answer: model, benchmark, and as `Results.frame`.

    Where they are of several tasks, benchmarks stand by their task, and say it; replay and online
    of the same are told apart.

    Raises:
        ValueError: there is no such evaluation.
    """
    pairs = by_domain(evaluations)
    several = len({name for name, _ in pairs}) > 1
    found: dict[tuple[str, str], pd.DataFrame] = {}
    for domain, one in pairs:
        if one.settings["answer"] != answer:
            continue
        name = f"{domain}: {one.settings['benchmark']}" if several else one.settings["benchmark"]
        if (one.settings["model"], name) in found:
            name = f"{name} ({one.settings['mode']})"
        frame = one.frame(variant)
        key = one.settings["model"], name
        found[key] = frame.assign(**dict(zip((MODEL, BENCHMARK), key, strict=True)))
    if not found:
        raise ValueError(f"there is no evaluation with {answer} answers")
    return pd.concat(found.values(), ignore_index=True)


def _rules(evaluations: Sequence[Evaluation], answer: str, variant: AesVariant) -> pd.DataFrame:
    frame = grid_frame(evaluations, answer, variant)
    return frame[frame["kind"] == "rule"]


def grid(frame: pd.DataFrame, rows: Sequence[str], columns: Sequence[Column], **more: Any) -> Table:
    """A table with a group of columns for each benchmark and, of several, their mean.

    The mean is of independent benchmarks, so that half-widths add in squares; a row that a
    benchmark lacks has none.

    Args:
        frame: of `grid_frame`.
        rows: columns of the frame whose values name a row.
        columns: of each group.
        more: of `Table`.
    """
    names = [one.name + end for one in columns for end in ENDS]
    benchmarks = list(dict.fromkeys(frame[BENCHMARK]))
    order = frame[list(rows)].drop_duplicates()
    index = pd.MultiIndex.from_frame(order)
    blocks = {
        name: frame[frame[BENCHMARK] == name].set_index(list(rows))[names].reindex(index)
        for name in benchmarks
    }
    if len(benchmarks) > 1:
        mean = pd.DataFrame(index=index, columns=names, dtype=float)
        for one in columns:
            values, lows, highs = (
                np.stack([block[one.name + end] for block in blocks.values()]).astype(float)
                for end in ENDS
            )
            value, count = values.mean(axis=0), len(benchmarks)
            mean[one.name] = value
            mean[f"{one.name}_low"] = value - np.sqrt(((values - lows) ** 2).sum(axis=0)) / count
            mean[f"{one.name}_high"] = value + np.sqrt(((highs - values) ** 2).sum(axis=0)) / count
        blocks[AVERAGE] = mean
    numbers = pd.concat(blocks, axis=1).astype(float)
    return Table(numbers, tuple(columns), **more)


def chosen_parameters(
    validation: Sequence[Evaluation], variant: AesVariant = AES_ABSOLUTE
) -> dict[tuple[str, str], str]:
    """(model, method) -> the setting of the highest AES on validation, averaged over benchmarks."""
    answers = dict.fromkeys(one.settings["answer"] for one in validation)
    frame = pd.concat([_rules(validation, answer, variant) for answer in answers])
    scores = frame.groupby([MODEL, "method", "setting"], sort=False)["aes"].mean()
    best = scores.groupby([MODEL, "method"], sort=False).idxmax()
    return {(model, method): setting for model, method, setting in best}


def best_aes_table(
    evaluations: Sequence[Evaluation],
    answer: Literal["forced", "free"] = "forced",
    *,
    chosen: Mapping[tuple[str, str], str] | None = None,
    variant: AesVariant = AES_ABSOLUTE,
) -> Table:
    """Table 1: each method's best operating point on each benchmark.

    Args:
        evaluations: of any models and benchmarks.
        answer: which kind of answers; the two are never mixed.
        chosen: settings chosen on validation (`chosen_parameters`); None chooses on the traces
            shown, for each benchmark by itself, as the paper did.
        variant: which AES.

    Raises:
        ValueError: no evaluation of that kind, or a method that validation lacks.
    """
    frame = _rules(evaluations, answer, variant)
    if chosen is None:
        scores = frame.assign(aes=frame["aes"].fillna(-np.inf))
        picked = scores.groupby([MODEL, BENCHMARK, "method"], sort=False)["aes"].idxmax()
        frame = frame.loc[sorted(picked)]
    else:
        keys = list(zip(frame[MODEL], frame["method"], strict=True))
        if lacking := sorted(set(keys) - set(chosen)):
            model, method = lacking[0]
            raise ValueError(
                f"validation has no {method} of {model}: evaluate the same policies and rules "
                "there, under the same model name"
            )
        frame = frame[[chosen[key] == s for key, s in zip(keys, frame["setting"], strict=True)]]
    counted = not frame["flops_ratio"].isna().all()
    how = "on these very traces, as in the paper" if chosen is None else "on validation"
    return grid(
        frame,
        (MODEL, "method"),
        (ACCURACY, LENGTH, AES, *([COMPUTE] if counted else [])),
        caption=(
            f"Each method at its best AES, chosen {how}; {answer} answers. AES {variant.label}. "
            + (f"{AVERAGE} is the mean over benchmarks. " if frame[BENCHMARK].nunique() > 1 else "")
            + (COMPUTE_CAPTION if counted else "")
            + "95 % intervals by problem."
        ),
        corner="Model / Method",
        name=f"best-aes-{answer}",
    )


def full_table(
    evaluations: Sequence[Evaluation],
    model: str,
    answer: Literal["forced", "free"] = "forced",
    *,
    variant: AesVariant = AES_ABSOLUTE,
) -> Table:
    """The appendix' table of one model: every rule at every parameter.

    Raises:
        ValueError: no evaluation of that model and kind.
    """
    frame = _rules(evaluations, answer, variant)
    models = list(dict.fromkeys(frame[MODEL]))
    if model not in models:
        raise ValueError(f"no evaluation of {model!r} with {answer} answers; {models} have")
    frame = frame[frame[MODEL] == model]
    counted = not frame["flops_ratio"].isna().all()
    columns = [replace(ACCURACY, best="")]
    if answer == "free":  # lengths are of thinking and answer together
        columns += [Column("CoT", "tokens"), Column("Ans", "answer_tokens")]
        columns += [
            Column("CoT + Ans", "generated_tokens"),
            Column("Red. %", "total_reduction", 100, 1),
        ]
    else:
        columns += [replace(LENGTH, best=""), Column("Red. %", "reduction", 100, 1)]
    return grid(
        frame,
        ("method", "setting"),
        (*columns, *([COMPUTE] if counted else [])),
        caption=f"Full results for {model}, {answer} answers. "
        f"{COMPUTE_CAPTION if counted else ''}95 % intervals by problem.",
        corner="Method / Param",
        name=f"full-{model}-{answer}".replace("/", "-"),
    )
