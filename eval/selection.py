"""Choosing an operating point on validation: pure functions of the candidates' numbers.

The chosen candidate, never the choice, is then applied to the test split, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from .metrics import AES_ABSOLUTE, AesVariant, charged_tokens
from .replay import Outcome

__all__ = ["Criterion", "best_aes", "choose", "largest_reduction"]

Criterion = Literal["reduction", "aes"]


def largest_reduction(
    accuracy: npt.ArrayLike, tokens: npt.ArrayLike, base_accuracy: float, max_loss: float = 0.01
) -> int | None:
    """The candidate with the fewest tokens among those that lose at most `max_loss` accuracy.

    Args:
        accuracy: (C,) each candidate's accuracy on validation.
        tokens: (C,) its mean thinking tokens there.
        base_accuracy: the full trace's accuracy there.
        max_loss: accuracy that may be lost, in [0, 1]; .01 is one point.

    Returns:
        Its number (of equals the more accurate, then the first); None where no candidate is
        accurate enough: then the full trace is kept.

    Raises:
        ValueError: `max_loss` outside [0, 1], or no candidates.
    """
    if not 0.0 <= max_loss <= 1.0:
        raise ValueError(f"max_loss is {max_loss!r}; it must lie in [0, 1] (one point is .01)")
    acc, length = _candidates(accuracy, tokens)
    allowed = np.flatnonzero(acc >= base_accuracy - max_loss - 1e-12)
    if not allowed.size:
        return None
    order = np.lexsort((-acc[allowed], length[allowed]))  # stable: by tokens, then accuracy
    return int(allowed[order[0]])


def best_aes(
    accuracy: npt.ArrayLike,
    tokens: npt.ArrayLike,
    base_accuracy: float,
    base_tokens: float,
    variant: AesVariant = AES_ABSOLUTE,
) -> int:
    """The candidate with the highest AES; of equals the first.

    Args:
        accuracy: (C,) each candidate's accuracy on validation.
        tokens: (C,) its mean thinking tokens there.
        base_accuracy: the full trace's accuracy there.
        base_tokens: the full trace's mean thinking tokens there.
        variant: which AES.

    Raises:
        ValueError: no candidates, or see `metrics.aes`.
    """
    acc, length = _candidates(accuracy, tokens)
    return int(np.nanargmax(variant(acc, length, base_accuracy, base_tokens)))


def choose(
    candidates: Sequence[Outcome],
    base: Outcome,
    criterion: Criterion = "reduction",
    *,
    max_loss: float = 0.01,
    variant: AesVariant = AES_ABSOLUTE,
) -> int | None:
    """Chooses among outcomes on the validation traces, by either criterion.

    Args:
        candidates: each candidate's outcome.
        base: the full traces' outcome.
        criterion: "reduction" (see `largest_reduction`) or "aes" (see `best_aes`).
        max_loss: for "reduction".
        variant: for "aes"; its `charge` is what both count as tokens.

    Returns:
        The chosen one's number; None where criterion "reduction" allows none.

    Raises:
        ValueError: no candidates, or an unknown criterion.
    """
    accuracy = [outcome.accuracy for outcome in candidates]
    tokens = [
        float(
            charged_tokens(
                variant.charge,
                outcome.mean_tokens,
                outcome.flops.mean(),
                base.mean_tokens,
                base.flops.mean(),
            )
        )
        for outcome in candidates
    ]
    if criterion == "reduction":
        return largest_reduction(accuracy, tokens, base.accuracy, max_loss)
    if criterion == "aes":
        return best_aes(accuracy, tokens, base.accuracy, base.mean_tokens, variant)
    raise ValueError(f"criterion is {criterion!r}; it must be 'reduction' or 'aes'")


def _candidates(
    accuracy: npt.ArrayLike, tokens: npt.ArrayLike
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    acc, length = np.asarray(accuracy, np.float64), np.asarray(tokens, np.float64)
    if acc.ndim != 1 or acc.shape != length.shape or not acc.size:
        raise ValueError(
            f"accuracy has shape {acc.shape} and tokens {length.shape}; "
            "give one of each for at least one candidate"
        )
    return acc, length
