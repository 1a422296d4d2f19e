"""The losses of the baselines that share OS-Pruner's architecture and training loop.

Both are classifiers of prefixes, whose probability is compared with a threshold when generating:
the classification probe of "the answer forced here is right", and answer convergence, "the answer
forced here is the trace's final answer" (the paper's section on baselines).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

__all__ = ["classification_loss"]


def classification_loss(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Binary cross-entropy, the mean over the batch's real steps.

    Args:
        logits: (N, T) at step ends.
        targets: (N, T) in [0, 1]: correctness A_i for the probe, equality with the answer forced
            at T for convergence.
        mask: (N, T) bool, true on real steps.

    Returns:
        A scalar.

    Raises:
        ValueError: there is no real step.
    """
    if not bool(mask.any()):
        raise ValueError("mask has no real step: there is nothing to classify")
    return F.binary_cross_entropy_with_logits(logits[mask], targets[mask].to(logits.dtype))
