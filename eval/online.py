"""Online evaluation: real generation with policies and rules, the way users run them.

Problems, prompts, sampling, caps and grades are those of labels, so that what is generated is what
was labelled, and replay predicts it. Every method sees the same problems with the same seeds: its
rows are those of the full trace up to their stops, and differences between methods are paired.

A finished batch of one method is a line of a journal, fsynced, whose name holds a hash of the run's
settings: a stopped run repeats at most one batch. Without time, Pass@1 over more samples needs no
generation: label more, and replay.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.formats_ospruner import TokenFormat
from modeling_ospruner.generation_ospruner import generate_pruned
from modeling_ospruner.stopping_ospruner import StopPolicyConfig, StopRecord, mix64
from ospruner.durable import append_durably
from ospruner.engines.interface import ForkRequest, end_ids
from ospruner.engines.transformers.engine import TransformersEngine
from ospruner.formats import follow
from ospruner.rules import Budget, StopRule

from .evaluation import Evaluation, Rule
from .methods import FULL, PolicyUse
from .problems.problem import Problem
from .problems.task import Task
from .replay import Outcome
from .results import refuse_other_settings
from .schema import LabelSettings
from .table import FloatArray

_NEVER = Budget(2**31 - 1)

How = PolicyUse | StopRule | None
"""What decides; None never stops: the full trace."""


@dataclass(frozen=True)
class OnlineProblems:
    """A labelled problem, as the base was asked it.

    Attributes:
        problem: the problem.
        prompt_ids: its prompt.
    """

    problem: Problem
    prompt_ids: Sequence[int]

    @classmethod
    def of_labels(cls, traces: Any, limit: int | None = None) -> list[OnlineProblems]:
        """The first so many problems of labels, each once, in order.

        Raises:
            ValueError: limit < 1.
        """
        if limit is not None and limit < 1:
            raise ValueError(f"limit is {limit}; it must be at least 1")
        found: dict[str, OnlineProblems] = {}
        columns = ["problem_id", "problem", "answer", "family", "prompt_ids"]
        for row in traces.select_columns(columns):
            problem = Problem(row["problem_id"], row["problem"], row["answer"], row["family"])
            found.setdefault(problem.id, cls(problem, row["prompt_ids"]))
        return list(found.values())[:limit]


@dataclass(frozen=True)
class SampleRow:
    """What one row of one method came to.

    Attributes:
        tokens: thinking tokens.
        answer_tokens: generated tokens of the answer.
        answer: what stood in the box; "" for nothing.
        correct: the grade; no verdict counts as wrong.
        reason: "policy", "budget", "natural", or "cap".
        probe_tokens: what the rule spent on deciding.
        seconds: its share of the batch's time.
        rethinks: of its record.
    """

    tokens: int
    answer_tokens: int
    answer: str
    correct: float
    reason: str
    probe_tokens: int = 0
    seconds: float = 0.0
    rethinks: int = 0


def read_journal(path: Path) -> dict[tuple[str, int], list[SampleRow]]:
    """The finished batches of a run by method and first problem, a line each; {} before the first.

    Raises:
        ValueError: the file is damaged.
    """
    if not path.exists():
        return {}
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):  # a line torn by a kill
        with path.open("r+b") as file:
            file.truncate(len(whole))
    try:
        return {
            (one["method"], one["batch"]): [SampleRow(**row) for row in one["rows"]]
            for one in map(json.loads, whole.splitlines())
        }
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}: {error}): delete it to begin anew"
        ) from error


def evaluate_online(
    problems: Sequence[OnlineProblems],
    methods: Sequence[PolicyUse | StopRule],
    generate: Callable[[How, Sequence[OnlineProblems], int], list[SampleRow]],
    settings: LabelSettings,
    about: Mapping[str, Any],
    out: str | Path | None = None,
    *,
    batch_problems: int = 1,
    progress: Callable[[str, int, int], None] = lambda phase, done, total: None,
) -> Evaluation:
    """Generates what is missing and returns the evaluation; methods may be added later.

    Args:
        problems: what to ask.
        methods: what to evaluate beside the full trace.
        generate: a `Generator`'s `run`.
        settings: how to sample; `samples_per_problem` is k, and Pass@1 the mean over them.
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
    named: dict[str, tuple[Rule, How]] = {}
    for how in (None, *methods):
        rule = _rule(how)
        key = f"{rule.method} {rule.parameter_name}={rule.parameter}"
        if key in named:
            raise ValueError(f"two methods are {key!r}; give each method once")
        named[key] = rule, how
    identity = {
        **about,
        "answer": settings.answer,
        "mode": "online",
        "label_settings": settings.to_dict(),
        "batch_problems": batch_problems,
        "problems": [one.problem.id for one in problems],
    }
    journal, done = None, dict[tuple[str, int], list[SampleRow]]()
    if out is not None:
        refuse_other_settings(Path(out), identity)
        hashed = hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=8)
        journal = Path(out) / f"online-{hashed.hexdigest()}.jsonl"
        journal.parent.mkdir(parents=True, exist_ok=True)
        done = read_journal(journal)
    tasks = [(start, key) for start in range(0, len(problems), batch_problems) for key in named]
    for number, (start, key) in enumerate(tasks, start=1):
        if (key, start) not in done:
            rows = generate(named[key][1], problems[start : start + batch_problems], start)
            done[key, start] = rows
            if journal is not None:
                line = {"method": key, "batch": start, "rows": [vars(row) for row in rows]}
                append_durably(journal, json.dumps(line, ensure_ascii=False).encode() + b"\n")
        progress("generate", number, len(tasks))
    starts = dict.fromkeys(start for start, _ in tasks)
    rows_of = {key: [row for start in starts for row in done[key, start]] for key in named}
    full = next(iter(rows_of.values()))
    k = settings.samples_per_problem
    return Evaluation(
        settings=identity,
        rules=[
            replace(rule, outcome=_outcome(rows_of[key], full)) for key, (rule, _) in named.items()
        ],
        problem_index=np.repeat(np.arange(len(problems)), k),
    )


