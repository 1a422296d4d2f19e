"""Rules without training at work in generate: what a step's end is asked for is made here.

A trial answer is decoded greedily on a copy of the row's cache, so that the row's own cache and the
random state stay as they are.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedTokenizerBase, StaticCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from modeling_ospruner.formats_ospruner import MarkerState, TokenFormat
from modeling_ospruner.generation_ospruner import generate_pruned
from modeling_ospruner.stopping_ospruner import RowPlan, Said, StopPolicyConfig, StopRecord
from ospruner.formats import guess
from ospruner.logits import last_logits, top_entropy

from .signals import TrialAnswer

_ATTENTION = (DynamicLayer, DynamicSlidingWindowLayer)
_STATIC = (StaticLayer, StaticSlidingWindowLayer)
_RECURRENT = (
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
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
    if settings.rule is None:
        raise ValueError(
            "stop_policy holds no rule, and without a policy something has to decide: pass a rule, "
            "such as rules.AnswerEntropy(0.4), or rules.Budget(1000)"
        )
    if token_format is None:
        token_format = TokenFormat.compile(guess(tokenizer), tokenizer)
    return generate_pruned(
        base, None, token_format, settings, inputs=inputs, tokenizer=tokenizer, **kwargs
    )


@dataclass
class _LiveEnd:
    """The `StepEnd` of a row in generate."""

    asker: LiveRule
    row: int
    record: StopRecord
    ids: torch.Tensor  # (S,) its text so far
    step: int
    thinking_tokens: int
    may_stop: bool
    tokens: int = 0  # that it has spent on trial answers

    def trial_answer(self, max_tokens: int) -> TrialAnswer:
        """An answer forced here, of at most so many tokens; the row is left as it is."""
        answer, tokens = self.asker.trials.answer(self.row, max_tokens)
        self.tokens += tokens
        return answer

    def next_text(self) -> str:
        """The text of the token that the model finds most likely to come next."""
        return self.asker.decode([int(self.asker.scores[self.row].argmax())])

    def step_text(self) -> str:
        """The text of the step that has ended here."""
        before = self.record.step_ends[-1] if self.record.step_ends else 0
        return self.asker.decode(self.ids[before - self.thinking_tokens :].tolist())

    def thinking_entropy(self) -> float:
        """Mean entropy, in nats, at which the thinking's tokens so far were drawn."""
        return self.asker.entropies[self.row] / self.thinking_tokens


