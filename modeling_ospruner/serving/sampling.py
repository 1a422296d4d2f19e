"""Token choice with counter-based draws: a row's tokens don't depend on its batch."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from modeling_ospruner.draws_ospruner import mix64

from .engine import SamplingSettings

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
