"""Stop rules by themselves, and on the embedded reasoner without any policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from modeling_ospruner import (
    Agreement,
    AnswerEntropy,
    Budget,
    LearnedPolicy,
    OSPrunerConfig,
    StopPolicyConfig,
    StopRecord,
    StopRule,
    TrialConfidence,
    generate_with_rule,
    uniform,
)
from modeling_ospruner.rules_ospruner import TrialAnswer, Verdict
from ospruner.demo.shipped import Reasoner, draw_split
from ospruner.eval.problems.problem import user_message
from ospruner.eval.table import TraceTable
from ospruner.eval.thinking import thinking_entropies


@dataclass
class Ends:
    """The step ends of one row, with what a rule may find there."""

    answers: Sequence[TrialAnswer] = ()
    probabilities: Sequence[float] = ()
    words: Sequence[str] = ()
    every: int = 10
    sample_index: int = 4
    may_stop: bool = True
    step: int = 0
    asked: list[tuple[int, int]] = field(default_factory=list)

    @property
    def thinking_tokens(self) -> int:
        return (self.step + 1) * self.every

    def stop_probability(self, numbers: Sequence[float] = ()) -> float:
        return self.probabilities[self.step]

    def trial_answer(self, max_tokens: int) -> TrialAnswer:
        self.asked.append((self.step, max_tokens))
        return self.answers[self.step]

    def next_text(self) -> str:
        return self.words[self.step]

    def step_text(self) -> str:
        raise AssertionError

    def thinking_entropy(self) -> float:
        raise AssertionError


def verdicts(rule: StopRule, ends: Any, steps: int) -> list[Verdict]:
    row = rule.for_row()
    out = []
    for step in range(steps):
        ends.step = step
        out.append(row.at_step_end(ends))
    return out


def answer(
    text: str = "7",
    logprobs: Sequence[float] = (0.0,),
    entropy: float = 0.0,
    ended: Any = "closed",
) -> TrialAnswer:
    return TrialAnswer(tuple(range(len(logprobs))), ended, tuple(logprobs), entropy, text)


def test_the_learned_policy_draws_or_compares() -> None:
    probabilities = [0.1, 0.9, 0.5, math.nan] * 10
    ends = Ends(probabilities=probabilities)
    drawn = verdicts(LearnedPolicy("sample", seed=3), ends, 40)
    assert [v.stop for v in drawn] == [uniform(3, 4, i) < p for i, p in enumerate(probabilities)]
    assert {v.stop for v in drawn} == {True, False}
    compared = verdicts(LearnedPolicy("threshold", 0.5), ends, 4)
    assert [v.stop for v in compared] == [False, True, True, False]
    assert [v.signal for v in compared[:3]] == [0.1, 0.9, 0.5]


def test_a_strided_policy_is_asked_at_every_kth_step_end_alone() -> None:
    probabilities = [0.9] * 8
    found = verdicts(LearnedPolicy("threshold", 0.5, step_stride=3), Ends((), probabilities), 8)
    assert [v.stop for v in found] == [False, False, True, False, False, True, False, False]
    assert [v.signal for v in found if not v.stop] == [None] * 6


def test_a_windowed_policy_votes_or_averages() -> None:
    """TERMINATOR: more than half of the last so many; Thought Calibration: their mean."""
    said = [0.9, 0.1, 0.8, 0.7, 0.2, 0.3, 0.9]
    vote = LearnedPolicy("threshold", 0.7, window=3)
    # Of three, two: at steps 3 (.9, .8), 4 (.8, .7), 5 (.8, .7), and no more.
    found = verdicts(vote, Ends((), said), 7)
    assert [i for i, v in enumerate(found, 1) if v.stop] == [3, 4, 5]
    assert [v.signal for v in found] == said
    # Means of three, of fewer before: .9, .5, .6, .533, .567, .4, .467.
    mean = LearnedPolicy("threshold", 0.55, window=3, by="mean")
    found = verdicts(mean, Ends((), said), 7)
    assert [i for i, v in enumerate(found, 1) if v.stop] == [1, 3, 5]
    with pytest.raises(ValueError, match="window is 3, but mode 'sample' draws at each step"):
        LearnedPolicy("sample", window=3)


def test_a_budget_is_reached_at_a_step_end() -> None:
    found = verdicts(Budget(25), Ends(), 4)
    assert [v.stop for v in found] == [False, False, True, True]
    assert Budget(25).reason == "budget"


def test_entropy_stops_at_most_at_its_threshold() -> None:
    ends = Ends(answers=[answer(entropy=value) for value in (0.5, 0.3, 0.2)])
    found = verdicts(AnswerEntropy(0.3), ends, 3)
    assert found == [(False, 0.5), (True, 0.3), (True, 0.2)]
    assert ends.asked == [(0, 1), (1, 1), (2, 1)]  # the first token is enough


def test_confidence_is_the_geometric_mean_of_the_answers_probabilities() -> None:
    logs = [math.log(0.5), math.log(0.98)]
    ends = Ends(
        answers=[
            answer(logprobs=logs),
            answer(logprobs=[math.log(0.97)] * 3),
            answer(logprobs=[0.0], ended="length"),
            answer(logprobs=[]),
        ]
    )
    found = verdicts(TrialConfidence(0.95), ends, 4)
    assert found[0].signal == pytest.approx(math.sqrt(0.5 * 0.98))
    assert [v.stop for v in found] == [False, True, False, False]
    assert found[2].signal == 1.0  # it was sure, but not complete
    assert found[3].signal is None


def test_agreement_counts_equal_answers_in_a_row() -> None:
    texts = ["7", "7", "8", "8 ", "8", "", "8", "8", "8"]
    ends = Ends(answers=[answer(text) for text in texts])
    found = verdicts(Agreement(3), ends, 9)
    assert [v.signal for v in found] == [1, 2, 1, 2, 3, 0, 1, 2, 3]
    assert [v.stop for v in found] == [n == 3 for n in (1, 2, 1, 2, 3, 0, 1, 2, 3)]
    cut = Ends(answers=[answer("7"), answer("7", ended="length"), answer("7")])
    assert [v.signal for v in verdicts(Agreement(2), cut, 3)] == [1, 0, 1]


def test_agreement_takes_any_equality() -> None:
    ends = Ends(answers=[answer("7"), answer("7.0"), answer("14/2")])
    same: list[tuple[str, str]] = []

    def equal(one: str, other: str) -> bool:
        same.append((one, other))
        return eval(one) == eval(other)

    assert verdicts(Agreement(3, equal), ends, 3)[2] == (True, 3.0)
    assert same == [("7", "7.0"), ("7.0", "14/2")]
    assert not any(v.stop for v in verdicts(Agreement(2), ends, 3))


def test_rows_remember_by_themselves() -> None:
    rule = Agreement(2)
    one, other = rule.for_row(), rule.for_row()
    ends = Ends(answers=[answer("7"), answer("7")])
    assert [one.at_step_end(ends).signal, other.at_step_end(ends).signal] == [1, 1]
    ends.step = 1
    assert one.at_step_end(ends) == (True, 2.0)


def test_answers_are_tried_where_the_rule_wants_them() -> None:
    answers = [answer(entropy=0.0)] * 6
    spaced = Ends(answers=answers)
    found = verdicts(AnswerEntropy(0.1, every_tokens=25), spaced, 6)
    assert [step for step, _ in spaced.asked] == [2, 5]  # at 30 and 60 tokens
    assert [v.signal for v in found] == [None, None, 0.0, None, None, 0.0]
    words = Ends(answers=answers, words=[" Wait", "So", "Waiting", "Alternatively", " the", "\n"])
    verdicts(TrialConfidence(transition_words=("Wait", "Alternatively")), words, 6)
    assert [step for step, _ in words.asked] == [0, 3]
    early = Ends(answers=answers, may_stop=False)
    assert verdicts(Agreement(2), early, 6) == [(False, None)] * 6
    assert early.asked == []


def wrong(value: Any) -> Any:
    """A value that type checkers don't see through."""
    return value


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Budget(0), ValueError, "Budget: tokens is 0; it must be 1 or more"),
        (lambda: Budget(True), TypeError, "Budget: tokens is True; it must be an integer"),
        (
            lambda: AnswerEntropy(-0.1),
            ValueError,
            r"threshold is -0.1; it must .* \[0, 2.996\]",
        ),
        (lambda: AnswerEntropy(math.nan), ValueError, r"threshold is nan; it must lie in \[0,"),
        (lambda: TrialConfidence(0), ValueError, r"threshold is 0; it must lie in \(0, 1\]"),
        (
            lambda: TrialConfidence(wrong("high")),
            TypeError,
            "threshold is 'high'; it must be",
        ),
        (lambda: TrialConfidence(max_tokens=0), ValueError, "max_tokens is 0; it must be 1 or mo"),
        (
            lambda: TrialConfidence(every_tokens=wrong(1.5)),
            TypeError,
            "every_tokens is 1.5; it must be",
        ),
        (lambda: Agreement(1), ValueError, "Agreement: count is 1; it must be 2 or more"),
        (lambda: Agreement(2, wrong("same")), TypeError, "equal is 'same'; it must take two texts"),
        (
            lambda: Agreement(transition_words=wrong("Wait")),
            TypeError,
            "transition_words is 'Wait'; it must be a tuple of words",
        ),
    ],
)
def test_bad_rules_are_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def prompts_of(reasoner: Reasoner) -> list[str]:
    """The prompts of six problems."""
    return [
        str(
            reasoner.tokenizer.apply_chat_template(
                [{"role": "user", "content": user_message(problem, reasoner.token_format.format)}],
                add_generation_prompt=True,
                tokenize=False,
            )
        )
        for problem in draw_split("test", 6, 0)
    ]


