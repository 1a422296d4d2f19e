"""The task `generated`: problems of reasoning-gym's generators, graded by their own scorers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ospruner.optional import needed

from ..grading.sandbox import check_sandbox, run_program
from .domains import normalised
from .problem import Problem
from .task import Grade, Task

__all__ = ["GYM", "Generated", "gym_rows"]

GYM = "reasoning-gym:"
"""What the name of a data set made by reasoning-gym begins with."""

PIP_LINE = "pip install reasoning-gym"
_NAMED = re.compile(r"(?P<families>\w+(?:\+\w+)*)(?::(?P<count>\d+))?(?::(?P<seed>\d+))?")
_SECONDS_TO_START, _SECONDS_EACH = 60.0, 5.0

_SCORER = """
import json, signal, sys, warnings
from unittest.mock import MagicMock
warnings.simplefilter("ignore")
# One of its packages draws, and matplotlib does not load where no file can be written.
for part in ("", ".pyplot", ".animation", ".collections"):
    sys.modules["matplotlib" + part] = MagicMock()
sys.modules |= {"mpl_toolkits": MagicMock(), "mpl_toolkits.mplot3d": MagicMock()}
import reasoning_gym
made, result = {}, []
def too_long(*ignored): raise TimeoutError
signal.signal(signal.SIGALRM, too_long)
for answer, reference in asked:
    entry, problem = json.loads(reference), None
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        key = entry["family"], entry["seed"], entry["size"]
        if key not in made:
            made[key] = reasoning_gym.create_dataset(key[0], seed=key[1], size=key[2])
        problem = made[key][entry["index"]]
        same = problem["answer"] == entry["answer"]
        grade = float(made[key].score_answer(answer, problem)) if same else None
        result.append(grade if same else "another version of reasoning-gym")
    except TimeoutError:
        result.append("time limit")
    except Exception as error:  # the generator's fault, or else the answer's
        why = "unreadable" if problem else "the problem cannot be made again: " + repr(error)
        result.append(why)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
"""


def gym_rows(text: str) -> Iterator[dict[str, Any]]:
    """Rows of reasoning-gym's generators, in turn, so that the first ones are of all families.

    Args:
        text: "reasoning-gym:FAMILY[+FAMILY...][:COUNT[:SEED]]": 100 of each with seed 0.

    Raises:
        MissingPackageError: reasoning-gym is not installed.
        ValueError: a name that is none, or no such family.
    """
    found = _NAMED.fullmatch(text.removeprefix(GYM))
    if found is None:
        raise ValueError(
            f"dataset is {text!r}; write {GYM}FAMILY+FAMILY:COUNT:SEED, such as "
            f"{GYM}leg_counting+chain_sum:200:1"
        )
    gym = needed("reasoning_gym", f"a dataset {GYM}...", PIP_LINE)
    count, seed = int(found["count"] or 100), int(found["seed"] or 0)
    made = {}
    for family in found["families"].split("+"):
        try:
            made[family] = gym.create_dataset(family, seed=seed, size=count)
        except ValueError as error:
            raise ValueError(
                f"reasoning-gym has no family {family!r} ({error}); its families are listed at "
                "https://github.com/open-thought/reasoning-gym/blob/main/GALLERY.md"
            ) from error
    for index in range(count):
        for family, dataset in made.items():
            question, answer = dataset[index]["question"], dataset[index]["answer"]
            reference = {"family": family, "seed": seed, "size": count, "index": index}
            yield {
                "id": f"{family}/{seed}/{index}",
                "problem": question,
                "answer": json.dumps(reference | {"answer": answer}),
                "family": family,
            }


class Generated(Task):
    """Problems of reasoning-gym, each graded by the scorer of its own family, in [0, 1].

    The reference (`Problem.answer`) says which problem it is, and what its generator holds to be
    right. Scorers run locked in (`sandbox`): some evaluate what the model wrote.
    """

    name = "generated"
    instruction = (
        "Please reason step by step, and put your final answer, in the form that is asked for, "
        r"within \boxed{}."
    )
    max_answer_tokens = 64

    def check(self) -> None:
        """Refuses to begin without reasoning-gym, or where its scorers cannot be locked in."""
        needed("reasoning_gym", "the task generated", PIP_LINE)
        check_sandbox()

    def read_row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """A row of `gym_rows`; others are refused.

        Raises:
            ValueError: the row's reference was not made by `gym_rows`.
        """
        try:
            known = {"family", "seed", "size", "index", "answer"} <= set(json.loads(row["answer"]))
        except (KeyError, TypeError, ValueError):
            known = False
        if not known:
            raise ValueError(
                "the task generated grades problems that reasoning-gym made here: give --dataset "
                f"{GYM}FAMILY, or another --task"
            )
        return row

    def grade(self, answer: str | None, problem: Problem) -> float | None:
        """What the family's scorer says."""
        return self.grade_many([(answer or "", problem)])[0].value

    def grade_many(self, asked: Sequence[tuple[str, Problem]]) -> list[Grade]:
        """See `Task.grade_many`; all in one child process."""
        self.check()
        pairs = list(dict.fromkeys((answer, p.answer) for answer, p in asked if answer))
        grades = dict(zip(pairs, _score(pairs), strict=True))
        none = Grade(None, "no answer")
        return [grades.get((answer, problem.answer), none) for answer, problem in asked]

    def equal(self, one: str, other: str) -> bool | None:
        """Whether both are the same short text."""
        return normalised(one) == normalised(other)


def _score(pairs: Sequence[tuple[str, str]]) -> list[Grade]:
    """Grades of (answer, reference); where one breaks the scorer, each in a child of its own."""
    if not pairs:
        return []
    ran = run_program(
        _SCORER,
        _SECONDS_TO_START + _SECONDS_EACH * len(pairs),
        memory_bytes=4 << 30,
        given={"asked": [list(pair) for pair in pairs], "seconds": _SECONDS_EACH},
        packages=True,
    )
    if ran.ended == "done":
        return [
            Grade(None, said) if isinstance(said, str) else Grade(min(1.0, max(0.0, said)))
            for said in ran.result
        ]
    if len(pairs) == 1:
        return [Grade(None, "crash" if ran.ended == "error" else ran.ended)]
    return [grade for pair in pairs for grade in _score([pair])]
