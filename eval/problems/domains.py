"""Tasks by name, and those beside mathematics: letters of options, and exact texts.

Labels and policies pin a task by its settings, from which it is opened again.
"""

import hashlib
import inspect
import re
import string
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modeling_ospruner.configuration_ospruner import check_choice
from ospruner.rules.families import run_file

from .problem import Problem
from .task import Math, Task

_LISTED = re.compile(r"^[ \t]*[(\[]?([A-Z])[.):\]][ \t]", re.MULTILINE)
_WRAPPED = re.compile(
    r"\\(?:text|mathrm|textbf|mathbf|textit|boxed)\s*\{(.*)\}|\$(.*)\$|\\\((.*)\\\)|\*\*(.*)\*\*"
)
_NAMED = re.compile(
    r"(?is)(?:(?:the\s+)?(?:correct\s+)?(?:option|answer|choice)(?:\s+is)?\s*:?\s*)?"
    r"[(\[{*]*([A-Z])(?P<behind>[)\]}*]+[.:]?|[.:])?(?:\s+(?P<rest>.*))?"
)
_ANOTHER = re.compile(r"(?:and|or|,|/|&)\s*[(\[]?[A-Z]\b", re.IGNORECASE)
# A letter in prose is upper-case or in brackets: no article, no "I".
_SAID = re.compile(
    r"(?i:answer(?:\s+is)?)(?:[\s$*:]|\\[a-z]+\{)*"
    r"(?:[(\[]([A-Za-z])[)\]]|(?!I\s+[a-z])([A-Z])(?![A-Za-z']))"
)


class Choice(Task):
    r"""Questions whose answer is the letter of an option.

    Args:
        prompt: see `Task`.
        force: what is forced before the letter: "box" (`\boxed{`) or "answer" (`Answer:`, ended by
            a line break).
        labels: what labels hold: "letter", the grade of the question's likeliest letter, read in
            one forward; "probability", the right letter's share of the probability of all of the
            question's letters, in the same forward; "decoded", the grade of an answer that is
            decoded, as in generation.
    """

    name = "choice"
    max_answer_tokens = 8

    def __init__(self, prompt: str = "default", force: str = "box", labels: str = "letter") -> None:
        super().__init__(prompt)
        check_choice("choice", "force", force, ("box", "answer"))
        check_choice("choice", "labels", labels, ("letter", "probability", "decoded"))
        self.force = force
        self.labels = labels
        self.labels_expect = labels == "probability"
        where = r"within \boxed{}" if force == "box" else 'after "Answer: "'
        self.instruction = (
            "Please reason step by step, and put the letter of the right option, and nothing else, "
            f"{where}."
        )
        if force == "answer":
            self.box_prefix, self.answer_end = "Answer:", "\n"

    @property
    def settings(self) -> dict[str, Any]:
        """See `Task.settings`."""
        chosen = {} if self.force == "box" else {"force": self.force}
        if self.labels != "letter":
            chosen["labels"] = self.labels
        return super().settings | chosen

    def read_row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """A row with its options written below the question, each behind a letter.

        Rows of ARC (`choices` with `text` and `label`, `answerKey`), of MMLU (`choices`, and the
        number of the right one from 0 in `answer`), or of the same shapes. A row without `choices`
        is taken as it is: its options stand in its text.

        Raises:
            ValueError: the right one is none of the options, or there are more than 26.
        """
        if (choices := row.get("choices")) is None:
            return row
        arc = isinstance(choices, Mapping)
        texts = list(choices["text"] if arc else choices)
        letters = string.ascii_uppercase[: len(texts)]
        labels = list(map(str, choices["label"] if arc else letters))  # ARC has some with 1 to 4
        right = row.get("answerKey", row.get("answer"))
        number = right if type(right) is int else None
        if number is None and str(right) in labels:
            number = labels.index(str(right))
        if number is None or not 0 <= number < len(texts) or len(texts) > len(letters):
            raise ValueError(
                f"the right option is {right!r}, of {len(texts)} options {labels}: it must be the "
                "letter of one of at most 26, or its number from 0"
            )
        options = "\n".join(f"{one}. {text}" for one, text in zip(letters, texts, strict=True))
        question = row.get("question", row.get("problem"))
        return {**row, "problem": f"{question}\n\n{options}", "answer": letters[number]}

    def options(self, problem: Problem) -> tuple[str, ...]:
        """The letters of the options that the question lists, a line each; see `Task.options`."""
        if self.labels == "decoded":
            return ()
        letters = _listed(problem.problem)
        if len(letters) < 2:
            raise ValueError(
                f"problem {problem.id!r} lists no options: give the column `choices`, or write "
                'each on a line of its own ("A. ..."), or decode the answers '
                "(--task choice:labels=decoded)"
            )
        if _letter(problem.answer) not in letters:
            raise ValueError(
                f"problem {problem.id!r}: its answer is {problem.answer!r}, its options are "
                f"{', '.join(letters)}: the answer must be the letter of one"
            )
        return tuple(f" {one}" if self.force == "answer" else one for one in letters)

    def read_forced(self, text: str) -> str | None:
        """The letter; what stands there where it is none; None where the answer never ended."""
        found = super().read_forced(text) if self.force == "box" else text.partition("\n")[0]
        return None if found is None else _letter(found) or found.strip() or None

    def read_free(self, text: str) -> str | None:
        """The letter in the last box, or after the last "answer is"; None where there is none."""
        if boxed := super().read_free(text):
            return _letter(boxed) or boxed
        said = _SAID.findall(unicodedata.normalize("NFKC", text))
        return (said[-1][0] or said[-1][1]).upper() if said else None

    def grade(self, answer: str | None, problem: Problem) -> float | None:
        """Whether it is the right letter; what is no letter is wrong."""
        if (right := _letter(problem.answer)) is None:
            raise ValueError(
                f"problem {problem.id!r}: its answer is {problem.answer!r}; of a choice it must be "
                "the letter of an option"
            )
        return _letter(answer) == right if answer else None

    def equal(self, one: str, other: str) -> bool | None:
        """Whether both are the same letter, or the same text where they are none."""
        return (_letter(one) or one.strip()) == (_letter(other) or other.strip())


