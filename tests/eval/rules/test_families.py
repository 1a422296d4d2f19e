from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from modeling_ospruner.rules_ospruner import (
    Agreement,
    AnswerEntropy,
    Budget,
    StopRule,
    TrialConfidence,
)
from ospruner.eval.arithmetic import LayerWork, ModelWork
from ospruner.eval.compute import Compute
from ospruner.eval.replay import replay_budget, replay_step
from ospruner.eval.rules.families import AtStep, parse_rule
from ospruner.eval.rules.replayed import replay_rule
from ospruner.eval.rules.rivals import (
    Deer,
    Dynasor,
    HaltCot,
    Puma,
    Refrain,
    RunJump,
    ThinkJustEnough,
)
from ospruner.eval.table import TraceTable

ROWS = {
    # Each step of a trace: answer, tokens, mean log-probability, entropy.
    "first": [("7", 3, -2.0, 1.5), ("8", 2, -0.2, 0.3), ("8", 2, -0.01, 0.1), ("8", 2, -0.01, 0.1)],
    "second": [("", 8, -0.01, 0.9), ("5", 3, -0.5, 0.5), ("6", 3, -0.4, 0.6)],
}


def labelled() -> tuple[Dataset, TraceTable]:
    columns: dict[str, list[Any]] = {
        "problem_id": list(ROWS),
        "family": ["", ""],
        "step_ends": [[10 * (i + 1) for i in range(len(steps))] for steps in ROWS.values()],
        "forced_answers": [[s[0] for s in steps] for steps in ROWS.values()],
        "forced_correct": [[float(s[0] == "8") for s in steps] for steps in ROWS.values()],
        "matches_final": [[s[0] == steps[-1][0] for s in steps] for steps in ROWS.values()],
        "forced_answer_tokens": [[s[1] for s in steps] for steps in ROWS.values()],
        "forced_logprob": [[s[2] for s in steps] for steps in ROWS.values()],
        "forced_entropy": [[s[3] for s in steps] for steps in ROWS.values()],
        "forced_answer_entropy": [[2 * s[3] for s in steps] for steps in ROWS.values()],
        "natural_correct": [1.0, 0.0],
        "natural_answer_tokens": [4, 4],
        "ended": ["natural", "natural"],
    }
    dataset = Dataset.from_dict(columns)
    return dataset, TraceTable.from_dataset(dataset)


SUFFIX = 4  # tokens forced before every trial answer


@pytest.mark.parametrize(
    ("text", "kind", "method", "parameter"),
    [
        ("budget:200", Budget, "fixed budget", 200.0),
        ("step:5", AtStep, "fixed step", 5.0),
        ("entropy:0.4", AnswerEntropy, "answer entropy", 0.4),
        ("confidence:.95", TrialConfidence, "trial confidence", 0.95),
        ("deer:.9", Deer, "DEER", 0.9),
        ("agreement:3", Agreement, "answer agreement", 3.0),
        ("dynasor:3", Dynasor, "Dynasor", 3.0),
        ("es-cot:10", RunJump, "ES-CoT", 10.0),
        ("halt-cot:.6", HaltCot, "HALT-CoT", 0.6),
        ("just-enough:.5", ThinkJustEnough, "Think Just Enough", 0.5),
        ("refrain:.7", Refrain, "REFRAIN", 0.7),
        ("puma:.98", Puma, "PUMA-like", 0.98),
    ],
)
def test_rules_by_name(text: str, kind: type, method: str, parameter: float) -> None:
    rule = parse_rule(text)
    assert isinstance(rule.rule, kind)
    assert isinstance(rule.rule, StopRule)
    assert (rule.method, rule.parameter) == (method, parameter)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("luck:3", "rule 'luck:3' is not known; rules are written as budget:200"),
        ("budget", "rule 'budget' is not known"),
        ("budget:many", "'many' is no number"),
        ("budget:2.5", "budget takes a whole number, not 2.5"),
        ("budget:0", "tokens"),
        ("step:0", "step is 0; the first step is 1"),
        ("entropy:9", "threshold"),
        ("confidence:2", "threshold"),
        ("agreement:1", "count"),
        ("es-cot:0", "jump"),
        ("halt-cot:-1", "threshold"),
        ("refrain:1.5", "threshold"),
        ("puma:2", "confidence"),
        ("neat:0.5", "rule 'neat:0.5' cannot be had: NEAT .* activations of chosen neurons"),
    ],
)
def test_bad_rules_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_rule(text)


