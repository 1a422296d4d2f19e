"""How sure the base was of its thinking: what labels do not keep, from a pass over each trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from ospruner.bases import input_device
from ospruner.logits import top_entropy
from ospruner.progress import Progress, silent

from .table import FloatArray, TraceTable

__all__ = ["thinking_entropies"]

PIECE = 1024
"""Tokens that a pass takes at once: of a long trace, all logits together would fill gigabytes."""


@torch.no_grad()
def thinking_entropies(
    base: PreTrainedModel,
    dataset: Any,
    table: TraceTable,
    progress: Progress = silent,
) -> FloatArray:
    """(N, T) the mean entropy at which each trace's tokens were drawn, up to each step.

    In nats, each over the ENTROPY_TOKENS most likely tokens at temperature 1, as `StepEnd` gives it
    in generate. NaN on padding.

    Args:
        base: that wrote the traces.
        dataset: the labelled traces.
        table: the same as arrays.
        progress: called with phase "thinking".
    """
    found = np.full(table.mask.shape, np.nan)
    device = input_device(base)
    for n, row in enumerate(dataset.select_columns(["prompt_ids", "trace_ids"])):
        prompt, trace = row["prompt_ids"], row["trace_ids"]
        ids = torch.tensor([*prompt, *trace[:-1]], device=device)[None]
        cache = DynamicCache(config=base.config.get_text_config())
        recurrent = any(isinstance(layer, LinearAttentionLayer) for layer in cache.layers)
        entropies: list[float] = []
        for piece in ids.split(ids.shape[1] if recurrent else PIECE, dim=1):
            logits = base(input_ids=piece, past_key_values=cache, use_cache=True).logits[0]
            entropies += top_entropy(logits).tolist()
        # The logits after the prompt's last token drew the first one of the thinking.
        sums = np.cumsum(entropies[len(prompt) - 1 :])
        ends = table.lengths[n, : table.num_steps[n]]
        found[n, : len(ends)] = sums[ends - 1] / ends
        progress("thinking", n + 1, len(table))
    return found