def _letter(text: str) -> str | None:
    r"""The one letter that an answer such as `B`, `(b)`, `\textbf{(B)}`, `$B$` or `B. 42` names."""
    text = unicodedata.normalize("NFKC", text).strip()
    while inner := _WRAPPED.fullmatch(text):
        text = next(group for group in inner.groups() if group is not None).strip()
    found = _NAMED.fullmatch(text)
    if found is None or (found["rest"] and not found["behind"]):  # "a dog", "I think"
        return None
    return None if found["rest"] and _ANOTHER.match(found["rest"]) else found[1].upper()


def _listed(text: str) -> list[str]:
    """The letters A, B, ... of the last list of options in a question."""
    found: list[str] = []
    for letter in _LISTED.findall(text):
        if letter == "A":
            found = ["A"]
        elif found and ord(letter) == ord(found[-1]) + 1:
            found.append(letter)
    return found


class Exact(Task):
    """Short answers that must be the reference, but for case, spaces, punctuation and articles."""

    name = "exact"
    instruction = (
        "Please reason step by step, and put your final answer, as short as you can, within "
        r"\boxed{}."
    )

    def grade(self, answer: str | None, problem: Problem) -> float | None:
        """Whether it is the reference; "a || b" names several that are right."""
        wanted = {normalised(one) for one in problem.answer.split("||")}
        said = normalised(answer or "")
        return None if not said else said in wanted

    def equal(self, one: str, other: str) -> bool | None:
        """Whether both are the same once normalised."""
        return normalised(one) == normalised(other)


_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_TEXTED = re.compile(r"\A\\(?:text|mathrm|textbf|mathbf)\{(.*)\}\Z")
_MEANING = ("Sm", "Sc", "Mn", "Mc")  # signs of mathematics and of currencies, and marks on letters
_STOPS = re.compile(r"(?<!\d)[.,](?!\d)|[.,](?!\d)|_")


def normalised(text: str) -> str:
    """A short answer without case, punctuation, articles and spaces at its ends.

    Signs of arithmetic and a number's points and commas stay.
    """
    text = _TEXTED.sub(r"\1", text.strip())
    text = unicodedata.normalize("NFKC", text).replace("−", "-").casefold()
    said = (
        c if c.isalnum() or c in ".,+-*/=<>%^°" or unicodedata.category(c) in _MEANING else " "
        for c in text
    )
    kept = " ".join(_STOPS.sub(" ", "".join(said)).split())
    return " ".join(_ARTICLES.sub(" ", kept).split()) or kept


TASKS: dict[str, type[Task]] = {task.name: task for task in (Math, Choice, Exact)}
"""The built-in tasks by name."""


def parse_task(text: str, prompt: str = "default") -> Task:
    """The task that a user named.

    Args:
        text: a name of `TASKS`, a .py file with a subclass of `Task`, either with settings behind
            it: "choice:force=answer".
        prompt: one of `task.PROMPT_PRESETS`.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: no such task, or a setting that it does not take.
    """
    name, _, given = text.partition(":")
    parts = [part.partition("=") for part in given.split(",") if part]
    if bad := [key for key, sign, _ in parts if not sign]:
        raise ValueError(f"task is {text!r}: {bad} are no settings; write name:setting=value")
    settings: dict[str, Any] = {"name": name, **{key: value for key, _, value in parts}}
    if name.endswith(".py"):
        settings["file"] = name
    if prompt != "default":
        settings["prompt"] = prompt
    return open_task(settings)


def open_task(settings: Mapping[str, Any]) -> Task:
    """The task of settings: its name, and what was chosen (`Task.settings`).

    Raises:
        FileNotFoundError: its file is missing.
        ValueError: no such task, a setting that it does not take, or a file that cannot be run,
            does not define one task, or has changed.
    """
    chosen = dict(settings)
    name, file, hashed = chosen.pop("name"), chosen.pop("file", None), chosen.pop("sha256", None)
    if file is None and name not in TASKS:
        raise ValueError(
            f"task is {name!r}; it must be one of {', '.join(TASKS)}, or a .py file with a "
            "subclass of Task"
        )
    kind = TASKS[name] if file is None else _class_in(Path(file))
    allowed = set(inspect.signature(kind).parameters)
    if unknown := sorted(set(chosen) - allowed):
        raise ValueError(f"the task {name} takes the settings {sorted(allowed)}, not {unknown}")
    task = kind(**chosen)
    if hashed not in (None, kind.sha256):
        raise ValueError(
            f"the task {file} has changed since it was used here: take back the change, "
            "or label anew in another folder"
        )
    return task


def _class_in(path: Path) -> type[Task]:
    """The one subclass of `Task` in a Python file, which is run."""
    module = f"ospruner_task_{path.stem}"
    values = run_file(path, "task", "a subclass of Task", module).values()
    classes = [one for one in values if inspect.isclass(one) and issubclass(one, Task)]
    found = [one for one in classes if one.__module__ == module]
    if len(found) != 1:
        raise ValueError(f"{path} defines {len(found)} subclasses of Task; it must define one")
    kind: type[Task] = found[0]
    kind.file, kind.sha256 = str(path), hashlib.sha256(path.read_bytes()).hexdigest()
    return kind
