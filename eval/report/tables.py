"""Tables: numbers of a frame with their intervals, for terminal, Markdown and LaTeX.

`Table` is the one maker. Frames are those of `Results`: a number x with its interval stands in the
columns x, x_low and x_high. Several comparisons stand in one frame, `grid_frame`, of which the
paper's tables are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from ..methods import FULL
from ..results import ENDS, NAMED, Estimate, Results, best_rows, markdown_table

AVERAGE = "AVERAGE"
MODEL, BENCHMARK = "model", "benchmark"
INTERVALS = "95 % intervals by problem (± is the wider half)"


@dataclass(frozen=True)
class Column:
    """A column of numbers."""

    head: str  # its heading; terminals break it at a line break
    name: str  # of the frame's column
    scale: float = 1  # what numbers are multiplied by, such as 100 for percent
    digits: int = 0  # decimals
    ranked: bool = False  # the numbers compete: of each section the two highest are marked
    signed: bool = False  # numbers have a + where they are positive
    narrow: bool = False  # terminals leave out its intervals, for the methods' names need the width


ACCURACY, LENGTH = Column("Acc", "accuracy", 100, 1), Column("Len", "tokens")
AES = Column("AES", "aes", digits=2, ranked=True)  # few tokens alone win nothing
COMPUTE = Column("Comp", "flops_ratio", 100)
MAIN = (
    Column("accuracy %", "accuracy", 100, 1),
    Column("thinking\ntokens", "tokens"),
    Column("saved %", "reduction", 100, 1),
    Column("AES", "aes", digits=2),
)


@dataclass(frozen=True, eq=False)
class Table:
    """A table of numbers with intervals; `print` of a rich console shows it."""

    # A row for each row shown; columns (group, name), where each number has its low and high
    # end beside it. The group is "" in a table without groups.
    numbers: pd.DataFrame
    columns: tuple[Column, ...]  # how to show the numbers of each group
    caption: str = ""  # what is shown, on what, and how points were chosen
    corner: str = "method"  # heading of the rows' labels
    name: str = "table"  # a file name without its ending
    title: str = ""  # above it in a terminal and on the page
    bold: int | None = None  # number of the row that is bold in a terminal
    line_after: int | None = None  # number of the row below which a terminal has a line

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
        numbers = frame.reindex(columns=names).astype(float).set_axis(pd.Index(labels), axis=0)
        return cls(pd.concat({"": numbers}, axis=1), tuple(columns), **more)

    @property
    def _shown(self) -> list[tuple[str, Column]]:
        groups = self.numbers.columns.get_level_values(0).unique()
        return [(group, column) for group in groups for column in self.columns]

    @property
    def _labels(self) -> list[str]:
        """The rows' labels, on one line."""
        rows = [one if isinstance(one, tuple) else (one,) for one in self.numbers.index]
        return [" ".join(filter(None, row)) for row in rows]

    def texts(self, *ways: str, half: bool = False, escape: Any = str) -> pd.DataFrame:
        """The numbers as text, `half` or not (`Estimate.text`); columns (group, name).

        Of a ranked column the highest number, as shown, stands between the halves of the first way,
        such as "**|**", the second highest between those of the second. Those compete whose labels
        begin alike, of one model say; the full trace with none.
        """
        found, index = {}, self.numbers.index
        sections, rival = index.get_level_values(0), index.get_level_values(-1) != FULL
        for group, one in self._shown:
            rows = self.numbers[group][[one.name + end for end in ENDS]].to_numpy()
            how: dict[str, Any] = {"signed": one.signed, "half": half}
            said = [escape(Estimate(*row).text(one.scale, one.digits, **how)) for row in rows]
            found[group, one.name] = texts = np.array(said, dtype=object)
            if one.ranked:
                shown = pd.Series(np.round(one.scale * rows[:, 0], one.digits), index).where(rival)
                places = shown.groupby(sections).rank("dense", ascending=False).to_numpy()
                for place, way in enumerate(ways, 1):
                    before, after = way.split("|")
                    texts[places == place] = before + texts[places == place] + after
        return pd.DataFrame(found, index)

    def markdown(self) -> str:
        """GitHub's Markdown, the caption above; the best bold, the second best underlined."""
        cells = self.texts("**|**", "<u>|</u>").to_numpy()
        rows = [[label, *row] for label, row in zip(self._labels, cells, strict=True)]
        heads = [f"{group} {one.head}".strip() for group, one in self._shown]
        above = f"{self.caption}\n\n" if self.caption else ""
        return f"{above}{markdown_table([self.corner, *heads], rows)}\n"

    def latex(self) -> str:
        """A booktabs table, each number with its interval."""
        body = self.texts(r"\textbf{|}", r"\underline{|}", escape=_tex)
        body = body.rename(index=_tex).rename_axis([None] * body.index.nlevels)
        heads = [(_tex(group), _tex(one.head.replace("\n", " "))) for group, one in self._shown]
        body.columns = pd.MultiIndex.from_tuples(heads)
        body = body if any(group for group, _ in heads) else body.droplevel(0, axis=1)
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

    def __rich__(self) -> RichTable:
        """A terminal's table, one rule a row, each number with half of its interval."""
        table = RichTable(
            title=self.title or None,
            caption=self.caption or None,
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            title_justify="left",
            caption_justify="left",
        )
        table.add_column(self.corner, min_width=14)
        texts = self.texts(half=True)
        for group, one in self._shown:
            table.add_column(one.head, justify="right", no_wrap=True)
            if one.narrow:
                texts[group, one.name] = texts[group, one.name].str.partition(" ")[0]
        for number, (label, cells) in enumerate(zip(self._labels, texts.to_numpy(), strict=True)):
            parts = [cell.partition(" ±") for cell in cells]
            table.add_row(
                Text(label),
                *(Text.assemble(value, (mark + half, "dim")) for value, mark, half in parts),
                style="bold" if number == self.bold else "",
                end_section=number == self.line_after,
            )
        return table


