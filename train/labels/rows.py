"""Rows of labelled traces: sample a trace, fork an answer at each step, read it, grade it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from modeling_ospruner.formats_ospruner import TokenFormat
from ospruner.engines.interface import ForkedAnswer, Sampled, SamplingSettings
from ospruner.eval.problems.problem import Problem
from ospruner.eval.problems.task import Grade, Task
from ospruner.eval.schema import LabelSettings

__all__ = [
    "GRADE_COLUMNS",
    "OptionIds",
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


def grade_rows(rows: Sequence[dict[str, Any]], task: Task) -> None:
    """Fills in `GRADE_COLUMNS` from the answers in the rows.

    A label is the grade of its answer; by `Task.labels_expect` it is the expected grade of the
    options, E[A] = sum_k p_k A(k), which has the mean of a drawn answer's grade and no variance.

    Most steps of a trace give one of a few answers: each is graded, and compared with the answer
    forced at the last step, once.

    Args:
        rows: labelled traces; changed in place.
        task: grades and compares.
    """
    asked: dict[tuple[str, Problem], None] = {}
    pairs: dict[tuple[str, str], None] = {}
    problems = [
        Problem(row["problem_id"], row["problem"], row["answer"], row["family"]) for row in rows
    ]
    for row, problem in zip(rows, problems, strict=True):
        options = _answers(task, problem) if task.labels_expect else ()
        for answer in {*row["forced_answers"], row["natural_answer"], *options}:
            asked[answer, problem] = None
        for answer in set(row["forced_answers"]):
            pairs[row["forced_answers"][-1], answer] = None
    grades: dict[tuple[str, Problem], Grade] = dict(
        zip(asked, task.grade_many(list(asked)), strict=True)
    )
    same = dict(zip(pairs, task.equal_many(list(pairs)), strict=True))
    for row, problem in zip(rows, problems, strict=True):
        answers, final = row["forced_answers"], row["forced_answers"][-1]
        graded = [grades[answer, problem] for answer in answers]
        row["forced_correct"] = [grade.value for grade in graded]
        row["ungraded_reasons"] = [grade.reason for grade in graded]
        if task.labels_expect:
            worth = [grades[option, problem].value for option in _answers(task, problem)]
            for step, shares in enumerate(row["option_probabilities"]):
                if shares is not None and None not in worth:
                    terms = (p * (a or 0.0) for p, a in zip(shares, worth, strict=True))
                    row["forced_correct"][step] = min(1.0, math.fsum(terms))
        row["matches_final"] = [same[final, answer] for answer in answers]
        row["natural_correct"] = grades[row["natural_answer"], problem].value


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
    task: Task,
    forced: bool,
    fmt: TokenFormat,
) -> dict[str, Any]:
    """A row of a trace, which `grade_rows` completes.

    Args:
        key: whose trace this is.
        prompt_ids: its prompt.
        trace: the trace, with at least one thinking token.
        step_ends: where answers were forked off it, by `labelled_step_ends`.
        answers: the answers there.
        tokenizer: the base's.
        task: reads the answers.
        forced: whether the answers began with the task's prefix.
        fmt: says whether the trace is the reply, so that its own answer stands in it, and where its
            own answer begins after a marker of several tokens.
    """
    problem, texts = key.problem, _Texts(tokenizer)
    read = task.read_forced if forced else task.read_free
    options = _answers(task, problem) if forced else ()

    def said(answer: ForkedAnswer) -> str:
        if answer.option_logprobs is None:
            return read(texts.of(answer.ids)) or ""
        return options[answer.option_logprobs.index(max(answer.option_logprobs))]

    contents = [said(answer) for answer in answers]
    own = texts.of(trace.answer_ids)
    if trace.end_ids and fmt.end_marker is not None:
        own = texts.of([*trace.end_ids, *trace.answer_ids])
        own = own[own.find(fmt.end_marker.literal) + len(fmt.end_marker.literal) :]
    elif not fmt.format.think_end and trace.ended == "natural":
        own = texts.of(trace.trace_ids)
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
        "forced_answer_entropy": [answer.whole_entropy for answer in answers],
        "option_probabilities": [
            None
            if answer.option_logprobs is None
            else [math.exp(value) for value in answer.option_logprobs]
            for answer in answers
        ],
        "natural_answer": task.read_free(own) or "",
        "natural_answer_tokens": len(trace.answer_ids),
        "natural_answer_ids": list(trace.answer_ids),
        "ended": trace.ended,
    }


class OptionIds:
    """The tokens of the options that labels choose among; see `Task.options`.

    Args:
        task: has the options.
        tokenizer: the base's.
        fmt: the base's reasoning format, in the task's shape.
        answer: the labels' answer mode; free answers are decoded.

    Raises:
        ValueError: the labels are expected grades of options, and answers are free.
    """

    def __init__(
        self, task: Task, tokenizer: PreTrainedTokenizerBase, fmt: TokenFormat, answer: str
    ) -> None:
        if answer == "free" and task.labels_expect:
            raise ValueError(
                "labels of probabilities (labels=probability) are read behind what is forced, but "
                "answers are free: take answer=forced, or other labels"
            )
        self._task = task
        self._tokenizer = tokenizer
        prefix = fmt.format.box_prefix
        # As `TokenFormat.compile` tokenises them: together, unless a token reaches over the seam.
        self._before = (
            (fmt.format.closing + prefix, [*fmt.closing_ids, *fmt.box_prefix_ids]),
            (prefix, [*fmt.box_prefix_ids]),
        )
        self._free = answer == "free"
        self._known: dict[str, int] = {}

    def of(self, problem: Problem) -> tuple[int, ...]:
        """The ids of a problem's options; () where its answers are decoded.

        Raises:
            ValueError: see `Task.options`; or an option is not one token of its own.
        """
        return () if self._free else tuple(map(self._id, self._task.options(problem)))

    def check(self, problems: Sequence[Problem]) -> None:
        """Refuses problems as `of` does."""
        for problem in problems:
            self.of(problem)

    def _id(self, option: str) -> int:
        if option not in self._known:
            written = [
                (self._tokenizer.encode(text + option, add_special_tokens=False), before)
                for text, before in self._before
            ]
            found = next((ids[-1] for ids, before in written if ids[:-1] == before), None)
            if found is None:
                prefix, (ids, before) = self._before[-1][0], written[-1]
                raise ValueError(
                    f"the option {option.strip()!r} is not one token of its own behind {prefix!r}: "
                    f"these are the tokens {before}, with it {ids}. Decode the answers "
                    "(--task choice:labels=decoded)"
                )
            self._known[option] = found
        return self._known[option]


def _answers(task: Task, problem: Problem) -> tuple[str, ...]:
    """The options as answers."""
    return tuple(option.strip() for option in task.options(problem))


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


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
