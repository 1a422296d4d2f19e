from __future__ import annotations

from pathlib import Path

import pytest

from ospruner.eval.problems.problem import Problem
from ospruner.eval.problems.task import (
    PROMPT_PRESETS,
    Task,
    load_task_class,
    prompt_token_ids,
)
from ospruner.formats import DEEPSEEK_R1

PROBLEMS = [Problem("a", "What is 6*7?", "42")]

CHOICE = '''
from ospruner.eval.problems.problem import Problem
from ospruner.eval.problems.task import Task


class MultipleChoice(Task):
    """Questions whose answer is a letter."""

    def grade(self, answer: str | None, problem: Problem) -> bool | None:
        letter = (answer or "").strip().strip("().").upper()
        return letter == problem.answer if letter in {"A", "B", "C", "D"} else None
'''


def message(prompt: str) -> str:
    return Task(prompt).message(PROBLEMS[0], DEEPSEEK_R1)


def test_a_preset_stands_between_problem_and_instruction() -> None:
    assert message("default") == f"What is 6*7?\n\n{DEEPSEEK_R1.user_instruction}"
    draft = message("chain-of-draft")
    assert draft.split("\n\n") == [
        "What is 6*7?",
        PROMPT_PRESETS["chain-of-draft"],
        DEEPSEEK_R1.user_instruction,
    ]
    assert "5 words at most" in draft
    assert "check it in a different way" in message("check")


def test_mathematics_reads_and_grades() -> None:
    task = Task()
    assert task.read_forced("42} is it") == "42"
    assert task.read_free("so \\boxed{42}.") == "42"
    assert task.grade("42", PROBLEMS[0]) is True
    assert task.grade("41", PROBLEMS[0]) is False
    assert task.grade(None, PROBLEMS[0]) is None


def test_another_domain_is_one_file(tmp_path: Path) -> None:
    path = tmp_path / "choice.py"
    path.write_text(CHOICE)
    task, problem = load_task_class(path)(), Problem("q", "Which?", "B")
    assert task.grade(" (b). ", problem) is True
    assert task.grade("C", problem) is False
    assert task.grade("perhaps B", problem) is None


def test_bad_tasks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="prompt is 'shout'; it must be one of .'default', 'conc"):
        Task("shout")
    with pytest.raises(FileNotFoundError, match="no task at .*nothing.py"):
        load_task_class(tmp_path / "nothing.py")
    (tmp_path / "none.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match="defines 0 subclasses of Task; it must define one"):
        load_task_class(tmp_path / "none.py")
    (tmp_path / "task.txt").write_text("")
    with pytest.raises(ValueError, match="is no .py file"):
        load_task_class(tmp_path / "task.txt")


def test_a_tokenizer_without_template_is_refused() -> None:
    class Bare:
        chat_template = None

    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        prompt_token_ids("a", "hi", Bare(), None)  # type: ignore[arg-type]