# Styler's own escaping knows no Greek.
_MATHS = zip("≥≤∞αβγ±", ("geq", "leq", "infty", "alpha", "beta", "gamma", "pm"), strict=True)
_TEX = str.maketrans(
    {sign: f"\\{sign}" for sign in "%_&#"}
    | {sign: f"$\\{name}$" for sign, name in _MATHS}
    | {"–": "--"}
)


def _tex(text: str) -> str:
    return text.translate(_TEX)


def grid_frame(comparisons: Sequence[Results]) -> pd.DataFrame:
    """All comparisons: model, benchmark, answer, and as `Results.frame`.

    Replay and online of the same are told apart.
    """
    found: dict[tuple[str, ...], pd.DataFrame] = {}
    for one in comparisons:
        model, name, answer, mode = (one.settings[setting] for setting in NAMED)
        if (model, name, answer) in found:
            name = f"{name} ({mode})"
        found[model, name, answer] = one.frame.assign(model=model, benchmark=name, answer=answer)
    return pd.concat(found.values(), ignore_index=True)


def _grid(
    frame: pd.DataFrame, rows: Sequence[str], columns: Sequence[Column], caption: str, **more: Any
) -> Table:
    """A table of a `grid_frame`: a group of columns for each benchmark and, of several, their mean.

    They are independent, so that half-widths add in squares; a row that a benchmark lacks has no
    mean. Compute stands there where it was counted.
    """
    if not frame["flops_ratio"].isna().all():
        columns = [*columns, COMPUTE]
        caption += "Comp: all that was computed, in % of the full trace's operations. "
    names = [one.name + end for one in columns for end in ENDS]
    index = pd.MultiIndex.from_frame(frame[list(rows)].drop_duplicates())
    blocks = {
        str(name): of_one.set_index(list(rows))[names].reindex(index).astype(float)
        for name, of_one in frame.groupby(BENCHMARK, sort=False)
    }
    if len(blocks) > 1:
        caption += f"{AVERAGE} is the mean over benchmarks. "
        values = np.stack([block.to_numpy() for block in blocks.values()])
        values = values.reshape(len(blocks), len(index), len(columns), len(ENDS))
        mean = values[..., :1].mean(axis=0)  # (rows, columns, 1)
        half = np.linalg.norm(values[..., 1:] - values[..., :1], axis=0) / len(blocks)
        ends = np.concatenate([mean, mean + half * [-1, 1]], axis=-1)
        blocks[AVERAGE] = pd.DataFrame(ends.reshape(len(index), -1), index, names)
    caption += "95 % intervals by problem."
    return Table(pd.concat(blocks, axis=1), tuple(columns), caption, **more)


def best_aes_table(frame: pd.DataFrame) -> Table:
    """Table 1: each method at the setting that validation chose, else at its best AES.

    Of a `grid_frame` whose answers are of one kind, for the two are never mixed.
    """
    frame = frame[frame["kind"] == "rule"]
    (answer,) = frame["answer"].unique()
    settings = [frame[name] for name in (MODEL, BENCHMARK, "method")]
    chosen = frame["chosen"].astype(bool)
    by_validation = chosen.groupby(settings).transform("any")
    open_ones = ~by_validation & (chosen.groupby(settings).transform("size") > 1)
    how = "on these very traces, as in the paper" if open_ones.any() else "on validation"
    if open_ones.any() and by_validation.any():
        how = f"on validation where it was compared with some, else {how}"
    frame = best_rows(frame, (MODEL, BENCHMARK, "method")).sort_index()
    caption = f"Each method at its best AES, chosen {how}; {answer} answers. AES "
    caption += f"{' and '.join(frame['aes_label'].unique())}. "
    named = {"corner": "Model / Method", "name": f"best-aes-{answer}"}
    return _grid(frame, (MODEL, "method"), [ACCURACY, LENGTH, AES], caption, **named)


def full_table(frame: pd.DataFrame, model: str) -> Table:
    """The appendix' table of one model and kind of answers: every rule at every parameter."""
    frame = frame[(frame["kind"] == "rule") & (frame[MODEL] == model)]
    (answer,) = frame["answer"].unique()
    columns = [ACCURACY, LENGTH, Column("Red. %", "reduction", 100, 1)]
    if answer == "free":  # lengths are of thinking and answer together
        columns = [ACCURACY, Column("CoT", "tokens"), Column("Ans", "answer_tokens")]
        columns.append(Column("CoT + Ans", "generated_tokens"))
        columns.append(Column("Red. %", "total_reduction", 100, 1))
    # Thresholds that lie close together read alike.
    rows, frame = ("method", "setting", "parameter"), frame.fillna({"parameter": -1.0})
    named = {"corner": "Method / Param", "name": f"full-{model}-{answer}".replace("/", "-")}
    table = _grid(frame, rows, columns, f"Full results for {model}, {answer} answers. ", **named)
    return replace(table, numbers=table.numbers.droplevel("parameter"))
