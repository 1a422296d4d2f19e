"""Rules of one's own, from a file and from an installed package."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from ospruner.eval.rules import own
from ospruner.eval.rules.families import parse_rule
from ospruner.eval.rules.replayed import replay_rule

from .test_families import SUFFIX, labelled

RULE = """
from modeling_ospruner.rules_ospruner import Verdict


class ShortAnswer:
    \"\"\"Stops where the trial answer is short.\"\"\"

    reason = "policy"
    asks = frozenset({"trial_answer"})

    def __init__(self, tokens):
        if tokens < 0:
            raise ValueError("tokens is negative")
        self.tokens = tokens

    def for_row(self):
        return self

    def at_step_end(self, end):
        length = len(end.trial_answer(32).ids)
        return Verdict(length <= self.tokens, float(length))


class Nothing:
    def __init__(self, value):
        pass
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_rules.py"
    path.write_text(RULE)
    return path


def test_a_rule_of_a_file_is_replayed_and_charged(file: Path) -> None:
    rule = parse_rule(f"{file}:ShortAnswer:2")
    assert (rule.method, rule.parameter, rule.parameter_name) == ("ShortAnswer", 2.0, "")
    dataset, table = labelled()
    outcome = replay_rule(dataset, table, rule.rule, SUFFIX)
    # The first trace's second answer has two tokens; none of the second's free steps has.
    assert outcome.tokens.tolist() == [20, 30]
    assert outcome.probe_tokens.tolist() == [2 * SUFFIX + 3 + 2, 2 * SUFFIX + 8 + 3]


def test_a_rule_of_a_package_goes_by_its_name(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = own.rule_class(file, "ShortAnswer")

    class Point(importlib.metadata.EntryPoint):
        def load(self) -> object:
            return kind

    def points(*, group: str) -> list[Point]:
        assert group == "ospruner_rules"
        return [Point("short", "somewhere:Short", group)]

    monkeypatch.setattr(own, "entry_points", points)
    rule = parse_rule("short:2")
    assert (rule.method, rule.parameter) == ("short", 2.0)
    assert isinstance(rule.rule, kind)
    with pytest.raises(ValueError, match="rule 'shrt:2' is not known.*installed: short"):
        parse_rule("shrt:2")


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        (":Missing:1", "defines no class 'Missing'; it has .*ShortAnswer, Nothing"),
        (":ShortAnswer:-1", "cannot be made .ValueError: tokens is negative"),
        (":ShortAnswer:many", "'many' is no number"),
        (":Nothing:1", "Nothing is no stop rule: it must have reason, asks and for_row"),
    ],
)
def test_bad_rules_of_one_s_own_are_refused(file: Path, ending: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_rule(f"{file}{ending}")


def test_files_that_are_missing_or_broken_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no rule at .*absent.py"):
        parse_rule(f"{tmp_path / 'absent.py'}:Rule:1")
    broken = tmp_path / "broken.py"
    broken.write_text("import nothing_of_this_name")
    with pytest.raises(ValueError, match="broken.py cannot be run .ModuleNotFoundError"):
        parse_rule(f"{broken}:Rule:1")