def _rule(how: How) -> Rule:
    """Method, parameter and its name, as tables have them, and no outcome yet."""
    nothing = _outcome([], [])
    if how is None:
        return Rule(FULL, nothing)
    if isinstance(how, PolicyUse):
        return Rule(how.method, nothing, how.parameter, how.parameter_name)
    return Rule(how.method, nothing, how.threshold, how.family.parameter_name)


def _outcome(rows: Sequence[SampleRow], full: Sequence[SampleRow]) -> Outcome:
    def column(name: str, of: Sequence[SampleRow] = rows) -> FloatArray:
        return np.array([vars(row)[name] for row in of], np.float64)

    correct, full_correct = column("correct"), column("correct", full)
    stopped = np.array([row.reason not in ("natural", "cap") for row in rows], np.float64)
    return Outcome(
        correct=correct,
        helped=correct * (1.0 - full_correct),
        harmed=(1.0 - correct) * full_correct,
        truncated=np.array([row.reason == "cap" for row in rows], np.float64),
        stopped=stopped,
        stopped_answer=stopped * column("answer_tokens"),
        rethought=stopped * (column("rethinks") > 0),
        **{name: column(name) for name in ("tokens", "answer_tokens", "probe_tokens", "seconds")},
        flops=np.full(len(rows), np.nan),  # replay counts them, here seconds are measured
    )


