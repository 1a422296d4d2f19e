"""The built-in tasks: how each asks, forces, reads, grades and compares."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ospruner.eval.grading.pool import Grade
from ospruner.eval.problems.domains import TASKS, Choice, Exact, open_task, parse_task
from ospruner.eval.problems.problem import Problem, user_message
from ospruner.eval.problems.sources import load_source
from ospruner.eval.problems.task import PROMPT_PRESETS, Math, Task, prompt_token_ids
from ospruner.formats import DEEPSEEK_R1, QWEN3

B = Problem("q", "Which?", "B")


def test_mathematics_is_as_it_was() -> None:
    task = parse_task("math")
    assert (task.settings, task.shape(DEEPSEEK_R1)) == ({"name": "math"}, DEEPSEEK_R1)
    assert task.message(B, DEEPSEEK_R1) == f"Which?\n\n{DEEPSEEK_R1.user_instruction}"
    half = Problem("h", "?", "0.5")
    asked = [(r"\frac{1}{2}", half), ("3", half), ("", half)]
    assert task.grade_many(asked) == [Grade(1.0), Grade(0.0), Grade(None, "no answer")]
    assert task.equal_many([("1", "1.0"), ("1", "2"), ("", "1")]) == [True, False, None]


def test_a_choice_is_a_letter_in_a_box_or_in_prose() -> None:
    task = Choice()
    letters = {
        "B": ("b", "(B)", "B. 42", "Ｂ", "B) blue"),
        "C": (r"\text{C}", r"\textbf{(C)}", "$C$"),
        "D": ("Option d", "the correct answer is d"),
    }
    words = ("Boron", "42", "a dog", "I think", "A and B", "A, C", "(A) or (B)")
    for letter, texts in (letters | {word: (word,) for word in words}).items():
        assert [task.read_forced(f"{text}}}") for text in texts] == [letter] * len(texts)
        assert task.grade(letter, B) is (letter == "B")
    assert task.read_forced("B") is None
    assert [task.equal("b", "(B)"), task.equal("B", "C")] == [True, False]
    for text, read in (
        ("I say \\boxed{A}, no, \\boxed{C}.", "C"),
        ("Therefore the answer is (B).", "B"),
        ("Nobody knows.", None),
        ("**Answer:** $\\textbf{D}$, and the answer is I think clear", "D"),
    ):
        assert task.read_free(text) == read
    assert task.grade_many([("", B), ("B", B)]) == [Grade(None, "no answer"), Grade(1.0)]
    with pytest.raises(ValueError, match="its answer is 'B and C'; of a choice it must be the let"):
        task.grade("B", Problem("q", "?", "B and C"))


def test_a_choice_may_be_forced_after_words() -> None:
    task = parse_task("choice:force=answer")
    assert task.settings == {"name": "choice", "force": "answer"}
    shape = task.shape(DEEPSEEK_R1)
    assert (shape.box_prefix, shape.answer_end) == ("Answer:", "\n")
    assert task.read_forced("C\n") == "C"
    assert 'after "Answer: "' in task.message(B, shape)
    # Another task on a policy's format gets its own box back.
    assert Math().shape(shape) == DEEPSEEK_R1


def test_a_choice_knows_its_letters() -> None:
    asked = "Plan A. is bad.\nA. old\nB. list\n\nWhich?\n\nA. one\n(B) two\nC) three"
    listed = Problem("q", asked, "c")
    assert Choice().options(listed) == ("A", "B", "C")
    assert Choice(force="answer").options(listed) == (" A", " B", " C")
    assert Choice(labels="decoded").options(listed) == ()
    assert Math().options(listed) == ()
    assert Choice(labels="probability").labels_expect > Choice().labels_expect
    with pytest.raises(ValueError, match="its answer is 'D', its options are A, B, C"):
        Choice().options(Problem("q", asked, "D"))


def test_rows_of_arc_and_mmlu_become_choices(tmp_path: Path) -> None:
    choices = {"text": ["red", "blue"], "label": ["1", "2"]}
    arc = {"question": "Sky?", "answerKey": "2", "id": "a", "choices": choices}
    mmlu = {"question": "Sky?", "choices": ["red", "blue"], "answer": 1, "id": "m"}
    path = tmp_path / "quiz.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (arc, mmlu)))
    one, two = load_source(str(path), read=Choice().read_row).problems
    assert one.problem == two.problem == "Sky?\n\nA. red\nB. blue"
    assert one.answer == two.answer == "B"
    with pytest.raises(ValueError, match="the right option is 7, of 2 options"):
        Choice().read_row({**mmlu, "answer": 7})
    named = load_source("arc-easy", files=[path], read=Choice().read_row)
    assert [problem.answer for problem in named.problems] == ["B"]  # one question, twice


def test_short_answers_are_normalised() -> None:
    same = (("The Eiffel Tower.", "eiffel tower"), (r"\text{b}", "B"), ("−3", "-3"), ("a", "A"))
    other = (("3.5", "35"), ("-3", "3"), ("√2", "2"), ("x ≤ 3", "x ≥ 3"), ("5 €", "5 $"))
    more = ("cat", "feline || cat"), ("20 °C", "20 C"), ("dog", "cat")
    for number, (said, wanted) in enumerate((*same, *more, *other)):
        assert Exact().grade(said, Problem("x", "?", wanted)) is (number < 5), said


def test_tasks_are_named_and_come_back_from_their_settings(tmp_path: Path) -> None:
    for name in TASKS:
        assert open_task(parse_task(name).settings).settings == {"name": name}
    concise = open_task(parse_task("exact", prompt="concise").settings)
    assert "\n\nBe concise.\n\n" in concise.message(B, DEEPSEEK_R1)
    file = tmp_path / "mine.py"
    file.write_text("from ospruner.eval.problems.domains import Choice\nclass Mine(Choice): pass\n")
    settings = parse_task(f"{file}:force=answer").settings
    assert settings["name"] == "Mine"
    assert open_task(settings).settings == settings
    file.write_text(file.read_text() + "# changed\n")
    with pytest.raises(ValueError, match="the task .*mine.py has changed"):
        open_task(settings)


def test_presets_and_instructions_are_paragraphs_of_their_own() -> None:
    for said, asked in (("Box it.", "Which?\n\nBox it."), ("", "Which?")):
        assert user_message(B, replace(QWEN3, user_instruction=said)) == asked
    for name, preset in PROMPT_PRESETS.items():
        paragraphs = Task(name).message(B, DEEPSEEK_R1).split("\n\n")
        assert paragraphs == [x for x in ("Which?", preset, DEEPSEEK_R1.user_instruction) if x]
    assert "5 words at most" in PROMPT_PRESETS["chain-of-draft"]
    assert "check it in a different way" in PROMPT_PRESETS["check"]


def test_bad_tasks_and_tokenizers_are_refused(tmp_path: Path) -> None:
    (none := tmp_path / "none.py").write_text("x = 1\n")
    for text, message in (
        ("maths", "task is 'maths'; it must be one of math, choice"),
        ("exact:force=box", "the task exact takes the settings .'prompt'., not"),
        ("choice:force", "'force'. are no settings"),
        ("choice:force=shout", "force is 'shout'"),
        ("math:prompt=shout", "prompt is 'shout'"),
        (str(none), "defines 0 subclasses of Task; it must define one"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_task(text)
    bare: Any = SimpleNamespace(chat_template=None)
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        prompt_token_ids("a", "hi", bare, bare)
