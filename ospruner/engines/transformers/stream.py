"""One call of the transformers engine: what is begun, sampled and forked, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from modeling_ospruner.formats_ospruner import TokenFormat

from ..interface import (
    AnswerStop,
    ForkRequest,
    OpenPrompts,
    Sampled,
    SamplingSettings,
    TraceDesk,
    TraceRequest,
)
from .batch import Batch, padded
from .forks import Forks
from .rows import SamplingRow, batch_noise, choose, run_alone, uniforms

if TYPE_CHECKING:
    from .engine import TransformersEngine

_REFILL_SHARE = 8  # replace finished rows once they are one in so many


@dataclass(frozen=True)
class Finished:
    """A sampled trace that is to be forked."""

    request: TraceRequest
    trace: Sampled
    fork: ForkRequest

    @property
    def tokens(self) -> int:
        """Of prompt and trace."""
        return len(self.fork.prompt_ids) + len(self.fork.trace_ids)


class Stream:
    """One call: what is sampled, and what becomes of it. The arguments are those of the call."""

    def __init__(
        self,
        engine: TransformersEngine,
        desk: TraceDesk,
        settings: SamplingSettings,
        fmt: TokenFormat | None,
        suffix_ids: Sequence[int],
        max_new_tokens: int,
        stop: Callable[[], AnswerStop] | None,
    ) -> None:
        self.engine = engine
        self.model = engine.model
        self.desk = desk
        self.settings = settings
        self.fmt = fmt
        self.fork_added = len(suffix_ids) + max_new_tokens
        self.suffix_ids = suffix_ids
        self.forks = Forks(
            engine.model,
            engine.packed,
            suffix_ids,
            max_new_tokens,
            stop,
            engine.eos_ids,
            engine.counts,
        )
        self.noise = batch_noise(engine.model)
        self.added = settings.max_new_tokens + 1 + settings.max_answer_tokens
        self.prompts = OpenPrompts(engine)
        self.waiting: TraceRequest | None = None  # for memory
        self.finished: list[Finished] = []
        self.free = engine.budget.free()  # since no row was live
        self.longest = 0  # prompt since then

    def run(self) -> None:
        """Samples in one batch, whose rows are replaced as they finish, until there are no more."""
        batch = self._batch()
        rows: list[SamplingRow | None] = []
        while True:
            live = [slot for slot, row in enumerate(rows) if row is not None]
            gone = len(rows) - len(live)
            if not live:
                batch, rows = self._batch(), []  # the memory is free
            if not live or (self.engine.packed and gone * _REFILL_SHARE >= len(rows)):
                kept = [rows[slot] for slot in live]
                if new := self._refill(len(live)):
                    fresh, logits = self._prefill(new)
                    if live:
                        batch.keep(live, fresh)
                    else:
                        batch = fresh
                    rows = [*kept, *new]
                    self._choose(rows, range(len(kept), len(rows)), logits)
                    continue
                if not live:
                    return
                batch.keep(live)
                rows = kept
            elif 2 * gone >= len(rows):
                batch.keep(live)
                rows = [rows[slot] for slot in live]
            live = [slot for slot, row in enumerate(rows) if row is not None]
            ids = torch.tensor([[0 if row is None else row.tokens[-1]] for row in rows])
            real = torch.tensor([[row is not None] for row in rows])
            self._choose(rows, live, batch.feed(ids, real)[live])

    def _batch(self) -> Batch:
        return Batch(self.model, self.engine.sample_counts, self.engine.packed)

    def _prefill(self, rows: Sequence[SamplingRow]) -> tuple[Batch, torch.Tensor]:
        """Runs prompts, each once; the batch, and the logits (B, V) after each."""
        batch = self._batch()
        prompts = [tuple(row.request.prompt_ids) for row in rows]
        different = list(dict.fromkeys(prompts)) if self.engine.packed else prompts
        logits = batch.feed(*padded(different))
        if len(different) < len(prompts):
            places = {prompt: i for i, prompt in enumerate(different)}
            index = [places[prompt] for prompt in prompts]
            batch.keep(index)
            logits = logits[index]
        return batch, logits

    def _choose(
        self, rows: list[SamplingRow | None], slots: Sequence[int], logits: torch.Tensor
    ) -> None:
        """Draws the next token of the rows in these slots from their logits (K, V)."""
        chosen = [row for slot in slots if (row := rows[slot]) is not None]
        states = np.array([row.state for row in chosen], dtype=np.uint64)
        steps = np.array([len(row.tokens) for row in chosen], dtype=np.uint64)
        draws = uniforms(states, steps)
        tokens, close = (t.cpu() for t in choose(logits, draws, self.settings, self.noise))
        for i in close.nonzero()[:, 0].tolist():
            alone = run_alone(self.model, chosen[i].text, self.engine.sample_counts)
            tokens[i] = choose(alone, draws[i : i + 1], self.settings)[0]
        assert self.fmt is not None
        for slot, row, token in zip(slots, chosen, tokens.tolist(), strict=True):
            if row.push(token, self.settings, self.fmt, self.engine.eos_ids):
                rows[slot] = None
                self.prompts.sampled(row.request, row.text[:-1])
                self._sampled(row.request, row.sampled(self.engine.eos_ids))

    # What is begun, and what becomes of it.

    def _refill(self, live: int) -> list[SamplingRow]:
        """Rows to be sampled beside so many live ones, after forking what it is time to fork."""
        if not live:
            self.free, self.longest = self.engine.budget.free(), 0
        rows: list[SamplingRow] = []
        while True:
            if self._enough():
                self._fork(live)
            rows += self._begin(live + len(rows))
            full = live + len(rows) >= self.engine.batch_size or self.waiting is not None
            if full or not self._fork(live + len(rows)):
                return rows

    def _enough(self) -> bool:
        """Whether the finished traces fill a pass."""
        tokens = sum(one.tokens for one in self.finished)
        return tokens >= self.engine.fork_tokens or len(self.finished) >= self.engine.batch_size

    def _begin(self, live: int) -> list[SamplingRow]:
        """Begins traces beside live rows, as memory takes them; sampled ones are finished."""
        rows: list[SamplingRow] = []
        budget = self.engine.budget
        while live + len(rows) < self.engine.batch_size and not self._enough():
            request, self.waiting = self.waiting or self._asked(), None
            if request is None:
                break
            if request.trace is not None:
                self._sampled(request, request.trace)
                continue
            longest = max(self.longest, len(request.prompt_ids))
            if live + len(rows) >= budget.rows(longest + self.added, self.free):
                if live or rows:
                    self.waiting = request
                    break
                self._failed(request, budget.refusal(longest + self.added))
                continue
            self.longest = longest
            rows.append(SamplingRow.start(request, self.settings.seed))
        return rows

    def _asked(self) -> TraceRequest | None:
        """The desk's next trace, but those that the engine refuses."""
        while request := self.desk.begin():
            self.prompts.begin(request)
            try:
                if not len(request.prompt_ids):
                    raise ValueError("the prompt is empty; a trace needs a prompt")
                if request.trace is None:
                    self.engine.refuse_beyond_positions(
                        len(request.prompt_ids), self.settings.max_new_tokens
                    )
            except ValueError as error:
                self._failed(request, error)
                continue
            return request
        return None

    def _sampled(self, request: TraceRequest, trace: Sampled) -> None:
        if not (cuts := self.desk.sampled(request, trace)):
            self.prompts.end(request)
            self.desk.done(request, trace, [])
            return
        kept = trace.trace_ids[: max(cuts)]
        try:
            self.engine.refuse_beyond_positions(
                len(request.prompt_ids) + len(kept), self.fork_added
            )
        except ValueError as error:
            self._failed(request, error)
            return
        fork = ForkRequest(request.prompt_ids, kept, cuts, request.options)
        self.finished.append(Finished(request, trace, fork))

    def _failed(self, request: TraceRequest, error: ValueError) -> None:
        self.prompts.end(request)
        self.desk.failed(request, error)

    def _fork(self, live: int) -> bool:
        """Forks finished traces, those that memory takes beside live rows; whether it did any."""
        finished, self.finished = self.finished, []
        ready: list[Finished] = []
        free = self.engine.budget.free()
        for one in finished:
            fits = not live or self.engine.budget.rows(self._columns(one), free)
            (ready if fits else self.finished).append(one)
        for group in self._groups(ready):
            answers = self.forks.run([one.fork for one in group])
            for one, own in zip(group, answers, strict=True):
                self.prompts.forked(one.request, one.fork, self.suffix_ids, own)
                self.prompts.end(one.request)
                self.desk.done(one.request, one.trace, own)
        return bool(ready)

    def _columns(self, one: Finished) -> int:
        """What a trace takes in the cache with all of its forks."""
        return one.tokens + len(one.fork.cuts) * self.fork_added

    def _groups(self, traces: Sequence[Finished]) -> Iterator[list[Finished]]:
        """Traces to be forked together: those of one prompt, then those of similar length."""
        longest: dict[tuple[int, ...], int] = {}
        for one in traces:
            prompt = tuple(one.fork.prompt_ids)
            longest[prompt] = max(one.tokens, longest.get(prompt, 0))

        def place(one: Finished) -> tuple[int, tuple[int, ...], int]:
            prompt = tuple(one.fork.prompt_ids)
            return longest[prompt], prompt, one.tokens

        group: list[Finished] = []
        for one in sorted(traces, key=place, reverse=True):
            widest = max(other.tokens for other in (*group, one))
            columns = max(map(self._columns, (*group, one)))
            fitting = min(self.engine.fork_tokens // widest, self.engine.batch_size)
            if len(group) >= min(fitting, self.engine.budget.rows(columns)) and group:
                yield group
                group = []
            group.append(one)
        if group:
            yield group