class Generator:
    """transformers' `generate` with the hook in it; its time counts.

    The full trace, whose time is the yardstick, is generated with a budget that no row reaches: the
    same thinking, and the same kind of answer as every other method writes, so that a policy which
    never stops does the same work. Outside the time are the answers of rows cut at the token cap.

    Args:
        base: the base.
        tokenizer: its own.
        fmt: its format, that of the labels.
        task: grades.
        settings: of the labels, with seed and samples of this run.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        fmt: TokenFormat,
        task: Task,
        settings: LabelSettings,
    ) -> None:
        self.base, self.tokenizer, self.fmt = base, tokenizer, fmt
        self.task, self.settings = task, settings
        self._engine = TransformersEngine(base, tokenizer)
        self._eos = end_ids(base.generation_config, tokenizer)
        self._loaded: tuple[str, OSPrunerForCausalLM] | None = None

    def run(self, how: How, batch: Sequence[OnlineProblems], first_problem: int) -> list[SampleRow]:
        """One method on some problems: a row for each sample, those of a problem together."""
        settings, k = self.settings, self.settings.samples_per_problem
        asked = [one for one in batch for _ in range(k)]
        room = len(self.fmt.forced_suffix(settings.answer)) + settings.max_answer_tokens
        prompts = [list(one.prompt_ids) for one in asked]
        ids, arguments = self._arguments(prompts, settings.max_new_tokens + room)
        call = self._call(how, first_problem * k)
        with torch.random.fork_rng():
            torch.manual_seed(mix64(mix64(settings.seed) ^ first_problem) >> 1)
            started = time.perf_counter()
            output, records = call(ids, **arguments)
            generated = output[:, ids.shape[1] :].tolist()  # also waits for the device
            seconds = (time.perf_counter() - started) / len(prompts)
            rows = list(self._rows(asked, generated, records))
        return [replace(row, seconds=seconds) for row in rows]

    def _arguments(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Prompts, padded at the left, and what generate is told."""
        width, settings, pad = max(map(len, prompts)), self.settings, min(self._eos)
        pads = [width - len(prompt) for prompt in prompts]  # masked, so that any id will do
        ids = [[pad] * n + list(p) for n, p in zip(pads, prompts, strict=True)]
        arguments: dict[str, Any] = {
            "attention_mask": torch.tensor([[0] * n + [1] * (width - n) for n in pads]),
            "max_new_tokens": max_new_tokens,
            "pad_token_id": pad,
            "do_sample": settings.temperature > 0,
        }
        if settings.temperature > 0:
            sampled = ("temperature", "top_p", "top_k")
            arguments |= {name: vars(settings)[name] for name in sampled}
        arguments["attention_mask"] = arguments["attention_mask"].to(self.base.device)
        return torch.tensor(ids, device=self.base.device), arguments

    def _call(self, how: How, first_sample_index: int) -> Callable[..., Any]:
        """What generates: (ids, **arguments) -> (output, records)."""
        settings, policy, stride = self.settings, None, 1
        said: dict[str, Any] = {
            "seed": settings.seed,
            "first_sample_index": first_sample_index,
            "answer": settings.answer,
            "max_answer_tokens": settings.max_answer_tokens,
        }
        if isinstance(how, PolicyUse):
            if self._loaded is None or self._loaded[0] != how.path:
                self._loaded = how.path, OSPrunerForCausalLM.from_base(self.base, how.path)
            chosen = self._loaded[1]
            policy, stride = chosen.policy, chosen.config.step_stride
            said |= {"mode": how.mode, "threshold": how.threshold, "price": how.asked_price}
        else:
            said["rule"] = how or _NEVER
        config, base = StopPolicyConfig(**said), cast("Any", self.base)
        return partial(
            generate_pruned, base, policy, self.fmt, config, stride, tokenizer=self.tokenizer
        )

    def _rows(
        self,
        asked: Sequence[OnlineProblems],
        generated: Sequence[Sequence[int]],
        records: Sequence[StopRecord],
    ) -> Iterator[SampleRow]:
        settings, fmt = self.settings, self.fmt
        texts_end = self._eos.difference(fmt.think_end_ids)
        found: list[tuple[int, str]] = []  # tokens, reason
        answers: dict[int, list[int]] = {}
        for i, (ids, record) in enumerate(zip(generated, records, strict=True)):
            length, reason = record.thinking_tokens, str(record.reason)
            if length > settings.max_new_tokens or reason == "length":
                length, reason = min(length, settings.max_new_tokens), "cap"
            found.append((length, reason))
            closed = reason != "cap" and ids[length] not in texts_end
            # What the model has written to end it, which nothing is put before.
            own = follow(fmt, asked[i].prompt_ids, ids) if closed and reason == "natural" else None
            after = length if own is None else length + own.end_tokens
            if settings.answer == "free" and own is not None:
                answers[i] = self._until_eos(ids[after:])[: settings.max_answer_tokens]
            elif closed:
                start = after + len(fmt.forced_suffix(settings.answer, own))
                answers[i] = self._answer(ids[start:])
        answers |= self._forked(asked, generated, found, answers)
        for i, (length, reason) in enumerate(found):
            forced = settings.answer == "forced"
            read = self.task.read_forced if forced else self.task.read_free
            text = str(self.tokenizer.decode(answers[i], skip_special_tokens=False))
            answer = read(text) or ""
            yield SampleRow(
                tokens=length,
                answer_tokens=len(answers[i]),
                answer=answer,
                correct=self.task.grade(answer or None, asked[i].problem) or 0.0,
                reason=reason,
                probe_tokens=records[i].probe_tokens,
                rethinks=records[i].rethinks,
            )

    def _forked(
        self,
        asked: Sequence[OnlineProblems],
        generated: Sequence[Sequence[int]],
        found: Sequence[tuple[int, str]],
        answers: Mapping[int, Any],
    ) -> dict[int, list[int]]:
        """Answers of the rows that have none: those cut at the token cap."""
        missing = [i for i in range(len(asked)) if i not in answers]
        requests = [
            ForkRequest(list(asked[i].prompt_ids), generated[i][: found[i][0]], [found[i][0]])
            for i in missing
        ]
        forced = self.settings.answer == "forced"
        forks = self._engine.fork(
            requests,
            self.fmt.forced_suffix(self.settings.answer),
            self.settings.max_answer_tokens,
            self.fmt.box_state if forced else None,
        )
        return {i: list(fork.ids) for i, (fork,) in zip(missing, forks, strict=True)}

    def _until_eos(self, ids: Sequence[int]) -> list[int]:
        return list(ids[: next((n for n, t in enumerate(ids) if t in self._eos), len(ids))])

    def _answer(self, ids: Sequence[int]) -> list[int]:
        """The answer's own tokens, through the brace that closes a forced one."""
        kept = self._until_eos(ids)[: self.settings.max_answer_tokens]
        if self.settings.answer == "forced":
            box = self.fmt.box_state()
            closed = next((n for n, token in enumerate(kept) if box.push(token)), len(kept))
            kept = kept[: closed + 1]
        return kept