@pytest.mark.parametrize(
    ("rule", "tokens", "probes"),
    [
        # entropy 0.4: one token each, tried at steps 1 and 2, and at both free steps of the other
        ("entropy:0.4", [20, 30], [2 * (SUFFIX + 1), 2 * (SUFFIX + 1)]),
        # exp(-0.01) is reached at step 3; the other's first answer never closed its box
        ("confidence:0.95", [30, 30], [3 * SUFFIX + 7, 2 * SUFFIX + 11]),
        ("agreement:2", [30, 30], [3 * SUFFIX + 7, 2 * SUFFIX + 11]),
    ],
)
def test_trial_answers_decide_and_are_charged(
    rule: str, tokens: list[float], probes: list[float]
) -> None:
    dataset, table = labelled()
    outcome = replay_rule(dataset, table, parse_rule(rule).rule, SUFFIX)
    assert outcome.tokens.tolist() == tokens
    assert outcome.probe_tokens.tolist() == probes


def test_the_compute_of_trial_answers_by_hand() -> None:
    """One layer: 100 operations a token and 10 for each token attended to, 1,000 for logits."""
    dataset, table = labelled()
    work = ModelWork((LayerWork(100, 10),), logits=1000)
    compute = Compute(work, np.array([5, 0]), SUFFIX)
    charged = compute.charge(table)

    def read(start: int, end: int) -> int:
        return sum(100 + 10 * (position + 1) for position in range(start, end))

    # Stopped after 20 tokens of thinking, and an answer of 2 of which the last is not read again.
    stopped = read(0, 5 + 20 + SUFFIX + 1) + 1000 * (20 + 2)
    assert charged.flops is not None
    assert charged.flops[0, 1] == stopped
    rule = parse_rule("entropy:0.4").rule
    outcome = replay_rule(dataset, charged, rule, SUFFIX, compute=compute)
    # Tried after 10 and 20 tokens, one token each: the closing is read, the logits are taken.
    trials = read(15, 15 + SUFFIX) + read(25, 25 + SUFFIX) + 2 * 1000
    assert outcome.flops[0] == stopped + trials
    np.testing.assert_array_equal(outcome.tokens, replay_rule(dataset, table, rule, SUFFIX).tokens)
    tail = compute.charge_tail(charged, 1)
    assert tail.flops is not None
    assert tail.flops[0, 1] - stopped == read(0, 25)
    assert compute.charge_tail(table, 1) is table
    queries = compute.charge_tail(charged, 1, queries=True)
    assert queries.flops is not None
    assert queries.flops[0, 1] - stopped == read(14, 15) + read(24, 25)
    last = int(table.last[0])
    assert (queries.flops - charged.flops)[0, last] == (queries.flops - charged.flops)[0, last - 1]
    with pytest.raises(ValueError, match="trial answers have no price: give replay_rule the Comp"):
        replay_rule(dataset, charged, rule, SUFFIX)


def test_deer_tries_answers_only_before_transition_words() -> None:
    dataset, table = labelled()
    # Token 1 is " Wait", any other a word; the first trace goes on with it after step 3 only, the
    # second never. Confidence alone would stop the first trace at step 3, too, but charge more.
    traces = [[0] * (10 * len(steps)) for steps in ROWS.values()]
    traces[0][30] = 1
    both = dataset.add_column("trace_ids", traces)

    def decode(ids: list[int]) -> str:
        return "".join(" Wait" if one == 1 else " so" for one in ids)

    outcome = replay_rule(both, table, parse_rule("deer:0.95").rule, SUFFIX, decode)
    assert outcome.tokens.tolist() == [30, 30]
    assert outcome.probe_tokens.tolist() == [SUFFIX + 2, 0]
    early = replay_rule(both, table, parse_rule("deer:0.995").rule, SUFFIX, decode)
    assert early.tokens.tolist() == [40, 30]


def test_rules_that_read_lengths_cost_nothing() -> None:
    dataset, table = labelled()
    for rule, expected in (
        ("budget:15", replay_budget(table, 15)),
        ("step:2", replay_step(table, 2)),
    ):
        outcome = replay_rule(dataset, table, parse_rule(rule).rule, SUFFIX)
        np.testing.assert_array_equal(outcome.columns(), expected.columns())
        assert outcome.probe_tokens.tolist() == [0, 0]


def test_what_labels_do_not_tell_is_refused() -> None:
    dataset, table = labelled()
    watching = TrialConfidence(transition_words=("Wait",))
    with pytest.raises(ValueError, match="reads the thinking: give replay_rule the tok.* decode"):
        replay_rule(dataset, table, watching, SUFFIX)
    nulls = [[None] * len(steps) for steps in ROWS.values()]
    old = dataset.remove_columns("forced_entropy").add_column("forced_entropy", nulls)
    with pytest.raises(ValueError, match="forced_entropy is null.*label again"):
        replay_rule(old, table, AnswerEntropy(), SUFFIX)
