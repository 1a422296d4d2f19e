"""Answers tried in the middle of a generate, on a copy of one row's cache.

The row's own cache, the random state and what generate does next are left as they are.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from .reasoning_format import TokenFormat
from .stop_rules import TrialAnswer

ENTROPY_TOKENS = 20
"""How many of the most likely tokens an answer's entropy is taken over."""

_ATTENTION = (DynamicLayer, DynamicSlidingWindowLayer)
_STATIC = (StaticLayer, StaticSlidingWindowLayer)
_RECURRENT = (
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely tokens, and their natural log-probabilities at temperature 1.

    Args:
        logits: (..., V).

    Returns:
        Token ids and log-probabilities, (...).
    """
    tokens = logits.argmax(-1)
    best = logits.gather(-1, tokens[..., None])[..., 0].float()
    return tokens, best - logits.float().logsumexp(-1)


def top_entropy(logits: torch.Tensor) -> torch.Tensor:
    """Entropy in nats (...) over the ENTROPY_TOKENS most likely tokens of logits (..., V)."""
    kept = logits.float().topk(min(ENTROPY_TOKENS, logits.shape[-1]), dim=-1).values
    logs = kept.log_softmax(-1)
    return -(logs.exp() * logs).sum(-1)


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
        decode: from token ids to text; None leaves `TrialAnswer.text` empty.
    """

    def __init__(
        self,
        base: Any,
        token_format: TokenFormat,
        eos_ids: frozenset[int],
        masked_ids: Sequence[int] = (),
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
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
        self._extra = {"logits_to_keep": 1} if base._supports_logits_to_keep() else {}

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
        ids: list[int] = []
        logprobs: list[float] = []
        ended: Literal["closed", "eos", "length"] = "length"
        self._looking = False
        try:
            for piece in pieces:
                logits = self._feed(piece, position, pads, cache)
                position += len(piece)
            entropy = float(top_entropy(logits))
            while len(ids) < max_tokens:
                token, logprob = self._choose(logits)
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
        answer = TrialAnswer(tuple(ids), ended, tuple(logprobs), entropy, self._text(ids, ended))
        return answer, len(suffix) + len(ids) + (ended == "eos")

    def _choose(self, logits: torch.Tensor) -> tuple[int, float]:
        """The token that a forced answer would take, and its plain log-probability."""
        plain = logits.float()
        allowed = plain.clone()
        allowed[self._masked] = -torch.inf
        token = int(allowed.argmax())
        return token, float(plain[token] - plain.logsumexp(-1))

    def _text(self, ids: Sequence[int], ended: str) -> str:
        if self._decode is None:
            return ""
        text = self._decode(ids)
        return text[: text.rfind("}")] if ended == "closed" else text

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
            **self._extra,
        }
        if self._positions is not None:
            arguments["position_ids"] = torch.arange(position, position + S, device=device)[None]
        if pads:
            mask = torch.ones(1, pads + position + S, dtype=torch.long, device=device)
            mask[:, :pads] = 0
            arguments["attention_mask"] = mask
        logits: torch.Tensor = self._base(**arguments).logits[0, -1]
        return logits
