"""Online evaluation: real generation, method by method, batch by batch, resumable.

Every method sees the same problems with the same seeds, so that its rows are those of the full
trace up to their stops, and differences between methods are paired. A finished batch of one method
is a line of `online.jsonl`, fsynced; an interrupted run repeats at most one batch.

    transformers   `generate` with the hook: what users run, its wall-clock measured
    other engines  the engine samples the whole trace, the policy scores it in transformers, and
                   the answer is forked at the drawn stop: exact accuracy and length, no wall-clock
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ospruner.durable import append_durably

from ..intervals import Rule
from ..methods import FULL
from ..problems.problem import Problem
from ..problems.task import ProblemSet
from ..replay import Outcome
from .evaluation import Evaluation, refuse_other_settings
from .settings import OnlineSettings

__all__ = ["Batch", "Journal", "Method", "Runner", "SampleRow", "evaluate_online"]

JOURNAL = "online.jsonl"


@dataclass(frozen=True)
class Method:
    """What is evaluated: a name for tables, and what the runner does with it.

    Attributes:
        method: the family's name.
        parameter: what picks it from the family; None where there is none.
        parameter_name: what that is.
        how: the runner's own: a `PolicyUse`, a `StopRule`, or None for the full trace.
    """

    method: str
    parameter: float | None
    parameter_name: str
    how: Any

    @property
    def key(self) -> str:
        """Its name in the journal."""
        return f"{self.method} {self.parameter_name}={self.parameter}"


FULL_METHOD = Method(FULL, None, "", None)


@dataclass(frozen=True)
class Batch:
    """Problems generated together, each `samples` times, in the order of the rows.

    Attributes:
        first_problem: number of the first problem in the run.
        problems: the problems.
        samples: k.
    """

    first_problem: int
    problems: Sequence[Problem]
    samples: int

    @property
    def rows(self) -> list[tuple[Problem, int]]:
        """(problem, sample index) of each row."""
        return [(problem, k) for problem in self.problems for k in range(self.samples)]

    @property
    def first_sample_index(self) -> int:
        """The first row's index among all rows of the run."""
        return self.first_problem * self.samples


@dataclass(frozen=True)
class SampleRow:
    """What one row of one method came to.

    Attributes:
        tokens: thinking tokens.
        answer_tokens: generated tokens of the answer.
        answer: what stood in the box; "" for nothing.
        correct: the grade; no verdict counts as wrong.
        reason: "policy", "budget", "natural", or "cap".
        probe_tokens: what the rule spent on deciding.
        seconds: its share of the batch's time; NaN where not measured.
        natural_correct: grade of the answer after the trace's own end; NaN where there is none.
        flops: floating-point operations of all that was computed for it, by arithmetic.
    """

    tokens: int
    answer_tokens: int
    answer: str
    correct: float
    reason: str
    probe_tokens: int = 0
    seconds: float = float("nan")
    natural_correct: float = float("nan")
    flops: float = float("nan")


class Runner(Protocol):
    """Generates one batch."""

    def run(
        self, methods: Sequence[Method], batch: Batch
    ) -> Iterator[tuple[Method, list[SampleRow]]]:
        """Each method, as soon as it is done, with one row for each of `batch.rows`."""


