"""The exact expected reward of a stochastic stopping policy, in log space.

A policy that stops at step i with probability pi_i, given that it got there, stops at step i with

    P(tau = i) = [prod_{j<i} (1 - pi_j)] pi_i,      pi_T := 1 (the natural end is a forced stop),

and earns R = sum_i P(tau = i) (A_i - lambda L_i) (the paper's Eq. 1-3). Products of sigmoids are
taken as sums of logsigmoids, so that logits of +-50 and traces of 1,000 steps lose nothing.

Every tensor is padded to T steps; `mask` is true on the real steps, which come first in each row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def last_step_mask(mask: Tensor) -> Tensor:
    """Marks the last real step of each row, where stopping is forced.

    Args:
        mask: (N, T) bool, true on real steps.

    Returns:
        (N, T) bool, true exactly once a row.

    Raises:
        TypeError: `mask` is not boolean.
        ValueError: `mask` is not two-dimensional, a row has no real step, or a real step follows
            padding.
    """
    if mask.dtype != torch.bool:
        raise TypeError(
            f"mask has dtype {mask.dtype}; give a torch.bool tensor, true on real steps"
        )
    if mask.ndim != 2:
        raise ValueError(f"mask has shape {tuple(mask.shape)}; it must be (N, T)")
    if mask.shape[0] and (mask.shape[1] == 0 or not bool(mask[:, 0].all())):
        raise ValueError("mask has a row without steps; every trace needs at least its natural end")
    following = F.pad(mask[:, 1:], (0, 1))  # (N, T) is the next step real?
    if bool((following & ~mask).any()):
        raise ValueError("mask has a real step after padding; pad each row at its right end only")
    return mask & ~following


def log_stop_distribution(logits: Tensor, mask: Tensor) -> Tensor:
    """Log-probability that the policy stops at each step.

    log P(tau = i) = sum_{j<i} log(1 - pi_j) + log pi_i with pi = sigmoid(logits), and log pi_T = 0.
    Half precision is computed in float32. Logits of the last step and of padding have no effect and
    receive no gradient, whatever their value.

    Args:
        logits: (N, T) stop logits.
        mask: (N, T) bool, true on real steps.

    Returns:
        (N, T) log-probabilities, -inf on padding; `exp` of each row sums to one.

    Raises:
        TypeError, ValueError: see `last_step_mask`; or the shapes differ.
    """
    _same_shape("logits", logits, mask)
    last = last_step_mask(mask)  # (N, T)
    free = mask & ~last  # steps where the policy has a choice
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    x = torch.where(free, logits, torch.zeros_like(logits))  # (N, T)
    log_go = torch.where(free, F.logsigmoid(-x), torch.zeros_like(x))
    log_pi = torch.where(free, F.logsigmoid(x), torch.zeros_like(x))
    log_survival = F.pad(log_go.cumsum(dim=1)[:, :-1], (1, 0))  # (N, T) sum over j < i
    return (log_survival + log_pi).masked_fill(~mask, -math.inf)


def expected_reward(
    logits: Tensor, correct: Tensor, lengths: Tensor, price: float, mask: Tensor
) -> Tensor:
    """Expected reward of each trace, R = sum_i P(tau = i) (A_i - lambda L_i); differentiable.

    Args:
        logits: (N, T) stop logits.
        correct: (N, T) A_i in [0, 1], the correctness of the answer forced at each step.
        lengths: (N, T) L_i, thinking tokens through each step.
        price: of a token >= 0, reward lost per thinking token.
        mask: (N, T) bool, true on real steps.

    Returns:
        (N,) expected rewards, in the logits' precision (float32 at least).

    Raises:
        TypeError, ValueError: `price` is negative or not finite; or see
            `log_stop_distribution`.
    """
    if not (math.isfinite(price) and price >= 0):
        raise ValueError(f"price is {price!r}; it must be a finite number >= 0")
    _same_shape("correct", correct, mask)
    _same_shape("lengths", lengths, mask)
    probability = log_stop_distribution(logits, mask).exp()  # (N, T)
    reward = correct.to(probability.dtype) - price * lengths.to(probability.dtype)
    return (probability * reward.masked_fill(~mask, 0.0)).sum(dim=1)


def stop_entropy(logits: Tensor, mask: Tensor) -> Tensor:
    """Entropy of the step at which the policy stops, H(tau) = -sum_i P(tau = i) log P(tau = i).

    It is also the entropy of the choices that are met on the way, each weighted with the
    probability that the policy gets there. Differentiable.

    Args:
        logits: (N, T) stop logits.
        mask: (N, T) bool, true on real steps.

    Returns:
        (N,) entropies in nats, in the logits' precision (float32 at least); 0 where a trace has
        one step.

    Raises:
        TypeError, ValueError: see `log_stop_distribution`.
    """
    log_probability = log_stop_distribution(logits, mask)  # (N, T)
    # Logs are finite on real steps: 0 log 0 is 0, and so is its gradient.
    terms = log_probability.exp() * log_probability.masked_fill(~mask, 0.0)
    return -terms.sum(dim=1)


def _same_shape(name: str, tensor: Tensor, mask: Tensor) -> None:
    if tensor.shape != mask.shape:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} but mask has {tuple(mask.shape)}; "
            "both must be (N, T)"
        )
