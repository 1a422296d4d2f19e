"""What engines and rules read from a base's logits."""

from __future__ import annotations

from typing import Any

import torch

from ospruner.rules.signals import ENTROPY_TOKENS


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely tokens, and their natural log-probabilities at temperature 1.

    Args:
        logits: (..., V).

    Returns:
        Token ids and log-probabilities, (...).
    """
    tokens = logits.argmax(-1)
    best = logits.gather(-1, tokens[..., None])[..., 0].float()
    return tokens, best - logits.float().logsumexp(-1)


def last_logits(base: Any, **arguments: Any) -> torch.Tensor:
    """One forward; the logits (B, V) after each row's last token.

    Those of other tokens are not computed: of a long prompt they would fill gigabytes.

    Args:
        base: a causal LM.
        arguments: of its forward.
    """
    if base._supports_logits_to_keep():
        arguments["logits_to_keep"] = 1
    logits: torch.Tensor = base(**arguments).logits[:, -1]
    return logits


def top_entropy(logits: torch.Tensor) -> torch.Tensor:
    """Entropy in nats (...) over the ENTROPY_TOKENS most likely tokens of logits (..., V)."""
    kept = logits.float().topk(min(ENTROPY_TOKENS, logits.shape[-1]), dim=-1).values
    logs = kept.log_softmax(-1)
    return -(logs.exp() * logs).sum(-1)
