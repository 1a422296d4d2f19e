"""The embedded engine: any transformers causal LM, with its own decode loop instead of generate."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer

from modeling_ospruner.formats_ospruner import TokenFormat
from ospruner.bases import input_device, max_positions

from ..interface import (
    AnswerStop,
    Engine,
    ForkedAnswer,
    ForkRequest,
    OpenPrompt,
    OpenPrompts,
    Sampled,
    SamplingSettings,
    TokenCount,
    TokenTrie,
    TraceDesk,
    TraceRequest,
    add_forks,
    check_forks,
    end_ids,
    unique_fork_tokens,
)
from .budget import MemoryBudget
from .cache import SlotCache, fast_attention, takes_fast_attention
from .packed_forks import PackedForks
from .packed_sampling import PackedSampler
from .rows import SamplingRow, batch_effects, row_keys
from .sequential import fork_one, sample_batch

Rules = tuple[Sequence[int], int, Callable[[], AnswerStop] | None]
"""Suffix, cap and stop rule of answers, as in `Engine.fork`."""

_PACKED_ATTENTION = ("sdpa", "eager")  # implementations that take any mask


class TransformersEngine(Engine):
    """Samples traces and forks answers with a model in this process.

    Where every layer attends to everything (and the attention takes custom masks), rows are
    replaced as they finish, and the forks of a trace are one packed tree. Other models (sliding
    windows, recurrent states) go the sequential way, a batch at a time: same results, slower. In
    float32 a row's tokens do not depend on what else is in the call; in half precision, with
    experts or recurrent states (`batch_effects`) they do not where `batch_size` is 1, for each row
    then runs by itself.

    Rows are admitted by memory: as many of the greatest possible length as the free memory of each
    device that holds keys and values takes. A trace's own forks are never parted; in a stream they
    wait for the rows being sampled only where memory does not take both.

    Args:
        model: a causal LM; it is put in eval mode.
        tokenizer: its tokenizer, for the ids that end a text.
        batch_size: rows sampled, and traces forked, together, where memory holds so many.
        fork_tokens: cap on rows x columns of the traces forked together.
        memory_share: of the free memory, what keys and values may take, in (0, 1).

    Raises:
        ValueError: a number out of its range.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int = 128,
        fork_tokens: int = 16_384,
        memory_share: float = 0.8,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("fork_tokens", fork_tokens)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be 1 or more")
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.fork_tokens = fork_tokens
        self.eos_ids = end_ids(model.generation_config, tokenizer)
        self.counts = TokenCount()
        self.sample_counts = TokenCount()
        effects = batch_effects(self.model)
        alone = batch_size == 1 and effects is not None
        self.batch_effects = None if alone else effects
        self.packed = not alone and _takes_packed_trees(self.model)
        grouped = self.packed and takes_fast_attention(self.model)
        self.budget = MemoryBudget(self.model, memory_share, repeats=not grouped)

    @torch.inference_mode()
    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        settings: SamplingSettings,
        fmt: TokenFormat,
        keys: Sequence[str] | None = None,
        on_done: Callable[[int, Sampled], None] | None = None,
    ) -> list[Sampled]:
        """Samples one trace and its natural answer per prompt; see `Engine.sample`.

        Raises:
            ValueError: a prompt is empty, or prompt and cap exceed the base's positions, or the
                memory.
        """
        self.refuse_prompts(prompts, settings)
        named = row_keys(prompts, keys)
        rows = [
            SamplingRow.start(i, prompt, key, settings.seed)
            for i, (prompt, key) in enumerate(zip(prompts, named, strict=True))
        ]
        results: dict[int, Sampled] = {}

        def done(index: int, sampled: Sampled) -> None:
            results[index] = sampled
            if on_done is not None:
                on_done(index, sampled)

        count = self.sample_counts
        added = settings.max_new_tokens + 1 + settings.max_answer_tokens
        longest = max(map(len, prompts), default=0) + added
        together = min(self.batch_size, self.budget.checked_rows(longest))
        if self.packed:
            waiting = deque(rows)

            def more(free: int) -> list[SamplingRow]:
                return [waiting.popleft() for _ in range(min(free, len(waiting)))]

            self._sampler(together, settings, fmt).run(more, done)
        else:
            for start in range(0, len(rows), together):
                batch = rows[start : start + together]
                sample_batch(self.model, batch, settings, fmt, self.eos_ids, count, done)
        trie = TokenTrie()
        for row in rows:
            trie.add([*row.prompt, *row.tokens[:-1]])
        count.unique += len(trie)
        return [results[i] for i in range(len(rows))]

    @torch.inference_mode()
    def fork(
        self,
        requests: Sequence[ForkRequest],
        suffix_ids: Sequence[int],
        max_new_tokens: int,
        stop: Callable[[], AnswerStop] | None = None,
        on_done: Callable[[int, list[ForkedAnswer]], None] | None = None,
    ) -> list[list[ForkedAnswer]]:
        """Decodes greedily after every cut of every trace; see `Engine.fork`.

        Raises:
            ValueError: the suffix is empty, `max_new_tokens` is below 1, or a trace and its answer
                exceed the base's positions.
        """
        check_forks(suffix_ids, max_new_tokens)
        kept = (len(one.prompt_ids) + max(one.cuts, default=0) for one in requests)
        self.refuse_beyond_positions(kept, len(suffix_ids) + max_new_tokens)
        results: dict[int, list[ForkedAnswer]] = {}

        def done(index: int, answers: list[ForkedAnswer]) -> None:
            results[index] = answers
            if on_done is not None:
                on_done(index, answers)

        self.fork_all(requests, (suffix_ids, max_new_tokens, stop), done)
        self.counts.unique += unique_fork_tokens(requests, suffix_ids, results)
        return [results[i] for i in range(len(requests))]

    @torch.inference_mode()
    def sample_and_fork(
        self,
        desk: TraceDesk,
        settings: SamplingSettings,
        fmt: TokenFormat,
        suffix_ids: Sequence[int],
        max_new_tokens: int,
        stop: Callable[[], AnswerStop] | None = None,
    ) -> None:
        """Samples and forks a stream of traces; see `Engine.sample_and_fork`.

        Between two steps of sampling, finished traces are forked, as many together as memory and
        `fork_tokens` take, or all where the desk begins no other trace before. The sequential way
        takes traces in batches, and forks each batch once its last trace is sampled.

        Raises:
            ValueError: as `fork`. What `sample` refuses fails its trace alone.
        """
        check_forks(suffix_ids, max_new_tokens)
        if self.packed:
            stream = _Stream(self, desk, settings, (suffix_ids, max_new_tokens, stop))
            self._sampler(self.batch_size, settings, fmt).run(stream.more, stream.sampled)
            return
        while batch := list(itertools.islice(iter(desk.begin, None), self.batch_size)):
            self._sample_then_fork(batch, desk, settings, fmt, suffix_ids, max_new_tokens, stop)

    def _sampler(self, slots: int, settings: SamplingSettings, fmt: TokenFormat) -> PackedSampler:
        layers = self.model.config.get_text_config().num_hidden_layers
        return PackedSampler(
            self.model, layers, slots, settings, fmt, self.eos_ids, self.sample_counts
        )

    def fork_all(
        self,
        requests: Sequence[ForkRequest],
        rules: Rules,
        on_done: Callable[[int, list[ForkedAnswer]], None],
    ) -> None:
        """Decodes after every cut, calling `on_done` with each request's index and answers."""
        own, places = _distinct(requests)
        known: dict[int, list[ForkedAnswer]] = {}
        waiting = dict(enumerate(places))

        def hand_on() -> None:
            """Finishes the requests all of whose answers are known."""
            for i, row in list(waiting.items()):
                if all(owner in known for owner, _ in row):
                    del waiting[i]
                    on_done(i, [known[owner][k] for owner, k in row])

        run = self._runner(requests, own, rules)
        for group in self._groups(own, len(rules[0]) + rules[1]):
            known.update(zip(group, run(group), strict=True))
            hand_on()
        hand_on()

    def refuse_prompts(self, prompts: Sequence[Sequence[int]], settings: SamplingSettings) -> None:
        """Refuses what cannot be sampled.

        Raises:
            ValueError: a prompt is empty, or prompt and cap exceed the base's positions.
        """
        if empty := [i for i, prompt in enumerate(prompts) if not len(prompt)]:
            raise ValueError(f"prompts {empty} are empty; a trace needs a prompt")
        self.refuse_beyond_positions(map(len, prompts), settings.max_new_tokens)

    def refuse_beyond_positions(self, lengths: Iterable[int], added: int) -> None:
        """Refuses texts of which `added` tokens more would be beyond the base's positions."""
        limit, longest = max_positions(self.model.config), max(lengths, default=0)
        if limit is not None and longest + added > limit:
            raise ValueError(
                f"a text of {longest} tokens and {added} new ones exceed the base's {limit} "
                "positions (max_position_embeddings): lower max_new_tokens, or shorten the text"
            )

    def _runner(
        self,
        requests: Sequence[ForkRequest],
        own: Sequence[ForkRequest],
        rules: Rules,
    ) -> Callable[[list[int]], list[list[ForkedAnswer]]]:
        """What forks a group of traces: packed, or one after the other.

        Args:
            requests: with all their cuts.
            own: the same with the cuts that are left to each, see `_distinct`.
            rules: of the answers.
        """
        if not self.packed:
            return lambda group: [
                fork_one(self.model, own[i], requests[i].cuts, *rules, self.eos_ids, self.counts)
                for i in group
            ]
        layers = self.model.config.get_text_config().num_hidden_layers
        forks = PackedForks(self.model, layers, *rules, self.eos_ids, self.counts)

        def run(group: list[int]) -> list[list[ForkedAnswer]]:
            with fast_attention(self.model):
                return forks.run([own[i] for i in group])

        return run

    def _groups(self, requests: Sequence[ForkRequest], added: int) -> Iterator[list[int]]:
        """Traces to be forked together: those of one prompt, then those of similar length.

        Args:
            requests: the traces.
            added: tokens of each fork, suffix and answer.
        """
        lengths = [len(request.prompt_ids) + len(request.trace_ids) for request in requests]
        prompts = [tuple(request.prompt_ids) for request in requests]
        longest: dict[tuple[int, ...], int] = {}
        for prompt, length in zip(prompts, lengths, strict=True):
            longest[prompt] = max(length, longest.get(prompt, 0))
        order = sorted(
            (i for i, request in enumerate(requests) if len(request.cuts)),
            key=lambda i: (longest[prompts[i]], prompts[i], lengths[i]),
            reverse=True,
        )
        group: list[int] = []
        widest = most_cuts = 0
        for i in order:
            widest, most_cuts = max(widest, lengths[i]), max(most_cuts, len(requests[i].cuts))
            fitting = self.fork_tokens // widest
            if group and len(group) < min(fitting, self.batch_size):
                fitting = self.budget.rows(widest + most_cuts * added)
            if group and len(group) >= min(fitting, self.batch_size):
                yield group
                group, widest, most_cuts = [], lengths[i], len(requests[i].cuts)
            group.append(i)
        if group:
            yield group


