"""Rows of labelled traces: sample a trace, fork an answer at each step, read it, grade it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from modeling_ospruner.engines.interface import ForkedAnswer, Sampled, SamplingSettings
from modeling_ospruner.formats_ospruner import TokenFormat
from ospruner.eval.grading.boxed import Verdict, compare_many, extract_boxed, read_box
from ospruner.eval.problems.problem import Problem
from ospruner.eval.schema import LabelSettings

__all__ = [
    "GRADE_COLUMNS",
    "TraceKey",
    "grade_rows",
    "labelled_step_ends",
    "sampling_settings",
    "ungraded_row",
    "wanted_traces",
]


@dataclass(frozen=True)
class TraceKey:
    """One trace to be sampled: which problem, and which of its samples.

    Attributes:
        problem: the problem.
        sample_index: 0 .. samples_per_problem - 1.
    """

    problem: Problem
    sample_index: int

    @property
    def name(self) -> str:
        """The row's key for the engine: with the seed, it decides all of the trace's draws."""
        return f"{self.problem.id}/{self.sample_index}"


def wanted_traces(problems: Sequence[Problem], samples_per_problem: int) -> list[TraceKey]:
    """Every trace of a label run, in order.

    Raises:
        ValueError: no problems, or an id that two problems share.
    """
    if not problems:
        raise ValueError("problems is empty; give at least one problem to label")
    seen: set[str] = set()
    for problem in problems:
        if problem.id in seen:
            raise ValueError(f"two problems share the id {problem.id!r}; ids must be unique")
        seen.add(problem.id)
    return [TraceKey(problem, k) for problem in problems for k in range(samples_per_problem)]


def sampling_settings(settings: LabelSettings) -> SamplingSettings:
    """The engine's sampling settings of a label run."""
    return SamplingSettings(
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        max_new_tokens=settings.max_new_tokens,
        seed=settings.seed,
    )


GRADE_COLUMNS = ("forced_correct", "matches_final", "ungraded_reasons", "natural_correct")
"""The columns that `grade_rows` fills in."""

_Pair = tuple[str | None, str | None]


def grade_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Fills in `GRADE_COLUMNS` from the answers in the rows.

    Most steps of a trace give one of a few answers: each is graded, and compared with the answer
    forced at the last step, once.

    Args:
        rows: labelled traces; changed in place.
    """
    wanted: dict[_Pair, None] = {}
    for row in rows:
        for answer in {*row["forced_answers"], row["natural_answer"]}:
            wanted[row["answer"], answer] = None
        for answer in set(row["forced_answers"]):
            wanted[row["forced_answers"][-1], answer] = None
    verdicts: dict[_Pair, Verdict] = dict(zip(wanted, compare_many(list(wanted)), strict=True))
    for row in rows:
        answers, final = row["forced_answers"], row["forced_answers"][-1]
        graded = [verdicts[row["answer"], answer] for answer in answers]
        row["forced_correct"] = [_number(verdict) for verdict in graded]
        row["ungraded_reasons"] = [verdict.reason for verdict in graded]
        row["matches_final"] = [verdicts[final, answer].correct for answer in answers]
        row["natural_correct"] = _number(verdicts[row["answer"], row["natural_answer"]])


def _number(verdict: Verdict) -> float | None:
    return None if verdict.correct is None else float(verdict.correct)


def labelled_step_ends(
    fmt: TokenFormat, trace_ids: Sequence[int], step_stride: int = 1
) -> list[int]:
    """L_i of the steps that get a label.

    Args:
        fmt: where steps end.
        trace_ids: the thinking tokens.
        step_stride: label every k-th step, and always the last.
    """
    ends = fmt.step_ends(trace_ids)
    return [end for i, end in enumerate(ends, start=1) if i % step_stride == 0 or i == len(ends)]


def ungraded_row(
    key: TraceKey,
    prompt_ids: Sequence[int],
    trace: Sampled,
    step_ends: Sequence[int],
    answers: Sequence[ForkedAnswer],
    tokenizer: PreTrainedTokenizerBase,
    forced: bool,
    in_reply: bool = False,
) -> dict[str, Any]:
    """A row of a trace, which `grade_rows` completes.

    Args:
        key: whose trace this is.
        prompt_ids: its prompt.
        trace: the trace, with at least one thinking token.
        step_ends: where answers were forked off it, by `labelled_step_ends`.
        answers: the answers there.
        tokenizer: the base's.
        forced: whether the answers began in a box.
        in_reply: whether the trace is the reply, so that its own answer stands in it.
    """
    problem, texts = key.problem, _Texts(tokenizer)
    contents = [_content(texts.of(answer.ids), forced) for answer in answers]
    own_ids = trace.trace_ids if in_reply and trace.ended == "natural" else trace.answer_ids
    return {
        "problem_id": problem.id,
        "sample_index": key.sample_index,
        "family": problem.family,
        "problem": problem.problem,
        "answer": problem.answer,
        "prompt_ids": list(prompt_ids),
        "trace_ids": list(trace.trace_ids),
        "step_ends": list(step_ends),
        "forced_answers": contents,
        "forced_answer_tokens": [len(answer.ids) for answer in answers],
        "forced_answer_ids": [answer.ids for answer in answers],
        "forced_logprob": [_mean(answer.logprobs) for answer in answers],
        "forced_entropy": [answer.entropy for answer in answers],
        "natural_answer": extract_boxed(texts.of(own_ids)) or "",
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
