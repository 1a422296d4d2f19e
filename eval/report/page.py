"""One self-contained HTML page of a folder of evaluations: tables, pictures, trace viewer."""

from __future__ import annotations

import base64
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..compute import flops_scale
from ..metrics import AES_ABSOLUTE, AesVariant
from ..online.evaluation import Evaluation, find_evaluations
from ..results import Difference, Estimate, Result, best_rows
from ..text import penalty_name
from .paper import BENCHMARKS, MODELS, compare_with_paper
from .pictures import save_difficulty, save_dynamics, save_panels
from .summary import differences_of, never_right, never_right_told, of_probabilities
from .tables import GridTable, best_aes_table, by_domain, chosen_parameters, full_table, group
from .terminal import (
    DIFFERENCES_CAPTION,
    compute_heading,
    counts_compute,
    largest_flops,
)

__all__ = ["render_report", "write_report"]

TEMPLATE = "report.html.jinja"
Draw = Callable[[Sequence[Path]], None]


@dataclass
class Section:
    """A part of the page.

    Attributes:
        id: its anchor.
        heading: its heading.
        notes: paragraphs.
        figures: "data" (base64 SVG), "alt", "caption".
        tables: "caption", "columns", "rows" (with "cells" and "limit").
    """

    id: str
    heading: str
    notes: list[str] = field(default_factory=list)
    figures: list[dict[str, str]] = field(default_factory=list)
    tables: list[dict[str, Any]] = field(default_factory=list)


def write_report(
    folder: str | Path,
    *,
    out: str | Path | None = None,
    validation: str | Path | None = None,
    dynamics: Sequence[str | Path] = (),
    variant: AesVariant = AES_ABSOLUTE,
    length_penalties: Sequence[float] = (),
    title: str = "Stopping rules compared",
    differences: bool = False,
) -> list[Path]:
    """Writes the page, and beside it the paper's tables (markdown, CSV, LaTeX) and pictures.

    Args:
        folder: evaluations, in it and below.
        out: where to write; None for the folder itself.
        validation: evaluations on which to choose each method's parameter; None chooses on the
            traces shown, as the paper did, and the tables say so.
        dynamics: folders of training runs, for the picture of their dynamics.
        variant: which AES.
        length_penalties: lambdas at which to show the reward.
        title: of the page.
        differences: show each method's paired differences too.

    Returns:
        The files written, the page first.

    Raises:
        ValueError: no evaluation there, or one that is shown twice.
    """
    evaluations = [one for _, one in by_domain(find_evaluations(folder))]
    chosen = None
    if validation is not None:
        chosen = chosen_parameters(find_evaluations(validation), variant)
    target = Path(folder if out is None else out)
    target.mkdir(parents=True, exist_ok=True)
    tables = _grid_tables(evaluations, chosen, variant)
    written = []
    for table in tables:
        for ending, text in (
            ("md", table.markdown()),
            ("csv", table.csv()),
            ("tex", table.latex()),
        ):
            written.append(target / f"{table.name}.{ending}")
            written[-1].write_text(text, "utf-8")
    figures = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, draw in _pictures(evaluations, dynamics, variant).items():
            written.append(target / f"{name}.png")
            svg = Path(scratch) / "picture.svg"
            draw([written[-1], svg])
            figures.append(_figure(name, svg.read_bytes()))
    page = target / "report.html"
    html = render_report(
        evaluations,
        tables,
        figures,
        title=title,
        variant=variant,
        length_penalties=length_penalties,
        differences=differences,
    )
    page.write_text(html, "utf-8")
    return [page, *written]


def render_report(
    evaluations: Sequence[Evaluation],
    tables: Sequence[GridTable],
    figures: Sequence[dict[str, str]],
    *,
    title: str,
    variant: AesVariant = AES_ABSOLUTE,
    length_penalties: Sequence[float] = (),
    differences: bool = False,
) -> str:
    """The page's HTML.

    Args:
        evaluations: what to show.
        tables: the paper's tables of it.
        figures: pictures, as `Section.figures`.
        title: of the page.
        variant: which AES.
        length_penalties: lambdas at which to show the reward.
        differences: show each method's paired differences too.
    """
    summary = Section("summary", "Summary")
    summary.tables = [_grid(table) for table in tables]
    summary.figures = list(figures)
    sections = [summary]
    for number, one in enumerate(evaluations, 1):
        sections.append(_section(one, f"e{number}", variant, length_penalties, differences))
    modes = sorted({one.settings["mode"] for one in evaluations})
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template(TEMPLATE).render(
        title=title,
        about=(
            f"{len(evaluations)} evaluation{'s' * (len(evaluations) > 1)} ({', '.join(modes)}); "
            f"AES {variant.label}; brackets are 95 % intervals by problem (cluster bootstrap)."
        ),
        sections=sections,
        viewers=[{"name": one.name, "traces": one.traces} for one in evaluations if one.traces],
    )


