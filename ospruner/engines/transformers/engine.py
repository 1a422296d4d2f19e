"""The embedded engine: any transformers causal LM, with its own decode loop instead of generate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from modeling_ospruner.formats_ospruner import TokenFormat
from ospruner.bases import input_device

from ..interface import (
    AnswerStop,
    Engine,
    ForkRequest,
    SamplingSettings,
    TokenCount,
    TraceDesk,
    end_ids,
)
from .batch import fast_attention, takes_fast_attention, takes_slots
from .choosing import batch_effects
from .forks import Forks
from .memory import MemoryBudget
from .stream import Stream

_MASKED_ATTENTION = ("sdpa", "eager")  # implementations that take any mask


class TransformersEngine(Engine):
    """Samples traces and forks answers with a model in this process.

    Where every layer attends to everything (and the attention takes custom masks), rows are
    replaced as they finish, and the forks of a trace decode side by side on copies of its keys and
    values. Other bases (sliding windows, recurrent states) are sampled a batch at a time, and their
    forks decoded one by one: same results, slower. In float32 a row's
    tokens do not depend on what else is in the call; in half precision, with experts or recurrent
    states (`batch_effects`) they do not where `batch_size` is 1, for each row then runs by itself.

    Rows are admitted by memory: as many of the greatest possible length as the free memory of each
    device that holds keys and values takes. Forks take what is free beside the rows being sampled,
    and wait for these where that is nothing.

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
        self.packed = not alone and _takes_copies(self.model)
        grouped = self.packed and takes_fast_attention(self.model)
        self.budget = MemoryBudget(self.model, memory_share, repeats=not grouped)

    @torch.inference_mode()
    def sample_and_fork(
        self,
        desk: TraceDesk,
        settings: SamplingSettings,
        fmt: TokenFormat | None,
        suffix_ids: Sequence[int],
        max_new_tokens: int,
        stop: Callable[[], AnswerStop] | None = None,
    ) -> None:
        """Samples and forks a stream of traces; see `Engine.sample_and_fork`.

        Between two steps of sampling finished traces are forked: once they fill `fork_tokens`, or
        where the desk begins no other trace before.
        """
        with fast_attention(self.model) if self.packed else nullcontext():
            Stream(self, desk, settings, fmt, suffix_ids, max_new_tokens, stop).run()


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


@torch.inference_mode()
def _takes_copies(model: PreTrainedModel) -> bool:
    """Whether forks of a few tokens on copied rows get the probabilities that walked ones do."""
    config = model.config.get_text_config()
    if not takes_slots(model.config) or config._attn_implementation not in _MASKED_ATTENTION:
        return False
    ids = [(7 * i + 3) % config.vocab_size for i in range(12)]
    options = list(range(min(config.vocab_size, 512)))
    traces = [ForkRequest(ids[:n], ids[4:10], (3, 6), options) for n in (2, 4)]
    found = []
    for packed in (True, False):
        with fast_attention(model) if packed else nullcontext():
            forks = Forks(model, packed, ids[9:], 1, None, frozenset(), TokenCount())
            answers = [one for row in forks.run(traces) for one in row]
        found.append(torch.tensor([one.option_logprobs for one in answers]))
    tolerance = 1e-3 if model.dtype == torch.float32 else 5e-2
    error = (found[0] - found[1]).abs().max()
    return bool(error <= tolerance * found[1].abs().max().clamp(min=1))
