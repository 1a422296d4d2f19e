"""Labels: at the end of each step of a trace, force the answer and grade it.

Nothing is rolled out again later: the objective and every baseline are computed exactly from these
grades (the paper's section on data preprocessing).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from modeling_ospruner.reasoning_format import TokenFormat
from modeling_ospruner.serving.engine import Engine, ForkedAnswer, ForkRequest, Sampled
from ospruner.eval.benchmarks import Problem, user_message
from ospruner.eval.grading import extract_boxed, read_box
from ospruner.eval.schema import LabelSettings, validate_row
from ospruner.eval.task import prompt_token_ids
from ospruner.hub_cards.facts import provenance

from .grades import grade_rows
from .label_folder import TokenCosts
from .label_writer import Chunk, LabelFolder
from .progress import Progress, silent
from .traces import TraceKey, sample_traces, wanted_traces

__all__ = ["label", "label_traces", "labelled_step_ends"]


def label(
    problems: Sequence[Problem],
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    fmt: TokenFormat,
    settings: LabelSettings,
    out_dir: str | Path,
    *,
    chunk_traces: int = 512,
    shard_traces: int = 2048,
    source: Mapping[str, Any] | None = None,
    progress: Progress = silent,
) -> Dataset:
    """Samples traces of the problems, labels every step, and keeps all in a folder.

    A run that was killed continues: finished chunks are kept, and as a trace depends only on the
    seed, the problem and its sample index, the result is that of an undisturbed run. More problems
    may be added later. An interrupt (Ctrl-C) leaves what was committed in shards.

    Args:
        problems: what to reason about; ids are unique.
        engine: runs the base.
        tokenizer: the base's.
        fmt: the base's reasoning format.
        settings: of the run; an empty `reasoning_format` is filled in.
        out_dir: an empty folder, or one of an earlier run with the same settings.
        chunk_traces: traces sampled, forked and committed together. A kill loses at most these.
        shard_traces: traces in a Parquet file, at least.
        source: where the problems come from, JSON values; kept in the manifest.
        progress: called with phases "sample", "fork" and "grade": in traces, and the last in
            comparisons of answers.

    Returns:
        The labelled traces, columns `schema.FEATURES`.

    Raises:
        ValueError: bad problems, a folder that holds something else or other settings, or
            settings whose reasoning format is not `fmt`.
    """
    if chunk_traces < 1 or shard_traces < 1:
        raise ValueError(
            f"chunk_traces is {chunk_traces} and shard_traces {shard_traces}; both must be >= 1"
        )
    settings = _with_format(settings, fmt)
    wanted = wanted_traces(problems, settings.samples_per_problem)
    with LabelFolder(out_dir, settings, shard_traces, source) as folder:
        _check_problems(folder, problems)
        todo = [k for k in wanted if (k.problem.id, k.sample_index) not in folder.done]
        done = len(wanted) - len(todo)
        try:
            for start in range(0, len(todo), chunk_traces):
                keys = todo[start : start + chunk_traces]
                counter = _Counter(progress, done + start, len(wanted))
                folder.commit(_label_chunk(keys, engine, tokenizer, fmt, settings, counter))
        except KeyboardInterrupt:
            folder.compact()
            raise
        dataset = folder.finish()
        if todo:
            provenance(
                folder.path,
                seed=settings.seed,
                base_model=settings.base_model,
                base_revision=settings.base_revision,
                details={"settings": settings.to_dict()},
            )
    return dataset


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


def _label_chunk(
    keys: Sequence[TraceKey],
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    fmt: TokenFormat,
    settings: LabelSettings,
    counter: _Counter,
) -> Chunk:
    before = _costs(engine)
    prompts = [
        prompt_token_ids(key.problem.id, user_message(key.problem, fmt.format), tokenizer, fmt)
        for key in keys
    ]
    counter.start("sample")
    traces = sample_traces(keys, prompts, engine, fmt, settings, counter.one_sampled)
    kept = [i for i, trace in enumerate(traces) if trace.trace_ids]
    rows = label_traces(
        [keys[i] for i in kept],
        [prompts[i] for i in kept],
        [traces[i] for i in kept],
        engine,
        tokenizer,
        fmt,
        settings,
        counter,
    )
    dropped = [
        (key.problem.id, key.sample_index, "the trace has no thinking tokens")
        for key, trace in zip(keys, traces, strict=True)
        if not trace.trace_ids
    ]
    after = _costs(engine)
    spent = {name: value - vars(before)[name] for name, value in vars(after).items()}
    return Chunk(rows, dropped, TokenCosts(**spent))


class _Counter:
    """Adds what earlier chunks did to the progress of this one."""

    def __init__(self, progress: Progress, done: int, total: int) -> None:
        self._progress = progress
        self._done = done
        self._total = total
        self._sampled = 0

    def start(self, phase: str) -> None:
        """Shows a phase before its first trace."""
        self._progress(phase, self._done, self._total)

    def one_sampled(self, index: int, trace: Sampled) -> None:
        """Counts a sampled trace."""
        self._sampled += 1
        self("sample", self._sampled, self._total)

    def __call__(self, phase: str, done: int, total: int, note: str = "") -> None:
        """Takes a phase's state within the chunk."""
        if phase == "grade":  # counts comparisons, not traces
            self._progress(phase, done, total, note)
        else:
            self._progress(phase, self._done + done, self._total, note)


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


def _costs(engine: Engine) -> TokenCosts:
    forks, sampling = engine.counts, engine.sample_counts
    return TokenCosts(
        forks.computed, forks.unique, forks.padding, sampling.computed, sampling.unique
    )


def _with_format(settings: LabelSettings, fmt: TokenFormat) -> LabelSettings:
    literals = fmt.format.to_dict()
    if settings.reasoning_format and settings.reasoning_format != literals:
        raise ValueError(
            f"settings.reasoning_format is {settings.reasoning_format}, but the format compiled "
            f"for the tokenizer is {literals}; leave the former empty, or make them agree"
        )
    return dataclasses.replace(settings, reasoning_format=literals)


def _check_problems(folder: LabelFolder, problems: Sequence[Problem]) -> None:
    given = {problem.id: (problem.problem, problem.answer) for problem in problems}
    for problem_id, stored in folder.problems.items():
        if problem_id not in given:
            raise ValueError(
                f"{folder.path} holds traces of problem {problem_id!r}, which is not among the "
                f"{len(given)} given: give all of its problems to continue it, or use another "
                "folder"
            )
        if given[problem_id] != stored:
            raise ValueError(
                f"{folder.path} holds traces of problem {problem_id!r} with (problem, answer) "
                f"{stored}, given is {given[problem_id]}: use another folder"
            )
