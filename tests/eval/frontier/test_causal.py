"""The estimate of the best rule without hindsight, where the best rule is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from ospruner.eval.frontier.areas import gap_closed
from ospruner.eval.frontier.causal import Known, causal_family, fit_stops
from ospruner.eval.limits import hindsight_oracle
from ospruner.eval.replay import Outcome, replay_at, replay_full
from ospruner.eval.table import TraceTable

STEPS = 5


def drawn(seed: int, traces: int = 300) -> Known:
    """Each step's answer is right by a coin; right ones are certain, so that they can be told."""
    rng = np.random.default_rng(seed)
    right = rng.random((traces, STEPS)) < 0.3
    columns: dict[str, list[Any]] = {
        "problem_id": [f"{seed}-{n}" for n in range(traces)],
        "family": [""] * traces,
        "step_ends": [[10 * (t + 1) for t in range(STEPS)]] * traces,
        "forced_answers": [["1" if x else "0" for x in row] for row in right],
        "forced_correct": right.astype(float).tolist(),
        "forced_entropy": [[0.1 if x else 1.5 for x in row] for row in right],
        "forced_answer_entropy": [[0.1 if x else 1.5 for x in row] for row in right],
        "forced_logprob": [[-0.1 if x else -1.5 for x in row] for row in right],
        "matches_final": [[bool(x == row[-1]) for x in row] for row in right],
        "forced_answer_tokens": [[1] * STEPS] * traces,
        "natural_correct": right[:, -1].astype(float).tolist(),
        "natural_answer_tokens": [1] * traces,
        "ended": ["natural"] * traces,
    }
    dataset = Dataset.from_dict(columns)
    return Known.of_labels(dataset, TraceTable.from_dataset(dataset))


PENALTY = 0.005  # a step costs .05, and the next is right with .3: going on from a wrong one pays


def test_it_finds_the_best_rule_where_it_is_known() -> None:
    """Stop at the first right answer, which the entropy tells; the oracle knows of none, too."""
    validation, test = drawn(0), drawn(1)
    stops = fit_stops(validation, test, PENALTY)
    table = test.table
    first = np.where(table.correct.any(axis=1), table.correct.argmax(axis=1), STEPS - 1)

    def reward(at: Any) -> float:
        outcome = replay_at(table, at)
        return outcome.accuracy - PENALTY * outcome.mean_tokens

    full = replay_full(table)
    best, never = reward(first), full.accuracy - PENALTY * full.mean_tokens
    assert reward(stops) > never + 0.97 * (best - never)
    family = causal_family(validation, test, [PENALTY])
    closed = gap_closed(family, validation.table, table, PENALTY)
    assert 0.8 < closed.value < 1  # traces that are never right stop at once only in hindsight
    oracle = hindsight_oracle(table, PENALTY)
    assert best < oracle.accuracy - PENALTY * oracle.mean_tokens


def test_it_reads_no_grades_of_the_traces_that_it_stops() -> None:
    validation, test = drawn(0, 60), drawn(1, 60)
    wrong = replace(test.table, correct=1 - test.table.correct)
    blind = Known(wrong, test.features)
    np.testing.assert_array_equal(
        fit_stops(validation, test, PENALTY), fit_stops(validation, blind, PENALTY)
    )
    one = stops_of(validation, test)
    # Grades of a validation problem do not decide its own stops either.
    flipped = validation.table.correct.copy()
    flipped[0] = 1 - flipped[0]
    other = Known(replace(validation.table, correct=flipped), validation.features)
    assert stops_of(other, test)[0] == one[0]


def stops_of(validation: Known, test: Known) -> list[float]:
    """The tokens at which each validation trace stops."""
    (outcome,) = causal_family(validation, test, [PENALTY]).validation
    assert isinstance(outcome, Outcome)
    return [float(tokens) for tokens in outcome.tokens]


def test_features_without_news_gain_nothing() -> None:
    """Where nothing tells a right answer, it does as well as the best blind rule, not better."""
    validation, test = drawn(0), drawn(1)
    deaf = [replace_features(known) for known in (validation, test)]
    stops = fit_stops(deaf[0], deaf[1], PENALTY)
    outcome = replay_at(test.table, stops)
    blind = float(test.table.correct[:, 0].mean()) - PENALTY * 10  # at once
    assert outcome.accuracy - PENALTY * outcome.mean_tokens == pytest.approx(blind, abs=0.03)


def replace_features(known: Known) -> Known:
    return Known(known.table, known.features[..., 8:])  # lengths alone


def test_too_few_problems_are_refused() -> None:
    with pytest.raises(ValueError, match="folds is 3 for 2 validation problems"):
        causal_family(drawn(0, 2), drawn(1, 5), [PENALTY])
