"""What the model's forward returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import Cache
from transformers.utils.generic import ModelOutput


@dataclass
class OSPrunerOutput(ModelOutput):
    """The base's output, and what the policy says about each position.

    Attributes:
        loss: the base's language modelling loss; with `labels` only.
        logits: of the next tokens, (B, S, V) or fewer positions with `logits_to_keep`.
        past_key_values: the base's cache.
        hidden_states: L+1 tensors (B, S, H), from the embeddings to what follows the final norm;
            with `output_hidden_states=True` only.
        attentions: L tensors (B, heads, S, S); with `output_attentions=True` only.
        router_logits: of a mixture of experts; with `output_router_logits=True` only.
        aux_loss: the load balancing loss of a mixture of experts, likewise.
        stop_probabilities: (B, S) float32, the probability of stopping after each token, had a
            step ended there. With `output_stop_probabilities=True` only. Gradients reach the
            policy. At padding they mean nothing.
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    past_key_values: Cache | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None
    aux_loss: torch.Tensor | None = None
    stop_probabilities: torch.Tensor | None = None
