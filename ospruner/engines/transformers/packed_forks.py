"""Answers forked off traces as packed trees: every shared token is computed once.

A trace's prompt and thinking run once; traces that begin alike share that beginning. All forks of
a trace then decode side by side as further columns of the same row, each seeing the trace up to its
cut and its own tokens, at the positions that they would have alone (tree attention).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from ospruner.bases import input_device
from ospruner.logits import greedy, last_logits, top_entropy

from ..interface import AnswerStop, ForkedAnswer, ForkRequest, TokenCount
from .cache import SlotCache
from .rows import Branch, batch_noise, greedy_alone, is_close, option_scores

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
            cache.select(torch.tensor([rows[i] for i in first]))
        rows = new
        longest: list[Sequence[int]] = [()] * (new[-1] + 1)
        for group, text in zip(new, ordered, strict=True):
            longest[group] = max(longest[group], text, key=len)
        _run(model, cache, longest, start, end, count)
    places = dict(zip(order, rows, strict=True))
    cache.select(torch.tensor([places[i] for i in range(len(texts))]))
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
    device = input_device(model)
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
            causal = torch.full((S, high), hidden, dtype=model.dtype, device=device)
            mask = causal.triu(low + 1).expand(R, 1, S, high)
        last_logits(
            model,
            input_ids=ids.to(device),
            attention_mask=mask,
            position_ids=torch.arange(low, high, device=device).expand(R, S),
            past_key_values=cache,
            use_cache=True,
        )
        count.computed += real
        count.padding += R * S - real


_COLUMN_CHUNK = 16


class PackedForks:
    """Forks a group of traces together.

    Args:
        model: a causal LM whose layers all attend to everything.
        num_layers: how many it has.
        suffix_ids: put after each cut.
        max_new_tokens: cap on each answer.
        stop: makes the rule that completes one answer.
        eos_ids: ids that end a text.
        count: where tokens are counted.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        num_layers: int,
        suffix_ids: Sequence[int],
        max_new_tokens: int,
        stop: Callable[[], AnswerStop] | None,
        eos_ids: frozenset[int],
        count: TokenCount,
    ) -> None:
        self.model = model
        self.num_layers = num_layers
        self.suffix_ids = suffix_ids
        self.suffix = torch.tensor(list(suffix_ids), dtype=torch.long)
        self.max_new_tokens = max_new_tokens
        self.stop = stop
        self.eos_ids = eos_ids
        self.count = count
        self.device = input_device(model)
        self.hidden = torch.finfo(model.dtype).min
        self.noise = batch_noise(model)

    def run(self, requests: Sequence[ForkRequest]) -> list[list[ForkedAnswer]]:
        """The answers of each request, in the order of its cuts."""
        branches = [[Branch(cut, self.stop) for cut in request.cuts] for request in requests]
        if not any(branches):
            return [[] for _ in requests]
        self.requests = requests
        self.branches = branches
        self.rows = list(range(len(requests)))
        self.starts = [len(request.prompt_ids) for request in requests]
        self._trunk(requests)
        self._suffixes()
        while self._drop_finished():
            self._step()
        return [[branch.finished() for branch in row] for row in branches]

    def _trunk(self, requests: Sequence[ForkRequest]) -> None:
        """Runs prompts and thinking; what lies beyond a row's own is never visible to a fork."""
        texts = [
            [*request.prompt_ids, *request.trace_ids[: max(request.cuts, default=0)]]
            for request in requests
        ]
        self.cache = prefill_shared(self.model, self.num_layers, texts, self.count)

    def _suffixes(self) -> None:
        """Runs the suffix of every fork, and takes each one's first token."""
        R, S = len(self.branches), self.cache.columns
        K, s = max(map(len, self.branches)), len(self.suffix)
        ends = torch.zeros(R, K, dtype=torch.long)  # tokens that a fork sees of the trunk
        for row, branches in enumerate(self.branches):
            for k, branch in enumerate(branches):
                ends[row, k] = self.starts[row] + branch.cut
        self.ends = ends
        own = K * s
        columns = S + own
        # (R, K, columns): 0 where fork k sees the column once its suffix is complete.
        self.mask = torch.full(
            (R, K, columns + K * _COLUMN_CHUNK), self.hidden, dtype=self.model.dtype
        ).to(self.device)
        trunk_seen = torch.arange(S) < ends[..., None]  # (R, K, S)
        self.mask[..., :S].masked_fill_(trunk_seen.to(self.device), 0)
        fork = torch.arange(own) // s  # (own,): which fork a suffix token belongs to
        mine = fork[None] == torch.arange(K)[:, None]  # (K, own)
        self.mask[..., S:columns].masked_fill_(mine.to(self.device), 0)
        block = self.mask[:, fork.to(self.device), :columns]  # (R, own, columns)
        ahead = torch.ones(own, own, dtype=torch.bool).triu(1)
        block[..., S:].masked_fill_(ahead.to(self.device), self.hidden)
        positions = ends[..., None] + torch.arange(s)  # (R, K, s)
        logits = self.model(
            input_ids=self.suffix.repeat(K).expand(R, own).to(self.device),
            attention_mask=block[:, None],
            position_ids=positions.view(R, own).to(self.device),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=torch.arange(s - 1, own, s, device=self.device),
        ).logits  # (R, K, V)
        real = s * sum(map(len, self.branches))
        self._count(real, R * own)
        self.ends = ends + s
        self._push(logits, list(range(R)), [list(range(len(row))) for row in self.branches])

    def _drop_finished(self) -> bool:
        """Drops rows whose forks are all finished; whether any fork is left."""
        going = [
            place
            for place, row in enumerate(self.rows)
            if any(branch.ended is None for branch in self.branches[row])
        ]
        if not going:
            return False
        if 2 * len(going) <= len(self.rows):
            index = torch.tensor(going)
            self.cache.select(index)
            self.mask = self.mask[index.to(self.device)]
            self.ends = self.ends[index]
            self.rows = [self.rows[place] for place in going]
        return True

    def _step(self) -> None:
        """Decodes one token of every unfinished fork."""
        active = [
            [k for k, branch in enumerate(self.branches[row]) if branch.ended is None]
            for row in self.rows
        ]
        R, K, columns = len(self.rows), max(map(len, active)), self.cache.columns
        forks = torch.zeros(R, K, dtype=torch.long)
        ids = torch.zeros(R, K, dtype=torch.long)
        for place, (row, ks) in enumerate(zip(self.rows, active, strict=True)):
            forks[place, : len(ks)] = torch.tensor(ks, dtype=torch.long)
            ids[place, : len(ks)] = torch.tensor([self.branches[row][k].ids[-1] for k in ks])
        self._widen(columns + K)
        places = torch.arange(R)[:, None].expand(R, K)
        own = columns + torch.arange(K).expand(R, K)
        real = torch.arange(K) < torch.tensor([[len(ks)] for ks in active])  # (R, K)
        self.mask[places[real], forks[real], own[real]] = 0
        position_ids = self.ends.gather(1, forks)
        self.ends[places[real], forks[real]] += 1
        mask = self.mask[places, forks, : columns + K]  # (R, K, columns + K)
        logits = self.model(
            input_ids=ids.to(self.device),
            attention_mask=mask[:, None],
            position_ids=position_ids.to(self.device),
            past_key_values=self.cache,
            use_cache=True,
        ).logits
        self._count(sum(map(len, active)), R * K)
        self._push(logits, self.rows, active)

    def _push(self, logits: torch.Tensor, rows: list[int], forks: list[list[int]]) -> None:
        """Gives forks their next tokens from logits (R, K, V), whose places they fill in order."""
        tokens, logprobs = (values.tolist() for values in greedy(logits))
        close, entropies = is_close(logits, self.noise).tolist(), top_entropy(logits).tolist()
        for place, (row, ks) in enumerate(zip(rows, forks, strict=True)):
            request = self.requests[row]
            for i, k in enumerate(ks):
                branch, token, logprob = self.branches[row][k], tokens[place][i], logprobs[place][i]
                kept = [*request.prompt_ids, *request.trace_ids[: branch.cut]]
                text = [*kept, *self.suffix_ids, *branch.ids]
                if request.options:
                    own = logits[place, i]
                    branch.choose(
                        request.options,
                        option_scores(
                            self.model, own, request.options, text, self.noise, self.count
                        ),
                    )
                    continue
                if close[place][i]:
                    token, logprob = greedy_alone(self.model, text, self.count)
                entropy = entropies[place][i]
                branch.push(token, logprob, entropy, self.max_new_tokens, self.eos_ids)

    def _widen(self, columns: int) -> None:
        if columns > self.mask.shape[-1]:
            R, K, old = self.mask.shape
            wider = self.mask.new_full((R, K, columns + K * _COLUMN_CHUNK), self.hidden)
            wider[..., :old] = self.mask
            self.mask = wider

    def _count(self, real: int, slots: int) -> None:
        self.count.computed += real
        self.count.padding += slots - real
