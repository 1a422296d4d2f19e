"""One self-contained HTML page of a folder of comparisons: tables and pictures."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..results import Results, find_results
from .paper import BENCHMARKS, MODELS, comparison_table, with_published
from .pictures import draw_dynamics, draw_pareto
from .summary import differences_table, tables_of, told
from .tables import (
    BENCHMARK,
    MODEL,
    best_aes_table,
    full_table,
    grid_frame,
)

PARETO = (
    "Accuracy against thinking tokens, from 5 points below the full trace up; small: everything. "
    "Bands are 95 % intervals by problem."
)
DYNAMICS = "Validation after each stage of the annealing; dashes are where the price fell."


def write_report(
    folder: str | Path,
    *,
    out: str | Path | None = None,
    title: str = "Stopping rules compared",
) -> list[Path]:
    """Writes the page, and beside it the paper's tables (markdown, CSV, LaTeX) and pictures.

    Args:
        folder: comparisons, in it and below; training runs there are drawn, too.
        out: where to write; None for the folder itself.
        title: of the page.

    Returns:
        The files written, the page first.

    Raises:
        ValueError: no comparison there, or one that is shown twice.
    """
    comparisons = list(find_results(folder).values())
    tables, figures = [], {}
    everything = grid_frame(comparisons)
    for answer, frame in everything.groupby("answer"):
        tables.append(best_aes_table(frame))
        for model, of_model in frame.groupby(MODEL, sort=False):
            tables.append(full_table(frame, str(model)))
            panels = {str(name): one for name, one in of_model.groupby(BENCHMARK, sort=False)}
            name = f"pareto-{model}-{answer}".replace("/", "-")
            figures[name] = draw_pareto(panels, f"{model}, {answer} answers"), PARETO
    finished = Path(folder).rglob("trainer_state.json")
    runs = sorted(one.parent for one in finished if one.with_name("run.json").is_file())
    for number, run in enumerate(runs, 1):
        drawn = draw_dynamics(run, f"Training dynamics: {run.name}")
        figures[f"dynamics-{number}"] = drawn, DYNAMICS
    target = Path(folder if out is None else out)
    target.mkdir(parents=True, exist_ok=True)
    written = [target / "report.html"]
    for table in tables:
        texts = {"md": table.markdown(), "csv": table.csv(), "tex": table.latex()}
        for ending, text in texts.items():
            written.append(target / f"{table.name}.{ending}")
            written[-1].write_text(text, "utf-8")
    summary = _section("summary", "Summary", [table.html() for table in tables])
    for name, (figure, says) in figures.items():
        written.append(target / f"{name}.png")
        figure.savefig(written[-1])
        figure.savefig(svg := io.BytesIO(), format="svg")
        data = base64.b64encode(svg.getvalue()).decode()
        summary["figures"].append({"data": data, "alt": f"{name}: {says}", "caption": says})
    sections = [_of_comparison(f"e{number}", one) for number, one in enumerate(comparisons, 1)]

    modes = sorted({one.settings["mode"] for one in comparisons})
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    text = environment.get_template("report.html.jinja").render(
        title=title,
        about=(
            f"{len(comparisons)} comparison{'s' * (len(comparisons) > 1)} ({', '.join(modes)}); "
            f"AES {' and '.join(everything['aes_label'].unique())}; brackets are 95 % intervals by "
            "problem (cluster bootstrap)."
        ),
        sections=[summary, *sections],
    )
    written[0].write_text(text, "utf-8")
    return written


def _section(
    anchor: str, heading: str, tables: Sequence[str], notes: Sequence[str] = ()
) -> dict[str, Any]:
    """A part of the page: `tables` are HTML, `notes` paragraphs."""
    return {"id": anchor, "heading": heading, "notes": notes, "figures": [], "tables": tables}


def _of_comparison(anchor: str, one: Results) -> dict[str, Any]:
    """All numbers of a comparison, beside the paper's where it has them."""
    said = one.settings
    how = "exact expectations on labelled traces" if said["mode"] == "replay" else "generated"
    first = one.frame.iloc[0]
    notes = [
        f"{first['traces']:,} traces of {first['problems']:,} problems; {said['mode']}: {how}."
    ]
    tables = tables_of(one)
    if len(one.differences):
        tables.append(differences_table(one.differences))
    if said["model"] in MODELS and said["benchmark"] in BENCHMARKS:
        caption = "Measured beside published, same model, benchmark, method and parameter"
        beside = with_published(one)
        tables.append(comparison_table(beside, said["answer"] == "free", caption=caption))
    texts = [table.html() for table in tables]
    return _section(anchor, one.name, texts, [*notes, *told(one)])
