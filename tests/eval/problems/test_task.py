from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ospruner.eval.problems.problem import Problem, user_message
from ospruner.eval.problems.registry import load_task_class
from ospruner.eval.problems.task import PROMPT_PRESETS, Task, prompt_token_ids
from ospruner.formats import DEEPSEEK_R1, QWEN3

PROBLEMS = [Problem("a", "What is 6*7?", "42")]


def message(prompt: str) -> str:
    return Task(prompt).message(PROBLEMS[0], DEEPSEEK_R1)


def test_an_instruction_is_a_paragraph_of_its_own() -> None:
    problem = PROBLEMS[0]
    for instruction, asked in (("Box it.", "What is 6*7?\n\nBox it."), ("", "What is 6*7?")):
        assert user_message(problem, replace(QWEN3, user_instruction=instruction)) == asked


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


def test_bad_tasks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="prompt is 'shout'; it must be 'default' or 'conc"):
        Task("shout")
    (tmp_path / "none.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match="defines 0 subclasses of Task; it must define one"):
        load_task_class(tmp_path / "none.py")


def test_a_tokenizer_without_template_is_refused() -> None:
    class Bare:
        chat_template = None

    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        prompt_token_ids("a", "hi", Bare(), None)  # type: ignore[arg-type]
