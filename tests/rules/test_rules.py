"""Each rival's definition, on sequences whose stops are found by hand; rules by name."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ospruner import rules
from ospruner.rules import FAMILIES, Deer, Family, StepEnd, StopRule, families, parse_rule
from ospruner.rules.signals import Same, TrialAnswer


@dataclass
class End:
    """What a rule may find at the step ends of a row."""

    answers: Sequence[TrialAnswer] = ()
    texts: Sequence[str] = ()
    words: Sequence[str] = ()
    entropies: Sequence[float] = ()
    every: int = 10
    may_stop: bool = True
    tried: list[int] = field(default_factory=list)

    def at(self, step: int) -> StepEnd:
        def trial_answer(max_tokens: int) -> TrialAnswer:
            self.tried.append(step)
            return self.answers[step]

        told: tuple[Any, ...] = (self.words, self.texts, self.entropies)
        here = [partial(one.__getitem__, step) for one in told]
        return StepEnd(0, step, (step + 1) * self.every, self.may_stop, trial_answer, *here)


def stops(rule: StopRule, end: End, steps: int) -> list[int]:
    """At which steps, from 1, a rule would stop, were it never obeyed."""
    decide = rule.for_row()
    return [step + 1 for step in range(steps) if decide(end.at(step))[0]]


def alike(one: str, other: str) -> bool:
    return one.removesuffix(".0") == other.removesuffix(".0")


def said(text: str, sure: float = 1.0, ended: Any = "closed", bits: float = 0.0) -> TrialAnswer:
    log = math.log(sure)
    return TrialAnswer((0, 0), ended, (log, log), 0.0, text, bits * math.log(2))


def test_dynasor_wants_k_equal_answers_none_of_which_hesitates() -> None:
    answers = ["3", "7", "7.0", "7", "wait, 7", "7", "7", "7", "", "7"]
    end = End([said(text) for text in answers], every=64)
    assert stops(rules.Dynasor(3, same=alike), end, len(answers)) == [4, 8]
    # Every 64 tokens: with steps of 40 tokens, an answer is tried at 80, 160, 240, 320 of them.
    end = End([said("7")] * 8, every=40)
    assert stops(rules.Dynasor(3), end, 8) == [6, 8]
    assert end.tried == [1, 3, 5, 7]


def test_es_cot_stops_where_the_run_jumps() -> None:
    # Runs of 1, 3, 2, 1, and then of 7s: with the 0 before the first, the earlier differences are
    # 1, 2, -1, -1, of mean .25 and deviation 1.5. A run of r 7s has the difference r - 1.
    answers = ["1", "2", "2", "2", "3", "3", "4", *["7"] * 8]
    end = End([said(text) for text in answers])
    # t = (d - .25) 2 / 1.5 is above the quantile 2.353 of 3 degrees from d = 3 on: r = 4.
    assert stops(rules.RunJump(1), end, len(answers))[-5:] == [11, 12, 13, 14, 15]
    assert stops(rules.RunJump(5), end, len(answers)) == [13, 14, 15]
    assert stops(rules.RunJump(3), end, len(answers)) == [11, 12, 13, 14, 15]
    # At step 4 the only earlier difference is 1: nothing to test, so the 2 alone decides.
    assert 4 in stops(rules.RunJump(2), end, len(answers))
    # Without a change, and with incomplete answers.
    whole, cut = said("7"), said("7", ended="length")
    assert stops(rules.RunJump(3), End([whole] * 5), 5) == [3, 4, 5]
    assert stops(rules.RunJump(3), End([whole, whole, cut, whole, whole]), 5) == []


def test_halt_cot_wants_two_entropies_in_a_row_below_theta() -> None:
    end = End([said("7", bits=value) for value in (0.5, 0.7, 0.59, 0.6, 0.5, 0.1, 0.2)])
    assert stops(rules.HaltCot(0.6), end, 7) == [6, 7]
    unclear = [said("7", bits=0.1), said("7", bits=0.1, ended="length"), said("7", bits=0.1)]
    assert stops(rules.HaltCot(0.6), End(unclear), 3) == []
    assert stops(rules.HaltCot(0.0), End([said("7")] * 3), 3) == []


def test_deer_must_be_above_its_threshold_before_wait_and_tries_ten_times() -> None:
    words = ["So", " Wait", "Alternatively", "Wait", "Wait"]
    end = End([said("7", value) for value in (0.99, 0.95, 0.99, 0.96, 0.94)], words=words)
    assert stops(rules.Deer(0.95), end, 5) == [4]
    assert end.tried == [1, 3, 4]
    end = End([said("7", 0.5)] * 10 + [said("7", 0.99)] * 2, words=["Wait"] * 12)
    assert stops(rules.Deer(0.95), end, 12) == []
    assert end.tried == list(range(10))
    assert stops(rules.Deer(0.95, trials=12), end, 12) == [11, 12]


def test_think_just_enough_compares_the_mean_entropy_in_bits() -> None:
    end = End(entropies=[math.log(4), math.log(2), 0.5 * math.log(2)])
    assert stops(rules.ThinkJustEnough(0.99), end, 3) == [3]
    assert stops(rules.ThinkJustEnough(2.5), end, 3) == [1, 2, 3]


def test_refrain_wants_reflection_on_an_answer_that_repeats_a_step() -> None:
    texts = [
        "Wait, two and two is four.",  # reflective, but nothing is answered yet
        "So the answer is four.",
        "Now two and two is four.",  # a repetition without reflection
        "Hmm, two and two is four.",
        "Hmm, what of seven?",  # reflection on something new
    ]
    # To the first step: 4 of 6 words each with two "two"s: (4+1+1+1) / 8 = 7 / 8.
    assert stops(rules.Refrain(0.87), End(texts=texts), 5) == [4]
    assert stops(rules.Refrain(0.9), End(texts=texts), 5) == []
    # Of step 5's four words "hmm" alone is in step 4, whose norm is the root of 8.
    assert stops(rules.Refrain(1 / math.sqrt(4 * 8) - 1e-9), End(texts=texts), 5) == [4, 5]


def test_loops_are_steps_that_say_the_same_again() -> None:
    texts = ["So 2 + 2 is 4.", "Hm", "so (2+2) is 4", "...", "Hm!", "So 2 + 2 is 4!", "So 2 + 3"]
    assert stops(rules.Loops(1), End(texts=texts), 7) == [3, 5, 6]
    assert stops(rules.Loops(2), End(texts=texts), 7) == [6]


def test_puma_verifies_at_two_redundant_steps() -> None:
    texts = ["a b", "c d", "c d e", "c d e", "c d", "x", "x", "x"]
    answers = ["1", "2", "7", "7", "8", "9", "9", "9"]
    sure = [1.0, 1.0, 0.99, 0.97, 0.99, 1.0, 0.99, 0.95]
    end = End([said(a, s) for a, s in zip(answers, sure, strict=True)], texts)
    # Steps 3, 4, 5, 7 and 8 repeat the one before. 4 confirms 3; 5 says something else; 8 is less
    # sure than 7 by more than .03.
    assert stops(rules.Puma(0.98, first_step=1), end, 8) == [4]
    assert end.tried == [2, 3, 4, 6, 7]
    assert stops(rules.Puma(0.995, first_step=1), end, 8) == []
    assert stops(rules.Puma(0.98, first_step=1, drop=0.05), end, 8) == [4, 8]
    assert stops(rules.Puma(0.98, first_step=5), end, 8) == []


def test_trial_answers_by_hand() -> None:
    """The answer's certainty and agreement, at each step end or where one is due."""
    answers = [said("7", 0.5), said("7", 0.9), said("7", 0.99, ended="length"), said("7", 0.96)]
    end = End(answers, words=["so", "Wait", "Wait", "so"])
    assert stops(rules.TrialConfidence(0.9), end, 4) == [2, 4]
    assert stops(rules.TrialConfidence(0.9, transition_words=("Wait",)), end, 4) == [2]
    end = End([said(text) for text in ("3", "7", "7", "", "7", "7", "7")])
    assert stops(rules.Agreement(3), end, 7) == [7]
    assert stops(rules.Agreement(2), end, 7) == [3, 6, 7]
    sure = [TrialAnswer((0,), "closed", (0.0,), nats) for nats in (0.5, 0.4, 0.3, math.nan)]
    assert stops(rules.AnswerEntropy(0.4), End(sure), 4) == [2, 3]
    assert stops(rules.Budget(21), End(), 4) == [3, 4]