def solve(
    reasoner: Reasoner, rule: StopRule | dict[str, Any]
) -> tuple[list[StopRecord], list[list[int]]]:
    """Greedy traces of six problems under a rule: records, and what was generated."""
    tokenizer = reasoner.tokenizer
    inputs = tokenizer(
        prompts_of(reasoner),
        return_tensors="pt",
        padding=True,
        padding_side="left",
        add_special_tokens=False,
    )
    output, records = generate_with_rule(
        reasoner.model,
        tokenizer,
        rule,
        token_format=reasoner.token_format,
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=160,
        do_sample=False,
    )
    return records, output[:, inputs["input_ids"].shape[1] :].tolist()


@pytest.fixture(scope="module")
def whole(reasoner: Reasoner) -> tuple[list[StopRecord], list[list[int]]]:
    """What the reasoner writes when nothing stops it."""
    return solve(reasoner, Budget(10_000))


RULES: dict[str, StopRule] = {
    "entropy": AnswerEntropy(0.05),
    "confidence": TrialConfidence(0.97),
    "confidence before words": TrialConfidence(0.97, transition_words=("Let", "That")),
    "agreement": Agreement(2),
}


@pytest.mark.parametrize("name", RULES)
def test_training_free_rules_shorten_the_reasoners_traces(
    reasoner: Reasoner, whole: tuple[list[StopRecord], list[list[int]]], name: str
) -> None:
    """Each row is the whole trace up to its stop, and then the answer that was tried there."""
    records, texts = solve(reasoner, RULES[name])
    full, full_texts = whole
    stopped = [i for i, record in enumerate(records) if record.reason == "policy"]
    assert len(stopped) >= 4
    tokens, full_tokens = (sum(r.thinking_tokens for r in rs) for rs in (records, full))
    assert tokens + sum(r.probe_tokens for r in records) < full_tokens
    suffix = reasoner.token_format.forced_suffix()
    for i, record in enumerate(records):
        kept = record.thinking_tokens
        assert texts[i][:kept] == full_texts[i][:kept]
        assert len(record.signals) == len(record.step_ends)
        assert record.probabilities == []
        measured = [signal for signal in record.signals if not math.isnan(signal)]
        assert record.nan_steps == 0
        assert (record.probe_tokens > 0) == bool(measured)
        if i in stopped:
            assert texts[i][kept : kept + len(suffix)] == suffix
            assert not math.isnan(record.signals[-1])
            assert "}" in reasoner.tokenizer.decode(texts[i][kept + len(suffix) :])


