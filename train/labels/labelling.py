"""Rows of labelled traces: how a base's traces are asked for, answered, read and graded."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from modeling_ospruner.formats_ospruner import ReasoningFormat, TokenFormat
from ospruner.engines.interface import ForkedAnswer, Sampled, SamplingSettings
from ospruner.eval.problems.domains import open_task
from ospruner.eval.problems.problem import Problem
from ospruner.eval.problems.task import Task, prompt_token_ids
from ospruner.eval.schema import LabelSettings


@dataclass(frozen=True)
class ImportedTrace:
    """A trace that others made, as text."""

    reasoning: str  # the thinking, without the markers around it
    response: str  # what followed the thinking; "" where nothing is known of it
    closed: bool  # whether the model ended its thinking itself


@dataclass(frozen=True)
class TraceKey:
    """One trace: which problem, and which of its samples."""

    problem: Problem
    sample_index: int  # 0 .. samples_per_problem - 1
    given: ImportedTrace | None = None  # where others made it; None where it is to be sampled

    @property
    def name(self) -> str:
        """The row's key for the engine: with the seed, it decides all of the trace's draws."""
        return f"{self.problem.id}/{self.sample_index}"

    @property
    def place(self) -> tuple[str, int]:
        """What tells its row from others: problem id and sample index."""
        return self.problem.id, self.sample_index


@dataclass(eq=False)
class Labeller:
    """How a base's traces are asked for, answered and read.

    Raises:
        ValueError: labels are to be expected grades of options, and answers free.
    """

    tokenizer: PreTrainedTokenizerBase  # the base's
    fmt: TokenFormat  # the base's reasoning format, in the task's shape (`Task.shape`)
    settings: LabelSettings  # of the run; `reasoning_format` is filled in
    # Asks, reads and grades; None for the settings' own, which runs no programs.
    given_task: InitVar[Task | None] = None

    def __post_init__(self, given_task: Task | None) -> None:
        self.settings = replace(self.settings, reasoning_format=self.fmt.format.to_dict())
        self.task = open_task(self.settings.task) if given_task is None else given_task
        self._prompts: dict[str, array[int]] = {}  # by problem
        self._option_ids: dict[str, int] = {}
        if self.settings.answer == "free" and self.task.labels_expect:
            raise ValueError(
                "labels of probabilities (labels=probability) are read behind what is forced, but "
                "answers are free: take answer=forced, or other labels"
            )

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, settings: LabelSettings) -> Labeller:
        """That of labels which were made with these settings."""
        literals = ReasoningFormat.from_dict(settings.reasoning_format)
        return cls(tokenizer, TokenFormat.compile(literals, tokenizer), settings)

    @property
    def sampling(self) -> SamplingSettings:
        """How the engine samples traces."""
        names = ("temperature", "top_p", "top_k", "max_new_tokens", "seed")
        return SamplingSettings(**{name: vars(self.settings)[name] for name in names})

    def prompt(self, problem: Problem) -> list[int]:
        """The token ids that ask a problem (`prompt_token_ids`), templated once."""
        if problem.id not in self._prompts:
            message = self.task.message(problem, self.fmt.format)
            ids = prompt_token_ids(
                problem.id, message, self.tokenizer, self.fmt, self.settings.prompt_date
            )
            self._prompts[problem.id] = array("i", ids)
        return self._prompts[problem.id].tolist()

    def options(self, problem: Problem) -> tuple[int, ...]:
        """The tokens of the options that labels choose among; () where answers are decoded.

        Raises:
            ValueError: see `Task.options`; or an option is not one token of its own.
        """
        if self.settings.answer == "free":
            return ()
        return tuple(map(self._option_id, self.task.options(problem)))

    def _option_id(self, option: str) -> int:
        if option in self._option_ids:
            return self._option_ids[option]
        fmt, prefix = self.fmt, self.fmt.format.box_prefix
        # As `TokenFormat.compile` tokenises it: together, unless a token reaches over the seam.
        for text, before in (
            (fmt.format.closing + prefix, [*fmt.closing_ids, *fmt.box_prefix_ids]),
            (prefix, [*fmt.box_prefix_ids]),
        ):
            ids = self.tokenizer.encode(text + option, add_special_tokens=False)
            if ids[:-1] == before:
                return self._option_ids.setdefault(option, ids[-1])
        raise ValueError(
            f"the option {option.strip()!r} is not one token of its own behind {prefix!r}: these "
            f"are the tokens {before}, with it {ids}. Decode the answers "
            "(--task choice:labels=decoded)"
        )

    def step_ends(self, trace_ids: Sequence[int]) -> list[int]:
        """L_i of the steps that get a label: each `step_stride`-th, and always the last."""
        ends, stride = self.fmt.step_ends(trace_ids), self.settings.step_stride
        return [end for i, end in enumerate(ends, start=1) if i % stride == 0 or i == len(ends)]

    def imported(self, given: ImportedTrace, prompt_ids: Sequence[int]) -> Sampled:
        """A trace that others made as if it had been sampled, cut at `max_new_tokens`.

        There are no generated ids: the tokenizer tokenises the texts, in which nothing is a control
        token. What opens the thinking is put before it where the prompt lacks it.
        """
        form, reasoning, opening = self.fmt.format, given.reasoning, list[int]()
        tail = self._text(prompt_ids[-64:])
        if form.think_start and form.think_start not in tail.rpartition(form.think_end)[2]:
            newline = "\n" if form.think_start == "<think>" else ""
            opening = self.tokenizer.encode(form.think_start + newline, add_special_tokens=False)
        if opening or tail.endswith("\n"):
            reasoning = reasoning.lstrip("\n")
        texts: dict[str, Any] = {"add_special_tokens": False, "split_special_tokens": True}
        ids = [*opening, *self.tokenizer.encode(reasoning, **texts)]
        cap = self.settings.max_new_tokens
        if len(ids) > cap or not given.closed:
            return Sampled(ids[:cap], [], "cap")
        return Sampled(ids, list(self.tokenizer.encode(given.response, **texts)), "natural")

    def row(
        self,
        key: TraceKey,
        trace: Sampled,
        step_ends: Sequence[int],
        answers: Sequence[ForkedAnswer],
    ) -> dict[str, Any]:
        """A row of a trace with a thinking token, and its answers; `grade_rows` completes it."""
        return {
            "problem_id": key.problem.id,
            "sample_index": key.sample_index,
            "family": key.problem.family,
            "problem": key.problem.problem,
            "answer": key.problem.answer,
            "prompt_ids": self.prompt(key.problem),
            "trace_ids": list(trace.trace_ids),
            "step_ends": list(step_ends),
            "forced_answers": [self._said(answer, key.problem) for answer in answers],
            "forced_answer_tokens": [len(answer.ids) for answer in answers],
            "forced_answer_ids": [answer.ids for answer in answers],
            "forced_logprob": [
                sum(answer.logprobs) / len(answer.logprobs) if answer.logprobs else None
                for answer in answers
            ],
            "forced_entropy": [answer.entropy for answer in answers],
            "forced_answer_entropy": [answer.whole_entropy for answer in answers],
            "option_probabilities": [
                answer.option_logprobs and [math.exp(one) for one in answer.option_logprobs]
                for answer in answers
            ],
            "natural_answer": self.task.read_free(self._after(trace)) or "",
            "natural_answer_tokens": len(trace.answer_ids),
            "natural_answer_ids": list(trace.answer_ids),
            "ended": trace.ended,
        }

    def _said(self, answer: ForkedAnswer, problem: Problem) -> str:
        if answer.option_logprobs is not None:
            best = answer.option_logprobs.index(max(answer.option_logprobs))
            return self.task.options(problem)[best].strip()
        forced = self.settings.answer == "forced"
        read = self.task.read_forced if forced else self.task.read_free
        return read(self._text(answer.ids)) or ""

    def _after(self, trace: Sampled) -> str:
        """The text that holds a trace's own answer."""
        marker = self.fmt.end_marker
        if trace.end_ids and marker is not None:  # its last token may hold some of the answer
            text = self._text([*trace.end_ids, *trace.answer_ids])
            return text[text.find(marker.literal) + len(marker.literal) :]
        if not self.fmt.format.think_end and trace.ended == "natural":
            return self._text(trace.trace_ids)  # the trace is the reply
        return self._text(trace.answer_ids)

    def _text(self, ids: Sequence[int]) -> str:
        plain = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(list(ids), **plain))


