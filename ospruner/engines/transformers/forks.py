"""Answers forked off a group of traces: each trace runs once, its forks on copies of its cache."""

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..interface import AnswerStop, ForkedAnswer, ForkRequest, TokenCount, top_entropy
from ..rows import Branch
from .batch import RowBatch, joined, padded
from .choosing import batch_noise, is_close, run_alone

TOGETHER = 128
"""Answers that decode side by side at most: more of them only leave a processor's caches."""
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
    packed: bool  # rows of its cache can be copied, see `RowBatch`
    suffix_ids: Sequence[int]
    max_new_tokens: int
    stop: Callable[[], AnswerStop] | None
    eos_ids: frozenset[int]
    count: TokenCount

    def __post_init__(self) -> None:
        self.noise = batch_noise(self.model)

    def run(
        self, forks: Sequence[ForkRequest], together: int = TOGETHER
    ) -> list[list[ForkedAnswer]]:
        """The answers of each trace, in the order of its cuts; so many decode side by side."""
        texts = [[*fork.prompt_ids, *fork.trace_ids] for fork in forks]
        branches = []
        for fork, text in zip(forks, texts, strict=True):
            ends = [len(fork.prompt_ids) + cut for cut in fork.cuts]
            kept = [[*text[:end], *self.suffix_ids] for end in ends]
            branches.append([Branch(self.stop, one, fork.options) for one in kept])
        if self.packed:
            self._copy(texts, branches, together)
        else:
            for text, own in zip(texts, branches, strict=True):
                self._walk(text, own)
        return [[one.answer for one in own if one.answer is not None] for own in branches]

    def _copy(
        self, texts: Sequence[list[int]], branches: Sequence[list[Branch]], together: int
    ) -> None:
        """Runs the traces in the rows of batches, and each fork on a copy of its trace's row."""
        size = max(1, _PASS_TOKENS // max(map(len, texts)))
        trunks = []
        for low in range(0, len(texts), size):
            trunks.append(RowBatch(self.model, self.count, packed=True))
            trunks[-1].feed(*padded(texts[low : low + size], at_left=False))
        # Of forks in the order of their cuts, little is copied that they do not see.
        rows = [(branch, row) for row, own in enumerate(branches) for branch in own]
        rows.sort(key=lambda one: len(one[0].kept))
        for low in range(0, len(rows), together):
            chunk = sorted(rows[low : low + together], key=lambda one: one[1])
            parts = []
            for number, own in itertools.groupby(chunk, lambda one: one[1] // size):
                some = list(own)
                ends = [len(branch.kept) - len(self.suffix_ids) for branch, _ in some]
                parts.append((trunks[number], [row % size for _, row in some], ends))
            self._decode(joined(parts), [branch for branch, _ in chunk])

    def _walk(self, text: Sequence[int], branches: Sequence[Branch]) -> None:
        """Walks one trace from cut to cut, and decodes each answer on a copy of the cache."""
        batch = RowBatch(self.model, self.count, packed=False)
        for branch in sorted(branches, key=lambda one: len(one.kept)):
            end = len(branch.kept) - len(self.suffix_ids)
            if end > batch.columns:
                batch.feed(torch.tensor([text[batch.columns : end]]))
            forked = copy.copy(batch)
            forked.cache = copy.deepcopy(batch.cache)
            self._decode(forked, [branch])

    def _decode(self, batch: RowBatch, branches: Sequence[Branch]) -> None:
        """Runs the suffix in each row of a batch, then decodes until all answers are complete."""
        logits = batch.feed(torch.tensor(self.suffix_ids).expand(len(branches), -1))
        while True:
            live = [row for row, branch in enumerate(branches) if branch.answer is None]
            self._push([branches[row] for row in live], logits[live])
            live = [row for row in live if branches[row].answer is None]
            if not live:
                return
            if 2 * len(live) <= len(branches):
                batch, branches = batch.take(live), [branches[row] for row in live]
            ids = [[branch.ids[-1] if branch.ids else 0] for branch in branches]
            real = [[branch.answer is None] for branch in branches]
            logits = batch.feed(torch.tensor(ids), torch.tensor(real))

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