class LiveRule:
    """A context in which one generate asks a rule about its rows.

    Args:
        rule: a `StopRule`, whose module imports this one.
        base: the causal LM.
        plan: what its rows have in common.
        tokenizer: the base's; None refuses rules that read texts.

    Raises:
        ValueError: the rule reads texts, and there is no tokenizer.
    """

    def __init__(
        self, rule: Any, base: Any, plan: RowPlan, tokenizer: PreTrainedTokenizerBase | None
    ) -> None:
        if "text" in rule.asks and tokenizer is None:
            raise ValueError(f"the rule {rule!r} reads texts: pass tokenizer=")
        self._rule = rule
        self._plan = plan
        self._tokenizer = tokenizer
        self._rows: dict[int, Any] = {}
        self._checked = "trial_answer" not in rule.asks
        masks = plan.settings.mask_reentry
        fmt = plan.token_format
        self.trials = TrialAnswers(
            base,
            fmt,
            plan.eos_ids.union(fmt.answer_end_ids),
            fmt.reentry_ids if masks else (),
            None if tokenizer is None else self.decode,
            masks,
        )
        self.scores = torch.empty(0)
        self.entropies: dict[int, float] = {}  # sums over the thinking so far, by row
        self._drawn: torch.Tensor = torch.empty(0)  # of the tokens that come next
        self._thinking: list[int] = []

    def __enter__(self) -> LiveRule:
        if not self._checked:
            self.trials.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.trials.close()

    def keep(self, thinking: list[int], scores: torch.Tensor) -> None:
        """After each forward: adds the entropies at which thinking rows drew their last token."""
        if not self._checked:
            self.trials.check()
            self._checked = True
        if "thinking_entropy" in self._rule.asks and thinking:
            for row, entropy in zip(self._thinking, self._drawn.tolist(), strict=True):
                self.entropies[row] = self.entropies.get(row, 0.0) + entropy
            self._thinking, self._drawn = thinking, top_entropy(scores[thinking])
        if not thinking:
            self.trials.close()
        self.scores = scores

    def ask(self, rows: list[int], records: list[StopRecord], ids: torch.Tensor) -> list[Said]:
        """What the rule says of rows that have ended a step."""
        return [self._ask(row, one, ids[row]) for row, one in zip(rows, records, strict=True)]

    def _ask(self, row: int, record: StopRecord, ids: torch.Tensor) -> Said:
        rule = self._rows.setdefault(row, self._rule.for_row())
        tokens = record.thinking_tokens
        end = _LiveEnd(
            self, row, record, ids, len(record.step_ends), tokens,
            tokens >= self._plan.settings.min_thinking_tokens,
        )  # fmt: skip
        stop, signal = rule.at_step_end(end)
        return Said(signal, None, stop and signal == signal, end.tokens)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        assert self._tokenizer is not None  # the rule reads texts
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def fork_row(cache: Cache, row: int, config: Any) -> DynamicCache:
    """A copy of one row of a cache, which may grow and be written to by itself.

    Args:
        cache: a dynamic or static cache of any number of rows.
        row: its index.
        config: the base's configuration.

    Raises:
        ValueError: the cache, or one of its layers, is of a kind that cannot be copied by rows.
    """
    if type(cache) not in (DynamicCache, StaticCache) or cache.offloading:
        raise ValueError(
            f"trial answers cannot copy a row of a {type(cache).__name__}"
            f"{' with offloading' if type(cache) is DynamicCache else ''}: leave "
            "cache_implementation out (or 'static'), or use a stop rule without trial answers"
        )
    forked = DynamicCache(config=config)
    layers: list[Any] = cache.layers
    for i, layer in enumerate(layers):
        kind = type(layer)
        if kind not in (*_ATTENTION, *_STATIC, *_RECURRENT):
            raise ValueError(
                f"trial answers cannot copy a row of a cache layer {kind.__name__} (layer {i}): "
                "use a stop rule without trial answers"
            )
        if kind in _STATIC:
            _fill(forked.layers[i], layer, row)
            continue
        own = copy.copy(layer)
        if kind is not LinearAttentionLayer and layer.is_initialized:
            # Dynamic layers never write into these tensors: growing makes new ones.
            own.keys, own.values = layer.keys[row : row + 1], layer.values[row : row + 1]
        if kind in _RECURRENT:
            for name, value in vars(layer).items():
                if isinstance(value, dict):
                    setattr(own, name, {k: _row_of(v, row) for k, v in value.items()})
        forked.layers[i] = own
    return forked


def _row_of(value: Any, row: int) -> Any:
    return value[row : row + 1].clone() if isinstance(value, torch.Tensor) else value


def _fill(target: Any, source: Any, row: int) -> None:
    """Puts what a static layer holds of one row into an empty dynamic one."""
    length = int(source.get_seq_length())
    held = min(length, source.max_cache_len)
    if length:
        target.update(
            source.keys[row : row + 1, :, :held].clone(),
            source.values[row : row + 1, :, :held].clone(),
        )
    if isinstance(target, DynamicSlidingWindowLayer):
        target.cumulative_length = length


