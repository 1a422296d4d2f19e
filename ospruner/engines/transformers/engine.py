"""The embedded engine: any transformers causal LM, with its own decode loop instead of generate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer

from modeling_ospruner.configuration_ospruner import max_positions
from ospruner.bases import input_device

from ..interface import Call, Engine, ForkJob, ForkRequest, TokenCount, TraceRequest, end_ids
from ..rows import SamplingRow
from .batch import RowBatch, attention_for, joined, padded
from .choosing import batch_effects, batch_noise, choose, run_alone
from .forks import TOGETHER, Forks
from .memory import MemoryBudget

_MASKED_ATTENTION = ("sdpa", "eager")  # implementations that take any mask
_REFILL_SHARE = 8  # replace finished rows once they are one in so many


@dataclass
class _Stream(Call):
    """Samples in one batch, whose rows are replaced as they finish, until there are no more.

    Between two steps of sampling finished traces are forked: once they fill `fork_tokens`, or where
    the desk begins no other trace before.
    """

    engine: TransformersEngine

    def __post_init__(self) -> None:
        engine, asked = self.engine, (self.suffix_ids, self.max_new_tokens, self.stop)
        self.model = engine.model
        self.forks = Forks(engine.model, engine.packed, *asked, engine.eos_ids, engine.counts)
        self.batch = partial(RowBatch, engine.model, engine.sample_counts, engine.packed)
        self.noise = batch_noise(engine.model)
        self.added = self.settings.max_new_tokens + 1 + self.settings.max_answer_tokens
        self.fork_added = len(self.suffix_ids) + self.max_new_tokens
        self.waiting: TraceRequest | None = None  # for memory
        self.finished: list[ForkJob] = []  # traces that are to be forked
        self.free = engine.budget.free()  # since no row was live
        self.longest = 0  # prompt since then

    @torch.inference_mode()
    def run(self) -> None:
        """See `Engine.sample_and_fork`."""
        with attention_for(self.model, self.engine.packed):
            self._run()

    def _run(self) -> None:
        rows: list[SamplingRow] = []
        while True:
            live = [slot for slot, row in enumerate(rows) if not row.finished]
            kept, gone = [rows[slot] for slot in live], len(rows) - len(live)
            if not live:
                batch, rows = self.batch(), []  # the memory is free
            refills = not live or (self.engine.packed and gone * _REFILL_SHARE >= len(rows))
            if refills and (new := self._refill(len(live))):
                fresh, logits = self._prefill(new)
                if live:
                    fresh = joined([(batch, live), (fresh, range(len(new)))])
                batch, rows = fresh, [*kept, *new]
                self._choose(new, logits)
                continue
            if not live:
                return
            if refills or 2 * gone >= len(rows):
                batch, rows = batch.take(live), kept
            real = torch.tensor([not row.finished for row in rows])
            ids = torch.tensor([row.tokens[-1] for row in rows]) * real
            logits = batch.feed(ids[:, None], real[:, None])
            self._choose(kept, logits[real.to(logits.device)])

    def _prefill(self, rows: Sequence[SamplingRow]) -> tuple[RowBatch, torch.Tensor]:
        """Runs prompts, each once; the batch, and the logits (B, V) after each."""
        batch = self.batch()
        prompts = [tuple(row.request.prompt_ids) for row in rows]
        different = list(dict.fromkeys(prompts)) if self.engine.packed else prompts
        logits = batch.feed(*padded(different))
        if len(different) < len(prompts):
            index = [different.index(prompt) for prompt in prompts]
            batch, logits = batch.take(index), logits[index]
        return batch, logits

    def _choose(self, rows: Sequence[SamplingRow], logits: torch.Tensor) -> None:
        """Draws the next token of rows (B) from their logits (B, V)."""
        numbers = [row.draw(len(row.tokens)) >> 11 for row in rows]
        draws = torch.tensor(numbers, dtype=torch.float64) * 2.0**-53
        tokens, close = (t.cpu() for t in choose(logits, draws, self.settings, self.noise))
        for i in close.nonzero()[:, 0].tolist():
            alone = run_alone(self.model, rows[i].text, self.engine.sample_counts)
            tokens[i] = choose(alone, draws[i : i + 1], self.settings)[0]
        for row, token in zip(rows, tokens.tolist(), strict=True):
            row.push(token, self.settings, self.engine.eos_ids)
            if row.finished:
                self.count_sampled(row.request, len(row.tokens))
                self._keep(self.sampled(row.request, row.sampled(self.engine.eos_ids)))

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
        tokens = sum(map(_tokens, self.finished))
        return tokens >= self.engine.fork_tokens or len(self.finished) >= self.engine.batch_size

    def _begin(self, live: int) -> list[SamplingRow]:
        """Begins traces beside live rows, as memory takes them; sampled ones are finished."""
        rows, budget = list[SamplingRow](), self.engine.budget
        while live + len(rows) < self.engine.batch_size and not self._enough():
            request, self.waiting = self.waiting or self.desk.begin(), None
            if request is None:
                break
            if request.trace is not None:
                self._keep(self.sampled(request, request.trace))
                continue
            length = len(request.prompt_ids)
            if self._refused(request, length, self.settings.max_new_tokens):
                continue
            longest = max(self.longest, length)
            if live + len(rows) >= budget.rows(longest + self.added, self.free):
                if live or rows:
                    self.waiting = request
                    break
                self.desk.failed(request, budget.refusal(longest + self.added))
                continue
            self.longest = longest
            assert self.fmt is not None
            rows.append(SamplingRow(request, self.settings.seed, self.fmt))
        return rows

    def _keep(self, job: ForkJob | None) -> None:
        """Keeps a trace until it is forked, unless the engine refuses it."""
        if job is not None and not self._refused(job.request, _tokens(job), self.fork_added):
            self.finished.append(job)

    def _refused(self, request: TraceRequest, length: int, added: int) -> bool:
        """Whether so many tokens more than a text has are beyond the base: the trace fails then."""
        limit = max_positions(self.model.config)
        if limit is None or length + added <= limit:
            return False
        error = ValueError(
            f"a text of {length} tokens and {added} new ones exceed the base's {limit} "
            "positions (max_position_embeddings): lower max_new_tokens, or shorten the text"
        )
        self.desk.failed(request, error)
        return True

    def _fork(self, live: int) -> bool:
        """Forks finished traces, those that memory takes beside live rows; whether it did any.

        Traces of similar length run together, and need room for themselves and for their forks.
        """
        budget, free = self.engine.budget, self.engine.budget.free()
        waiting, ready = list[ForkJob](), list[ForkJob]()
        for job in sorted(self.finished, key=_tokens, reverse=True):
            fits = not live or budget.rows(_tokens(job) + self.fork_added, free) >= 2
            (ready if fits else waiting).append(job)
        self.finished, done = waiting, bool(ready)
        while ready:
            longest = _tokens(ready[0])
            fitting = budget.rows(longest + self.fork_added)
            most = min(self.engine.fork_tokens // longest, self.engine.batch_size)
            size = max(1, min(most, fitting // 2))
            group, ready = ready[:size], ready[size:]
            together = max(1, min(TOGETHER, fitting - size))
            answers = self.forks.run([job.fork for job in group], together)
            for job, own in zip(group, answers, strict=True):
                self.forked(job, own)
        return done


def _tokens(job: ForkJob) -> int:
    """Of prompt and trace, as far as it is forked."""
    return len(job.fork.prompt_ids) + len(job.fork.trace_ids)


class TransformersEngine(Engine):
    """Samples traces and forks answers with a model in this process.

    Where every layer attends to everything (and the attention takes custom masks), rows are
    replaced as they finish, and the forks of a trace decode side by side. Other bases (sliding
    windows, recurrent states) are sampled a batch at a time, and their forks decoded one by one:
    same results, slower. In float32 a row's tokens do not depend on what else is in the call; in
    half precision, with experts or recurrent states (`batch_effects`) they do not where
    `batch_size` is 1, for each row then runs by itself.

    Rows are admitted by memory: as many of the greatest possible length as the free memory of each
    device that holds keys and values takes. Forks take what is free beside the rows being sampled,
    and wait for these where that is nothing.

    Raises:
        ValueError: a number out of its range.
    """

    calls = _Stream

    def __init__(
        self,
        model: PreTrainedModel,  # a causal LM; it is put in eval mode
        tokenizer: PreTrainedTokenizerBase,  # its own, for the ids that end a text
        batch_size: int = 128,  # rows sampled, and traces forked, together, if memory holds them
        fork_tokens: int = 16_384,  # cap on rows x columns of the traces forked together
        memory_share: float = 0.8,  # of the free memory, for keys and values, in (0, 1)
    ) -> None:
        super().__init__()
        for name, value in (("batch_size", batch_size), ("fork_tokens", fork_tokens)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be 1 or more")
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.fork_tokens = fork_tokens
        self.eos_ids = end_ids(model.generation_config, tokenizer)
        effects = batch_effects(self.model)
        alone = batch_size == 1 and effects is not None
        self.batch_effects = None if alone else effects
        self.packed = not alone and _takes_trees(self.model)
        own = self.packed and model.config.get_text_config()._attn_implementation == "sdpa"
        self.budget = MemoryBudget(self.model, memory_share, repeats=not own)


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

    Where the answer is one of the `options`, these tokens, its probability is among them alone.
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


@torch.inference_mode()
def _takes_trees(model: PreTrainedModel) -> bool:
    """Whether forks of a few tokens in their trace's row get the probabilities of walked ones."""
    config = model.config.get_text_config()
    layers = DynamicCache(config=model.config).layers
    attends_to_all = all(type(layer) is DynamicLayer for layer in layers)
    if not attends_to_all or config._attn_implementation not in _MASKED_ATTENTION:
        return False
    ids = [(7 * i + 3) % config.vocab_size for i in range(12)]
    options = list(range(min(config.vocab_size, 512)))
    traces = [ForkRequest(ids[:n], ids[4:10], (3, 6), options) for n in (2, 4)]
    found = []
    for packed in (True, False):
        with attention_for(model, packed):
            forks = Forks(model, packed, ids[9:], 1, None, frozenset(), TokenCount())
            answers = [one for row in forks.run(traces, TOGETHER) for one in row]
        found.append(torch.tensor([one.option_logprobs for one in answers]))
    tolerance = 1e-3 if model.dtype == torch.float32 else 5e-2
    error = (found[0] - found[1]).abs().max()
    return bool(error <= tolerance * found[1].abs().max().clamp(min=1))
