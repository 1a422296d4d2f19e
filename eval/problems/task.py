"""A task: how problems are asked, how an answer is forced and read, graded and compared.

`Task` is this interface, for labelling, training, replay and online evaluation alike. Its defaults
are mathematics (`math`), which is `Math` in bulk. `domains.TASKS` has the built-in ones by name;
another domain is one file with a subclass (docs/tasks.md shows one). A task is named by its
settings, which labels and policies pin.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from modeling_ospruner.configuration_ospruner import check_choice
from modeling_ospruner.formats_ospruner import ReasoningFormat, TokenFormat

from ..grading.boxed import check_grader, compare_many, equal, extract_boxed, read_box
from ..grading.pool import Grade
from .problem import Problem

PROMPT_PRESETS = {
    "default": "",
    "concise": "Be concise.",
    "chain-of-draft": (
        "Think step by step, but only keep a minimum draft for each thinking step, with 5 words "
        "at most."
    ),
    "check": (
        "Think step by step. Once you have a result, check it in a different way, and correct it "
        "if the check fails."
    ),
}
"""What is said between the problem and the format's own instruction: brevity, or checks, asked for.

"chain-of-draft" is the instruction of Chain of Draft (Xu et al., 2025) without its "####" answer:
the format's own instruction asks for a box.
"""


def prompt_token_ids(
    problem_id: str,
    message: str,
    tokenizer: PreTrainedTokenizerBase,
    fmt: TokenFormat,
    date: str = "",
) -> list[int]:
    """The prompt of a user's message, the instruction included, through the chat template.

    The date, as YYYY-MM-DD, is what a template names as today; "" for today.

    Raises:
        ValueError: the tokenizer has no chat template, or its prompt closes the thinking.
    """
    if tokenizer.chat_template is None:
        raise ValueError(
            "the tokenizer has no chat template: set tokenizer.chat_template, or use the "
            "reasoning model's own tokenizer"
        )
    turns = [{"role": "user", "content": message}]
    own = fmt.format.template_arguments
    if date:
        own["strftime_now"] = datetime.fromisoformat(date).strftime
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False, **own)
    ids = list(tokenizer.encode(str(text), add_special_tokens=False))
    if fmt.thinking_span(ids).closed:
        raise ValueError(
            f"the prompt of problem {problem_id!r} already closes the thinking "
            f"({fmt.format.closing!r}): choose the chat template's thinking mode, such as "
            "--template-arg enable_thinking=true"
        )
    return ids


BOX = "\\boxed{"


class Task:
    """How one domain is asked, answered and graded; subclasses change what theirs needs.

    The defaults are mathematics with boxed answers.

    Args:
        prompt: one of PROMPT_PRESETS.
    """

    name: ClassVar[str] = ""  # what settings and errors call it
    file: ClassVar[str] = ""  # that it was loaded from; "" for a built-in one
    sha256: ClassVar[str] = ""  # of that file
    instruction: str = ""  # asks for the answer; "" for the reasoning format's own sentence
    box_prefix: str = ""  # forced before an answer; "" for the format's own, an open box
    answer_end: str = ""  # ends a forced answer; "" for the brace that closes its box
    max_answer_tokens: int = 32  # the cap of a forced answer where none is given
    # Whether a label is the expected grade over `options`, each with its probability, instead of
    # the likeliest one's grade.
    labels_expect: bool = False

    def __init__(self, prompt: str = "default") -> None:
        check_choice("task", "prompt", prompt, list(PROMPT_PRESETS))
        self.prompt = prompt

    @property
    def settings(self) -> dict[str, Any]:
        """Its name and what was chosen: JSON values, from which `domains.open_task` makes it."""
        own: dict[str, Any] = {"name": self.name or type(self).__name__}
        if self.file:
            own = {"name": type(self).__name__, "file": self.file, "sha256": self.sha256}
        return own if self.prompt == "default" else {**own, "prompt": self.prompt}

    def check(self) -> None:
        """Refuses to begin where answers could not be graded.

        Raises:
            ValueError: why, and what to do.
        """

    def read_row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """A row of a data set as one with `problem` and `answer`; by default as it is."""
        return row

    def shape(self, reasoning_format: ReasoningFormat) -> ReasoningFormat:
        """The format with this task's forced answer; labels and policies pin its literals."""
        if not self.box_prefix and not reasoning_format.answer_end:
            return reasoning_format
        # A format in another task's shape has lost its own box.
        return replace(
            reasoning_format, box_prefix=self.box_prefix or BOX, answer_end=self.answer_end
        )

    def message(self, problem: Problem, fmt: ReasoningFormat) -> str:
        """The user's turn: the problem, the prompt preset, the instruction."""
        asked = self.instruction or fmt.user_instruction
        parts = (problem.problem, PROMPT_PRESETS[self.prompt], asked)
        return "\n\n".join(part for part in parts if part)

    def options(self, problem: Problem) -> tuple[str, ...]:
        """The answers among which labels choose, as they stand behind what is forced.

        Where there are any, the answer of a label is the likeliest of them in the forward that
        runs what is forced, and nothing is decoded. Each must be one token there.

        Raises:
            ValueError: the problem lists no options, or the right one is none of them.
        """
        return ()

    def read_forced(self, text: str) -> str | None:
        """The answer in a forced answer's text, whose prefix was forced; None for none."""
        return read_box(text)

    def read_free(self, text: str) -> str | None:
        """The answer in a text that the model wrote freely; None where there is none."""
        return extract_boxed(text)

    def grade(self, answer: str | None, problem: Problem) -> float | None:
        """What the answer is worth, in [0, 1] (True is 1); None where there is no verdict."""
        return equal(problem.answer, answer)

    def equal(self, one: str, other: str) -> bool | None:
        """Whether two answers mean the same; None where there is no verdict."""
        return equal(one, other)

    def same(self, one: str, other: str) -> bool:
        """Whether two answers surely mean the same: what rules of agreement ask."""
        return bool(one and other and self.equal(one, other))

    def grade_many(self, asked: Sequence[tuple[str, Problem]]) -> list[Grade]:
        """What answers ("" for none) are worth, in order; by default `grade` of each."""
        grades = []
        for answer, problem in asked:
            value = self.grade(answer, problem) if answer else None
            reason = "undecided" if answer else "no answer"
            grades.append(Grade(None, reason) if value is None else Grade(float(value)))
        return grades

    def equal_many(self, pairs: Sequence[tuple[str, str]]) -> list[bool | None]:
        """Whether pairs of answers mean the same, in order; by default `equal` of each."""
        return [self.equal(one, other) if one and other else None for one, other in pairs]


class Math(Task):
    """Mathematics: boxed answers, graded by Math-Verify in processes of their own."""

    name = "math"

    def check(self) -> None:
        """See `Task.check`."""
        check_grader()

    def grade_many(self, asked: Sequence[tuple[str, Problem]]) -> list[Grade]:
        """See `Task.grade_many`; many at once."""
        found = compare_many([(problem.answer, answer) for answer, problem in asked])
        return [Grade(None if g.value is None else float(g.value), g.reason) for g in found]

    def equal_many(self, pairs: Sequence[tuple[str, str]]) -> list[bool | None]:
        """See `Task.equal_many`; many at once."""
        return [None if g.value is None else bool(g.value) for g in compare_many(pairs)]
