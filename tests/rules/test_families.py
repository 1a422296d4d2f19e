"""Rules by name, by value, and from a file of one's own."""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ospruner import rules
from ospruner.rules import FAMILIES, Deer, Family, StepEnd, StopRule, families, parse_rule
from ospruner.rules.signals import Same, TrialAnswer

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