@dataclass(frozen=True)
class _Begun:
    """A trace in a stream.

    Attributes:
        request: what the desk asked for.
        prompt: where its tokens are counted.
        row: its row in the sampler.
    """

    request: TraceRequest
    prompt: OpenPrompt
    row: SamplingRow


class _Stream:
    """What a sampler is given to sample, and what becomes of its traces.

    Args:
        engine: forks them.
        desk: where they come from, and where they are handed in.
        settings: how to sample.
        rules: of the answers.
    """

    def __init__(
        self,
        engine: TransformersEngine,
        desk: TraceDesk,
        settings: SamplingSettings,
        rules: Rules,
    ) -> None:
        self._engine = engine
        self._desk = desk
        self._settings = settings
        self._rules = rules
        self._added = settings.max_new_tokens + 1 + settings.max_answer_tokens
        self._fork_added = len(rules[0]) + rules[1]
        self._prompts = OpenPrompts(engine)
        self._numbers = itertools.count()
        self._live: dict[int, _Begun] = {}  # by the row's index
        self._next: _Begun | None = None  # waits for memory
        self._finished: list[tuple[_Begun, Sampled, ForkRequest]] = []  # to be forked
        self._free = engine.budget.free()  # since no row was live
        self._longest = 0  # prompt since then

    def more(self, free: int) -> list[SamplingRow]:
        """Rows for so many free slots, after forking what it is time to fork."""
        if not self._live:
            self._free, self._longest = self._engine.budget.free(), 0
        waiting = sum(len(one.prompt_ids) + len(one.trace_ids) for *_, one in self._finished)
        if waiting >= self._engine.fork_tokens or len(self._finished) >= self._engine.batch_size:
            self._fork()
        rows = self._begin(free)
        if len(rows) < free and self._next is None and self._finished:
            self._fork()
            rows += self._begin(free - len(rows))
        return rows

    def sampled(self, index: int, trace: Sampled) -> None:
        """Takes a finished row."""
        begun = self._live.pop(index)
        request = begun.request
        begun.prompt.sampled.add([*begun.row.prompt, *begun.row.tokens[:-1]])
        cuts = self._desk.sampled(request, trace)
        try:
            self._engine.refuse_beyond_positions(
                [len(request.prompt_ids) + max(cuts, default=0)], self._fork_added
            )
        except ValueError as error:
            self._failed(begun, error)
            return
        fork = ForkRequest(request.prompt_ids, trace.trace_ids, cuts, request.options)
        self._finished.append((begun, trace, fork))

    def _begin(self, free: int) -> list[SamplingRow]:
        """Begins traces, up to so many and as memory takes them."""
        rows: list[SamplingRow] = []
        while len(rows) < free and (begun := self._next or self._asked()):
            self._next = None
            longest = max(self._longest, len(begun.row.prompt))
            if len(self._live) >= self._engine.budget.rows(longest + self._added, self._free):
                if self._live:
                    self._next = begun
                    break
                try:
                    self._engine.budget.checked_rows(longest + self._added)
                except ValueError as error:
                    self._failed(begun, error)
                    continue
            self._longest = longest
            self._live[begun.row.index] = begun
            rows.append(begun.row)
        return rows

    def _asked(self) -> _Begun | None:
        """The desk's next trace, but those that the engine refuses."""
        while request := self._desk.begin():
            number, seed = next(self._numbers), self._settings.seed
            row = SamplingRow.start(number, request.prompt_ids, request.key, seed)
            begun = _Begun(request, self._prompts.begin(request), row)
            try:
                self._engine.refuse_prompts([request.prompt_ids], self._settings)
            except ValueError as error:
                self._failed(begun, error)
                continue
            return begun
        return None

    def _fork(self) -> None:
        """Forks finished traces: those that memory takes beside live rows, or else all."""
        free = self._engine.budget.free()
        finished, self._finished = self._finished, []
        ready: list[tuple[_Begun, Sampled, ForkRequest]] = []
        for one in finished:
            request = one[2]
            own = len(request.cuts) * self._fork_added
            columns = len(request.prompt_ids) + len(request.trace_ids) + own
            beside = not self._live or self._engine.budget.rows(columns, free)
            (ready if beside else self._finished).append(one)

        def done(index: int, answers: list[ForkedAnswer]) -> None:
            begun, trace, request = ready[index]
            add_forks(begun.prompt.forked, request, self._rules[0], answers)
            self._prompts.end(begun.request)
            self._desk.done(begun.request, trace, answers)

        self._engine.fork_all([request for *_, request in ready], self._rules, done)

    def _failed(self, begun: _Begun, error: ValueError) -> None:
        self._prompts.end(begun.request)
        self._desk.failed(begun.request, error)


