"""One self-contained HTML page of a folder of evaluations: tables, pictures, trace viewer."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..evaluation import Evaluation, find_evaluations
from ..metrics import AES_ABSOLUTE, AesVariant
from .paper import BENCHMARKS, MODELS, compare_with_paper, comparison_table
from .pictures import save_dynamics, save_panels
from .summary import never_right_told, of_probabilities, results_of
from .tables import (
    BENCHMARK,
    MODEL,
    Table,
    best_aes_table,
    by_domain,
    chosen_parameters,
    compute_column,
    full_table,
    grid_frame,
    price_columns,
)
from .terminal import COSTS, DIFFERENCES, DIFFERENCES_CAPTION, MAIN, SAVED, TIME

__all__ = ["write_report"]

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
        tables: HTML.
    """

    id: str
    heading: str
    notes: list[str] = field(default_factory=list)
    figures: list[dict[str, str]] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)


def write_report(
    folder: str | Path,
    *,
    out: str | Path | None = None,
    validation: str | Path | None = None,
    dynamics: Sequence[str | Path] = (),
    variant: AesVariant = AES_ABSOLUTE,
    prices: Sequence[float] = (),
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
        prices: of a token, at which to show the reward.
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
    summary, written = Section("summary", "Summary"), []
    pictures: dict[str, Draw] = {}
    for answer in ("forced", "free"):
        shown = [one for one in evaluations if one.settings["answer"] == answer]
        if not shown:
            continue
        tables = [best_aes_table(evaluations, answer, chosen=chosen, variant=variant)]
        frame = grid_frame(evaluations, answer, variant)
        for model, of_model in frame.groupby(MODEL, sort=False):
            tables.append(full_table(evaluations, str(model), answer, variant=variant))
            panels = dict(list(of_model.groupby(BENCHMARK, sort=False)))
            name = f"pareto-{model}-{answer}".replace("/", "-")
            pictures[name] = partial(save_panels, panels, title=f"{model}, {answer} answers")
        for table in tables:
            summary.tables.append(table.html())
            texts = {"md": table.markdown(), "csv": table.csv(), "tex": table.latex()}
            for ending, text in texts.items():
                written.append(target / f"{table.name}.{ending}")
                written[-1].write_text(text, "utf-8")
    for number, run in enumerate(dynamics, 1):
        title_of_run = f"Training dynamics: {Path(run).name}"
        pictures[f"dynamics-{number}"] = partial(save_dynamics, run, title=title_of_run)
    with tempfile.TemporaryDirectory() as scratch:
        for name, draw in pictures.items():
            written.append(target / f"{name}.png")
            svg = Path(scratch) / "picture.svg"
            draw([written[-1], svg])
            summary.figures.append(_figure(name, svg.read_bytes()))
    sections = [summary]
    for number, one in enumerate(evaluations, 1):
        sections.append(_section(one, f"e{number}", variant, prices, differences))
    page = target / "report.html"
    page.write_text(_rendered(evaluations, sections, title, variant), "utf-8")
    return [page, *written]


def _rendered(
    evaluations: Sequence[Evaluation], sections: Sequence[Section], title: str, variant: AesVariant
) -> str:
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


def _figure(name: str, svg: bytes) -> dict[str, str]:
    says = {
        "pareto": "Accuracy against thinking tokens. Points are labelled with λ or threshold; the "
        "wide grey line is the front of all methods; the band is OS-Pruner's 95 % interval.",
        "dynamics": "Validation after each stage of the annealing; dashes are where λ fell.",
    }[name.partition("-")[0]]
    data = base64.b64encode(svg).decode()
    return {"data": data, "alt": f"{name}: {says}", "caption": says}


def _section(
    one: Evaluation,
    anchor: str,
    variant: AesVariant,
    prices: Sequence[float],
    differences: bool,
) -> Section:
    found = results_of(one, variant=variant, prices=prices)
    frame = found.frame
    rules = frame[frame["kind"] == "rule"]
    replayed = one.settings["mode"] == "replay"
    section = Section(anchor, one.name)
    section.notes.append(
        f"{frame['traces'][0]:,} traces of {frame['problems'][0]:,} problems. "
        + ("Replay: exact expectations on labelled traces." if replayed else "Online: generated.")
    )
    if of_probabilities(one):
        section.notes.append("Accuracy is the mean probability of the right answer.")
    if told := never_right_told(found):
        section.notes.append(told)
    tables = [
        Table.of(
            frame,
            (*MAIN, *price_columns(frame, "reward", 1, 3)),
            caption="Rules, and below them limits. Click a heading to sort.",
        ),
        Table.of(
            rules,
            (*COSTS, *SAVED, *compute_column(rules), *TIME),
            caption="Changed answers, further tokens and time; – is not measured",
        ),
    ]
    if differences and len(found.differences):
        frame = found.differences
        caption = (
            f"{frame['rule'][0]} less each other method at its best AES, paired. "
            f"{DIFFERENCES_CAPTION}"
        )
        tables.append(Table.of(frame, DIFFERENCES, frame["other"].tolist(), caption=caption))
    if one.settings["model"] in MODELS and one.settings["benchmark"] in BENCHMARKS:
        measured, cells = compare_with_paper(one, variant=variant)
        caption = "Measured beside published, same model, benchmark, method and parameter"
        free = one.settings["answer"] == "free"
        tables.append(comparison_table(measured, cells, free, caption=caption))
    section.tables += [table.html() for table in tables]
    return section