class Journal:
    """Finished batches, one a line; the first line holds the run's settings.

    Args:
        path: the file; made where it does not exist.
        settings: of the run, JSON-ready.

    Raises:
        ValueError: the file is of a run with other settings, or damaged.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.done: dict[tuple[str, int], list[SampleRow]] = {}
        wanted = json.loads(json.dumps(settings))
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._append({"settings": wanted})
            return
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):  # a line torn by a kill
            with path.open("r+b") as file:
                file.truncate(len(whole))
        lines = whole.splitlines()
        try:
            records = [json.loads(line) for line in lines]
            stored = records[0]["settings"]
            for record in records[1:]:
                rows = [SampleRow(**_with_nan(row)) for row in record["rows"]]
                self.done[record["method"], record["batch"]] = rows
        except (IndexError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{path} is damaged ({type(error).__name__}: {error}): delete it to begin anew"
            ) from error
        if stored != wanted:
            names = sorted({*stored, *wanted})
            differences = [
                f"{name}: {stored.get(name)!r} there, {wanted.get(name)!r} asked for"
                for name in names
                if stored.get(name) != wanted.get(name)
            ]
            raise ValueError(
                f"{path} is of a run with other settings ({'; '.join(differences)}): use the same "
                "settings to continue it, or another --out"
            )

    def add(self, method: str, batch: int, rows: list[SampleRow]) -> None:
        """Makes a batch durable."""
        plain = [_without_nan(dataclasses.asdict(row)) for row in rows]
        self._append({"method": method, "batch": batch, "rows": plain})
        self.done[method, batch] = rows

    def _append(self, record: Mapping[str, Any]) -> None:
        append_durably(self.path, json.dumps(record, ensure_ascii=False).encode() + b"\n")


def evaluate_online(
    problem_set: ProblemSet,
    methods: Sequence[Method],
    runner: Runner,
    settings: OnlineSettings,
    about: Mapping[str, Any],
    out_dir: str | Path,
    progress: Callable[[str, int, int], None] = lambda phase, done, total: None,
) -> Evaluation:
    """Generates what is missing and returns the evaluation; methods may be added later.

    Args:
        problem_set: the problems and their task.
        methods: what to evaluate beside the full trace.
        runner: generates batches.
        settings: how.
        about: what else the run is of: "model", base, revision, format, engine. JSON-ready.
        out_dir: an empty folder, or that of an earlier run of the same settings.
        progress: called with phase "generate", in batches of one method.

    Raises:
        ValueError: the folder holds a run of other settings, or two methods have one name.
    """
    everything = [FULL_METHOD, *methods]
    keys = [method.key for method in everything]
    if len(set(keys)) != len(keys):
        raise ValueError(f"two methods have one name among {keys}; give each method once")
    identity = {
        **about,
        "benchmark": problem_set.name,
        "answer": settings.answer,
        "mode": "online",
        "prompt": problem_set.task.prompt,
        "task": problem_set.task.settings,
        "settings": settings.to_dict(),
        "problems": [problem.id for problem in problem_set.problems],
    }
    folder = Path(out_dir)
    refuse_other_settings(folder, identity)
    journal = Journal(folder / JOURNAL, identity)
    size = settings.batch_problems
    starts = range(0, len(problem_set.problems), size)
    done, total = 0, len(starts) * len(everything)
    for start in starts:
        batch = Batch(start, problem_set.problems[start : start + size], settings.samples)
        missing = [method for method in everything if (method.key, start) not in journal.done]
        done += len(everything) - len(missing)
        for method, rows in runner.run(missing, batch) if missing else ():
            journal.add(method.key, start, rows)
            done += 1
            progress("generate", done, total)
    rows_of = {key: [row for start in starts for row in journal.done[key, start]] for key in keys}
    return _evaluation(problem_set, everything, rows_of, settings, identity)


def _evaluation(
    problem_set: ProblemSet,
    methods: Sequence[Method],
    rows_of: Mapping[str, Sequence[SampleRow]],
    settings: OnlineSettings,
    identity: dict[str, Any],
) -> Evaluation:
    full = rows_of[FULL_METHOD.key]
    full_correct = np.array([row.correct for row in full])
    rules = []
    for method in methods:
        rows = rows_of[method.key]
        correct = np.array([row.correct for row in rows])
        outcome = Outcome(
            correct=correct,
            tokens=np.array([row.tokens for row in rows], np.float64),
            answer_tokens=np.array([row.answer_tokens for row in rows], np.float64),
            helped=correct * (1.0 - full_correct),
            harmed=(1.0 - correct) * full_correct,
            truncated=np.array([row.reason == "cap" for row in rows], np.float64),
            probe_tokens=np.array([row.probe_tokens for row in rows], np.float64),
            seconds=np.array([row.seconds for row in rows], np.float64),
            flops=np.array([row.flops for row in rows], np.float64),
        )
        rules.append(Rule(method.method, outcome, method.parameter, method.parameter_name))
    k = settings.samples
    return Evaluation(
        settings=identity,
        rules=rules,
        limits=[],
        problem_ids=[problem.id for problem in problem_set.problems],
        problem_index=np.repeat(np.arange(len(problem_set.problems)), k),
        families=[problem.family for problem in problem_set.problems for _ in range(k)],
        natural_correct=np.array([row.natural_correct for row in full]),
    )


def _without_nan(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and np.isnan(value) else value
        for name, value in row.items()
    }


def _with_nan(row: dict[str, Any]) -> dict[str, Any]:
    return {name: float("nan") if value is None else value for name, value in row.items()}
