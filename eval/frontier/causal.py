"""How far a rule without hindsight could get: fitted value iteration on what is known at a step.

The hindsight oracle knows which answers are right, so part of its gain is luck that no rule can
plan for. This estimate reads only what a rule may know when it decides: how long the thinking is,
the answer that would be forced here, how certain it is and how answers agreed so far, and what
trained policies say. By turns it follows a rule to the end of each labelled trace, regresses what
going on gained over stopping on what was known, and takes "stop where nothing is gained" as the
next rule (Longstaff and Schwartz, 2001, with one regression for all steps). It is fitted on
validation traces. A lower bound: better features or a better fit may show more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional as F

from ..replay import replay_at
from ..table import BoolArray, FloatArray, IntArray, TraceTable
from .areas import Family

__all__ = ["CAUSAL", "Known", "causal_family", "fit_stops"]

CAUSAL = "best without hindsight (estimate)"
ROUNDS, EPOCHS, BATCH, RATE, WIDTH = 5, 3, 256, 3e-3, 64
_ENTROPY, _LOGPROB = 3.0, -5.0  # where an answer has none


@dataclass(frozen=True, eq=False)
class Known:
    """Traces with what is known at each of their steps.

    Attributes:
        table: N traces of up to T steps.
        features: (N, T, F) numbers that depend on the trace up to the step, never on a grade.
    """

    table: TraceTable
    features: npt.NDArray[np.float32]

    @classmethod
    def of_labels(
        cls, dataset: Any, table: TraceTable, probabilities: Sequence[FloatArray] = ()
    ) -> Known:
        """What labels tell: lengths, forced answers and their certainty, and policies' words.

        Args:
            dataset: the labelled traces.
            table: the same as arrays.
            probabilities: (N, T) stop probabilities of any policies.
        """
        columns = ("forced_answers", "forced_entropy", "forced_logprob")
        trials = dataset.select_columns(list(columns))[:]
        answers = np.zeros((*table.mask.shape, 8), np.float32)
        for n, rows in enumerate(zip(*(trials[name] for name in columns), strict=True)):
            answers[n, : table.num_steps[n]] = _of_answers(*rows)
        lengths = np.where(table.mask, table.lengths, 0).astype(np.float32)
        steps = np.cumsum(table.mask, axis=1, dtype=np.float32)
        scale = max(1.0, float(table.full_tokens.mean()))
        own = np.diff(lengths, axis=1, prepend=0).clip(0)
        parts = [answers, np.stack([np.log1p(steps), lengths / scale, own / scale], axis=-1)]
        for pi in probabilities:
            clipped = np.clip(np.nan_to_num(pi), 1e-6, 1 - 1e-6).astype(np.float32)
            parts.append((np.log(clipped) - np.log1p(-clipped))[..., None])
        return cls(table, np.concatenate(parts, axis=-1))

    def subset(self, rows: IntArray) -> Known:
        """The traces of the given row numbers."""
        table = self.table.subset(rows)
        return Known(table, self.features[rows, : table.mask.shape[1]])


def _of_answers(
    answers: Sequence[str], entropies: Sequence[float | None], logprobs: Sequence[float | None]
) -> list[tuple[float, ...]]:
    """Certainty of the answer forced at each step, and how it agrees with those before it."""
    found: list[tuple[float, ...]] = []
    counts: dict[str, int] = {}
    run, previous = 0, None
    for step, (answer, entropy, logprob) in enumerate(
        zip(answers, entropies, logprobs, strict=True)
    ):
        counts[answer] = counts.get(answer, 0) + 1
        run = run + 1 if answer == previous else 1
        previous = answer
        found.append(
            (
                _ENTROPY if entropy is None else entropy,
                np.exp(_LOGPROB if logprob is None else logprob),
                _LOGPROB if logprob is None else max(logprob, _LOGPROB),
                np.log(run),
                np.log(counts[answer]),
                counts[answer] / (step + 1),
                np.log(len(counts)),
                float(not answer),
            )
        )
    return found


def causal_family(
    validation: Known,
    test: Known,
    length_penalties: Sequence[float],
    folds: int = 3,
    seed: int = 0,
) -> Family:
    """The estimate as a method among others: one fitted rule for each lambda.

    On test traces it is what was fitted on all validation traces. On validation, where the rules
    are chosen, each problem's stops come from a fit without that problem.

    Args:
        validation: on which to fit.
        test: traces of other problems.
        length_penalties: the lambdas to fit for.
        folds: parts of the validation problems.
        seed: of the fits.

    Raises:
        ValueError: fewer validation problems than folds.
    """
    problems = len(validation.table.problem_ids)
    if problems < folds:
        raise ValueError(f"folds is {folds} for {problems} validation problems; take fewer")
    fold = np.random.default_rng(seed).permutation(problems) % folds
    held = fold[validation.table.problem_index]  # (N,) the fold of each trace
    on_validation, on_test = [], []
    for penalty in length_penalties:
        stops = np.zeros(len(validation.table), np.int64)
        for k in range(folds):
            rest, part = (np.flatnonzero(rows) for rows in (held != k, held == k))
            stops[part] = fit_stops(validation.subset(rest), validation.subset(part), penalty, seed)
        on_validation.append(replay_at(validation.table, stops))
        on_test.append(replay_at(test.table, fit_stops(validation, test, penalty, seed)))
    return Family(CAUSAL, on_validation, on_test)


def fit_stops(known: Known, other: Known, price: float, seed: int = 0) -> IntArray:
    """Fits on some traces; (M,) the step index at which each of the others stops.

    Args:
        known: on which to fit. Traces cut at the token cap are left out, as in training.
        other: M traces; of these only the features are read.
        price: lambda.
        seed: of the fit.
    """
    table = known.table
    last = table.last[:, None]
    free = table.mask & (np.arange(table.mask.shape[1]) < last) & ~table.capped[:, None]
    if not free.any():
        return other.table.last.copy()
    n, i = np.nonzero(free)
    rows = known.features[n, i]
    mean, deviation = rows.mean(axis=0), rows.std(axis=0) + 1e-3
    inputs = torch.from_numpy(((rows - mean) / deviation).astype(np.float32))
    rewards = table.correct - price * table.lengths
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = nn.Sequential(
            nn.Linear(inputs.shape[1], WIDTH), nn.GELU(), nn.LayerNorm(WIDTH),
            nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1),
        )  # fmt: skip
        optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=0.02)
        total = ROUNDS * EPOCHS * -(-len(n) // BATCH)
        decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total)
        stops = np.zeros_like(free)
        for _ in range(ROUNDS):
            gain = _going_on(stops, rewards, table.last) - rewards
            target = torch.from_numpy(gain[n, i].astype(np.float32))
            net.train()
            for _ in range(EPOCHS):
                for batch in torch.randperm(len(n)).split(BATCH):
                    loss = F.mse_loss(net(inputs[batch])[:, 0], target[batch])
                    optimizer.zero_grad(set_to_none=True)
                    loss.backward()
                    optimizer.step()
                    decay.step()
            net.eval()
            stops = _nothing_gained(net, known, mean, deviation)
    return np.asarray(_nothing_gained(net, other, mean, deviation).argmax(axis=1), np.int64)


def _going_on(stops: BoolArray, rewards: FloatArray, last: IntArray) -> FloatArray:
    """(N, T) the reward of going on at a step and following the stops from the next one on."""
    value = np.zeros(len(rewards))
    found = np.zeros(rewards.shape)
    for step in range(rewards.shape[1] - 1, -1, -1):
        found[:, step] = value
        here = (step == last) | stops[:, step]
        value = np.where(step > last, 0.0, np.where(here, rewards[:, step], value))
    return found


@torch.no_grad()
def _nothing_gained(
    net: nn.Module, known: Known, mean: FloatArray, deviation: FloatArray
) -> BoolArray:
    """(N, T) where going on gains nothing; also at each trace's end, and on padding nowhere."""
    table = known.table
    n, i = np.nonzero(table.mask)
    inputs = torch.from_numpy(((known.features[n, i] - mean) / deviation).astype(np.float32))
    stops = np.zeros(table.mask.shape, bool)
    stops[n, i] = np.concatenate([(net(part)[:, 0] <= 0).numpy() for part in inputs.split(8192)])
    stops[np.arange(len(table)), table.last] = True
    return stops
