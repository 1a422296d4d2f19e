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

from modeling_ospruner.common.durable import room_needed
from modeling_ospruner.common.progress import Progress, silent
from modeling_ospruner.engines.interface import Engine, Sampled
from modeling_ospruner.formats_ospruner import TokenFormat
from modeling_ospruner.loading_ospruner import base_fingerprint
from ospruner.eval.grading.boxed import check_grader
from ospruner.eval.problems.problem import Problem, user_message
from ospruner.eval.problems.task import prompt_token_ids
from ospruner.eval.schema import LabelSettings
from ospruner.hub_cards.facts import PROVENANCE_FILE, provenance, read_provenance

from .folder import TokenCosts, data_hash
from .rows import TraceKey, label_traces, sample_traces, wanted_traces
from .writer import Chunk, LabelFolder

__all__ = ["label"]


def label(
    problems: Sequence[Problem],
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    fmt: TokenFormat,
    settings: LabelSettings,
    out_dir: str | Path,
    *,
    chunk_traces: int = 512,
    traces: Sequence[TraceKey] | None = None,
    retry_failed: bool = False,
    source: Mapping[str, Any] | None = None,
    progress: Progress = silent,
) -> Dataset:
    """Samples traces of the problems, labels every step, and keeps all in a folder.

    A run that was killed continues: finished chunks are kept, and as a trace depends only on the
    seed, the problem and its sample index, the result is that of an undisturbed run, with any
    `chunk_traces`; where the engine cannot promise that (`Engine.batch_effects`), the manifest says
    why. More problems may be added later. Damaged shards are set aside and their traces labelled
    again.

    Where an error ends a chunk, its traces are done one by one; those that raise one again are
    recorded as failed, with the error. Errors that keep out long traces bias the labels: look at
    their number.

    Args:
        problems: what to reason about; ids are unique.
        engine: runs the base.
        tokenizer: the base's.
        fmt: the base's reasoning format.
        settings: of the run; an empty `reasoning_format` and an unknown `base_fingerprint` are
            filled in.
        out_dir: an empty folder, or one of an earlier run with the same settings.
        chunk_traces: traces sampled, forked and committed together, as one Parquet file. A kill
            loses at most these.
        traces: which traces of the problems; by default `samples_per_problem` of each.
        retry_failed: try those again that failed in an earlier run.
        source: where the problems come from, JSON values; kept in the manifest.
        progress: called with phases "sample", "fork" and "grade": in traces, and the last in
            comparisons of answers.

    Returns:
        The labelled traces, columns `schema.FEATURES`.

    Raises:
        ValueError: bad problems, a folder that holds something else or other settings, settings
            whose reasoning format is not `fmt`, a full disk, or a broken grader.
        EnginesDownError: no server is left; what was committed is kept.
        Exception: that of the first trace, where every one of several raises one.
    """
    if chunk_traces < 1:
        raise ValueError(f"chunk_traces is {chunk_traces}; it must be 1 or more")
    settings = _with_format(settings, fmt)
    check_grader()
    source = dict(source or {})
    if settings.base_fingerprint is None:
        where, revision = settings.base_model, settings.base_revision
        found = base_fingerprint(where, revision)
        settings = dataclasses.replace(settings, base_fingerprint=found)
        if found is None:
            why = f"no safetensors files of {where!r} at revision {revision!r} on this machine"
            source["base_fingerprint"] = f"unknown: {why}"
    if traces is None:
        traces = wanted_traces(problems, settings.samples_per_problem)
    with room_needed(Path(out_dir)):
        try:
            with LabelFolder(out_dir, settings, source) as folder:
                _check_problems(folder, problems)
                folder.note_effects([engine.batch_effects] if engine.batch_effects else [])
                if retry_failed:
                    folder.forget_failed()
                todo = [k for k in traces if (k.problem.id, k.sample_index) not in folder.done]
                done = len(traces) - len(todo)
                for start in range(0, len(todo), chunk_traces):
                    keys = todo[start : start + chunk_traces]
                    counter = _Counter(progress, done + start, len(traces))
                    folder.commit(_label_or_part(keys, engine, tokenizer, fmt, settings, counter))
                return _finished(folder, settings)
        except KeyboardInterrupt:
            # It may have come in the middle of a commit: opening completes that, or takes it back.
            with LabelFolder(out_dir, settings, source):
                raise


def _finished(folder: LabelFolder, settings: LabelSettings) -> Dataset:
    dataset = folder.finish()
    found = data_hash(folder.chunks)
    recorded = (folder.path / PROVENANCE_FILE).is_file()
    if not recorded or read_provenance(folder.path).data_hash != found:
        provenance(
            folder.path,
            seed=settings.seed,
            base_model=settings.base_model,
            base_revision=settings.base_revision,
            data_hash=found,
            details={"settings": settings.to_dict()},
        )
    return dataset


def _label_or_part(
    keys: Sequence[TraceKey],
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    fmt: TokenFormat,
    settings: LabelSettings,
    counter: _Counter,
) -> Chunk:
    """Labels traces together and, where that raises an error, one by one, to see whose it is."""
    try:
        return _label_chunk(keys, engine, tokenizer, fmt, settings, counter)
    except OSError:  # servers that are gone, a full disk
        raise
    except Exception as error:  # noqa: BLE001 - recorded with the trace, or raised
        if len(keys) == 1:
            why = f"{type(error).__name__}: {error}"
            return Chunk([], failed=[(keys[0].problem.id, keys[0].sample_index, why)])
        first = error
    whole = Chunk([])
    for key in keys:
        one = _label_or_part([key], engine, tokenizer, fmt, settings, counter)
        whole.rows.extend(one.rows)
        whole.dropped.extend(one.dropped)
        whole.failed.extend(one.failed)
        whole.costs.add(one.costs)
    if len(whole.failed) == len(keys):  # the engine is broken, not they
        raise first
    return whole


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
    return Chunk(rows, dropped, costs=TokenCosts(**spent))


class _Counter:
    """Adds what earlier chunks did to the progress of this one."""

    def __init__(self, progress: Progress, done: int, total: int) -> None:
        self._progress = progress
        self._done = done
        self._total = total
        self._sampled = 0

    def start(self, phase: str) -> None:
        """Shows a phase before its first trace."""
        self._sampled = 0
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
