"""Sampling and forking for any causal LM, by its own kind of cache; slower than the packed way.

For models with sliding windows, recurrent states or attention kernels that take no custom mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from modeling_ospruner.formats_ospruner import TokenFormat
from ospruner.bases import input_device
from ospruner.logits import greedy, last_logits, top_entropy

from ..interface import (
    AnswerStop,
    ForkedAnswer,
    ForkRequest,
    Sampled,
    SamplingSettings,
    TokenCount,
)
from .cache import forked, own_cache
from .rows import (
    Branch,
    SamplingRow,
    batch_noise,
    choose,
    greedy_alone,
    is_close,
    option_scores,
    run_alone,
    uniforms,
)


def sample_batch(
    model: PreTrainedModel,
    rows: Sequence[SamplingRow],
    settings: SamplingSettings,
    fmt: TokenFormat,
    eos_ids: frozenset[int],
    count: TokenCount,
    on_done: Callable[[int, Sampled], None],
) -> None:
    """Samples a left-padded batch until its last row is finished."""
    lengths = torch.tensor([len(row.prompt) for row in rows])
    B, P = len(rows), int(lengths.max())
    ids = torch.zeros(B, P, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, P - len(row.prompt) :] = torch.as_tensor(row.prompt)
    mask = (torch.arange(P) >= (P - lengths)[:, None]).long()  # (B, P)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    count.computed += int(lengths.sum())
    count.padding += B * P - int(lengths.sum())
    cache = own_cache(model.config)
    device = input_device(model)
    states = np.array([row.state for row in rows], dtype=np.uint64)
    live = [True] * B
    noise = batch_noise(model)
    step = 0
    while True:
        logits = last_logits(
            model,
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            position_ids=positions.to(device),
            past_key_values=cache,
            use_cache=True,
        )
        draws = uniforms(states, np.full(B, step, dtype=np.uint64))
        tokens, close = (t.cpu() for t in choose(logits, draws, settings, noise))
        for i in close.nonzero()[:, 0].tolist():
            if live[i]:
                alone = run_alone(model, [*rows[i].prompt, *rows[i].tokens], count)
                tokens[i] = choose(alone, draws[i : i + 1], settings)[0]
        for i, (row, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
            if live[i] and row.push(token, settings, fmt, eos_ids):
                live[i] = False
                on_done(row.index, row.sampled(eos_ids))
        if not any(live):
            return
        step += 1
        ids = tokens[:, None]
        mask = torch.cat([mask, mask.new_ones(B, 1)], dim=1)
        positions = positions[:, -1:] + 1
        count.computed += sum(live)
        count.padding += B - sum(live)


def fork_one(
    model: PreTrainedModel,
    request: ForkRequest,
    places: Sequence[int],
    suffix_ids: Sequence[int],
    max_new_tokens: int,
    stop: Callable[[], AnswerStop] | None,
    eos_ids: frozenset[int],
    count: TokenCount,
) -> list[ForkedAnswer]:
    """Walks one trace from place to place, and decodes its answers on forks of the cache.

    Args:
        model: any causal LM.
        request: the trace, and the cuts whose answers are wanted.
        places: all cuts of the trace. The walk rests at each, so that the pieces in which a text
            is run, and with them its roundings, depend on the text alone.
        suffix_ids: put after each cut.
        max_new_tokens: cap on each answer.
        stop: makes the rule that completes an answer.
        eos_ids: ids that end a text.
        count: where tokens are counted.
    """
    noise = batch_noise(model)
    cache = own_cache(model.config)
    text = [*request.prompt_ids, *request.trace_ids]
    done = 0
    answers: dict[int, ForkedAnswer] = {}
    for cut in sorted(place for place in set(places) if place <= max(request.cuts)):
        end = len(request.prompt_ids) + cut
        if end > done:
            _feed(model, text[done:end], done, cache, count)
            done = end
        if cut not in request.cuts:
            continue
        fork = forked(cache)
        branch = Branch(cut, stop)
        logits = _feed(model, suffix_ids, end, fork, count)
        position = end + len(suffix_ids)
        while True:
            if request.options:
                kept = [*text[:end], *suffix_ids]
                scores = option_scores(model, logits, request.options, kept, noise, count)
                branch.choose(request.options, scores)
                break
            best, score = greedy(logits)
            token, logprob = int(best), float(score)
            if is_close(logits, noise):
                kept = [*text[:end], *suffix_ids, *branch.ids]
                token, logprob = greedy_alone(model, kept, count)
            branch.push(token, logprob, float(top_entropy(logits)), max_new_tokens, eos_ids)
            if branch.ended is not None:
                break
            logits = _feed(model, branch.ids[-1:], position, fork, count)
            position += 1
        answers[cut] = branch.finished()
    return [answers[cut] for cut in request.cuts]


def _feed(
    model: PreTrainedModel,
    token_ids: Sequence[int],
    position: int,
    cache: DynamicCache,
    count: TokenCount,
) -> torch.Tensor:
    """Runs tokens on the cache; the logits (V,) after the last one."""
    count.computed += len(token_ids)
    device = input_device(model)
    positions = torch.arange(position, position + len(token_ids), device=device)
    return last_logits(
        model,
        input_ids=torch.tensor([list(token_ids)], device=device),
        position_ids=positions[None],
        past_key_values=cache,
        use_cache=True,
    )[0]
