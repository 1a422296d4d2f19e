"""Choosing a policy's operating point on validation outcomes."""

from __future__ import annotations

from collections.abc import Sequence

from .metrics import largest_reduction
from .replay import Outcome

__all__ = ["choose"]


def choose(candidates: Sequence[Outcome], base: Outcome, *, max_loss: float = 0.01) -> int | None:
    """The candidate with the fewest tokens that loses at most so much; see `largest_reduction`.

    Args:
        candidates: each candidate's outcome on the validation traces.
        base: the full traces' outcome.
        max_loss: accuracy that may be lost.
    """
    accuracy = [outcome.accuracy for outcome in candidates]
    tokens = [outcome.mean_tokens for outcome in candidates]
    return largest_reduction(accuracy, tokens, base.accuracy, max_loss)