class TrialAnswers:
    """A context in which rows of a running generate can be asked for answers.

    It only looks on as the base's forwards of this thread pass, to know the cache and the
    positions.

    Args:
        base: the causal LM.
        token_format: the base's way of thinking.
        eos_ids: ids that end a text.
        masked_ids: ids that an answer must not hold.
        masks: whether an answer must not complete a marker of several tokens that would open the
            thinking again.
        decode: from token ids to text; None leaves `TrialAnswer.text` empty.
    """

    def __init__(
        self,
        base: Any,
        token_format: TokenFormat,
        eos_ids: frozenset[int],
        masked_ids: Sequence[int] = (),
        decode: Callable[[Sequence[int]], str] | None = None,
        masks: bool = False,
    ) -> None:
        self._marker = token_format.start_marker if masks else None
        self._base = base
        self._format = token_format
        self._eos_ids = eos_ids
        self._masked = list(masked_ids)
        self._decode = decode
        self._thread = threading.get_ident()
        self._handle: Any = None
        self._cache: Cache | None = None
        self._columns = 0
        self._positions: torch.Tensor | None = None  # of the last column, (B or 1,)
        self._axes = 2  # of the position ids: (B, S)
        self._looking = True

    def __enter__(self) -> TrialAnswers:
        self._handle = self._base.register_forward_pre_hook(self._look, with_kwargs=True)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stops looking on, and forgets the cache."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = self._cache = self._positions = None

    def _look(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() != self._thread or not self._looking:
            return
        self._cache = kwargs.get("past_key_values")
        self._columns += kwargs["input_ids"].shape[1]
        positions = kwargs.get("position_ids")
        self._axes = 2 if positions is None else positions.dim()
        self._positions = None if positions is None else positions[..., -1].reshape(-1)

    def check(self) -> None:
        """Tries to copy a row.

        Raises:
            ValueError: the base's cache cannot be copied by rows.
        """
        self._fork(0)

    def _fork(self, row: int) -> DynamicCache:
        if self._cache is None:
            raise ValueError(
                f"trial answers need past_key_values, which {type(self._base).__name__} does not "
                "use: use a stop rule without trial answers"
            )
        if self._axes != 2:
            raise ValueError(
                f"trial answers need position_ids (B, S), and {type(self._base).__name__} has "
                f"{self._axes} axes: use a stop rule without trial answers"
            )
        return fork_row(self._cache, row, self._base.config)

    @torch.no_grad()
    def answer(self, row: int, max_tokens: int) -> tuple[TrialAnswer, int]:
        """Forces an answer after a row's last token, and decodes it greedily.

        Args:
            row: the row's index.
            max_tokens: cap on the answer.

        Returns:
            The answer, and the number of tokens it took: those forced and those decoded.
        """
        cache = self._fork(row)
        position = self._columns
        if self._positions is not None:
            position = int(self._positions[row % len(self._positions)]) + 1
        pads = self._columns - position
        suffix = self._format.forced_suffix("forced")
        recurrent = any(isinstance(layer, LinearAttentionLayer) for layer in cache.layers)
        # Recurrent layers go on from a state one token at a time; attention takes them at once.
        pieces = [[token] for token in suffix] if recurrent else [suffix]
        box = self._format.box_state()
        reopening = None if self._marker is None else MarkerState(self._marker)
        ids: list[int] = []
        logprobs: list[float] = []
        ended: Literal["closed", "eos", "length"] = "length"
        self._looking = False
        try:
            for piece in pieces:
                logits = self._feed(piece, position, pads, cache)
                position += len(piece)
            entropy, whole = float(top_entropy(logits)), 0.0
            while len(ids) < max_tokens:
                whole += float(top_entropy(logits))
                more = () if reopening is None else reopening.completing()
                token, logprob = self._choose(logits, more)
                if reopening is not None:
                    reopening.push(token)
                if token in self._eos_ids:
                    ended = "eos"
                    break
                ids.append(token)
                logprobs.append(logprob)
                if box.push(token):
                    ended = "closed"
                    break
                if len(ids) < max_tokens:
                    logits = self._feed([token], position, pads, cache)
                    position += 1
        finally:
            self._looking = True
        said = self._text(ids, ended)
        answer = TrialAnswer(tuple(ids), ended, tuple(logprobs), entropy, said, whole)
        return answer, len(suffix) + len(ids) + (ended == "eos")

    def _choose(self, logits: torch.Tensor, masked: Sequence[int]) -> tuple[int, float]:
        """The token that a forced answer would take, and its plain log-probability."""
        plain = logits.float()
        allowed = plain.clone()
        allowed[[*self._masked, *masked]] = -torch.inf
        token = int(allowed.argmax())
        return token, float(plain[token] - plain.logsumexp(-1))

    def _text(self, ids: Sequence[int], ended: str) -> str:
        if self._decode is None:
            return ""
        text = self._decode(ids)
        return (
            text[: text.rfind(self._format.format.answer_end or "}")] if ended == "closed" else text
        )

    def _feed(
        self, token_ids: Sequence[int], position: int, pads: int, cache: DynamicCache
    ) -> torch.Tensor:
        """Runs tokens on a forked cache; the logits (V,) after the last one."""
        device = self._base.device
        S = len(token_ids)
        arguments: dict[str, Any] = {
            "input_ids": torch.tensor([list(token_ids)], device=device),
            "past_key_values": cache,
            "use_cache": True,
        }
        if self._positions is not None:
            arguments["position_ids"] = torch.arange(position, position + S, device=device)[None]
        if pads:
            mask = torch.ones(1, pads + position + S, dtype=torch.long, device=device)
            mask[:, :pads] = 0
            arguments["attention_mask"] = mask
        return last_logits(self._base, **arguments)[0]
