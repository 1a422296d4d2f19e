"""LearnStop: a classifier of the forced answer's correctness from scalars, without hidden states.

The original (arXiv 2606.30852) probes an answer at fixed budgets and reads confidence, entropy,
the share of earlier probes that agree, stability and the density of backtracking words. Ours probes
at each labelled step, and is a logistic regression on the same kinds of scalars.
"""

from itertools import pairwise
from typing import Literal

import numpy as np
import pandas as pd
from scipy.optimize import minimize
from scipy.special import expit

from ospruner.rules.families import Family
from ospruner.rules.signals import REFLECTION, StepEnd

from .measured import Measured, Split
from .table import BoolArray, FloatArray, TraceTable


def _of_labels(end: StepEnd) -> float:
    raise ValueError("LearnStop is fitted to labels: compare it there, with labels to choose on")


LEARN_STOP = Family("learnstop", _of_labels, "LearnStop")
DECAY = 1e-3  # of the weights' squares, beside the mean loss
FOLDS = 3
_ENTROPY, _LOGPROB = 3.0, -5.0  # where an answer has none
_ANSWERS = ["forced_answers", "forced_entropy", "forced_logprob"]


def learn_stop(
    test: Split, validation: Split, train: Split | None = None
) -> tuple[Measured, Measured]:
    """What LearnStop says at each step of the test and of the validation traces.

    Without traces to train on it is fitted to the validation traces, of which each is then scored
    by a fit without its problem.

    Raises:
        ValueError: fewer validation problems than folds.
    """
    table, features = validation.table, features_of(validation)
    if train is not None:
        weights = fit(train.table, features_of(train))
        found = scores(weights, features)
    else:
        if (problems := len(table.problem_ids)) < FOLDS:
            told = f"LearnStop is fitted in {FOLDS} folds, and there are {problems} problems"
            raise ValueError(told)
        fold = np.random.default_rng(0).permutation(problems) % FOLDS
        held, found = fold[table.problem_index], np.zeros(table.mask.shape)
        for k in range(FOLDS):
            found[held == k] = scores(fit(table, features, held != k), features[held == k])
        weights = fit(table, features)

    def measured(split: Split, found: FloatArray) -> Measured:
        """Scores as a rule's signal, which no trial answer is charged for."""
        free = np.arange(found.shape[1]) < split.table.last[:, None]
        return Measured(np.where(free, found, np.nan), *np.zeros((2, *found.shape)))

    return measured(test, scores(weights, features_of(test))), measured(validation, found)


def features_of(split: Split) -> FloatArray:
    """(N, T, F) scalars that depend on the trace up to the step, never on a grade."""
    table, mask = split.table, split.table.mask
    answers, words = np.zeros((*mask.shape, 8)), np.zeros(mask.shape)
    answers[mask] = _of_answers(split)
    for n, row in enumerate(split.dataset.select_columns(["trace_ids", "step_ends"])):
        for i, (start, end) in enumerate(pairwise([0, *row["step_ends"]])):
            text = split.decode(row["trace_ids"][start:end]).lower()
            words[n, i] = REFLECTION.search(text) is not None  # a backtracking word
    steps, lengths = np.cumsum(mask, axis=1), np.where(mask, table.lengths, 0)
    scale = max(1.0, float(table.full_tokens.mean()))
    own = np.diff(lengths, axis=1, prepend=0).clip(0)
    shares = np.where(mask, np.cumsum(words, axis=1) / np.maximum(steps, 1), 0.0)
    parts = [np.log1p(steps), lengths / scale, own / scale, shares]
    return np.concatenate([answers, np.stack(parts, axis=-1)], axis=-1)


def _of_answers(split: Split) -> FloatArray:
    """(S, 8) certainty of each forced answer, and how it agrees with the trace's earlier ones.

    S are the steps of all traces, one trace after another.
    """
    columns = split.dataset.select_columns(_ANSWERS)[:]
    trace = pd.Series(np.repeat(np.arange(len(split.table)), split.table.num_steps))
    answer, entropy, logprob = (
        pd.Series([one for row in columns[name] for one in row]) for name in _ANSWERS
    )
    sure = logprob.astype(float).fillna(_LOGPROB)
    changes = (answer != answer.shift()) | (trace != trace.shift())
    run, times, steps = (
        one.groupby(by).cumcount() + 1
        for one, by in ((answer, changes.cumsum()), (answer, [trace, answer]), (trace, trace))
    )
    different = (times == 1).groupby(trace).cumsum()
    certain = entropy.astype(float).fillna(_ENTROPY), np.exp(sure), sure.clip(lower=_LOGPROB)
    agrees = np.log(run), np.log(times), times / steps, np.log(different), answer == ""
    return np.column_stack([*certain, *agrees])


def fit(
    table: TraceTable, features: FloatArray, among: BoolArray | Literal[True] = True
) -> FloatArray:
    """(3, 1 + F) mean and deviation of features (N, T, F), and the weights; the first is the bias.

    It is fitted to the traces among these, but for those cut at the token cap, as in training.
    """
    used = table.mask & (among & ~table.capped)[:, None]
    rows, right = features[used], table.correct[used]
    mean, deviation = np.append(0, rows.mean(axis=0)), np.append(1, rows.std(axis=0) + 1e-6)
    inputs = (np.insert(rows, 0, 1, axis=1) - mean) / deviation
    decay = np.append(0, np.full(rows.shape[1], DECAY))  # not of the bias

    def loss(weights: FloatArray) -> tuple[float, FloatArray]:
        """The mean cross-entropy and the decay, with their gradient."""
        logits = inputs @ weights
        entropy = np.logaddexp(0, logits) - right * logits
        gradient = inputs.T @ (expit(logits) - right) / len(right) + 2 * decay * weights
        return float(entropy.mean() + decay @ weights**2), gradient

    weights = minimize(loss, np.zeros(len(mean)), jac=True, method="L-BFGS-B").x
    return np.stack([mean, deviation, weights])


def scores(fitted: FloatArray, features: FloatArray) -> FloatArray:
    """(N, T) the probability of being right at each step."""
    mean, deviation, weights = fitted
    found: FloatArray = expit(((features - mean[1:]) / deviation[1:]) @ weights[1:] + weights[0])
    return found