def _grid_tables(
    evaluations: Sequence[Evaluation],
    chosen: Mapping[tuple[str, str], float | None] | None,
    variant: AesVariant,
) -> list[GridTable]:
    tables = []
    for answer in ("forced", "free"):
        by_model = group(evaluations, answer)
        if by_model:
            tables.append(best_aes_table(evaluations, answer, chosen=chosen, variant=variant))
        tables += [full_table(evaluations, model, answer, variant=variant) for model in by_model]
    return tables


def _pictures(
    evaluations: Sequence[Evaluation], dynamics: Sequence[str | Path], variant: AesVariant
) -> dict[str, Draw]:
    """Name -> what draws the picture."""
    found: dict[str, Draw] = {}
    for answer in ("forced", "free"):
        for model, by_benchmark in group(evaluations, answer).items():
            panels = {}
            for name, one in by_benchmark.items():
                results, limits = one.results(variant=variant)
                panels[name] = [*results, *limits]
            key = f"pareto-{model}-{answer}".replace("/", "-")
            found[key] = _panel_drawer(panels, f"{model}, {answer} answers")
    for number, one in enumerate(evaluations, 1):
        best = best_rows(one.results(variant=variant)[0])
        shown = [best[m] for m in best if best[m]][:3]
        found[f"difficulty-{number}"] = _difficulty_drawer(one, shown)
    for number, folder in enumerate(dynamics, 1):
        found[f"dynamics-{number}"] = _dynamics_drawer(folder)
    return found


def _panel_drawer(panels: Mapping[str, Sequence[Result]], title: str) -> Draw:
    return lambda paths: save_panels(panels, paths, title=title)


def _difficulty_drawer(one: Evaluation, rules: Sequence[int]) -> Draw:
    return lambda paths: save_difficulty(one, rules, paths, title=f"By difficulty: {one.name}")


def _dynamics_drawer(folder: str | Path) -> Draw:
    title = f"Training dynamics: {Path(folder).name}"
    return lambda paths: save_dynamics(folder, paths, title=title)


def _figure(name: str, svg: bytes) -> dict[str, str]:
    kind = name.partition("-")[0]
    says = {
        "pareto": "Accuracy against thinking tokens. Points are labelled with λ or threshold; the "
        "wide grey line is the front of all methods; the band is OS-Pruner's 95 % interval.",
        "difficulty": "Problems in groups of equal size, by the length of their full traces.",
        "dynamics": "Validation after each stage of the annealing; dashes are where λ fell.",
    }[kind]
    data = base64.b64encode(svg).decode()
    return {"data": data, "alt": f"{name}: {says}", "caption": says}


def _section(
    one: Evaluation,
    anchor: str,
    variant: AesVariant,
    length_penalties: Sequence[float],
    differences: bool,
) -> Section:
    results, limits = one.results(variant=variant, length_penalties=length_penalties)
    section = Section(anchor, one.name)
    section.notes.append(
        f"{results[0].traces:,} traces of {results[0].problems:,} problems. "
        + (
            "Replay: exact expectations on labelled traces."
            if one.settings["mode"] == "replay"
            else "Online: generated."
        )
    )
    if of_probabilities(one):
        section.notes.append("Accuracy is the mean probability of the right answer.")
    if told := never_right_told(results, never_right(one)):
        section.notes.append(told)
    section.tables.append(_results(results, limits))
    section.tables.append(_costs(results))
    if differences and (found := differences_of(one, results, variant=variant)):
        section.tables.append(_differences(found))
    if one.settings["model"] in MODELS and one.settings["benchmark"] in BENCHMARKS:
        section.tables.append(_published(one, variant))
    return section


