"""A task: problems, how they are asked, and how answers are read and graded.

`Task` is mathematics. Another domain is one file with a subclass (docs/eval.md shows one), which
`ospruner eval online --task FILE.py` takes.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from modeling_ospruner.formats_ospruner import TokenFormat

from ..grading.boxed import extract_boxed, grade, read_box
from .problem import Problem, user_message

__all__ = ["PROMPT_PRESETS", "Task", "load_task_class", "prompt_token_ids"]

PROMPT_PRESETS = {
    "default": "",
    "concise": "Be concise.",
    "chain-of-draft": (
        "Think step by step, but only keep a minimum draft for each thinking step, with 5 words "
        "at most."
    ),
}
"""What is said between the problem and the format's own instruction: brevity asked for by prompt.

"chain-of-draft" is the instruction of Chain of Draft (Xu et al., 2025) without its "####" answer:
the format's own instruction asks for a box.
"""


def prompt_token_ids(
    problem_id: str, message: str, tokenizer: PreTrainedTokenizerBase, fmt: TokenFormat
) -> list[int]:
    """The prompt of a user's message, through the tokenizer's chat template.

    Args:
        problem_id: for errors.
        message: the user's turn, the format's instruction included.
        tokenizer: the base's.
        fmt: the base's reasoning format.

    Raises:
        ValueError: the tokenizer has no chat template, or its prompt closes the thinking.
    """
    if tokenizer.chat_template is None:
        raise ValueError(
            "the tokenizer has no chat template: set tokenizer.chat_template, or use the "
            "reasoning model's own tokenizer"
        )
    turns = [{"role": "user", "content": message}]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    ids = list(tokenizer.encode(str(text), add_special_tokens=False))
    if not fmt.in_thinking(ids):
        raise ValueError(
            f"the prompt of problem {problem_id!r} already closes the thinking "
            f"({fmt.format.closing!r}): choose the chat template's thinking mode"
        )
    return ids


class Task:
    """Problems of mathematics with boxed answers; subclasses change what another domain needs.

    Args:
        name: what tables call it.
        problems: at least one.
        prompt: one of PROMPT_PRESETS.

    Raises:
        ValueError: no problems, or an unknown preset.
    """

    def __init__(self, name: str, problems: Sequence[Problem], prompt: str = "default") -> None:
        if not problems:
            raise ValueError(f"the benchmark {name!r} is empty: give at least one problem")
        if prompt not in PROMPT_PRESETS:
            raise ValueError(f"prompt is {prompt!r}; it must be one of {list(PROMPT_PRESETS)}")
        self.name = name
        self.problems = list(problems)
        self.prompt = prompt

    def message(self, problem: Problem, fmt: TokenFormat) -> str:
        """The user's turn: the problem, the prompt preset, the format's instruction."""
        extra = PROMPT_PRESETS[self.prompt]
        if extra:
            problem = Problem(problem.id, f"{problem.problem}\n\n{extra}", problem.answer)
        return user_message(problem, fmt.format)

    def read_forced(self, text: str) -> str | None:
        """The answer in a forced answer's text, whose box prefix was forced; None for none."""
        return read_box(text)

    def read_free(self, text: str) -> str | None:
        """The answer in a text that the model wrote freely; None where there is none."""
        return extract_boxed(text)

    def grade(self, answer: str | None, problem: Problem) -> bool | None:
        """Whether the answer is right; None where there is no verdict."""
        return grade(answer, problem.answer)


def load_task_class(path: str | Path | None) -> type[Task]:
    """The one subclass of `Task` in a Python file, which is run; `Task` itself for None.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file cannot be run, or defines none, or several.
    """
    if path is None:
        return Task
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no task at {path}: give a .py file with a subclass of Task")
    spec = importlib.util.spec_from_file_location(f"ospruner_task_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no .py file; a task is a Python file with a subclass of Task")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a user's file may raise
        raise ValueError(
            f"the task {path} cannot be run ({type(error).__name__}: {error}): mend the file"
        ) from error
    found = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Task) and value is not Task
    ]
    if len(found) != 1:
        raise ValueError(f"{path} defines {len(found)} subclasses of Task; it must define one")
    return found[0]
