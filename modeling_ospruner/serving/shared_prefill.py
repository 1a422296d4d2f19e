"""Running many texts side by side so that every shared beginning is computed once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from .engine import TokenCount
from .slot_cache import SlotCache

__all__ = ["prefill_shared"]

_WORTH_A_PASS = 32  # tokens that a further pass must save
_PASS_COLUMNS = 1024  # a pass with a mask runs so many columns at most: the mask stays small


def prefill_shared(
    model: PreTrainedModel, num_layers: int, texts: Sequence[Sequence[int]], count: TokenCount
) -> SlotCache:
    """Runs texts and returns their keys and values, one row a text, token i in column i.

    Rows run as one as long as their tokens agree (the chat template's beginning, a problem's
    prompt, whole traces), and part where they differ. Columns beyond a row's text hold something
    that nobody may look at.

    Args:
        model: a causal LM whose layers all attend to everything.
        num_layers: how many it has.
        texts: token ids, at least one of them not empty.
        count: where tokens are counted.
    """
    order = sorted(range(len(texts)), key=lambda i: list(texts[i]))
    ordered = [texts[i] for i in order]
    columns = max(map(len, texts))
    agree = [_agreement(a, b, columns) for a, b in itertools.pairwise(ordered)]
    cache = SlotCache(num_layers)
    rows = [0] * len(ordered)  # the cache's row of each text, before anything ran
    for start, end in itertools.pairwise(_cuts(agree, columns)):
        new = _classes(agree, end)
        if start:
            first = [new.index(group) for group in range(new[-1] + 1)]
            cache.select(torch.tensor([rows[i] for i in first], device=model.device))
        rows = new
        longest: list[Sequence[int]] = [()] * (new[-1] + 1)
        for group, text in zip(new, ordered, strict=True):
            longest[group] = max(longest[group], text, key=len)
        _run(model, cache, longest, start, end, count)
    places = dict(zip(order, rows, strict=True))
    cache.select(torch.tensor([places[i] for i in range(len(texts))], device=model.device))
    return cache


def _agreement(a: Sequence[int], b: Sequence[int], columns: int) -> int:
    """How many first tokens two texts share; all columns where one begins with the other."""
    differ = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differ, columns)


def _classes(agree: Sequence[int], end: int) -> list[int]:
    """For each text in order, the number of the group that shares its first `end` tokens."""
    return list(itertools.accumulate((int(shared < end) for shared in agree), initial=0))


def _cuts(agree: Sequence[int], columns: int) -> list[int]:
    """The columns at which rows part, where that saves enough tokens for a pass of its own."""
    cuts = [0]
    for column in sorted({shared for shared in agree if 0 < shared < columns}):
        groups = _classes(agree, column)[-1] + 1
        if (column - cuts[-1]) * (len(agree) + 1 - groups) >= _WORTH_A_PASS:
            cuts.append(column)
    return [*cuts, columns]


def _run(
    model: PreTrainedModel,
    cache: SlotCache,
    texts: Sequence[Sequence[int]],
    start: int,
    end: int,
    count: TokenCount,
) -> None:
    """Runs the columns start..end of texts whose earlier columns are in the cache."""
    step = end - start if start == 0 else _PASS_COLUMNS
    for low in range(start, end, step):
        high = min(low + step, end)
        R, S = len(texts), high - low
        ids = torch.zeros(R, S, dtype=torch.long)
        real = 0
        for row, text in enumerate(texts):
            part = text[low:high]
            ids[row, : len(part)] = torch.tensor(part, dtype=torch.long)
            real += len(part)
        mask = None
        if low:  # (R, 1, S, high): each token sees the columns up to its own
            hidden = torch.finfo(model.dtype).min
            causal = torch.full((S, high), hidden, dtype=model.dtype, device=model.device)
            mask = causal.triu(low + 1).expand(R, 1, S, high)
        model(
            input_ids=ids.to(model.device),
            attention_mask=mask,
            position_ids=torch.arange(low, high, device=model.device).expand(R, S),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        count.computed += real
        count.padding += R * S - real