LIKELIHOOD_TOLERANCE = 0.1
"""In nats a token; bfloat16 and other kernels move a mean log-probability by a few hundredths."""


@torch.inference_mode()
def mean_logprob(
    model: PreTrainedModel,
    token_ids: Sequence[int],
    answer_ids: Sequence[int],
    options: Sequence[int] | None = None,
) -> float:
    """The mean log-probability, in nats a token, of an answer after a text.

    Args:
        model: a causal LM.
        token_ids: the text.
        answer_ids: the answer; at least one token.
        options: where the answer is one of these tokens, and its probability is among them alone.
    """
    ids = torch.tensor([[*token_ids, *answer_ids]], device=input_device(model))
    said = model(ids).logits[0, -len(answer_ids) - 1 : -1].float()  # (A, V)
    if options is not None:
        among = torch.full_like(said, -torch.inf)
        among[:, list(options)] = said[:, list(options)]
        said = among
    said = said.log_softmax(-1)
    chosen = torch.tensor(list(answer_ids), device=said.device)[:, None]
    return float(said.gather(-1, chosen).mean())


def _distinct(
    requests: Sequence[ForkRequest],
) -> tuple[list[ForkRequest], list[list[tuple[int, int]]]]:
    """Leaves each fork to the first request that has it: samples of a problem often begin alike.

    Returns:
        The requests with the cuts that are left to them, and for each original cut whose answer
        it gets: the request's index, and which of its cuts.
    """
    trie = TokenTrie()
    first: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
    own, places = [], []
    for i, request in enumerate(requests):
        kept: list[int] = []
        path = trie.add([*request.prompt_ids, *request.trace_ids[: max(request.cuts, default=0)]])
        row = []
        for cut in request.cuts:
            node = path[len(request.prompt_ids) + cut], tuple(request.options)
            if node not in first:
                first[node] = (i, len(kept))
                kept.append(cut)
            row.append(first[node])
        own.append(replace(request, cuts=kept))
        places.append(row)
    return own, places


