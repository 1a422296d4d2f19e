"""LearnStop: a classifier of the forced answer's correctness from scalars, without hidden states.

The original (arXiv 2606.30852) probes an answer at fixed budgets and reads confidence, entropy,
the share of earlier probes that agree, stability and the density of backtracking words. Ours probes
at each labelled step, and is a logistic regression on the same kinds of scalars.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional as F

from ospruner.rules.families import Family
from ospruner.rules.signals import REFLECTION, StepEnd

from .measured import LabelledRow, Measured, Split
from .table import FloatArray, TraceTable


def _of_labels(end: StepEnd) -> float:
    raise ValueError("LearnStop is fitted to labels: compare it there, with labels to choose on")


LEARN_STOP = Family("learnstop", _of_labels, "LearnStop")
DECAY = 1e-3  # of the weights' squares, beside the mean loss
FOLDS = 3
_ENTROPY, _LOGPROB = 3.0, -5.0  # where an answer has none
_ANSWERS = ("forced_answers", "forced_entropy", "forced_logprob")


def learn_stop(
    test: Split, validation: Split, train: Split | None = None
) -> tuple[Measured, Measured]:
    """What LearnStop says at each step of the test and of the validation traces.

    Args:
        test: the traces to measure on.
        validation: those of other problems, to choose on.
        train: on which to fit; None to fit on the validation traces, of which each is then scored
            by a fit without its problem.

    Raises:
        ValueError: fewer validation problems than folds.
    """
    table, features = validation.table, features_of(validation)
    if train is not None:
        weights = fit(train.table, features_of(train))
        both = scores(weights, features_of(test)), scores(weights, features)
        return _measured(test, both[0]), _measured(validation, both[1])
    problems = len(table.problem_ids)
    if problems < FOLDS:
        raise ValueError(f"LearnStop is fitted in {FOLDS} folds, and there are {problems} problems")
    fold = np.random.default_rng(0).permutation(problems) % FOLDS
    held, found = fold[table.problem_index], np.zeros(table.mask.shape)
    for k in range(FOLDS):
        rest = np.flatnonzero(held != k)
        part = table.subset(rest)
        weights = fit(part, features[rest, : part.mask.shape[1]])
        found[held == k] = scores(weights, features[held == k])
    there = scores(fit(table, features), features_of(test))
    return _measured(test, there), _measured(validation, found)


def _measured(split: Split, found: FloatArray) -> Measured:
    """Scores as a rule's signal, which no trial answer is charged for."""
    free = np.arange(found.shape[1]) < split.table.last[:, None]
    nothing = np.zeros(found.shape)
    return Measured(np.where(free, found, np.nan), nothing, nothing)


def features_of(split: Split) -> FloatArray:
    """(N, T, F) scalars that depend on the trace up to the step, never on a grade."""
    table = split.table
    columns = split.dataset.select_columns(list(_ANSWERS))[:]
    answers = np.zeros((*table.mask.shape, 8))
    for n, rows in enumerate(zip(*(columns[name] for name in _ANSWERS), strict=True)):
        answers[n, : table.num_steps[n]] = _of_answers(*rows)
    lengths = np.where(table.mask, table.lengths, 0)
    steps = np.cumsum(table.mask, axis=1)
    scale = max(1.0, float(table.full_tokens.mean()))
    own = np.diff(lengths, axis=1, prepend=0).clip(0)
    parts = [np.log1p(steps), lengths / scale, own / scale]
    if split.decode is not None:
        words = np.zeros(table.mask.shape)  # whether a step holds a backtracking word
        for n in range(len(table)):
            texts = [end.step_text().lower() for end in LabelledRow(split, n, {}).ends(True)]
            words[n, : len(texts)] = [any(word in text for word in REFLECTION) for text in texts]
        shares = np.cumsum(words, axis=1) / np.maximum(steps, 1)
        parts.append(np.where(table.mask, shares, 0.0))
    return np.concatenate([answers, np.stack(parts, axis=-1)], axis=-1)


def _of_answers(
    answers: Sequence[str], entropies: Sequence[float | None], logprobs: Sequence[float | None]
) -> list[tuple[float, ...]]:
    """Certainty of the answer forced at each step, and how it agrees with those before it."""
    found: list[tuple[float, ...]] = []
    counts: Counter[str] = Counter()
    run, previous = 0, None
    for answer, entropy, logprob in zip(answers, entropies, logprobs, strict=True):
        counts[answer] += 1
        run = run + 1 if answer == previous else 1
        previous = answer
        sure = _LOGPROB if logprob is None else logprob
        found.append(
            (
                _ENTROPY if entropy is None else entropy,
                math.exp(sure),
                max(sure, _LOGPROB),
                math.log(run),
                math.log(counts[answer]),
                counts[answer] / counts.total(),
                math.log(len(counts)),
                float(not answer),
            )
        )
    return found


def fit(table: TraceTable, features: FloatArray) -> FloatArray:
    """(3, 1 + F) mean and deviation of features (N, T, F), and the weights; the first is the bias.

    Traces cut at the token cap are left out, as in training.
    """
    used = table.mask & ~table.capped[:, None]
    rows = features[used]
    mean, deviation = rows.mean(axis=0), rows.std(axis=0) + 1e-6
    inputs = torch.from_numpy((rows - mean) / deviation)
    targets = torch.from_numpy(table.correct[used])
    weights = torch.zeros(1 + inputs.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        logits = inputs @ weights[1:] + weights[0]
        value = F.binary_cross_entropy_with_logits(logits, targets)
        value = value + DECAY * weights[1:].square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return np.stack([np.append(0, mean), np.append(1, deviation), weights.detach().numpy()])


def scores(fitted: FloatArray, features: FloatArray) -> FloatArray:
    """(N, T) the probability of being right at each step."""
    mean, deviation, weights = fitted
    logits = ((features - mean[1:]) / deviation[1:]) @ weights[1:] + weights[0]
    result: FloatArray = 1 / (1 + np.exp(-logits))
    return result
