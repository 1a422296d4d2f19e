"""One Markdown page of a folder of comparisons, with tables and pictures beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..results import Results, find_results
from .paper import BENCHMARKS, MODELS, comparison_table, with_published
from .pictures import draw_dynamics, draw_pareto
from .summary import differences_table, tables_of, told
from .tables import BENCHMARK, MODEL, best_aes_table, full_table, grid_frame

PARETO = (
    "Accuracy against thinking tokens, from 5 points below the full trace up; small: everything. "
    "Bands are 95 % intervals by problem."
)
DYNAMICS = "Validation after each stage of the annealing; dashes are where the price fell."


def write_report(
    folder: str | Path,
    *,
    out: str | Path | None = None,
) -> list[Path]:
    """Writes `report.md`, and beside it the paper's tables for LaTeX, and pictures.

    Args:
        folder: comparisons, in it and below; training runs there are drawn, too.
        out: where to write; None for the folder itself.

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
    written = [target / "report.md"]
    modes = sorted({one.settings["mode"] for one in comparisons})
    parts = [
        "# Stopping rules compared",
        f"{len(comparisons)} comparison{'s' * (len(comparisons) > 1)} ({', '.join(modes)}); AES "
        f"{' and '.join(everything['aes_label'].unique())}; brackets are 95 % intervals by problem "
        "(cluster bootstrap).",
    ]
    for table in tables:
        written.append(target / f"{table.name}.tex")
        written[-1].write_text(table.latex(), "utf-8")
        parts.append(table.markdown())
    for name, (figure, says) in figures.items():
        written.append(target / f"{name}.png")
        figure.savefig(written[-1])
        parts.append(f"![{says}]({written[-1].name})\n\n{says}")
    for one in comparisons:
        parts += _of_comparison(one)
    written[0].write_text("\n\n".join(part.strip() for part in parts) + "\n", "utf-8")
    return written


def _of_comparison(one: Results) -> Iterator[str]:
    """All numbers of a comparison, beside the paper's where it has them."""
    said, first = one.settings, one.frame.iloc[0]
    how = "exact expectations on labelled traces" if said["mode"] == "replay" else "generated"
    yield f"## {one.name}"
    yield f"{first['traces']:,} traces of {first['problems']:,} problems; {said['mode']}: {how}."
    yield from told(one)
    tables = tables_of(one)
    if len(one.differences):
        tables.append(differences_table(one.differences))
    if said["model"] in MODELS and said["benchmark"] in BENCHMARKS:
        caption = "Measured beside published, same model, benchmark, method and parameter"
        beside = with_published(one)
        tables.append(comparison_table(beside, said["answer"] == "free", caption=caption))
    for table in tables:
        yield f"### {table.title}\n\n{table.markdown()}" if table.title else table.markdown()
