"""LearnStop: a classifier of the forced answer's correctness from scalars, without hidden states.

The original (arXiv 2606.30852) probes an answer at fixed budgets and reads confidence, entropy,
the share of earlier probes that agree, stability and the density of backtracking words. Ours probes
at each labelled step, and is a logistic regression on the same kinds of scalars.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from ..rules.rivals import Refrain
from ..table import FloatArray, TraceTable
from .causal import Known

__all__ = ["LEARN_STOP", "backtracking", "cross_fitted", "fit_scores"]

LEARN_STOP = "LearnStop"
DECAY = 1e-3  # of the weights' squares, beside the mean loss


def backtracking(dataset: Any, table: TraceTable, decode: Callable[[list[int]], str]) -> FloatArray:
    """(N, T) share of the steps so far that hold a backtracking word; 0 on padding."""
    found = np.zeros(table.mask.shape)
    for n, row in enumerate(dataset.select_columns(["trace_ids", "step_ends"])):
        start = 0
        for i, end in enumerate(row["step_ends"]):
            text = decode(row["trace_ids"][start:end]).lower()
            found[n, i] = any(word in text for word in Refrain.REFLECTION)
            start = end
    steps = np.maximum(np.cumsum(table.mask, axis=1), 1)
    return np.where(table.mask, np.cumsum(found, axis=1) / steps, 0.0)


def fit_scores(known: Known, *others: Known) -> list[FloatArray]:
    """Fits on some traces; (M, T) the probability of being right at each step of the others.

    Args:
        known: on which to fit. Traces cut at the token cap are left out, as in training.
        others: of these only the features are read.
    """
    table = known.table
    used = table.mask & ~table.capped[:, None]
    rows = known.features[used].astype(np.float64)
    mean, deviation = rows.mean(axis=0), rows.std(axis=0) + 1e-6
    inputs = torch.from_numpy((rows - mean) / deviation)
    targets = torch.from_numpy(table.correct[used])
    weights = torch.zeros(inputs.shape[1] + 1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        logits = inputs @ weights[1:] + weights[0]
        value = F.binary_cross_entropy_with_logits(logits, targets)
        value = value + DECAY * weights[1:].square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    found = weights.detach().numpy()
    return [
        1 / (1 + np.exp(-(((one.features - mean) / deviation) @ found[1:] + found[0])))
        for one in others
    ]


def cross_fitted(known: Known, folds: int = 3, seed: int = 0) -> FloatArray:
    """(N, T) scores of each trace by a fit without its problem.

    Raises:
        ValueError: fewer problems than folds.
    """
    problems = len(known.table.problem_ids)
    if problems < folds:
        raise ValueError(f"folds is {folds} for {problems} problems; take fewer")
    fold = np.random.default_rng(seed).permutation(problems) % folds
    held = fold[known.table.problem_index]
    found = np.zeros(known.table.mask.shape)
    for k in range(folds):
        rest, part = (np.flatnonzero(rows) for rows in (held != k, held == k))
        (scores,) = fit_scores(known.subset(rest), known.subset(part))
        found[part, : scores.shape[1]] = scores
    return found
