"""Rules by name, by value, from a file of one's own and from an installed package."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

from ospruner import rules
from ospruner.rules import FAMILIES, Agreement, Budget, Deer, Family, StopRule, families, parse_rule

MINE = """
from ospruner.rules import Family


def length(ends, same, max_tokens=32):
    for end in ends:
        yield float(len(end.trial_answer(max_tokens).ids))


ASKS = frozenset({"trial_answer"})
SHORT = Family("short", length, "short answer", "tokens", "<=", 0, 99, asks=ASKS)
NOTHING = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_rules.py"
    path.write_text(MINE)
    return path


@pytest.mark.parametrize("text", families.EXAMPLES.split(", "))
def test_rules_by_name(text: str) -> None:
    rule = parse_rule(text)
    assert isinstance(rule, StopRule)
    name, _, number = text.partition(":")
    assert (rule.family, rule.threshold) == (FAMILIES[name], float(number))
    assert repr(rule) == text
    assert parse_rule(name) is FAMILIES[name]


def test_all_rules_have_examples() -> None:
    assert [one.partition(":")[0] for one in families.EXAMPLES.split(", ")] == list(FAMILIES)
    public = [one for name in rules.__all__ if isinstance(one := getattr(rules, name), Family)]
    assert {one.name for one in public} == set(FAMILIES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("luck:3", "rule 'luck:3' is not known. Rules are written as budget:200"),
        ("deeer:3", "rule 'deeer:3' is not known; did you mean the rule 'deer'."),
        ("budget:many", "'many' is no number"),
        ("budget:2.5", "'budget' takes a whole number, not 2.5"),
        ("budget:0", "'budget': tokens is 0; it must lie in .1, "),
        ("step:0", "'step': step is 0"),
        ("entropy:9", "'entropy': nats is 9; it must lie in .0, 2.99"),
        ("confidence:2", "'confidence': threshold is 2"),
        ("confidence:nan", "threshold is nan"),
        ("agreement:1", "'agreement': answers is 1"),
        ("es-cot:0", "'es-cot': jump is 0"),
        ("halt-cot:-1", "'halt-cot': bits is -1"),
        ("refrain:1.5", "'refrain': threshold is 1.5"),
        ("puma:2", "'puma': threshold is 2"),
    ],
)
def test_bad_rules_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_rule(text)


def test_settings_are_checked() -> None:
    assert Deer(0.9).settings["trials"] == 10
    assert Deer(0.9, trials=3).settings["trials"] == 3
    with pytest.raises(TypeError, match="'budget' has no setting 'trials'; it has .."):
        Budget(9, trials=3)
    with pytest.raises(ValueError, match="'agreement': every_tokens is 0; it must be at least 1"):
        Agreement(3, every_tokens=0)
    words: Any = "Wait"
    with pytest.raises(TypeError, match="transition_words is 'Wait'; it must be a tuple of words"):
        Deer(0.9, transition_words=words)
    assert "text" in rules.TrialConfidence(0.9, transition_words=("Wait",)).asks
    assert "text" not in rules.TrialConfidence(0.9).asks


def test_a_rule_of_a_file(file: Path) -> None:
    rule = parse_rule(f"{file}:SHORT:2")
    assert isinstance(rule, StopRule)
    assert (rule.method, rule.threshold) == ("short answer", 2.0)
    assert rule.asks == frozenset({"trial_answer"})
    assert isinstance(parse_rule(f"{file}:SHORT"), Family)


def test_a_rule_of_a_package_goes_by_its_name(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Point(importlib.metadata.EntryPoint):
        def load(self) -> object:
            return parse_rule(f"{file}:SHORT")

    def points(*, group: str) -> list[Point]:
        assert group == "ospruner_rules"
        return [Point("short", "somewhere:SHORT", group)]

    monkeypatch.setattr(families, "entry_points", points)
    rule = parse_rule("short:2")
    assert isinstance(rule, StopRule)
    assert rule.method == "short answer"
    with pytest.raises(ValueError, match="rule 'shrt:2' is not known.*installed: short"):
        parse_rule("shrt:2")


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        (":MISSING:1", "defines no 'MISSING'; its families are SHORT"),
        (":SHORT:-1", "'short': tokens is -1"),
        (":SHORT:many", "'many' is no number"),
        (":NOTHING:1", "is 3; it must be an ospruner.rules.Family"),
    ],
)
def test_bad_rules_of_one_s_own_are_refused(file: Path, ending: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_rule(f"{file}{ending}")


def test_files_that_are_missing_or_broken_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no rule at .*absent.py"):
        parse_rule(f"{tmp_path / 'absent.py'}:RULE:1")
    broken = tmp_path / "broken.py"
    broken.write_text("import nothing_of_this_name")
    with pytest.raises(ValueError, match="broken.py cannot be run .ModuleNotFoundError"):
        parse_rule(f"{broken}:RULE:1")
