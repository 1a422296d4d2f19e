"""Rules without training at work in generate: what a step's end is asked for is made here.

A trial answer is decoded greedily on a copy of the row's cache, so that the row's own cache and the
random state stay as they are.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedTokenizerBase, cache_utils

from modeling_ospruner.formats_ospruner import TokenFormat
from modeling_ospruner.generation_ospruner import generate_pruned
from modeling_ospruner.stopping_ospruner import RowPlan, Said, StopPolicyConfig, StopRecord
from ospruner.engines.interface import TokenCount, top_entropy
from ospruner.engines.rows import Branch
from ospruner.engines.transformers.batch import RowBatch
from ospruner.formats import guess

from .signals import StepEnd, TrialAnswer

_COPIED = (
    cache_utils.DynamicLayer,
    cache_utils.DynamicSlidingWindowLayer,
    cache_utils.LinearAttentionLayer,
    cache_utils.LinearAttentionAndFullAttentionLayer,
    cache_utils.LinearAttentionAndSlidingWindowAttentionLayer,
)


def generate_with_rule(
    base: Any,
    tokenizer: PreTrainedTokenizerBase,
    stop_policy: Any,
    inputs: torch.Tensor | None = None,
    token_format: TokenFormat | None = None,
    **kwargs: Any,
) -> tuple[Any, list[StopRecord]]:
    """`base.generate` with a rule without training, on any reasoning model, without a policy.

    Args:
        base: the causal LM.
        tokenizer: its tokenizer.
        stop_policy: a rule such as `AnswerEntropy(0.4)`, or settings that hold one as `rule`.
        inputs: prompt ids (B, S), left-padded; or pass `input_ids`.
        token_format: the base's way of thinking; None guesses it from the tokenizer, anew in each
            call: compile it once (`TokenFormat.compile`) for many.
        kwargs: generate's own arguments.

    Returns:
        What generate returns (an output object holds the records as `stop`, too), and one
        record a row.

    Raises:
        TypeError, ValueError: as `generate_pruned`, or the settings hold no rule.
    """
    settings = StopPolicyConfig.of(stop_policy)
    if token_format is None:
        token_format = TokenFormat.compile(guess(tokenizer), tokenizer)
    return generate_pruned(
        base, None, token_format, settings, inputs=inputs, tokenizer=tokenizer, **kwargs
    )


class LiveRule:
    """A context in which one generate asks a rule about its rows.

    Where the rule tries answers, it looks on as the base's forwards of this thread pass, to know
    the cache and the positions.

    Raises:
        ValueError: the rule reads texts, and there is no tokenizer.
    """

    def __init__(
        self,
        rule: Any,  # a `StopRule`, whose module imports this one
        base: Any,
        plan: RowPlan,  # what its rows have in common
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        if "text" in rule.asks and tokenizer is None:
            raise ValueError(f"the rule {rule!r} reads texts: pass tokenizer=")
        self._rule, self._base, self._tokenizer = rule, base, tokenizer
        self._format, settings = plan.token_format, plan.settings
        self._least = settings.min_thinking_tokens
        self._eos_ids = plan.eos_ids.union(self._format.answer_end_ids)
        # What must not open the thinking again: ids, and a marker of several of them.
        masked = self._format.reentry_ids if settings.mask_reentry else ()
        self._masked = torch.tensor(list(masked), dtype=torch.long)
        self._rows: dict[int, Any] = {}
        self._spent = 0  # tokens of the trial answers at a step's end
        self._unchecked = "trial_answer" in rule.asks
        self._scores = self._drawn = torch.empty(0)  # the latter: entropies of the tokens to come
        self._entropies: dict[int, float] = {}  # sums over the thinking so far, by row
        self._thinking: list[int] = []
        # Of the forward that has passed last:
        self._thread = threading.get_ident()
        self._handle: Any = None
        self._cache: Any = None
        self._columns = 0
        self._positions: torch.Tensor | None = None  # (B or 1, S)
        self._looking = True

    def __enter__(self) -> LiveRule:
        if self._unchecked:
            self._handle = self._base.register_forward_pre_hook(self._look, with_kwargs=True)
        return self

    def _close(self, *_: object) -> None:
        """Stops looking on, and forgets the cache."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = self._cache = self._positions = None

    __exit__ = _close

    def keep(self, thinking: list[int], scores: torch.Tensor) -> None:
        """After each forward: adds the entropies at which thinking rows drew their last token."""
        if self._unchecked:
            self._fork(0)  # refuses a cache that cannot be copied
            self._unchecked = False
        if "thinking_entropy" in self._rule.asks and thinking:
            for row, entropy in zip(self._thinking, self._drawn.tolist(), strict=True):
                self._entropies[row] = self._entropies.get(row, 0.0) + entropy
            self._thinking, self._drawn = thinking, top_entropy(scores[thinking])
        if not thinking:
            self._close()
        self._scores = scores

    def ask(self, rows: list[int], records: list[StopRecord], ids: torch.Tensor) -> list[Said]:
        """What the rule says of rows that have ended a step."""
        return [self._ask(row, one, ids[row]) for row, one in zip(rows, records, strict=True)]

    def _ask(self, row: int, record: StopRecord, ids: torch.Tensor) -> Said:
        decide = self._rows.setdefault(row, self._rule.for_row())
        tokens, self._spent = record.thinking_tokens, 0
        before = record.step_ends[-1] if record.step_ends else 0
        end = StepEnd(
            row=row,
            step=len(record.step_ends),
            thinking_tokens=tokens,
            may_stop=tokens >= self._least,
            trial_answer=partial(self._answer, row),
            next_text=lambda: self._decode([int(self._scores[row].argmax())]),
            step_text=lambda: self._decode(ids[before - tokens :].tolist()),
            thinking_entropy=lambda: self._entropies[row] / tokens,
        )
        stops, signal = decide(end)
        return Said(signal, None, stops, self._spent)

    def _decode(self, ids: Sequence[int]) -> str:
        assert self._tokenizer is not None  # the rule reads texts
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _look(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() != self._thread or not self._looking:
            return
        self._cache = kwargs.get("past_key_values")
        self._columns += kwargs["input_ids"].shape[1]
        self._positions = kwargs.get("position_ids")

    def _fork(self, row: int) -> DynamicCache:
        """A copy of one row of the cache.

        Raises:
            ValueError: the base's cache cannot be copied by rows.
        """
        name, at, lacks = type(self._base).__name__, self._positions, ""
        if self._cache is None:
            lacks = f"past_key_values, which {name} does not use"
        elif at is not None and at.dim() != 2:
            lacks = f"position_ids (B, S), and {name} has {at.dim()} axes"
        if lacks:
            raise ValueError(f"trial answers need {lacks}: use a stop rule without trial answers")
        return fork_row(self._cache, row)

    @torch.no_grad()
    def _answer(self, row: int, max_tokens: int) -> TrialAnswer:
        """Forces an answer after a row's last token, and decodes it greedily.

        The tokens it took, those forced and those decoded, are added to what is spent.
        """
        batch = RowBatch(self._base, TokenCount(), packed=False)
        batch.cache = self._fork(row)
        tokens, at = self._columns, self._positions
        if at is not None:
            tokens = int(at[row % len(at), -1]) + 1
        batch.seen = (torch.arange(self._columns) >= self._columns - tokens)[None]
        suffix = self._format.forced_suffix("forced")
        linear = cache_utils.LinearAttentionLayer
        recurrent = any(isinstance(layer, linear) for layer in batch.cache.layers)
        # Recurrent layers go on from a state one token at a time; attention takes them at once.
        pieces = [[token] for token in suffix] if recurrent else [suffix]
        branch = Branch(self._format.box_state)
        self._looking = False
        try:
            for piece in pieces:
                logits = batch.feed(torch.tensor([piece]))[0]
            while (answer := branch.answer) is None:
                plain = logits.float()  # its log-probabilities are those of an answer's tokens
                token = int(plain.index_fill(0, self._masked, -torch.inf).argmax())
                logprob, entropy = plain[token] - plain.logsumexp(-1), top_entropy(logits)
                branch.push(token, float(logprob), float(entropy), max_tokens, self._eos_ids)
                if branch.answer is None:
                    logits = batch.feed(torch.tensor([[token]]))[0]
        finally:
            self._looking = True
        said = "" if self._tokenizer is None else self._decode(answer.ids)
        if answer.ended == "closed":
            said = said[: said.rfind(self._format.format.answer_end or "}")]
        self._spent += len(suffix) + len(answer.ids) + (answer.ended == "eos")
        tried = tuple(answer.ids), answer.ended, tuple(answer.logprobs), answer.entropy
        return TrialAnswer(*tried, said, answer.whole_entropy)


def fork_row(cache: Cache, row: int) -> DynamicCache:
    """A copy of one row of a dynamic cache, which may grow and be written to by itself.

    Raises:
        ValueError: the cache, or one of its layers, is of a kind that cannot be copied by rows.
    """
    if type(cache) is not DynamicCache or cache.offloading:
        how = " with offloading" if type(cache) is DynamicCache else ""
        raise ValueError(
            f"trial answers cannot copy a row of a {type(cache).__name__}{how}: leave "
            "cache_implementation out, or use a stop rule without trial answers"
        )
    forked = copy.copy(cache)
    forked.layers = [copy.copy(layer) for layer in cache.layers]
    for i, layer in enumerate(forked.layers):
        if type(layer) not in _COPIED:
            raise ValueError(
                f"trial answers cannot copy a row of a cache layer {type(layer).__name__} (layer "
                f"{i}): use a stop rule without trial answers"
            )
        vars(layer).update({k: dict(v) for k, v in vars(layer).items() if isinstance(v, dict)})
        layer.reorder_cache(torch.LongTensor([row]))
    return forked