def _results(results: Sequence[Result], limits: Sequence[Result]) -> dict[str, Any]:
    rows = []
    for number, result in enumerate([*results, *limits]):
        cells = [
            _plain(result.name),
            _number(result.accuracy, 100, 1),
            _number(result.tokens, 1, 0),
            _number(result.reduction, 100, 1),
            _number(result.aes, 1, 2),
            *(_number(value, 1, 3) for _, value in result.rewards),
        ]
        rows.append({"cells": cells, "limit": number >= len(results)})
    rewards = [f"reward λ={penalty_name(penalty)}" for penalty, _ in results[0].rewards]
    return {
        "caption": "Rules, and below them (grey) limits. Click a heading to sort.",
        "columns": ["method", "accuracy %", "thinking tokens", "saved %", "AES", *rewards],
        "rows": rows,
    }


def _costs(results: Sequence[Result]) -> dict[str, Any]:
    scale, _ = flops_scale(largest_flops(results))
    return {
        "caption": "Changed answers, further tokens and time; – is not measured",
        "columns": [
            "method", "wrong to right %", "right to wrong %", "answer tokens", "probe tokens",
            "all tokens saved %", "cut at cap %", *compute_heading(results), "compute over full",
            "time over full", "tokens/s",
        ],
        "rows": [
            {
                "limit": False,
                "cells": [
                    _plain(r.name),
                    _number(r.helped, 100, 1),
                    _number(r.harmed, 100, 1),
                    _number(r.answer_tokens, 1, 1),
                    _number(r.probe_tokens, 1, 1),
                    _number(r.total_reduction, 100, 1),
                    _number(r.truncated, 100, 1),
                    *([_number(r.flops, 1 / scale, 1)] if counts_compute(results) else []),
                    _number(r.flops_ratio, 1, 2),
                    _number(r.time_ratio, 1, 2),
                    _number(r.tokens_per_second, 1, 0),
                ],
            }
            for r in results
        ],
    }  # fmt: skip


def _differences(differences: Sequence[Difference]) -> dict[str, Any]:
    return {
        "caption": f"{differences[0].rule} less each other method at its best AES, paired. "
        + DIFFERENCES_CAPTION,
        "columns": ["less", "accuracy, points", "thinking tokens", "saved, points", "AES"],
        "rows": [
            {
                "limit": False,
                "cells": [
                    _plain(one.other),
                    _number(one.accuracy, 100, 1, signed=True),
                    _number(one.tokens, 1, 1, signed=True),
                    _number(one.reduction, 100, 1, signed=True),
                    _number(one.aes, 1, 2, signed=True),
                ],
            }
            for one in differences
        ],
    }


def _published(one: Evaluation, variant: AesVariant) -> dict[str, Any]:
    free = one.settings["answer"] == "free"
    rows = []
    for result, cell in compare_with_paper(one, variant=variant):
        rows.append(
            {
                "limit": False,
                "cells": [
                    _plain(result.name),
                    _number(result.accuracy, 100, 1),
                    _plain("–" if cell is None else f"{cell.accuracy_percent:.1f}"),
                    _number(result.total_reduction if free else result.reduction, 100, 1),
                    _plain("–" if cell is None else f"{cell.reduction_percent:.1f}"),
                ],
            }
        )
    return {
        "caption": "Measured beside published, same model, benchmark, method and parameter",
        "columns": ["method", "accuracy %", "paper", "saved %", "paper"],
        "rows": rows,
    }


def _grid(table: GridTable) -> dict[str, Any]:
    rows = []
    for heading, above, label, numbers in table.flat():
        cells = [_plain(f"{heading}: {above} {label.strip()}".replace(":  ", ": "))]
        for number in numbers:
            if number is None:
                cells.append(_plain(""))
                continue
            cell = _number(number.estimate, number.scale, number.digits)
            cells.append(cell | {"mark": number.mark, "text": number.text()})
        rows.append({"cells": cells, "limit": False})
    return {"caption": table.caption, "columns": [table.corner, *table.heads], "rows": rows}


def _number(
    estimate: Estimate, scale: float, digits: int, *, signed: bool = False
) -> dict[str, Any]:
    value, low, high = estimate.texts(scale, digits, signed=signed)
    return {
        "text": value,
        "interval": "" if math.isnan(estimate.low) else f"[{low}, {high}]",
        "sort": "" if math.isnan(estimate.value) else f"{estimate.value:.12g}",
        "mark": "",
    }


def _plain(text: str) -> dict[str, Any]:
    return {"text": text, "interval": "", "sort": text, "mark": ""}
