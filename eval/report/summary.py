"""Results as tables, for terminal and page alike; and one Markdown page of a folder of them."""

from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from ..compute import flops_scale
from ..evaluation import of_probabilities
from ..results import Results, best_rows, find_results, main_rows, price_name, prices_of
from .paper import with_published
from .pictures import draw_dynamics, draw_pareto
from .tables import (
    BENCHMARK,
    INTERVALS,
    MAIN,
    MODEL,
    Column,
    Table,
    best_aes_table,
    full_table,
    grid_frame,
)

COSTS = (
    Column("wrong to\nright %", "helped", 100, 1),
    Column("right to\nwrong %", "harmed", 100, 1),
    Column("answer\ntokens", "answer_tokens", digits=1),
    Column("probe\ntokens", "probe_tokens", digits=1),
    Column("cut at\ncap %", "truncated", 100, 1),
)
ANSWERS = (
    Column("answer after\nstop", "answer_after_stop", digits=1),
    Column("after own\nend", "answer_after_end", digits=1),
    Column("thinks\non %", "rethought", 100, 1),
)
SAVED = Column("all tokens\nsaved %", "total_reduction", 100, 1)
TIME = (Column("time over\nfull", "time_ratio", digits=2), Column("tokens/s", "tokens_per_second"))
DIFFERENCES = (
    Column("accuracy,\npoints", "accuracy", 100, 1, signed=True),
    Column("thinking\ntokens", "tokens", digits=1, signed=True),
    Column("saved,\npoints", "reduction", 100, 1, signed=True),
    Column("AES", "aes", digits=2, signed=True),
)


def told(results: Results) -> list[str]:
    """What is to be known beside the tables: natural answers, probabilities, where savings are."""
    lines = []
    if (natural := results.natural_accuracy) is not None:
        right = f"{natural.text(100, 1)} % right (never mixed with forced ones)"
        lines.append(f"The model's own answers after its own end: {right}.")
    if of_probabilities(results.settings):
        lines.append("Accuracy is the mean probability of the right answer.")
    if found := results.about.get("rounding"):
        lines.append(
            f"The base computes in {found['dtype']}, so that replay is not exact: its stop "
            f"probabilities differ from generate's by {found['mean']:.1e} in the mean and "
            f"{found['largest']:.1e} at most, at {found['steps']} step ends."
        )
    for about, said in (("never_right", "right at no step"), ("at_cap", "cut at their cap")):
        if found := results.about.get(about):
            best, saved = best_rows(results.frame), found["saved"]
            shares = [
                f"{name} {100 * saved[name]:.0f} %"
                for name in (best["method"] + " " + best["setting"]).str.strip()
                if saved.get(name) is not None
            ]
            more = f", and of the tokens that are saved: {', '.join(shares)}" if shares else ""
            lines.append(
                f"{100 * found['traces']:.1f} % of the traces are {said}; they are "
                f"{100 * found['tokens']:.0f} % of the thinking tokens{more}."
            )
    return lines


def tables_of(results: Results) -> list[Table]:
    """The results, their costs, and whole methods where they were compared.

    Of many settings of a method those are left out that validation did not choose.
    """
    whole = frontier_tables(results) if len(results.frontiers) else []
    title, frame = f"{results.dataset}: {results.setting}", main_rows(results.frame)
    if less := len(results.frame) - len(frame):
        title = f"{title}; as validation chose ({less} more settings in results.json)"
    return [results_table(frame, title), *cost_tables(frame), *whole]


def results_table(frame: pd.DataFrame, title: str = "") -> Table:
    """The main numbers of a comparison: rules, the highest AES bold, and limits below a line."""
    columns, rules = list(MAIN), frame["kind"] == "rule"
    traces, problems, label = frame.iloc[0][["traces", "problems", "aes_label"]]
    if not frame["flops"].isna().all():
        scale, unit = flops_scale(float(frame["flops"].max()))
        columns.append(Column(f"compute\n{unit}", "flops", 1 / scale, 1, narrow=True))
    scores = frame["aes"].where(rules)
    return Table.of(
        frame,
        columns,
        caption=f"{traces:,} traces of {problems:,} problems; {INTERVALS}; AES {label}",
        title=title,
        bold=None if scores.isna().all() else int(scores.argmax()),
        line_after=int(rules.sum()) - 1,
    )


