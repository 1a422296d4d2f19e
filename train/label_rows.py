"""Rows of labelled traces: forking an answer at each step, reading it, and grading it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from modeling_ospruner.reasoning_format import TokenFormat
from modeling_ospruner.serving.engine import Engine, ForkedAnswer, ForkRequest, Sampled
from ospruner.eval.grading import extract_boxed, read_box
from ospruner.eval.schema import LabelSettings, validate_row

from .grades import grade_rows
from .progress import Progress, silent
from .traces import TraceKey

__all__ = ["label_traces", "labelled_step_ends"]


def labelled_step_ends(
    fmt: TokenFormat, trace_ids: Sequence[int], every: int = 1, max_forks: int = 0
) -> list[int]:
    """L_i of the steps that get a label.

    Args:
        fmt: where steps end.
        trace_ids: the thinking tokens.
        every: each so-many-th step, and always the last.
        max_forks: at most so many of these, evenly spread, and always the last; 0 for all.
    """
    ends = fmt.step_ends(trace_ids)
    ends = [end for i, end in enumerate(ends, start=1) if i % every == 0 or i == len(ends)]
    if max_forks and len(ends) > max_forks:
        ends = [ends[len(ends) * (k + 1) // max_forks - 1] for k in range(max_forks)]
    return ends


def label_traces(
    keys: Sequence[TraceKey],
    prompts: Sequence[Sequence[int]],
    traces: Sequence[Sampled],
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    fmt: TokenFormat,
    settings: LabelSettings,
    progress: Progress = silent,
) -> list[dict[str, Any]]:
    """Forces and grades the answer at each step of given traces; one row a trace.

    Args:
        keys: whose traces these are.
        prompts: the prompts' ids.
        traces: the traces, each with at least one thinking token.
        engine: runs the base.
        tokenizer: the base's.
        fmt: the base's reasoning format.
        settings: answer mode and cap, and `every`.
        progress: called with phases "fork", in traces of these, and "grade", in comparisons.
    """
    requests = [
        ForkRequest(
            prompt,
            trace.trace_ids,
            labelled_step_ends(fmt, trace.trace_ids, settings.every, settings.max_forks),
        )
        for prompt, trace in zip(prompts, traces, strict=True)
    ]
    forced = settings.answer == "forced"
    finished = 0

    def on_done(index: int, answers: list[ForkedAnswer]) -> None:
        nonlocal finished
        finished += 1
        progress("fork", finished, len(requests))

    forks = engine.fork(
        requests,
        fmt.forced_suffix(settings.answer),
        settings.max_answer_tokens,
        fmt.box_state if forced else None,
        on_done,
    )
    texts = _Texts(tokenizer)
    rows = []
    for key, request, trace, answers in zip(keys, requests, traces, forks, strict=True):
        contents = [_content(texts.of(answer.ids), forced) for answer in answers]
        rows.append(_row(key, request, trace, answers, contents, texts.of(trace.answer_ids)))
    grade_rows(rows, lambda done, total: progress("grade", done, total))
    for row in rows:
        validate_row(row)
    return rows


def _row(
    key: TraceKey,
    request: ForkRequest,
    trace: Sampled,
    answers: Sequence[ForkedAnswer],
    contents: Sequence[str],
    natural_text: str,
) -> dict[str, Any]:
    """A row without its grades."""
    problem = key.problem
    return {
        "problem_id": problem.id,
        "sample_index": key.sample_index,
        "family": problem.family,
        "problem": problem.problem,
        "answer": problem.answer,
        "prompt_ids": list(request.prompt_ids),
        "trace_ids": list(trace.trace_ids),
        "step_ends": list(request.cuts),
        "forced_answers": list(contents),
        "forced_answer_tokens": [len(answer.ids) for answer in answers],
        "forced_answer_ids": [answer.ids for answer in answers],
        "forced_logprob": [_mean(answer.logprobs) for answer in answers],
        "forced_entropy": [answer.entropy for answer in answers],
        "natural_answer": extract_boxed(natural_text) or "",
        "natural_answer_tokens": len(trace.answer_ids),
        "natural_answer_ids": list(trace.answer_ids),
        "ended": trace.ended,
    }


class _Texts:
    """Decodes token ids, equal ones once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[tuple[int, ...], str] = {}

    def of(self, ids: Sequence[int]) -> str:
        """The text of an answer's ids."""
        key = tuple(ids)
        if key not in self._known:
            self._known[key] = str(
                self._tokenizer.decode(
                    list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
                )
            )
        return self._known[key]


def _content(text: str, forced: bool) -> str:
    """What stands in the box; "" where it never closes."""
    return (read_box(text) if forced else extract_boxed(text)) or ""


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