@dataclass
class Told:
    """Keeps what each row's step ends say of the thinking."""

    found: dict[int, list[tuple[str, float]]] = field(default_factory=dict)
    reason: Any = "policy"

    @property
    def asks(self) -> Any:
        return frozenset({"text", "thinking_entropy"})

    def for_row(self) -> Any:
        return self

    def at_step_end(self, end: Any) -> Verdict:
        said = (end.step_text(), end.thinking_entropy())
        self.found.setdefault(end.sample_index, []).append(said)
        return Verdict(False)


def test_rules_are_told_steps_and_the_thinkings_entropy(
    reasoner: Reasoner, whole: tuple[list[StopRecord], list[list[int]]]
) -> None:
    """As a pass over each whole text finds them."""
    rule = Told()
    records, texts = solve(reasoner, rule)
    assert texts == whole[1]
    prompts = reasoner.tokenizer(prompts_of(reasoner), add_special_tokens=False)["input_ids"]
    traces = [text[: r.step_ends[-1]] for text, r in zip(texts, records, strict=True)]
    ends = [r.step_ends for r in records]
    steps = max(len(row) for row in ends)
    lengths = np.array([[*row, *[row[-1]] * (steps - len(row))] for row in ends])
    table = TraceTable(
        [], np.zeros(len(ends), np.int64), lengths, np.zeros(lengths.shape),
        np.zeros(lengths.shape, bool), lengths, np.ones(lengths.shape, bool),
        np.array([len(row) for row in ends]), np.zeros(len(ends)), np.zeros(len(ends), np.int64),
        np.zeros(len(ends), bool), [], np.zeros(len(ends), np.int64),
    )  # fmt: skip
    dataset = Dataset.from_dict({"prompt_ids": prompts, "trace_ids": traces})
    entropies = thinking_entropies(reasoner.model, dataset, table)
    for i, row in enumerate(ends):
        said = [reasoner.tokenizer.decode(traces[i][a:b]) for a, b in pairwise([0, *row])]
        assert [text for text, _ in rule.found[i]] == said
        np.testing.assert_allclose([h for _, h in rule.found[i]], entropies[i, : len(row)], 1e-3)
    assert len({round(h, 6) for row in rule.found.values() for _, h in row}) > len(ends)


