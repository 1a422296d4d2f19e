"""Online evaluation: real generation with policies and rules, the way users run them.

Problems, prompts, sampling, caps and grades are those of labels, so that what is generated is what
was labelled, and replay predicts it. Every method sees the same problems with the same seeds: its
rows are those of the full trace up to their stops, and differences between methods are paired.

A finished batch of one method is a file, whose name holds a hash of the run's settings: a stopped
run repeats at most one batch. Without time, Pass@1 over more samples needs no generation: label
more, and replay.
"""

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedTokenizerBase

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.formats_ospruner import TokenFormat
from modeling_ospruner.generation_ospruner import generate_pruned
from modeling_ospruner.stopping_ospruner import StopPolicyConfig, StopRecord, mix64
from ospruner.durable import read_checked, write_checked
from ospruner.engines.interface import ForkRequest, end_ids
from ospruner.engines.transformers.batch import padded
from ospruner.engines.transformers.engine import TransformersEngine
from ospruner.formats import follow
from ospruner.progress import Progress, silent
from ospruner.rules import Budget, StopRule

from .evaluation import Report, Rule
from .methods import FULL, PolicyUse
from .problems.problem import Problem
from .problems.task import Task
from .replay import Outcome
from .results import refuse_other_settings
from .schema import LabelSettings

NEVER = replace(Budget, method=FULL)(2**31 - 1)
"""The rule that never stops."""

How = PolicyUse | StopRule
"""What decides."""


class OnlineProblem(NamedTuple):
    """A labelled problem, and its prompt as the base was asked."""

    problem: Problem
    prompt_ids: Sequence[int]


def labelled_problems(traces: Any, limit: int | None = None) -> list[OnlineProblem]:
    """The first so many problems of labels, each once, in order."""
    found: dict[str, OnlineProblem] = {}
    columns = ["problem_id", "problem", "answer", "family", "prompt_ids"]
    for row in traces.select_columns(columns):
        *said, prompt_ids = (row[name] for name in columns)
        found.setdefault(said[0], OnlineProblem(Problem(*said), prompt_ids))
    return list(found.values())[:limit]


@dataclass(frozen=True)
class SampleRow:
    """What one row of one method came to; see `Outcome`."""

    tokens: int
    answer_tokens: int
    answer: str  # what stood in the box; "" for nothing
    correct: float
    reason: str  # "policy", "budget", "natural", or "cap"
    probe_tokens: int = 0
    seconds: float = 0.0  # its share of the batch's time
    rethinks: int = 0  # of its record


