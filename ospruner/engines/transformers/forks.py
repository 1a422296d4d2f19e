"""Answers forked off a group of traces: every shared token is computed once.

A trace's prompt and thinking run once. All its forks then decode side by side as further columns of
the same row, each seeing the trace up to its cut and its own tokens, at the positions that they
would have alone (tree attention). Where the cache takes no such columns, the trace is walked from
cut to cut, and each fork decodes on a copy of the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from ospruner.logits import greedy, top_entropy

from ..interface import AnswerStop, ForkedAnswer, ForkRequest, TokenCount
from .batch import Batch, padded
from .rows import Branch, batch_noise, greedy_alone, is_close, option_scores

_MASK_NUMBERS = 2**25  # of the pass that runs the suffixes: more forks take turns


class Forks:
    """Forks groups of traces.

    Args:
        model: a causal LM.
        packed: its cache takes columns of several forks, see `Batch`.
        suffix_ids: put after each cut.
        max_new_tokens: cap on each answer.
        stop: makes the rule that completes one answer.
        eos_ids: ids that end a text.
        count: where tokens are counted.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        packed: bool,
        suffix_ids: Sequence[int],
        max_new_tokens: int,
        stop: Callable[[], AnswerStop] | None,
        eos_ids: frozenset[int],
        count: TokenCount,
    ) -> None:
        self.model = model
        self.packed = packed
        self.suffix_ids = list(suffix_ids)
        self.max_new_tokens = max_new_tokens
        self.stop = stop
        self.eos_ids = eos_ids
        self.count = count
        self.noise = batch_noise(model)

    def run(self, forks: Sequence[ForkRequest]) -> list[list[ForkedAnswer]]:
        """The answers of each trace, in the order of its cuts."""
        branches = []
        for fork in forks:
            text = [*fork.prompt_ids, *fork.trace_ids]
            ends = [len(fork.prompt_ids) + cut for cut in fork.cuts]
            kept = [[*text[:end], *self.suffix_ids] for end in ends]
            branches.append([Branch(one, fork.options, self.stop) for one in kept])
        if self.packed and any(branches):
            self._grow(forks, branches)
        elif not self.packed:
            for fork, own in zip(forks, branches, strict=True):
                self._walk(fork, own)
        return [[branch.finished() for branch in own] for own in branches]

    def _grow(self, forks: Sequence[ForkRequest], branches: Sequence[list[Branch]]) -> None:
        """Runs traces in the rows of a batch, each prompt once, then their forks."""
        batch = Batch(self.model, self.count, packed=True)
        prompts = [tuple(fork.prompt_ids) for fork in forks]
        different = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
        starts = [len(prompt) for prompt in prompts]
        traces = [list(fork.trace_ids) for fork in forks]
        if len(different) < len(prompts):  # samples of one problem
            batch.feed(*padded(list(different), at_left=False))
            batch.keep([different[prompt] for prompt in prompts])
            starts = [batch.columns] * len(forks)
        else:
            traces = [[*prompt, *trace] for prompt, trace in zip(prompts, traces, strict=True)]
        if any(traces):
            batch.feed(*padded(traces, at_left=False))
        # Of all forks together the mask has R K s (C + K s) numbers.
        R, C, s = len(forks), batch.columns, len(self.suffix_ids)
        most = max(map(len, branches))
        together = max(1, _MASK_NUMBERS // (R * s * (C + most * s)))
        for low in range(0, most, together):
            part = [own[low : low + together] for own in branches]
            ends = [
                [start + cut for cut in list(fork.cuts)[low : low + together]]
                for start, fork in zip(starts, forks, strict=True)
            ]
            last = low + together >= most
            self._decode(batch, part, ends, last)
            if not last:
                batch.cut(C)

    def _decode(
        self,
        batch: Batch,
        branches: Sequence[list[Branch]],
        ends: Sequence[Sequence[int]],
        last: bool,
    ) -> None:
        """Runs the suffix of every fork, then decodes until all answers are complete.

        Args:
            batch: holds the traces, one a row.
            branches: of each row.
            ends: for each, the column before which it sees the trace.
            last: whether rows may be dropped when their forks are complete.
        """
        s, K = len(self.suffix_ids), max(map(len, branches))
        left = [list(range(len(own))) for own in branches]
        _, real = _index(left)  # (R, K)
        cuts, _ = _index(ends)
        sees = batch.seen[:, None] & (torch.arange(batch.columns) < cuts[..., None])  # (R, K, C)
        at = sees.sum(-1)  # (R, K) the next position of each
        mine = torch.eye(K, dtype=torch.bool).repeat_interleave(s, 1)  # (K, K s)
        own = (mine.repeat_interleave(s, 0) & torch.ones(K * s, K * s).tril().bool())[None]
        logits = batch.branch(
            torch.tensor(self.suffix_ids).repeat(len(branches), K),
            real.repeat_interleave(s, 1),
            (at[..., None] + torch.arange(s)).flatten(1),
            torch.cat([sees.repeat_interleave(s, 1), own.expand(len(branches), -1, -1)], -1),
            torch.arange(s - 1, K * s, s),
        )
        at = at + s
        sees = torch.cat([sees, mine.expand(len(branches), -1, -1)], -1)
        rows = list(branches)
        while True:
            self._push([[rows[r][k] for k in own] for r, own in enumerate(left)], logits)
            left = [[k for k, one in enumerate(own) if one.ended is None] for own in rows]
            live = [r for r, own in enumerate(left) if own]
            if not live:
                return
            if last and 2 * len(live) <= len(rows):
                before = batch.columns
                batch.keep(live)
                rows, left = [rows[r] for r in live], [left[r] for r in live]
                sees, at = sees[live][..., before - batch.columns :], at[live]
            going, real = _index(left)
            places = torch.arange(len(rows))[:, None]
            K = going.shape[1]
            ids, _ = _index([[rows[r][k].ids[-1] for k in own] for r, own in enumerate(left)])
            new = torch.eye(K, dtype=torch.bool).expand(len(rows), -1, -1)
            logits = batch.branch(
                ids,
                real,
                at[places, going],
                torch.cat([sees[places, going], new], -1),
                torch.arange(K),
            )
            column = torch.zeros(*sees.shape[:2], K, dtype=torch.bool)
            row, place = real.nonzero(as_tuple=True)
            column[row, going[row, place], place] = True
            sees = torch.cat([sees, column], -1)
            at[row, going[row, place]] += 1

    def _walk(self, fork: ForkRequest, branches: Sequence[Branch]) -> None:
        """Walks one trace from cut to cut, and decodes each answer on a copy of the cache."""
        batch = Batch(self.model, self.count, packed=False)
        text = [*fork.prompt_ids, *fork.trace_ids]
        for cut, branch in sorted(zip(fork.cuts, branches, strict=True), key=lambda one: one[0]):
            end = len(fork.prompt_ids) + cut
            if end > batch.columns:
                batch.feed(torch.tensor([text[batch.columns : end]]))
            forked, ids = batch.copy(), self.suffix_ids
            while branch.ended is None:
                self._push([[branch]], forked.feed(torch.tensor([ids]))[:, None])
                ids = branch.ids[-1:]

    def _push(self, branches: Sequence[Sequence[Branch]], logits: torch.Tensor) -> None:
        """Gives unfinished branches their next tokens.

        Args:
            branches: of each row, those whose logits come first.
            logits: (R, K, V).
        """
        tokens, logprobs = (values.tolist() for values in greedy(logits))
        close, entropies = is_close(logits, self.noise).tolist(), top_entropy(logits).tolist()
        for r, own in enumerate(branches):
            for k, branch in enumerate(own):
                if branch.options:
                    scores = option_scores(
                        self.model,
                        logits[r, k],
                        branch.options,
                        branch.kept,
                        self.noise,
                        self.count,
                    )
                    branch.choose(scores)
                    continue
                token, logprob = tokens[r][k], logprobs[r][k]
                if close[r][k]:
                    text = [*branch.kept, *branch.ids]
                    token, logprob = greedy_alone(self.model, text, self.count)
                branch.push(token, logprob, entropies[r][k], self.max_new_tokens, self.eos_ids)


def _index(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists of numbers as a table (R, K), and which of its places are filled."""
    return padded(rows, at_left=False)