def problem_of(row: Mapping[str, Any]) -> Problem:
    """The problem that a labelled trace is of."""
    return Problem(row["problem_id"], row["problem"], row["answer"], row["family"])


def grade_rows(rows: Sequence[dict[str, Any]], task: Task) -> None:
    """Fills in rows' grades, why there is none, and which answers match the last forced one.

    A label is the grade of its answer; by `Task.labels_expect` it is the expected grade of the
    options, E[A] = sum_k p_k A(k), which has the mean of a drawn answer's grade and no variance.

    Most steps of a trace give one of a few answers: each is graded, and compared with the answer
    forced at the last step, once.
    """
    asked: dict[tuple[str, Problem], None] = {}
    pairs: dict[tuple[str, str], None] = {}
    about: list[tuple[Problem, list[str]]] = []
    for row in rows:
        problem = problem_of(row)
        options = [one.strip() for one in task.options(problem)] if task.labels_expect else []
        about.append((problem, options))
        answers = row["forced_answers"]
        asked |= {(one, problem): None for one in (*answers, row["natural_answer"], *options)}
        pairs |= {(answers[-1], one): None for one in answers}
    grades = dict(zip(asked, task.grade_many(list(asked)), strict=True))
    same = dict(zip(pairs, task.equal_many(list(pairs)), strict=True))
    for row, (problem, options) in zip(rows, about, strict=True):
        answers = row["forced_answers"]
        graded = [grades[answer, problem] for answer in answers]
        row["forced_correct"] = [grade.value for grade in graded]
        row["ungraded_reasons"] = [grade.reason for grade in graded]
        row["matches_final"] = [same[answers[-1], answer] for answer in answers]
        row["natural_correct"] = grades[row["natural_answer"], problem].value
        worth = [grades[option, problem].value for option in options]
        for step, shares in enumerate(row["option_probabilities"] if options else ()):
            if shares is not None and None not in worth:
                expected = math.fsum(p * (a or 0.0) for p, a in zip(shares, worth, strict=True))
                row["forced_correct"][step] = min(1.0, expected)
