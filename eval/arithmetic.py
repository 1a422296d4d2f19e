"""What a model computes, in floating-point operations, by arithmetic on its configuration.

Two operations for each weight of the matrices that a token meets, and four for each token that it
attends to, for each number of a layer's heads: a product with its key, a product with its value. A
token that is generated also needs the logits of the whole vocabulary; of tokens that are only read,
the last one does. Norms, softmax, embeddings and the states of recurrent layers are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from modeling_ospruner.policy_ospruner import decoder_layers
from ospruner.bases import empty_base

__all__ = ["LayerWork", "ModelWork", "active_weights", "heads_width", "share_met"]

_ATTENTION_TOO = (
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)

FloatArray = npt.NDArray[np.float64]


def share_met(parameter: torch.Tensor, config: PreTrainedConfig, tokens: float = 1.0) -> float:
    """The share of a parameter's weights that tokens meet: of a mixture's experts, of any others 1.

    Args:
        parameter: of a decoder layer; stacked experts have three dimensions.
        config: the model's.
        tokens: how many, each sent to experts independently of the others.
    """
    if parameter.ndim != 3:  # (experts, in, out), as transformers stacks them
        return 1.0
    per_token = vars(config.get_text_config())["num_experts_per_tok"] / parameter.shape[0]
    return float(1 - (1 - per_token) ** tokens)


def active_weights(layer: torch.nn.Module, config: PreTrainedConfig) -> int:
    """Weights of a layer that a token meets: of a mixture's experts those that it is sent to.

    Args:
        layer: a decoder layer; its weights may lie on the meta device.
        config: the model's.
    """
    return round(sum(share_met(p, config) * p.numel() for p in layer.parameters()))


def _matrices(layer: torch.nn.Module, config: PreTrainedConfig) -> int:
    """The active weights of a layer that are multiplied with, not added or scaled by."""
    vectors = sum(p.numel() for p in layer.parameters() if p.ndim < 2)
    return active_weights(layer, config) - vectors


def heads_width(config: PreTrainedConfig) -> int:
    """Numbers in the queries of all heads of a layer."""
    text = config.get_text_config()
    head_dim = vars(text).get("head_dim") or text.hidden_size // text.num_attention_heads
    return int(text.num_attention_heads * head_dim)


@dataclass(frozen=True)
class LayerWork:
    """What one layer computes.

    Attributes:
        token: operations of one token in the layer's matrices.
        attended: operations for each token that it attends to; 0 for recurrent layers.
        window: how many tokens it attends to at the most, itself included; None for all.
    """

    token: float
    attended: float
    window: int | None = None

    def of(self, start: npt.ArrayLike, end: npt.ArrayLike) -> FloatArray:
        """Operations of the tokens from position `start` to just before `end`; arrays broadcast."""
        first, last = np.asarray(start, np.float64), np.asarray(end, np.float64)
        attended = self._attended_before(last) - self._attended_before(first)
        result: FloatArray = self.token * (last - first) + self.attended * attended
        return result

    def _attended_before(self, position: FloatArray) -> FloatArray:
        """How many tokens all tokens before a position attend to: 1 + 2 + ... up to the window."""
        inner = position if self.window is None else np.minimum(position, self.window)
        result: FloatArray = inner * (inner + 1) / 2 + (position - inner) * inner
        return result


@dataclass(frozen=True)
class ModelWork:
    """What a causal language model computes.

    Attributes:
        layers: its layers, from the first.
        logits: operations of the vocabulary's logits after one token.
    """

    layers: tuple[LayerWork, ...]
    logits: float

    @classmethod
    def of_config(cls, config: PreTrainedConfig) -> ModelWork:
        """Of any causal LM's configuration; no weights are read."""
        return cls.of_model(empty_base(config))

    @classmethod
    def of_model(cls, base: PreTrainedModel) -> ModelWork:
        """Of a model; its weights may lie on the meta device, and must not be packed."""
        config = base.config
        width = heads_width(config)
        caches = DynamicCache(config=config.get_text_config()).layers
        works = []
        for number, layer in enumerate(decoder_layers(base)):
            # A cache that makes its layers as they come holds plain attention.
            cache = caches[number] if number < len(caches) else None
            recurrent = isinstance(cache, LinearAttentionLayer)
            attends = not recurrent or isinstance(cache, _ATTENTION_TOO)
            window = cache.sliding_window if isinstance(cache, DynamicSlidingWindowLayer) else None
            works.append(LayerWork(2.0 * _matrices(layer, config), 4.0 * width * attends, window))
        text = config.get_text_config()
        return cls(tuple(works), 2.0 * text.hidden_size * text.vocab_size)

    def read(
        self, start: npt.ArrayLike, end: npt.ArrayLike, last_layers: int | None = None
    ) -> FloatArray:
        """Operations of passing the tokens from position `start` to just before `end`.

        Args:
            start: positions.
            end: positions.
            last_layers: only so many of the last layers, as a policy's tail; None for all.
        """
        layers = self.layers[len(self.layers) - last_layers :] if last_layers else self.layers
        if last_layers == 0:
            layers = ()
        result = np.zeros(np.broadcast_shapes(np.shape(start), np.shape(end)))
        for layer in layers:
            result = result + layer.of(start, end)
        return result

    def answer(
        self, position: npt.ArrayLike, forced: npt.ArrayLike, tokens: npt.ArrayLike
    ) -> FloatArray:
        """Operations of an answer: its forced beginning is read, then its tokens are generated.

        The last token that is generated is not passed again.

        Args:
            position: where the forced beginning starts.
            forced: tokens of the forced beginning.
            tokens: tokens generated after it.
        """
        start = np.asarray(position, np.float64)
        generated = np.asarray(tokens, np.float64)
        passed = np.asarray(forced, np.float64) + np.maximum(generated - 1, 0)
        result: FloatArray = self.read(start, start + passed) + self.logits * generated
        return result
