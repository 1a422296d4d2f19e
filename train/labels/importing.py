"""Traces that others made: read from their text, and labelled like our own."""

import re
from collections import Counter
from dataclasses import replace
from itertools import islice

from modeling_ospruner.formats_ospruner import ReasoningFormat
from ospruner.eval.problems.problem import (
    COLUMNS,
    Columns,
    Problem,
    first_of,
    problems_from_rows,
    read_rows,
    text_key,
)

from .labelling import ImportedTrace, TraceKey

_TRACE = ("reasoning", "response", "closed")


def read_traces(
    path: str,
    *,
    columns: Columns | None = None,
    limit: int | None = None,
    fmt: ReasoningFormat | None = None,
) -> list[TraceKey]:
    """Reads traces from a `.jsonl`, `.jsonl.gz` or `.parquet` file.

    Traces of one problem (by its normalised text) become its samples, whatever their ids, so that
    splits by problem keep them together. The problem's id is that of its first trace.

    Each row has `problem`, `answer` and `reasoning`; `id`, `response` (what followed the thinking)
    and `closed` (whether the model ended its thinking itself; true where absent) may be there.
    `columns` says where these stand, if not under their own names. The format splits reasoning that
    still holds its markers, and the answer behind them.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a row that is no trace, no row, or an unknown field in `columns`.
    """
    names = {**COLUMNS, **{name: (name,) for name in _TRACE}}
    names["reasoning"] = ("reasoning", "reasoning_content")  # as servers call it
    if unknown := sorted(set(columns or {}) - set(names)):
        raise ValueError(f"columns names the fields {unknown}; a trace has {list(names)}")
    names |= columns or {}
    rows = list(islice(read_rows(path), limit))
    # A problem may have many traces: without an id each row is numbered until its text is known.
    numbered = [
        {**row, names["id"][0]: number} if first_of(row, names["id"]) is None else row
        for number, row in enumerate(rows)
    ]
    columns = {name: names[name] for name in COLUMNS}
    problems = problems_from_rows(numbered, columns=columns, source=path)
    first: dict[str, Problem] = {}
    samples: Counter[str] = Counter()
    traces = []
    for number, (row, problem) in enumerate(zip(rows, problems, strict=True)):
        name = text_key(problem.problem)
        if first_of(row, names["id"]) is None:
            problem = replace(problem, id=name)
        problem = first.setdefault(name, problem)
        reasoning, response, closed = (first_of(row, names[name]) for name in _TRACE)
        where = f"{path}, row {number}: column {' or '.join(map(repr, names['reasoning']))}"
        if not isinstance(reasoning, str) or not reasoning.strip():
            raise ValueError(f"{where} holds {reasoning!r}; it must be the text of a trace")
        if not (closed is None or isinstance(closed, bool)):
            raise ValueError(
                f"{path}, row {number}: closed is {closed!r}; it must be true or false (without "
                "quotes): whether the model ended its thinking itself"
            )
        texts = _split(_paragraphs(reasoning), _paragraphs(str(response or "")), fmt, where)
        trace = ImportedTrace(*texts, closed is not False)
        traces.append(TraceKey(problem, samples[name], trace))
        samples[name] += 1
    return traces


def _paragraphs(text: str) -> str:
    """A text whose line breaks and blank lines are written as models write them."""
    return re.sub(r"\n[ \t]+(?=\n)", "\n", text.replace("\r\n", "\n").replace("\r", "\n"))


def _split(
    reasoning: str, response: str, fmt: ReasoningFormat | None, where: str
) -> tuple[str, str]:
    """Thinking and response of a text that may still hold the format's markers.

    Raises:
        ValueError: a marker stands where none can be, or what follows the thinking stands twice.
    """
    if fmt is None or not fmt.think_end:
        return reasoning, response
    if fmt.think_start and reasoning.lstrip().startswith(fmt.think_start):
        reasoning = reasoning.lstrip().removeprefix(fmt.think_start)
    thinking, end, after = reasoning.partition(fmt.think_end)
    markers = [one for one in (fmt.think_start, fmt.think_end) if one]
    if any(one in text for text in (thinking, after) for one in markers) or (
        after.strip() and response.strip() and after.strip() != response.strip()
    ):
        raise ValueError(
            f"{where} holds the markers {markers} of several thoughts, or another response than "
            "the column of responses: give the thinking alone"
        )
    if not thinking.strip():
        raise ValueError(f"{where} holds no thinking before {fmt.think_end!r}")
    return thinking, response if not end or response.strip() else after