@torch.inference_mode()
def _takes_packed_trees(model: PreTrainedModel) -> bool:
    """Whether a packed tree gives the logits of plain runs, tried on a few tokens."""
    layers = DynamicCache(config=model.config).layers
    if any(type(layer) is not DynamicLayer for layer in layers):
        return False
    if model.config.get_text_config()._attn_implementation not in _PACKED_ATTENTION:
        return False
    takes: Any = model  # its method is hidden behind nn.Module's __getattr__
    if not takes._supports_logits_to_keep():
        return False
    vocabulary = model.config.get_text_config().vocab_size
    trunk = [(7 * i + 3) % vocabulary for i in range(6)]
    tails = [(3, [(11 * i + 5) % vocabulary for i in range(3)]), (6, [2 % vocabulary] * 3)]
    cache = SlotCache(len(layers))
    device = input_device(model)
    model(input_ids=torch.tensor([trunk], device=device), past_key_values=cache, use_cache=True)
    hidden = torch.finfo(model.dtype).min
    mask = torch.full((1, 1, 6, 12), hidden, dtype=model.dtype, device=device)
    positions = []
    for k, (cut, tail) in enumerate(tails):
        for i in range(len(tail)):
            mask[0, 0, 3 * k + i, :cut] = 0
            mask[0, 0, 3 * k + i, 6 + 3 * k : 6 + 3 * k + i + 1] = 0
            positions.append(cut + i)
    with fast_attention(model):
        packed = model(
            input_ids=torch.tensor([[i for _, tail in tails for i in tail]], device=device),
            attention_mask=mask,
            position_ids=torch.tensor([positions], device=device),
            past_key_values=cache,
            use_cache=True,
        ).logits[0]
    alone = torch.cat(
        [
            model(input_ids=torch.tensor([trunk[:cut] + tail], device=device)).logits[0, cut:]
            for cut, tail in tails
        ]
    )
    tolerance = 1e-3 if model.dtype == torch.float32 else 5e-2
    error = (packed.float() - alone.float()).abs().max()
    return bool(error <= tolerance * alone.float().abs().max().clamp(min=1))
