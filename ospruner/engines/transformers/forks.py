"""Answers forked off a group of traces: each trace runs once, its forks beside it.

A fork decodes in columns of its trace's row that see the trace up to its cut, and one another
(tree attention). Where a base takes no such mask, each decodes on a copy of the cache.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..interface import AnswerStop, ForkedAnswer, ForkRequest, TokenCount, top_entropy
from ..rows import Branch
from .batch import MASK_NUMBERS, RowBatch, padded, table
from .choosing import batch_noise, is_close, run_alone

TOGETHER = 128  # answers that decode side by side: more of them only leave a processor's caches
_PASS_TOKENS = 2048  # of traces that run in one pass; as above


def _greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely tokens (...), and their log-probabilities in nats, of logits (..., V)."""
    tokens = logits.argmax(-1)
    best = logits.gather(-1, tokens[..., None])[..., 0].float()
    return tokens, best - logits.float().logsumexp(-1)


@dataclass
class Forks:
    """Forks groups of traces; `Engine.fork` says how."""

    model: PreTrainedModel  # a causal LM
    packed: bool  # its layers take any mask, see `RowBatch`
    suffix_ids: Sequence[int]
    max_new_tokens: int
    stop: Callable[[], AnswerStop] | None
    eos_ids: frozenset[int]
    count: TokenCount

    def __post_init__(self) -> None:
        self.noise = batch_noise(self.model)

    def run(self, forks: Sequence[ForkRequest], together: int) -> list[list[ForkedAnswer]]:
        """The answers of each trace, in the order of its cuts; so many decode side by side."""
        texts = [[*fork.prompt_ids, *fork.trace_ids] for fork in forks]
        branches = []
        for fork, text in zip(forks, texts, strict=True):
            ends = [len(fork.prompt_ids) + cut for cut in fork.cuts]
            kept = [[*text[:end], *self.suffix_ids] for end in ends]
            branches.append([Branch(self.stop, one, fork.options) for one in kept])
        if self.packed:
            self._tree(texts, branches, together)
        else:
            for text, own in zip(texts, branches, strict=True):
                self._walk(text, own)
        return [[one.answer for one in own if one.answer is not None] for own in branches]

    def _tree(
        self, texts: Sequence[list[int]], branches: Sequence[list[Branch]], together: int
    ) -> None:
        """Runs traces in the rows of batches, and their forks as further columns of these rows."""
        longest = max(map(len, texts))
        size = max(1, _PASS_TOKENS // longest)
        together = min(together, MASK_NUMBERS // (longest * len(self.suffix_ids)))
        for low in range(0, len(texts), size):
            batch = RowBatch(self.model, self.count, packed=True)
            batch.feed(*padded(texts[low : low + size], at_left=False))
            rows = [sorted(own, key=self._end) for own in branches[low:][:size]]
            width = max(1, together // len(rows))
            # The last cuts first: their columns then make room for those of forks that see less.
            while any(rows):
                chunk, rows = [row[-width:] for row in rows], [row[:-width] for row in rows]
                batch.crop(max(self._end(one) for row in chunk for one in row))
                self._decode(batch, chunk)

    def _end(self, branch: Branch) -> int:
        """How many tokens of its trace, prompt included, a fork sees."""
        return len(branch.kept) - len(self.suffix_ids)

    def _walk(self, text: Sequence[int], branches: Sequence[Branch]) -> None:
        """Walks one trace from cut to cut, and decodes each answer on a copy of the cache."""
        batch = RowBatch(self.model, self.count, packed=False)
        for branch in sorted(branches, key=self._end):
            end = self._end(branch)
            if end > batch.columns:
                batch.feed(torch.tensor([text[batch.columns : end]]))
            forked = copy.copy(batch)
            forked.cache = copy.deepcopy(batch.cache)
            ids = self.suffix_ids
            while branch.answer is None:
                self._push([branch], forked.feed(torch.tensor([ids])))
                ids = branch.ids[-1:]

    def _decode(self, batch: RowBatch, rows: Sequence[Sequence[Branch]]) -> None:
        """Runs the suffix of every fork in its row, then decodes until all answers are complete."""
        ends = table([[self._end(one) for one in row] for row in rows], 0)
        live = [list(range(len(row))) for row in rows]
        each, ids = len(self.suffix_ids), torch.tensor(self.suffix_ids).repeat(ends.shape)
        forks = table(live, -1).repeat_interleave(each, dim=1)
        while True:
            logits = batch.branch(ids, forks, ends, each)
            some = [(b, n, rows[b][k]) for b, own in enumerate(live) for n, k in enumerate(own)]
            places, columns, branches = zip(*some, strict=True)
            self._push(branches, logits[list(places), list(columns)])
            live = [[k for k, one in enumerate(row) if one.answer is None] for row in rows]
            left = [row for row, own in enumerate(live) if own]
            if not left:
                return
            if 2 * len(left) <= len(rows):
                batch, forks, ends = batch.take(left), forks[left], ends[left]
                rows, live = [rows[row] for row in left], [live[row] for row in left]
            last = [[row[k].ids[-1] for k in own] for row, own in zip(rows, live, strict=True)]
            each, ids = 1, table(last, 0)
            forks = torch.cat([forks, table(live, -1)], dim=1)

    def _push(self, branches: Sequence[Branch], logits: torch.Tensor) -> None:
        """Gives branches their next tokens, from logits (B, V)."""
        tokens, logprobs = (values.tolist() for values in _greedy(logits))
        close, entropies = is_close(logits, self.noise).tolist(), top_entropy(logits).tolist()
        for row, branch in enumerate(branches):
            if branch.options:
                said = logits[row]
                if is_close(said, self.noise, branch.options):
                    said = run_alone(self.model, branch.kept, self.count)[0]
                scores = said[list(branch.options)].float().tolist()
                branch.answer = ForkedAnswer.chosen(branch.options, scores)
                continue
            token, logprob = tokens[row], logprobs[row]
            if close[row]:
                alone = run_alone(self.model, [*branch.kept, *branch.ids], self.count)
                token, logprob = (value.item() for value in _greedy(alone))
            branch.push(token, logprob, entropies[row], self.max_new_tokens, self.eos_ids)
