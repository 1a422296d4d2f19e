"""The domains' problems, traces and examples, and the tasks' machinery on an embedded reasoner."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random

import numpy as np
import pytest

from ospruner.comparing import compare
from ospruner.demo.domains import (
    CHOICE_SHARES,
    DOMAINS,
    MIX,
    domain_of,
    draw_chain_sum,
    draw_choice,
    draw_domain,
    draw_mixed,
)
from ospruner.demo.examples import build_example
from ospruner.demo.fallible_reasoner import SECOND_CYCLE, write_trace
from ospruner.demo.problems import Split, apply, iterate_problems, split_of
from ospruner.demo.shipped import Reasoner
from ospruner.train.from_labels import load_labels, settings_for, train_from_labels
from ospruner.train.tail import no_denormals

CHAIN_SUM = re.compile(r"State the final answer to the following arithmetic problem: ([\d +-]+) =")


def test_choices_stand_as_their_task_writes_them_and_one_option_is_right() -> None:
    rng, families, counts = Random(0), set(), set()
    for _ in range(1000):
        problem = draw_choice(rng)
        families.add(problem.family)
        counts.add(len(problem.options))
        _, _, options = problem.problem.partition("\n\n")
        written = [f"{letter}. {text}" for letter, text in zip("ABCD", problem.options)]  # noqa: B905
        assert options.splitlines() == written
        assert problem.as_problem().answer == "ABCD"[problem.answer]
        if problem.family == "largest":
            values = [apply(s.left or 0, s.symbol, s.right) for s in problem.plan]
            assert len(set(values)) == len(values)
            assert values[problem.answer] == max(values)
        else:
            value = problem.start
            for step in problem.plan:
                value = apply(value, step.symbol, step.right)
            limit = int(problem.options[0].removeprefix("at most "))
            assert problem.options[1] == f"more than {limit}"
            assert problem.answer == (value > limit)
    assert families == set(CHOICE_SHARES)
    assert counts == {2, 3, 4}


def test_chain_sums_are_worded_as_reasoning_gym_words_them() -> None:
    rng = Random(1)
    ours = [draw_chain_sum(rng) for _ in range(500)]
    for problem in ours:
        found = CHAIN_SUM.fullmatch(problem.problem)
        assert found is not None
        assert _value(found[1]) == problem.answer
    assert min(p.answer for p in ours) < 0
    pytest.importorskip("reasoning_gym")
    for given in draw_domain("generated", "test", 50, seed=0):
        found = CHAIN_SUM.fullmatch(given.problem)
        assert found is not None
        assert str(_value(found[1])) == json.loads(given.answer)["answer"]
        assert split_of(given.problem) == "test"


def _value(terms: str) -> int:
    first, *rest = terms.split()
    total = int(first)
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        total += int(number) if sign == "+" else -int(number)
    return total


def test_the_writer_repairs_more_than_it_breaks_in_every_domain() -> None:
    rng = Random(2)
    counts = {domain: np.zeros(4) for domain in MIX}
    for _ in range(2500):
        problem = draw_mixed(rng)
        trace = write_trace(problem, rng)
        assert len(trace.paragraphs) == len(trace.beliefs)
        held = [belief for belief in trace.beliefs if belief is not None]
        first, last = held[0] == problem.answer, held[-1] == problem.answer
        counts[domain_of(problem)] += (1, last, last and not first, first and not last)
    for domain, (traces, right, repaired, broken) in counts.items():
        assert traces > 400, domain
        assert 0.6 < right / traces < 0.99, domain
        assert repaired > 3 * broken, domain


def test_the_writer_says_which_option_it_holds() -> None:
    rng = Random(4)
    for _ in range(200):
        problem = draw_choice(rng)
        trace = write_trace(problem, rng)
        voted = next(i for i, belief in enumerate(trace.beliefs) if belief is not None)
        assert trace.paragraphs[voted].endswith(f", {'ABCD'[trace.beliefs[voted] or 0]}.")


@pytest.mark.parametrize("domain", ["choice", "generated"])
def test_an_example_asks_and_answers_as_its_task_does(domain: str) -> None:
    tokenizer, task = Reasoner().tokenizer, DOMAINS[domain]
    draw = draw_choice if domain == "choice" else draw_chain_sum
    rng = Random(3)
    for _ in range(20):
        problem = draw(rng)
        pieces = build_example(tokenizer, problem, rng, SECOND_CYCLE)  # type: ignore[arg-type]
        prompt, answer = pieces[0][0], pieces[-1][0].replace("<|im_end|>", "")
        assert task.instruction in prompt
        assert problem.problem in prompt
        read = task.read_forced(answer)
        assert read is not None
        assert read in "ABCD" if domain == "choice" else int(read) is not None


def test_domains_keep_their_splits_apart() -> None:
    seen = {
        split: {problem.problem for problem in draw_domain("choice", split, 100, seed=0)}
        for split in ("train", "validation", "test")
    }
    assert not seen["train"] & seen["test"]
    assert not seen["validation"] & seen["test"]
    assert all(split_of(text) == split for split, texts in seen.items() for text in texts)
    first = next(iterate_problems("test", 0, draw_choice))
    assert first.problem in seen["test"]


COUNTS: dict[Split, int] = {"train": 14, "validation": 6, "test": 8}


@pytest.fixture(scope="module")
def choices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Labels of choices by split; the shipped reasoner knows no options, and guesses."""
    out, reasoner = tmp_path_factory.mktemp("choices"), Reasoner()
    with no_denormals():
        for split, count in COUNTS.items():
            problems = draw_domain("choice", split, count, seed=0)
            reasoner.label(problems, out / split, 0, task=DOMAINS["choice"])
    return out


def test_label_train_and_replay_choices(choices: Path, tmp_path: Path) -> None:
    rows = [row for split in COUNTS for row in load_labels(choices / split).traces]
    grades = [grade for row in rows for grade in row["forced_correct"]]
    assert set(grades) == {0.0, 1.0}
    settings = settings_for("5e-5,1e-2", head="price", tuning="queries", batch_size=4)
    (stage,) = train_from_labels(
        choices / "train", tmp_path / "run", settings, validation=choices / "validation"
    )
    found = compare(choices / "test", [str(stage.path), "agreement:3"], device="cpu").evaluation
    full, policy, agreement = found.results()[0]
    assert policy.tokens.value <= full.tokens.value
    assert agreement.tokens.value <= full.tokens.value

    try:
        DOMAINS["generated"].check()
    except ValueError as why:  # no reasoning-gym, or no sandbox
        pytest.skip(str(why))
    problems = draw_domain("generated", "test", 2, seed=0)
    sums = tmp_path / "sums"
    with no_denormals():
        Reasoner().label(problems, sums, 0, task=DOMAINS["generated"])
    graded = load_labels(sums).traces["ungraded_reasons"]
    assert {why for reasons in graded for why in reasons} <= {None, "no answer"}
    rules = compare(sums, ["budget:40", "agreement:2"], device="cpu").evaluation.results()[0]
    assert rules[1].tokens.value <= rules[0].tokens.value
    with pytest.raises(ValueError, match="task"):
        compare(sums, [str(stage.path)], device="cpu")
