"""What models and stopping cost in floating-point operations: one yardstick for every rule.

The paper counts thinking tokens. That is fair where rules differ in nothing else, but some run a
tail, some a second model, some try answers. Here each pays for what it computes: the prompt, the
thinking, what is forced and the answer; a policy for its tail on all tokens until the stop, or at
step ends where it is queries only, a verifier for all that it reads, a rule that tries answers for
each of them.

Arithmetic on a configuration: two operations for each weight of the matrices that a token meets,
and four for each token that it attends to, for each number of a layer's heads: a product with its
key, a product with its value. A token that is generated also needs the logits of the whole
vocabulary; of tokens that are only read, the last one does. Norms, softmax, embeddings and the
states of recurrent layers are left out.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from modeling_ospruner.policy_ospruner import decoder_layers
from ospruner.bases import empty_base

from .table import FloatArray, IntArray, TraceTable

_PREFIXES = ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"))


def active_weights(layer: torch.nn.Module, config: PreTrainedConfig) -> int:
    """Weights that a token meets of a decoder layer, which may lie on the meta device.

    Of a mixture's experts these are its share of them, of any others all.
    """
    text: Any = config.get_text_config()  # its attributes, for some families map this name

    def met(parameter: torch.Tensor) -> float:
        # (experts, in, out), as transformers stacks them; (channels, 1, kernel) is a convolution's.
        if parameter.ndim != 3 or parameter.shape[1] == 1:
            return parameter.numel()
        chosen = text.top_k_experts if hasattr(text, "top_k_experts") else text.num_experts_per_tok
        return parameter.numel() * chosen / parameter.shape[0]

    return round(sum(map(met, layer.parameters())))


def heads_width(config: PreTrainedConfig) -> int:
    """Numbers in the queries of all heads of a layer."""
    text = config.get_text_config()
    head_dim = vars(text).get("head_dim") or text.hidden_size // text.num_attention_heads
    return int(text.num_attention_heads * head_dim)


class LayerWork(NamedTuple):
    """What one layer computes."""

    token: float  # operations of one token in the layer's matrices
    attended: float  # operations for each token that it attends to; 0 for recurrent layers
    window: float = math.inf  # how many tokens it attends to at the most, itself included

    def before(self, position: FloatArray) -> FloatArray:
        """Operations of all tokens before a position: they attend to 1, 2, ... up to the window."""
        inner = np.minimum(position, self.window)
        attended = inner * (inner + 1) / 2 + (position - inner) * inner
        return self.token * position + self.attended * attended


class ModelWork(NamedTuple):
    """What a causal language model computes."""

    layers: tuple[LayerWork, ...]  # from the first
    logits: float  # operations of the vocabulary's logits after one token

    @classmethod
    def of_config(cls, config: PreTrainedConfig) -> ModelWork:
        """Of any causal LM's configuration; no weights are read."""
        text, works = config.get_text_config(), []
        # A cache that makes its layers as they come holds plain attention.
        caches = itertools.chain(DynamicCache(config=text).layers, itertools.repeat(DynamicLayer()))
        for layer, cache in zip(decoder_layers(empty_base(config)), caches, strict=False):
            attends = isinstance(cache, DynamicLayer)  # else it is recurrent alone
            window = math.inf
            if isinstance(cache, DynamicSlidingWindowLayer):
                window = cache.sliding_window
            vectors = sum(p.numel() for p in layer.parameters() if p.ndim < 2)  # added, or scale
            matrices = active_weights(layer, config) - vectors
            works.append(LayerWork(2.0 * matrices, 4.0 * heads_width(config) * attends, window))
        return cls(tuple(works), 2.0 * text.hidden_size * text.vocab_size)

    def read(
        self, start: npt.ArrayLike, end: npt.ArrayLike, last_layers: int | None = None
    ) -> FloatArray:
        """Operations of passing the tokens from position `start` to just before `end`.

        With `last_layers` only of so many of the last layers, as a policy's tail.
        """
        skipped = 0 if last_layers is None else len(self.layers) - last_layers
        first, last = (one.astype(np.float64) for one in np.broadcast_arrays(start, end))
        passed = (layer.before(last) - layer.before(first) for layer in self.layers[skipped:])
        return sum(passed, np.zeros(first.shape))

    def answer(
        self, position: npt.ArrayLike, forced: npt.ArrayLike, tokens: npt.ArrayLike
    ) -> FloatArray:
        """Operations of an answer: its forced beginning is read, then its tokens are generated.

        The last token that is generated is not passed again. The forced beginning starts at
        `position`.
        """
        start, generated = np.asarray(position, np.float64), np.asarray(tokens, np.float64)
        passed = np.asarray(forced, np.float64) + np.maximum(generated - 1, 0)
        result: FloatArray = self.read(start, start + passed) + self.logits * generated
        return result


@dataclass(frozen=True, eq=False)
class Compute:
    """What a base computes on N prompts."""

    work: ModelWork  # of the base
    prompt_tokens: IntArray  # (N,) tokens of each prompt
    forced_tokens: int  # tokens forced before an answer (`TokenFormat.forced_suffix`)

    def trial(self, row: int, tokens: int, answer_tokens: float) -> float:
        """Operations of one trial answer of a row after so many thinking tokens."""
        position = int(self.prompt_tokens[row]) + tokens
        return float(self.work.answer(position, self.forced_tokens, answer_tokens))

    def charge(self, table: TraceTable) -> TraceTable:
        """The table with what stopping at each step costs in `flops`.

        The prompt is read, so many tokens are generated, the closing is read, the answer generated.
        """
        ends = self._ends(table)
        thought = self.work.read(0, ends) + self.work.logits * table.lengths.astype(np.float64)
        answers = self.work.answer(ends, self.forced_tokens, table.answer_tokens)
        return replace(table, flops=thought + answers)

    def tail(self, table: TraceTable, layers: int, queries: bool = False) -> FloatArray:
        """(N, T) operations of a tail up to each step.

        Its layers run on the prompt and the thinking. If it is queries only, one token goes through
        them at each step's end but the last, where nothing is decided; that it makes no keys and
        values is left out. So are adapters and the linear head, a vector at each step's end.
        """
        ends = self._ends(table)
        if not queries:
            return self.work.read(0, ends, layers)
        due = np.arange(table.mask.shape[1]) < table.last[:, None]  # (N, T)
        return np.where(due, self.work.read(ends - 1, ends, layers), 0.0).cumsum(axis=1)

    def _ends(self, table: TraceTable) -> FloatArray:
        """(N, T) the position after each step."""
        found: FloatArray = table.lengths + self.prompt_tokens.astype(np.float64)[:, None]
        return found


def flops_scale(flops: float) -> tuple[float, str]:
    """What to divide operations by so that a number of this size is readable, and its unit."""
    return next((one for one in _PREFIXES if flops >= one[0]), (1e3, "kFLOP"))