def test_a_budget_needs_no_policy(
    reasoner: Reasoner, whole: tuple[list[StopRecord], list[list[int]]]
) -> None:
    records, _ = solve(reasoner, Budget(40))
    assert [r.reason for r in records].count("budget") >= 4
    for record, full in zip(records, whole[0], strict=True):
        ends = full.step_ends
        expected = next((end for end in ends if end >= 40), full.thinking_tokens)
        assert record.thinking_tokens == expected
        assert record.probe_tokens == 0
    limited, _ = solve(reasoner, {"rule": Budget(10_000), "max_thinking_tokens": 40})
    assert [r.thinking_tokens for r in limited] == [r.thinking_tokens for r in records]


def test_a_rule_is_needed_without_a_policy(reasoner: Reasoner) -> None:
    with pytest.raises(ValueError, match="stop_policy holds no rule"):
        solve(reasoner, {"threshold": 0.5})
    with pytest.raises(ValueError, match="LearnedPolicy asks for stop probabilities, but there is"):
        solve(reasoner, LearnedPolicy("sample"))


def test_rules_and_the_learned_policys_settings_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="mode, threshold, price and domain are the learned"):
        StopPolicyConfig(rule=Agreement(2), threshold=0.3)
    with pytest.raises(TypeError, match="rule is 'entropy'; it must be a StopRule"):
        StopPolicyConfig.of({"rule": "entropy"})
    with pytest.raises(TypeError, match="rule is <class .*Agreement.*>; it must be a StopRule"):
        StopPolicyConfig.of({"rule": Agreement})
    for incomplete in (StopPolicyConfig(), StopPolicyConfig(mode="threshold")):
        with pytest.raises(ValueError, match="without a rule the mode and its threshold must be"):
            incomplete.chosen_rule()
    assert StopPolicyConfig(mode="sample", seed=3).chosen_rule() == LearnedPolicy("sample", seed=3)
    for wrong in ({"mode": "sample", "threshold": 0.5}, {"mode": "threshold"}):
        with pytest.raises(ValueError, match="a threshold belongs to mode 'threshold', and to no"):
            LearnedPolicy(**wrong)
    assert StopPolicyConfig.of(Agreement(2)) == StopPolicyConfig(rule=Agreement(2))
    assert StopPolicyConfig(rule=Budget(5)).with_defaults(OSPrunerConfig()).mode is None