def test_the_documented_rule_wants_two_equal_and_sure_answers(repo_dir: Path) -> None:
    rule = parse_rule(f"{repo_dir / 'docs/examples/own_rule.py'}:SURE_TWICE:0.9", alike)
    assert isinstance(rule, StopRule)
    answers = (("7", 0.95), ("7.0", 0.8), ("7", 0.95), ("7", 0.92), ("8", 0.99), ("", 1), ("", 1))
    assert stops(rule, End([said(*one) for one in answers]), 7) == [4]


def test_nothing_is_tried_before_a_row_may_stop() -> None:
    end = End([said("7")] * 3, may_stop=False)
    assert stops(rules.Agreement(2), end, 3) == []
    assert end.tried == []


# Rules by name, by value, and from a file of one's own.

MINE = """
from ospruner.rules import Family


def length(ends, same, max_tokens=32):
    for end in ends:
        yield float(len(end.trial_answer(max_tokens).ids))


ASKS = frozenset({"trial_answer"})
SHORT = Family("short", length, "short answer", "tokens", "<=", 0, 99, asks=ASKS)
NOTHING = 3


def halves(end, most=100):
    return end.thinking_tokens / most
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (path := tmp_path / "my_rules.py").write_text(MINE)
    return path


@pytest.mark.parametrize("text", families.EXAMPLES.split(", "))
def test_rules_by_name(text: str) -> None:
    rule = parse_rule(text)
    assert isinstance(rule, StopRule)
    name, _, number = text.partition(":")
    assert (rule.family, rule.threshold) == (FAMILIES[name], float(number))
    assert repr(rule) == text
    assert rule.reason == ("budget" if name in ("budget", "step") else "policy")
    assert parse_rule(name) is FAMILIES[name]


def test_all_rules_have_examples() -> None:
    assert [one.partition(":")[0] for one in families.EXAMPLES.split(", ")] == list(FAMILIES)
    public = (getattr(rules, name) for name in rules.__all__)
    assert {one.name for one in public if isinstance(one, Family)} == set(FAMILIES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("deeer:3", "rule 'deeer:3' is not known; did you mean the rule 'deer'."),
        ("budget:2.5", "'budget' takes a whole number, not 2.5"),
        ("entropy:9", "'entropy': nats is 9; it must lie in .0, 2.99"),
        (":MISSING:1", "defines no 'MISSING'; its families are SHORT"),
        (":SHORT:many", "'many' is no number"),
        (":NOTHING:1", "3 is no rule: give a function of a step's end that gives a number"),
    ],
)
def test_bad_rules_are_refused(file: Path, text: str, message: str) -> None:
    """Further ones: tests/project/bad_inputs.txt."""
    with pytest.raises((TypeError, ValueError), match=message):
        parse_rule(f"{file}{text}" if text.startswith(":") else text)


def test_settings_are_checked() -> None:
    assert [rule.settings["trials"] for rule in (Deer(0.9), Deer(0.9, trials=3))] == [10, 3]
    refused: list[tuple[Family, dict[str, Any], str]] = [
        (rules.Budget, {"trials": 3}, "'budget' has no setting 'trials'"),
        (rules.Agreement, {"every_tokens": 0}, "'agreement': every_tokens is 0"),
        (rules.RunJump, {"transition_words": "Wait"}, "transition_words is 'Wait'"),
    ]
    for family, settings, message in refused:
        with pytest.raises((TypeError, ValueError), match=message):
            family(9, **settings)
    assert "text" in rules.TrialConfidence(0.9, transition_words=("Wait",)).asks
    assert "text" not in rules.TrialConfidence(0.9).asks


def step_end(tokens: int) -> StepEnd:
    answer = TrialAnswer((1, 2), "closed", (-0.1, -0.2), 0.5, "7")
    return StepEnd(0, 0, tokens, True, lambda most: answer, str, str, lambda: 0.1)


def test_a_rule_is_a_function_or_a_generator(file: Path) -> None:
    ends = [step_end(tokens) for tokens in (10, 30, 35)]

    def sure(end: StepEnd) -> float:
        return end.trial_answer(8).confidence

    def counted(ends: Iterable[StepEnd], same: Same) -> Iterator[int]:
        for number, _ in enumerate(ends):
            yield number

    for given, wanted in ((sure, [math.exp(-0.15)] * 3), (counted, [0, 1, 2])):
        family = Family.of(given)
        assert family.name == given.__name__
        for _ in range(2):  # each row begins anew
            assert list(family(0.5).measure(ends)) == pytest.approx(wanted)
        decide = family(0.5).for_row()
        assert [decide(end) for end in ends] == [(one >= 0.5, one) for one in wanted]
    assert Family.of(sure)(0.5).asks == {"trial_answer", "text", "thinking_entropy"}
    half, short = parse_rule(f"{file}:halves:.5"), parse_rule(f"{file}:SHORT")
    assert isinstance(half, StopRule)
    assert list(half.measure(ends)) == [0.1, 0.3, 0.35]
    assert isinstance(short, Family)
    assert (short.method, short(2).asks) == ("short answer", frozenset({"trial_answer"}))
    with pytest.raises(TypeError, match="rule 'step_text' gave '' at a step's end; it must give a"):
        list(Family("step_text", lambda end: end.step_text())(0.5).measure(ends))


def test_files_that_are_missing_or_broken_are_named(file: Path) -> None:
    file.write_text("import nothing_of_this_name")
    with pytest.raises(ValueError, match="my_rules.py cannot be run .ModuleNotFoundError"):
        parse_rule(f"{file}:RULE:1")
    with pytest.raises(FileNotFoundError, match="no rule at none.py"):
        parse_rule("none.py:RULE:1")


def test_the_page_shows_the_example(repo_dir: Path) -> None:
    page = (repo_dir / "docs/own-rule.md").read_text("utf-8")
    code = (repo_dir / "docs/examples/own_rule.py").read_text("utf-8").partition('"""\n\n')[2]
    assert code.strip() in page
