"""Traces that others made: read from their text, and labelled like our own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from modeling_ospruner.formats_ospruner import ReasoningFormat, TokenFormat
from ospruner.engines.interface import (
    AnswerStop,
    Engine,
    Sampled,
    SamplingSettings,
    TokenCount,
    TraceDesk,
    TraceRequest,
)
from ospruner.eval.problems.problem import Problem, problems_from_rows, read_rows
from ospruner.eval.problems.sources import text_key

from .rows import TraceKey

__all__ = ["ImportedTrace", "ImportedTraces", "read_traces"]

IMPORT_COLUMNS: dict[str, tuple[str, ...]] = {
    "id": ("id",),
    "problem": ("problem",),
    "answer": ("answer",),
    "family": ("family",),
    "reasoning": ("reasoning",),
    "response": ("response",),
    "closed": ("closed",),
}
"""Columns of a file of traces: `read_traces` says what they hold."""


@dataclass(frozen=True)
class ImportedTrace:
    """One trace as text.

    Attributes:
        key: its problem, and its number among the problem's traces.
        reasoning: the thinking, without the markers around it.
        response: what followed the thinking; "" where nothing is known of it.
        closed: whether the model ended its thinking itself.
    """

    key: TraceKey
    reasoning: str
    response: str
    closed: bool


def read_traces(
    path: str,
    *,
    columns: Mapping[str, Sequence[str]] | None = None,
    limit: int | None = None,
    fmt: ReasoningFormat | None = None,
) -> list[ImportedTrace]:
    """Reads traces from a `.jsonl`, `.jsonl.gz` or `.parquet` file.

    Traces of one problem (by its normalised text) become its samples, whatever their ids, so that
    splits by problem keep them together. The problem's id is that of its first trace.

    Args:
        path: the file. Each row has `id`, `problem`, `answer` and `reasoning`; `response` (what
            followed the thinking) and `closed` (whether the model ended its thinking itself; true
            where absent) may be there.
        columns: where these stand, if not under their own names.
        limit: read only the first so many.
        fmt: splits reasoning that still holds its markers, and the answer behind them.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a row that is no trace, an unknown field in `columns`, or limit < 1.
    """
    columns = columns or {}
    if unknown := sorted(set(columns) - set(IMPORT_COLUMNS)):
        raise ValueError(f"columns names the fields {unknown}; a trace has {list(IMPORT_COLUMNS)}")
    names = {**IMPORT_COLUMNS, **columns}
    rows: list[Mapping[str, Any]] = []
    for row in read_rows(path):
        if limit is not None and len(rows) >= max(limit, 1):
            break
        rows.append(row)
    fields = ("id", "problem", "answer", "family")
    problems = problems_from_rows(
        rows, columns={name: names[name] for name in fields}, limit=limit, source=path
    )
    first: dict[str, Problem] = {}
    samples: dict[str, int] = {}
    traces = []
    for number, (row, problem) in enumerate(zip(rows, problems, strict=True)):
        known = first.setdefault(text_key(problem.problem), problem)
        samples[known.id] = samples.get(known.id, -1) + 1
        values = {
            name: next((row[c] for c in names[name] if row.get(c) is not None), None)
            for name in ("reasoning", "response", "closed")
        }
        reasoning, closed = values["reasoning"], values["closed"]
        where = f"{path}, row {number}: column {' or '.join(map(repr, names['reasoning']))}"
        if not isinstance(reasoning, str) or not reasoning.strip():
            raise ValueError(f"{where} holds {reasoning!r}; it must be the text of a trace")
        if closed not in (None, True, False):
            raise ValueError(
                f"{path}, row {number}: closed is {closed!r}; it must be true or false (without "
                "quotes): whether the model ended its thinking itself"
            )
        response = _paragraphs(str(values["response"] or ""))
        traces.append(
            ImportedTrace(
                TraceKey(known, samples[known.id]),
                *_split(_paragraphs(reasoning), response, fmt, where),
                closed is None or bool(closed),
            )
        )
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


class ImportedTraces(Engine):
    """An `Engine` whose sampled traces are imported ones; another engine forks their answers.

    Args:
        traces: the traces.
        engine: forks the answers.
        tokenizer: of that engine's model. The traces' texts are tokenised by it, as there are no
            generated ids.
    """

    def __init__(
        self, traces: Sequence[ImportedTrace], engine: Engine, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.traces = {trace.key.name: trace for trace in traces}
        self.engine = engine
        self.tokenizer = tokenizer
        self.batch_effects = engine.batch_effects
        self.counts = engine.counts
        self.sample_counts = TokenCount()

    def sample_and_fork(
        self,
        desk: TraceDesk,
        settings: SamplingSettings,
        fmt: TokenFormat | None,
        suffix_ids: Sequence[int],
        max_new_tokens: int,
        stop: Callable[[], AnswerStop] | None = None,
    ) -> None:
        """Forks the traces of the desk's keys; see `Engine.sample_and_fork`."""
        assert fmt is not None
        form = fmt

        class Given:
            """The desk, whose traces are there before they are asked for."""

            sampled, done, failed = desk.sampled, desk.done, desk.failed

            @staticmethod
            def begin() -> TraceRequest | None:
                if (request := desk.begin()) is None:
                    return None
                return replace(request, trace=self.given(request, settings, form))

        self.engine.sample_and_fork(Given(), settings, None, suffix_ids, max_new_tokens, stop)

    def given(self, request: TraceRequest, settings: SamplingSettings, fmt: TokenFormat) -> Sampled:
        """An imported trace, cut at `max_new_tokens`."""
        trace = self.traces[request.key]
        ids = self._opened(request.prompt_ids, trace.reasoning, fmt)
        if len(ids) > settings.max_new_tokens or not trace.closed:
            return Sampled(ids[: settings.max_new_tokens], [], "cap")
        return Sampled(ids, self._ids(trace.response), "natural")

    def _opened(self, prompt: Sequence[int], reasoning: str, fmt: TokenFormat) -> list[int]:
        """A trace's ids, with what opens the thinking where the prompt does not write it."""
        start, opening = fmt.format.think_start, list[int]()
        tail = str(self.tokenizer.decode(list(prompt)[-64:], clean_up_tokenization_spaces=False))
        if start and start not in tail.rpartition(fmt.format.think_end)[2]:
            newline = "\n" if start == "<think>" else ""
            opening = list(self.tokenizer.encode(start + newline, add_special_tokens=False))
            reasoning = reasoning.lstrip("\n")
        elif tail.endswith("\n"):
            reasoning = reasoning.lstrip("\n")
        return opening + self._ids(reasoning)

    def _ids(self, text: str) -> list[int]:
        """The tokens of a text, in which nothing is a control token."""
        return list(
            self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        )
