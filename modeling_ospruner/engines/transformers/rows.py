"""The state of one row being sampled, and of one answer being forked; how tokens are chosen.

Draws are counter-based: a row's tokens do not depend on its batch.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from modeling_ospruner.engines.interface import AnswerStop, ForkedAnswer, Sampled, SamplingSettings
from modeling_ospruner.formats_ospruner import TokenFormat
from modeling_ospruner.rules_ospruner import mix64

_U64 = np.uint64
_FEW = 64


def row_keys(prompts: Sequence[Sequence[int]], keys: Sequence[str] | None) -> list[str]:
    """The given keys, or for each prompt its ids and how often they occurred before."""
    if keys is not None:
        if len(keys) != len(prompts):
            raise ValueError(f"keys has {len(keys)} entries for {len(prompts)} prompts")
        return list(keys)
    seen: Counter[tuple[int, ...]] = Counter()
    made = []
    for prompt in prompts:
        ids = tuple(prompt)
        made.append(f"{ids}/{seen[ids]}")
        seen[ids] += 1
    return made


def row_state(seed: int, key: str) -> int:
    """The 64-bit state from which `uniforms` draws for one row."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return mix64(mix64(seed) ^ int.from_bytes(digest, "big"))


def uniforms(states: npt.NDArray[np.uint64], steps: npt.NDArray[np.uint64]) -> torch.Tensor:
    """One draw in [0, 1) for each row's state and step (B,): `uniform`, vectorised."""
    z = (states ^ steps) + _U64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> _U64(27))) * _U64(0x94D049BB133111EB)
    z = z ^ (z >> _U64(31))
    return torch.from_numpy((z >> _U64(11)).astype(np.float64) * 2.0**-53)


def choose(logits: torch.Tensor, draws: torch.Tensor, settings: SamplingSettings) -> torch.Tensor:
    """Samples one token a row by inverting the CDF of the warped distribution.

    Temperature, then top-k, then top-p, as transformers orders them; the nucleus is the smallest
    set of most likely tokens whose mass reaches `top_p`.

    Args:
        logits: (B, V).
        draws: uniform in [0, 1), (B,).
        settings: temperature, top_k, top_p.

    Returns:
        Token ids (B,).
    """
    if settings.temperature == 0:
        return logits.argmax(-1)
    probabilities = torch.softmax(logits.float() / settings.temperature, dim=-1)  # (B, V)
    vocabulary = probabilities.shape[-1]
    if settings.top_k == 0 and settings.top_p == 1:
        return _invert(probabilities, draws)[:, 0]
    kept = min(settings.top_k or _FEW, vocabulary)
    values, ids = probabilities.topk(kept, dim=-1)  # (B, kept), descending
    if settings.top_k:
        values = values / values.sum(-1, keepdim=True)
    elif kept < vocabulary and bool((values.sum(-1) < settings.top_p).any()):
        values, ids = probabilities.sort(dim=-1, descending=True)
    before = values.cumsum(-1) - values
    values = values.masked_fill(before >= settings.top_p, 0.0)
    return ids.gather(-1, _invert(values, draws))[:, 0]


def _invert(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """The index (B, 1) at which the running share of the weights (B, V) passes the draw."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    target = draws.to(cumulative.device)[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True)
    last = (weights > 0).int().cumsum(-1).argmax(-1, keepdim=True)  # the last index with weight
    return torch.minimum(index, last)


@dataclass
class SamplingRow:
    """One prompt being sampled.

    Attributes:
        index: its place among the prompts.
        prompt: its prompt.
        state: what its draws come from.
        thinking: whether it is before the end marker.
        tokens: everything sampled, end marker and end-of-text token included.
    """

    index: int
    prompt: Sequence[int]
    state: int
    thinking: bool = True
    tokens: list[int] = field(default_factory=list)
    trace_length: int = 0
    ended: Literal["natural", "cap"] = "natural"

    @classmethod
    def start(cls, index: int, prompt: Sequence[int], key: str, seed: int) -> SamplingRow:
        """A row that has sampled nothing yet."""
        return cls(index, prompt, row_state(seed, key))

    def push(
        self, token: int, settings: SamplingSettings, fmt: TokenFormat, eos_ids: frozenset[int]
    ) -> bool:
        """Takes the next sampled token; whether the row is finished."""
        self.tokens.append(token)
        if token in eos_ids and token != fmt.think_end_id:
            return True
        if not self.thinking:
            return len(self.tokens) - self.trace_length - 1 >= settings.max_answer_tokens
        if token == fmt.think_end_id:
            self.thinking = False
            return False
        self.trace_length += 1
        if self.trace_length >= settings.max_new_tokens:
            self.ended = "cap"
            return True
        return False

    def sampled(self, eos_ids: frozenset[int]) -> Sampled:
        """The finished row's result."""
        answer = [] if self.thinking else self.tokens[self.trace_length + 1 :]
        if answer and answer[-1] in eos_ids:
            answer = answer[:-1]
        return Sampled(self.tokens[: self.trace_length], answer, self.ended)


class Branch:
    """One fork: the answer so far, and how it ended.

    Args:
        cut: how many thinking tokens it keeps.
        stop: makes the rule that completes the answer.
    """

    def __init__(self, cut: int, stop: Callable[[], AnswerStop] | None) -> None:
        self.cut = cut
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.entropy = 0.0
        self.ended: Literal["closed", "eos", "length"] | None = None
        self._rule = stop() if stop is not None else None

    def push(self, token: int, logprob: float, limit: int, eos_ids: frozenset[int]) -> None:
        """Takes the next token; sets `ended` where it completes the answer."""
        if token in eos_ids:
            self.ended = "eos"
            return
        self.ids.append(token)
        self.logprobs.append(logprob)
        if self._rule is not None and self._rule.push(token):
            self.ended = "closed"
        elif len(self.ids) >= limit:
            self.ended = "length"

    def finished(self) -> ForkedAnswer:
        """The answer.

        Raises:
            RuntimeError: it is not complete.
        """
        if self.ended is None:
            raise RuntimeError(f"the fork at {self.cut} thinking tokens is not finished")
        return ForkedAnswer(self.ids, self.ended, self.logprobs, self.entropy)