def evaluate_online(
    problems: Sequence[OnlineProblem],
    methods: Sequence[How],
    generate: Callable[[How, Sequence[OnlineProblem], int], list[SampleRow]],
    settings: LabelSettings,
    about: Mapping[str, Any],
    out: str | Path | None = None,
    *,
    batch_problems: int = 1,
    progress: Progress = silent,
) -> Report:
    """Generates what is missing and returns the report; methods may be added later.

    Args:
        problems: what to ask.
        methods: beside the full trace.
        generate: a `Generator`'s `run`.
        settings: how to sample; Pass@1 is the mean over `samples_per_problem`.
        about: "model" and "benchmark", as tables call them. JSON-ready.
        out: an empty folder, or that of an earlier run of the same settings; None keeps nothing.
        batch_problems: problems, with all their samples, generated in one batch. With 1 the
            wall-clock intervals are exact; more share a batch's time evenly between its rows.
        progress: called with phase "generate", in batches of one method.

    Raises:
        ValueError: the folder holds a run of other settings, two methods have one name, or a
            number is out of range.
    """
    if batch_problems < 1:
        raise ValueError(f"batch_problems is {batch_problems}; it must be at least 1")
    if settings.temperature == 0 and settings.samples_per_problem > 1:
        raise ValueError(
            f"samples is {settings.samples_per_problem} at temperature 0: greedy samples are all "
            "alike; take one"
        )
    named: dict[str, How] = {FULL: NEVER}
    for how in methods:
        key = f"{how.method} {how.parameter_name}={how.parameter}"
        if key in named:
            raise ValueError(f"two methods are {key!r}; give each method once")
        named[key] = how
    identity = {
        **about,
        "answer": settings.answer,
        "mode": "online",
        "label_settings": settings.to_dict(),
        "batch_problems": batch_problems,
        "problems": [one.problem.id for one in problems],
    }
    if out is not None:
        refuse_other_settings(Path(out), identity)
        (Path(out) / "online").mkdir(parents=True, exist_ok=True)
    done: dict[str, list[SampleRow]] = {key: [] for key in named}
    tasks = [(start, key) for start in range(0, len(problems), batch_problems) for key in named]
    for number, (start, key) in enumerate(tasks, start=1):
        named_by = json.dumps([identity, key, start], sort_keys=True).encode()
        name = hashlib.blake2b(named_by, digest_size=16).hexdigest()
        kept = None if out is None else Path(out) / "online" / f"{name}.json"
        if kept is not None and kept.exists():
            found = read_checked(kept, "delete it, and its batch is generated again")
            rows = [SampleRow(**row) for row in found["rows"]]
        else:
            rows = generate(named[key], problems[start : start + batch_problems], start)
            if kept is not None:
                write_checked(kept, {"method": key, "rows": [vars(row) for row in rows]})
        done[key] += rows
        progress("generate", number, len(tasks))
    right, rules = np.array([row.correct for row in done[FULL]]), []
    for key, how in named.items():
        found = pd.DataFrame([vars(row) for row in done[key]])
        stopped = ~found["reason"].isin(("natural", "cap"))
        outcome = Outcome.against(  # replay counts operations, here seconds are measured
            right,
            **found[["correct", "tokens", "answer_tokens", "probe_tokens", "seconds"]],
            truncated=found["reason"] == "cap",
            stopped=stopped,
            stopped_answer=stopped * found["answer_tokens"],
            rethought=stopped & (found["rethinks"] > 0),
        )
        given = () if how is NEVER else (how.parameter, how.parameter_name)
        rules.append(Rule(how.method, outcome, *given))
    index = np.repeat(np.arange(len(problems)), settings.samples_per_problem)
    return Report(rules, index, settings=identity)


