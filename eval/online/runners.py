"""What generates the batches of an online evaluation: transformers with the hook, or any engine."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.formats_ospruner import TokenFormat
from modeling_ospruner.generation_ospruner import generate_pruned
from modeling_ospruner.stopping_ospruner import StopPolicyConfig, StopRecord, mix64
from ospruner.engines.interface import (
    Engine,
    ForkedAnswer,
    ForkRequest,
    Sampled,
    SamplingSettings,
    end_ids,
)
from ospruner.engines.transformers.engine import (
    LIKELIHOOD_TOLERANCE,
    TransformersEngine,
    mean_logprob,
)
from ospruner.formats import follow
from ospruner.rules import Budget, StopRule
from ospruner.rules.live import generate_with_rule
from ospruner.scoring import stop_probabilities

from ..arithmetic import ModelWork
from ..compute import Compute
from ..methods import PolicyUse
from ..problems.task import Task, prompt_token_ids
from .batches import Batch, Method, SampleRow
from .settings import OnlineSettings

__all__ = ["EngineRunner", "HookRunner", "Setup"]

_COMPARED_ANSWERS = 8
_NEVER = Budget(2**31 - 1)
NATURAL_ANSWER_TOKENS = 512
"""Cap of the answer that the model writes after its own end."""


@dataclass(frozen=True)
class Setup:
    """What both runners need.

    Attributes:
        tokenizer: the base's.
        fmt: its reasoning format.
        task: asks and grades.
        settings: how to sample.
        work: what the base computes, for the compute that each row is charged.
    """

    tokenizer: PreTrainedTokenizerBase
    fmt: TokenFormat
    task: Task
    settings: OnlineSettings
    work: ModelWork

    def prompts(self, batch: Batch) -> list[list[int]]:
        """The prompt of each row."""
        by_problem = [
            prompt_token_ids(p.id, self.task.message(p, self.fmt.format), self.tokenizer, self.fmt)
            for p in batch.problems
        ]
        return [prompt for prompt in by_problem for _ in range(batch.samples)]

    def row(
        self, batch: Batch, index: int, tokens: int, reason: str, answer_ids: Sequence[int]
    ) -> SampleRow:
        """A graded row; the answer is read as the mode says."""
        text = str(self.tokenizer.decode(list(answer_ids), skip_special_tokens=False))
        forced = self.settings.answer == "forced"
        answer = self.task.read_forced(text) if forced else self.task.read_free(text)
        worth = self._worth(answer, batch, index)
        return SampleRow(tokens, len(answer_ids), answer or "", worth, reason)

    def flops(
        self,
        prompt: Sequence[int],
        how: Any,
        row: SampleRow,
        step_ends: Sequence[int],
        trials: Sequence[int] = (),
    ) -> float:
        """What a row has cost; the full trace is charged for its forced answer, as in replay.

        Args:
            prompt: the row's prompt.
            how: of its method.
            row: the row.
            step_ends: the thinking tokens after which a step ended, and the thinking might have.
            trials: the thinking tokens after which the rule tried answers; the trials' own tokens
                are spread evenly over them.
        """
        forced = len(self.fmt.forced_suffix(self.settings.answer))
        compute = Compute(self.work, np.array([len(prompt)]), forced)
        flops = compute.thinking([row.tokens], [row.answer_tokens])[0]
        if isinstance(how, PolicyUse):
            layers, stride = how.config.num_policy_layers, how.config.step_stride
            if how.config.tuning == "queries":
                flops += compute.queries(step_ends[stride - 1 :: stride], layers).sum()
            else:
                flops += compute.tail([row.tokens], layers)[0]
        if trials:
            suffix = len(self.fmt.forced_suffix("forced"))
            tried = replace(compute, forced_tokens=suffix)
            tokens = row.probe_tokens / len(trials) - suffix
            flops += sum(tried.trial(0, position, tokens) for position in trials)
        return float(flops)

    def natural_grade(self, batch: Batch, index: int, answer_ids: Sequence[int]) -> float:
        """Grade of what the model wrote after its own end; NaN where there is nothing."""
        if not len(answer_ids):
            return math.nan
        text = str(self.tokenizer.decode(list(answer_ids), skip_special_tokens=False))
        return self._worth(self.task.read_free(text), batch, index)

    def _worth(self, answer: str | None, batch: Batch, index: int) -> float:
        """An answer's grade; no verdict counts as wrong."""
        return self.task.grade(answer or None, batch.rows[index][0]) or 0.0

    def fork(self, engine: Engine, requests: Sequence[ForkRequest]) -> list[list[ForkedAnswer]]:
        """The answers after every cut of every request."""
        forced = self.settings.answer == "forced"
        return engine.fork(
            requests,
            self.fmt.forced_suffix(self.settings.answer),
            self.settings.max_answer_tokens,
            self.fmt.box_state if forced else None,
        )