def cost_tables(frame: pd.DataFrame) -> list[Table]:
    """What the main table leaves out of the rules, within 80 columns.

    Help and harm, answers, probes and caps; answers after a stop and after the trace's own end,
    where both are known; rewards at each price, and time where measured.
    """
    rules = frame[frame["kind"] == "rule"]
    tables = [Table.of(rules, COSTS, title="Changed answers and further tokens")]
    if "answer_after_end" in rules and rules["answer_after_stop"].notna().any():
        told = "An answer that thinks on opens or closes a thinking again, or begins with a doubt"
        tables.append(Table.of(rules, ANSWERS, caption=told, title="Thinking after the cut"))
    columns, title, caption = [SAVED], "Rewards", "Wall-clock: not measured in this mode"
    for price, name in prices_of(rules, "reward").items():
        columns.append(Column(f"reward\nprice={price_name(price)}", name, digits=3))
    if not rules["time_ratio"].isna().all():
        columns, title, caption = [*columns, *TIME], "Rewards and time", ""
    return [*tables, Table.of(rules, columns, caption=caption, title=title)]


def differences_table(frame: pd.DataFrame) -> Table:
    """Paired differences of one rule to others, of `Results.differences`."""
    caption = (
        f"{frame['rule'].iloc[0]} less each other method, as validation chose or else at their "
        f"best AES, paired; {INTERVALS}. Operating points and differences are of the same traces, "
        "and training seeds are in the intervals only where several were evaluated: an interval "
        "without 0 does not prove the sign."
    )
    return Table.of(frame, DIFFERENCES, frame["other"].tolist(), caption=caption)


def frontier_tables(results: Results) -> list[Table]:
    """Areas, the first method's lead over each other, and the shares of the oracle's gap."""
    frame = results.frontiers
    methods, told = frame["method"].tolist(), []
    columns = [
        Column("area, %", "area", 100, 2),
        Column(f"{methods[0]}'s less it, points", "lead", 100, 2, signed=True),
    ]
    if "fewer" in frame:
        columns.append(Column("tokens above\nit, %", "fewer", 100, 1, signed=True))
        told.append(
            "tokens above it: what a method thinks more, in % of the full trace, where it is as "
            f"right as {methods[0]} at the setting that validation chose"
        )
    left_out = results.about.get("left_out") or {}
    told += [f"left out: {name} ({why})" for name, why in left_out.items()]
    title = f"{results.dataset}: {results.setting}"
    tables = [Table.of(frame, columns, methods, caption="\n".join(told), title=title)]
    prices, title = prices_of(frame, "gap").items(), "Share of the oracle's gap closed, %"
    if gaps := [Column(f"price={price_name(price)}", name, 100, 1) for price, name in prices]:
        tables.append(Table.of(frame, gaps, methods, caption=INTERVALS, title=title))
    return tables


PARETO = (
    "Accuracy against thinking tokens, from 5 points below the full trace up; small: everything. "
    "Bands are 95 % intervals by problem."
)
DYNAMICS = "Validation after each stage of the annealing; dashes are where the price fell."


def write_report(folder: str | Path, *, out: str | Path | None = None) -> list[Path]:
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
    modes = ", ".join(sorted({one.settings["mode"] for one in comparisons}))
    parts = [
        "# Stopping rules compared",
        f"{len(comparisons)} comparison{'s' * (len(comparisons) > 1)} ({modes}); AES "
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
    if (beside := with_published(one)) is not None:
        free = said["answer"] == "free"  # whose lengths are of thinking and answer together
        columns = [
            Column("accuracy %", "accuracy", 100, 1),
            Column("paper's", "paper_accuracy_percent", digits=1),
            Column("tokens", "generated_tokens" if free else "tokens"),
            Column("paper's", "paper_length_tokens"),
            Column("saved %", "total_reduction" if free else "reduction", 100, 1),
            Column("paper's", "paper_reduction_percent", digits=1),
        ]
        caption = "Measured beside published, same model, benchmark, method and parameter"
        tables.append(Table.of(beside, columns, caption=caption))
    for table in tables:
        yield f"### {table.title}\n\n{table.markdown()}" if table.title else table.markdown()