@dataclass
class Generator:
    """transformers' `generate` with the hook in it; its time counts.

    The full trace, whose time is the yardstick, is generated with a budget that no row reaches: the
    same thinking, and the same kind of answer as every other method writes, so that a policy which
    never stops does the same work. Outside the time are the answers of rows cut at the token cap.
    Format and settings are those of the labels, with seed and samples of this run.
    """

    base: Any  # a PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    fmt: TokenFormat
    task: Task
    settings: LabelSettings

    def __post_init__(self) -> None:
        self._engine = TransformersEngine(self.base, self.tokenizer)
        self._eos = end_ids(self.base.generation_config, self.tokenizer)
        # The policy of the last method: each takes memory.
        self._opened = lru_cache(1)(partial(OSPrunerForCausalLM.from_base, self.base))

    def run(self, how: How, batch: Sequence[OnlineProblem], first_problem: int) -> list[SampleRow]:
        """One method on some problems: a row for each sample, those of a problem together."""
        settings, k = self.settings, self.settings.samples_per_problem
        asked = [one for one in batch for _ in range(k)]
        room = len(self.fmt.forced_suffix(settings.answer)) + settings.max_answer_tokens
        ids, real = (one.to(self.base.device) for one in padded([one.prompt_ids for one in asked]))
        sampled = ("temperature", "top_p", "top_k") if settings.temperature > 0 else ()
        said = {name: vars(settings)[name] for name in ("seed", "answer", "max_answer_tokens")}
        policy, stride = None, 1
        if isinstance(how, PolicyUse):
            chosen = self._opened(how.path)
            policy, stride = chosen.policy, chosen.config.step_stride
            said |= {"mode": how.mode, "threshold": how.threshold, "price": how.asked_price}
        else:
            said["rule"] = how
        config = StopPolicyConfig(first_sample_index=first_problem * k, **said)
        with torch.random.fork_rng():
            torch.manual_seed(mix64(mix64(settings.seed) ^ first_problem) >> 1)
            started = time.perf_counter()
            output, records = generate_pruned(
                self.base,
                policy,
                self.fmt,
                config,
                stride,
                ids,
                tokenizer=self.tokenizer,
                attention_mask=real.long(),
                max_new_tokens=settings.max_new_tokens + room,
                pad_token_id=min(self._eos),
                do_sample=bool(sampled),
                **{name: vars(settings)[name] for name in sampled},
            )
            generated = output[:, ids.shape[1] :].tolist()  # also waits for the device
            seconds = (time.perf_counter() - started) / len(asked)
            return list(self._rows(asked, generated, records, seconds))

    def _rows(
        self,
        asked: Sequence[OnlineProblem],
        generated: Sequence[Sequence[int]],
        records: Sequence[StopRecord],
        seconds: float,
    ) -> Iterator[SampleRow]:
        settings, fmt, task = self.settings, self.fmt, self.task
        forced = settings.answer == "forced"
        replies = zip(asked, generated, records, strict=True)
        ended = [self._ended(one.prompt_ids, ids, record) for one, ids, record in replies]
        cut = [i for i, (_, _, answer, _) in enumerate(ended) if answer is None]
        thoughts = ((list(asked[i].prompt_ids), generated[i], ended[i][0]) for i in cut)
        forks = self._engine.fork(
            [ForkRequest(prompt, ids[:length], [length]) for prompt, ids, length in thoughts],
            fmt.forced_suffix(settings.answer),
            settings.max_answer_tokens,
            fmt.box_state if forced else None,
        )
        forked = {i: list(fork.ids) for i, (fork,) in zip(cut, forks, strict=True)}
        for i, (length, reason, own, held) in enumerate(ended):
            ids = forked[i] if own is None else own
            text = str(self.tokenizer.decode(held or ids, skip_special_tokens=False))
            answer = (task.read_forced if forced else task.read_free)(text) or ""
            yield SampleRow(
                tokens=length,
                answer_tokens=len(ids),
                answer=answer,
                correct=task.grade(answer or None, asked[i].problem) or 0.0,
                reason=reason,
                probe_tokens=records[i].probe_tokens,
                seconds=seconds,
                rethinks=records[i].rethinks,
            )

    def _ended(
        self, prompt: Sequence[int], ids: Sequence[int], record: StopRecord
    ) -> tuple[int, str, list[int] | None, list[int] | None]:
        """Thinking tokens of a reply, why they ended, its answer, and what else holds that.

        The answer is missing (None) where the thinking was cut at the token cap, or ended the text.
        Where a base without markers ends the text, the trace is its reply and holds a free answer.
        """
        settings, fmt, length = self.settings, self.fmt, record.thinking_tokens
        reason, forced = str(record.reason), settings.answer == "forced"
        if length > settings.max_new_tokens or reason == "length":
            return min(length, settings.max_new_tokens), "cap", None, None
        if ids[length] in self._eos.difference(fmt.think_end_ids):
            if forced or fmt.format.think_end:
                return length, reason, None, None
            return length, reason, [], list(ids[:length])
        # What the model has written to end it, which nothing is put before.
        own = follow(fmt, prompt, ids) if reason == "natural" else None
        begins = length if own is None else length + own.end_tokens
        if forced or own is None:
            begins += len(fmt.forced_suffix(settings.answer, own))
        answer = ids[begins : begins + settings.max_answer_tokens]
        answer = list(itertools.takewhile(lambda token: token not in self._eos, answer))
        if forced:  # through the brace that closes it
            box = fmt.box_state()
            closed = next((n for n, token in enumerate(answer) if box.push(token)), len(answer))
            answer = answer[: closed + 1]
        return length, reason, answer, None