class HookRunner:
    """transformers' `generate` with the hook in it, the way users run a policy; its time counts.

    The full trace, whose time is the yardstick, is generated with a budget that no row reaches: the
    same thinking, and the same kind of answer as every other method writes, so that a policy which
    never stops does the same work. Outside the time are the model's own answers after the full
    trace, and the answers of rows cut at the token cap.
    """

    def __init__(self, setup: Setup, base: PreTrainedModel) -> None:
        self.setup = setup
        self.base = base
        self._engine = TransformersEngine(base, setup.tokenizer)
        self._eos = end_ids(base.generation_config, setup.tokenizer)
        self._loaded: tuple[str, OSPrunerForCausalLM] | None = None

    def run(
        self, methods: Sequence[Method], batch: Batch
    ) -> Iterator[tuple[Method, list[SampleRow]]]:
        """Generates the batch anew for each method, from the same seed."""
        prompts = self.setup.prompts(batch)
        for method in methods:
            yield method, self._generate(method, batch, prompts)

    def _generate(
        self, method: Method, batch: Batch, prompts: Sequence[Sequence[int]]
    ) -> list[SampleRow]:
        settings, fmt = self.setup.settings, self.setup.fmt
        room = len(fmt.forced_suffix(settings.answer)) + settings.max_answer_tokens
        ids, arguments = self._arguments(prompts, settings.max_thinking_tokens + room)
        call = self._call(method, batch)
        with torch.random.fork_rng():
            torch.manual_seed(mix64(mix64(settings.seed) ^ batch.first_problem) >> 1)
            started = time.perf_counter()
            output, records = call(ids, arguments)
            generated = output[:, ids.shape[1] :].tolist()  # also waits for the device
            seconds = (time.perf_counter() - started) / len(prompts)
            rows = self._rows(method, batch, prompts, generated, records)
        return [replace(row, seconds=seconds) for row in rows]

    def _arguments(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Prompts, padded at the left, and what generate is told."""
        width, device = max(map(len, prompts)), self.base.device
        pad = min(self._eos)  # masked, so that any id will do
        ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        return ids, {
            **self.setup.settings.generate_arguments(),
            "attention_mask": mask,
            "max_new_tokens": max_new_tokens,
            "pad_token_id": pad,
        }

    def _call(self, method: Method, batch: Batch) -> Any:
        """What generates: (ids, arguments) -> (output, records)."""
        model: Any = self.base
        settings = self.setup.settings
        common: dict[str, Any] = {
            "seed": settings.seed,
            "first_sample_index": batch.first_sample_index,
            "answer": settings.answer,
            "max_answer_tokens": settings.max_answer_tokens,
        }
        if isinstance(method.how, PolicyUse):
            use = method.how
            config = StopPolicyConfig(
                mode=use.mode, threshold=use.threshold, price=use.asked_price, **common
            )
            chosen = self._policy(use.path)
            stride = chosen.config.step_stride
            return lambda ids, more: generate_pruned(
                model, chosen.policy, self.setup.fmt, config, stride, ids, self.setup.tokenizer,
                **more,
            )  # fmt: skip
        config = StopPolicyConfig(rule=method.how or _NEVER, **common)
        return lambda ids, more: generate_with_rule(
            model, self.setup.tokenizer, config, ids, self.setup.fmt, **more
        )

    def _policy(self, path: str) -> OSPrunerForCausalLM:
        if self._loaded is None or self._loaded[0] != path:
            self._loaded = (path, OSPrunerForCausalLM.from_base(self.base, path))
        return self._loaded[1]

    def _rows(
        self,
        method: Method,
        batch: Batch,
        prompts: Sequence[Sequence[int]],
        generated: Sequence[Sequence[int]],
        records: Sequence[StopRecord],
    ) -> list[SampleRow]:
        settings, setup = self.setup.settings, self.setup
        cap = settings.max_thinking_tokens
        answers: dict[int, list[int]] = {}
        ends = self._eos.difference(setup.fmt.think_end_ids)  # of the text
        lengths, reasons = [], []
        ended: dict[int, int] = {}  # after the end marker
        natural: dict[int, float] = {}
        for i, (ids, record) in enumerate(zip(generated, records, strict=True)):
            length, reason = record.thinking_tokens, str(record.reason)
            if length > cap or reason == "length":
                length, reason = min(length, cap), "cap"
            lengths.append(length)
            reasons.append(reason)
            closed = reason != "cap" and ids[length] not in ends
            # What the model has written to end it, which nothing is put before.
            own = follow(setup.fmt, prompts[i], ids) if closed and reason == "natural" else None
            after = length if own is None else length + own.end_tokens
            if closed and reason == "natural":
                ended[i] = after
            elif method.how is None and reason == "natural" and not setup.fmt.format.think_end:
                # Its answer is a part of the reply that it thought in.
                natural[i] = setup.natural_grade(batch, i, ids[:length])
            if settings.answer == "free" and own is not None:
                answers[i] = self._until_eos(ids[after:])[: settings.max_answer_tokens]
            elif closed:
                start = after + len(setup.fmt.forced_suffix(settings.answer, own))
                answers[i] = self._answer(ids[start:])
        missing = [i for i in range(len(generated)) if i not in answers]
        requests = [
            ForkRequest(prompts[i], generated[i][: lengths[i]], [lengths[i]]) for i in missing
        ]
        for i, forked in zip(missing, setup.fork(self._engine, requests), strict=True):
            answers[i] = forked[0].ids
        if method.how is None:
            whole = [[*prompts[i], *generated[i][:after]] for i, after in ended.items()]
            texts = zip(ended, self._own_answers(whole), strict=True)
            natural |= {i: setup.natural_grade(batch, i, text) for i, text in texts}
        rows = []
        for i, (length, reason) in enumerate(zip(lengths, reasons, strict=True)):
            row = setup.row(batch, i, length, reason, answers[i])
            row = replace(
                row,
                probe_tokens=records[i].probe_tokens,
                natural_correct=natural.get(i, math.nan),
            )
            trials = _trials(records[i]) if row.probe_tokens else []
            flops = setup.flops(prompts[i], method.how, row, records[i].step_ends, trials)
            rows.append(replace(row, flops=flops))
        return rows

    def _own_answers(self, texts: Sequence[Sequence[int]]) -> list[list[int]]:
        """What the model writes after its own end, sampled as its thinking was.

        Args:
            texts: prompts with their thinking and the end marker.
        """
        if not texts:
            return []
        ids, arguments = self._arguments(texts, NATURAL_ANSWER_TOKENS)
        model: Any = self.base
        output = model.generate(ids, **arguments)[:, ids.shape[1] :].tolist()
        return [self._until_eos(answer) for answer in output]

    def _until_eos(self, ids: Sequence[int]) -> list[int]:
        return list(ids[: next((n for n, t in enumerate(ids) if t in self._eos), len(ids))])

    def _answer(self, ids: Sequence[int]) -> list[int]:
        """The answer's own tokens, through the brace that closes a forced one."""
        kept = self._until_eos(ids)[: self.setup.settings.max_answer_tokens]
        if self.setup.settings.answer == "forced":
            box = self.setup.fmt.box_state()
            closed = next((n for n, token in enumerate(kept) if box.push(token)), len(kept))
            kept = kept[: closed + 1]
        return kept


class EngineRunner:
    """Any engine: whole traces from the engine, the policy in transformers, answers forked.

    Accuracy and lengths are those of generation with the policy inside; wall-clock is not
    measured. Rules that try answers need them at every step: label, and replay.

    Args:
        setup: tokenizer, format, task, settings.
        engine: samples and answers.
        load_base: loads the base in transformers. It is called once, and only for a policy: the
            engine, which is up before, has then taken the memory that it needs.
    """

    def __init__(
        self, setup: Setup, engine: Engine, load_base: Callable[[], PreTrainedModel]
    ) -> None:
        self.setup = setup
        self.engine = engine
        self._load_base = functools.cache(load_base)
        self._policy = functools.lru_cache(1)(self._loaded)
        self._compared = False

    def _loaded(self, path: str) -> OSPrunerForCausalLM:
        return OSPrunerForCausalLM.from_base(self._load_base(), path)

    def run(
        self, methods: Sequence[Method], batch: Batch
    ) -> Iterator[tuple[Method, list[SampleRow]]]:
        """Samples the batch once, and forks it wherever a method stops."""
        setup, settings = self.setup, self.setup.settings
        for method in methods:
            how = method.how
            if isinstance(how, StopRule) and how.asks:
                raise ValueError(
                    f"{method.method} asks at each step for what this engine does not give: label "
                    "the problems and use `ospruner eval replay`, or use --engine transformers"
                )
        prompts = setup.prompts(batch)
        sampled = self.engine.sample(
            prompts,
            SamplingSettings(
                temperature=settings.temperature,
                top_p=settings.top_p,
                top_k=settings.top_k,
                max_new_tokens=settings.max_thinking_tokens,
                max_answer_tokens=NATURAL_ANSWER_TOKENS,
                seed=settings.seed,
            ),
            setup.fmt,
            [f"{problem.id}/{k}" for problem, k in batch.rows],
        )
        ends = [setup.fmt.step_ends(trace.trace_ids) or [0] for trace in sampled]
        stops = {
            method.key: self._stops(method, batch, prompts, sampled, ends) for method in methods
        }
        cuts = [sorted({stops[key][i] for key in stops}) for i in range(len(sampled))]
        requests = [
            ForkRequest(prompt, trace.trace_ids, cut)
            for prompt, trace, cut in zip(prompts, sampled, cuts, strict=True)
        ]
        forks = [
            dict(zip(cut, answers, strict=True))
            for cut, answers in zip(cuts, setup.fork(self.engine, requests), strict=True)
        ]
        if any(isinstance(method.how, PolicyUse) for method in methods):
            self._refuse_other_weights(requests, forks)
        for method in methods:
            at = stops[method.key]
            yield (
                method,
                [
                    self._row(
                        method, batch, i, prompts[i], trace, ends[i], at[i], forks[i][at[i]].ids
                    )
                    for i, trace in enumerate(sampled)
                ],
            )

    def _refuse_other_weights(
        self, requests: Sequence[ForkRequest], forks: Sequence[Mapping[int, ForkedAnswer]]
    ) -> None:
        """Once: refuses an engine that finds its answers more or less likely than the base does.

        A server's files are out of sight; that the base has the weights which the policy was
        trained on is checked where the policy is loaded.

        Raises:
            ValueError: naming the difference.
        """
        if self._compared:
            return
        suffix = self.setup.fmt.forced_suffix(self.setup.settings.answer)
        given = [
            (request, cut, answer)
            for request, of_one in zip(requests, forks, strict=True)
            for cut, answer in of_one.items()
            if answer.ids
        ]
        differences = []
        for request, cut, answer in given[:_COMPARED_ANSWERS]:
            text = [*request.prompt_ids, *request.trace_ids[:cut], *suffix]
            ours = mean_logprob(self._load_base(), text, answer.ids)
            differences.append(abs(ours - statistics.fmean(answer.logprobs)))
        if not differences:
            return  # nothing was answered yet: the next batch tells
        self._compared = True
        difference = statistics.median(differences)
        if not difference <= LIKELIHOOD_TOLERANCE:
            raise ValueError(
                "the engine serves other weights than the base of the policies "
                f"({str(self._load_base().name_or_path)!r}): their log-probabilities of its "
                f"answers differ by {difference:.2g} nats a token (tolerated: "
                f"{LIKELIHOOD_TOLERANCE}). Serve that base, or give policies of the served one"
            )

    def _row(
        self,
        method: Method,
        batch: Batch,
        index: int,
        prompt: Sequence[int],
        trace: Sampled,
        ends: Sequence[int],
        stop: int,
        forked: Sequence[int],
    ) -> SampleRow:
        full = len(trace.trace_ids)
        at_end = stop == full
        reason = "policy" if not at_end else "cap" if trace.ended == "cap" else "natural"
        if self.setup.settings.answer == "free" and reason == "natural":
            forked = trace.answer_ids[: self.setup.settings.max_answer_tokens]
        row = self.setup.row(batch, index, stop, reason, forked)
        # Without an end marker its answer is a part of the reply that it thought in.
        replied = not self.setup.fmt.format.think_end and reason == "natural" and not trace.end_ids
        own = trace.trace_ids if replied else trace.answer_ids
        natural = self.setup.natural_grade(batch, index, own)
        passed = [end for end in ends if end <= stop and end < full]
        flops = self.setup.flops(prompt, method.how, row, passed)
        return replace(row, natural_correct=natural if at_end else math.nan, flops=flops)

    def _stops(
        self,
        method: Method,
        batch: Batch,
        prompts: Sequence[Sequence[int]],
        sampled: Sequence[Sampled],
        ends: Sequence[Sequence[int]],
    ) -> list[int]:
        """The thinking tokens at which a method stops each row."""
        if method.how is None:
            return [of_row[-1] for of_row in ends]
        if isinstance(method.how, PolicyUse):
            return self._policy_stops(method.how, batch, prompts, sampled, ends)
        stops = []
        for of_row in ends:
            row = method.how.for_row()
            passed = (end for n, end in enumerate(of_row) if row.at_step_end(_Passed(n, end)).stop)
            stops.append(next(passed, of_row[-1]))
        return stops

    def _policy_stops(
        self,
        use: PolicyUse,
        batch: Batch,
        prompts: Sequence[Sequence[int]],
        sampled: Sequence[Sampled],
        ends: Sequence[Sequence[int]],
    ) -> list[int]:
        model = self._policy(use.path)
        stops = []
        for i, (prompt, trace, of_row) in enumerate(zip(prompts, sampled, ends, strict=True)):
            if len(of_row) < 2:  # the natural end is the only step
                stops.append(of_row[-1])
                continue
            pi = stop_probabilities(
                model,
                [*prompt, *trace.trace_ids],
                prompt_length=len(prompt),
                price=use.asked_price,
            ).tolist()
            draws = self.setup.settings.seed, batch.first_sample_index + i
            decided = (
                end
                for step, end in enumerate(of_row[:-1])
                if (step + 1) % use.config.step_stride == 0 and use.stops(pi[step], *draws, step)
            )
            stops.append(next(decided, of_row[-1]))
        return stops


def _trials(record: StopRecord) -> list[int]:
    """The thinking tokens after which a rule tried answers: where it measured something."""
    return [
        end
        for end, signal in zip(record.step_ends, record.signals, strict=True)
        if not math.isnan(signal)
    ]


class _Passed(NamedTuple):
    """A step end for rules that read lengths alone."""

    step: int
    thinking_tokens: int
    may_stop: bool = True
