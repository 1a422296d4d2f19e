"""A labelled trace: one row of a `datasets` dataset, its columns and their types.

Step i of a trace ends after L_i = `step_ends[i]` thinking tokens; there the answer
`forced_answers[i]` was forced and graded A_i = `forced_correct[i]`. The last step is the natural
end (or the token cap, `ended="cap"`), so that `step_ends[-1] == len(trace_ids)`. "Full" always
means the answer forced at the last step; the natural answer is kept beside it and never mixed in.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from datasets import Features, List, Value

from .table import TraceTable

__all__ = [
    "COLUMNS",
    "ENDED",
    "FEATURES",
    "MATH_TASK",
    "PREFIX_COLUMNS",
    "PREFIX_FEATURES",
    "STEP_COLUMNS",
    "LabelSettings",
    "TraceTable",
    "split_of",
    "validate_row",
]


COLUMNS: dict[str, tuple[Any, str]] = {
    "problem_id": (Value("string"), "the problem; splits and intervals go by it"),
    "sample_index": (Value("int32"), "which of the problem's sampled traces this is, from 0"),
    "family": (Value("string"), "kind or difficulty of the problem; empty where there is none"),
    "problem": (Value("string"), "the problem's text"),
    "answer": (Value("string"), "the reference answer, as it would stand in a box"),
    "prompt_ids": (List(Value("int32")), "token ids of the prompt"),
    "trace_ids": (
        List(Value("int32")),
        "token ids of the thinking as generated: no prompt, no end marker, nothing forced",
    ),
    "step_ends": (
        List(Value("int32")),
        "L_i, the thinking tokens through each labelled step; the last is the trace's length",
    ),
    "forced_answers": (
        List(Value("string")),
        "per step: what stood in the box of the answer forced there; empty where it never closed",
    ),
    "forced_correct": (
        List(Value("float32")),
        "A_i, per step: the forced answer's grade in [0, 1]; null where there is no verdict",
    ),
    "matches_final": (
        List(Value("bool")),
        "per step: equal to the answer forced at the last step; null where there is no verdict",
    ),
    "forced_answer_tokens": (
        List(Value("int32")),
        "per step: generated tokens of the forced answer, the closing one included",
    ),
    "forced_answer_ids": (
        List(List(Value("int32"))),
        "per step: the forced answer's token ids as generated, after everything that was forced",
    ),
    "forced_logprob": (
        List(Value("float32")),
        "per step: mean natural log-probability of the forced answer's tokens at temperature 1 "
        "(among the question's options, where it is one of these); null where it has none",
    ),
    "forced_entropy": (
        List(Value("float32")),
        "per step: entropy in nats over the 20 likeliest first tokens of the forced answer, or "
        "over the question's options",
    ),
    "forced_answer_entropy": (
        List(Value("float32")),
        "per step: the sum of the same over all tokens of the forced answer, that of its end "
        "included; null in labels made before it was kept",
    ),
    "option_probabilities": (
        List(List(Value("float32"))),
        "per step: probability of each of the question's options in its order, among them alone; "
        "null where the answer was decoded",
    ),
    "ungraded_reasons": (
        List(Value("string")),
        "per step: why there is no verdict (no answer, too long, unreadable, time limit, ...); "
        "null where there is one",
    ),
    "natural_answer": (
        Value("string"),
        "what stood in the last box after the trace's own end; empty where none did",
    ),
    "natural_correct": (Value("float32"), "its grade; null where there is no verdict"),
    "natural_answer_tokens": (Value("int32"), "tokens after the trace's own end"),
    "natural_answer_ids": (List(Value("int32")), "token ids after the trace's own end marker"),
    "ended": (
        Value("string"),
        "natural: the model ended its thinking; cap: it was cut at the token cap",
    ),
}
"""Type and meaning of each column."""

FEATURES = Features({name: kind for name, (kind, _) in COLUMNS.items()})

STEP_COLUMNS = (
    "step_ends",
    "forced_answers",
    "forced_correct",
    "matches_final",
    "forced_answer_tokens",
    "forced_answer_ids",
    "forced_logprob",
    "forced_entropy",
    "forced_answer_entropy",
    "option_probabilities",
    "ungraded_reasons",
)
"""Lists with one entry a labelled step."""

LATER_COLUMNS = ("forced_answer_entropy", "option_probabilities")
"""Those that older labels lack; they are read as nulls."""


PREFIX_COLUMNS: dict[str, tuple[Any, str]] = {
    "trace": (Value("int32"), "number of the trace's row in the default configuration, from 0"),
    "problem_id": (Value("string"), "as there"),
    "sample_index": (Value("int32"), "as there"),
    "family": (Value("string"), "as there"),
    "step": (Value("int32"), "which labelled step of the trace, from 1"),
    "steps": (Value("int32"), "labelled steps of the trace"),
    "end": (Value("int32"), "L_i: the prefix is the trace's first so many thinking tokens"),
    "fraction": (Value("float32"), "the same as a share of the trace's tokens"),
    "forced_answer": (Value("string"), "what stood in the box of the answer forced here"),
    "correct": (Value("float32"), "A_i in [0, 1]; null where there is no verdict"),
    "matches_final": (Value("bool"), "equal to the answer forced at the trace's last step"),
    "answer_tokens": (Value("int32"), "generated tokens of the forced answer"),
    "logprob": (Value("float32"), "their mean natural log-probability"),
    "entropy": (Value("float32"), "in nats, over the 20 likeliest first tokens"),
    "ungraded_reason": (Value("string"), "why there is no verdict"),
    "ended": (Value("string"), "how the trace ended: natural or cap"),
}
"""Type and meaning of the columns of the derived view with one row a labelled step."""

PREFIX_FEATURES = Features({name: kind for name, (kind, _) in PREFIX_COLUMNS.items()})


Ended = Literal["natural", "cap"]
ENDED: tuple[str, ...] = get_args(Ended)

_TEXT_COLUMNS = ("problem_id", "family", "problem", "answer", "natural_answer", "ended")


def validate_row(row: Mapping[str, Any]) -> None:
    """Checks that a row is a labelled trace, the relations between its columns included.

    Raises:
        TypeError, ValueError: naming the row, the column, the value, and what is allowed.
    """
    missing = [name for name in FEATURES if name not in row]
    unknown = [name for name in row if name not in FEATURES]
    if missing or unknown:
        raise ValueError(
            f"a labelled trace has exactly the columns of FEATURES; missing: {missing or 'none'}, "
            f"unknown: {unknown or 'none'}"
        )
    for name in _TEXT_COLUMNS:
        if not isinstance(row[name], str):
            raise TypeError(f"{name} is {row[name]!r}; it must be a text")
    if not row["problem_id"]:
        raise ValueError("problem_id is empty; splits and intervals go by it")
    where = f"trace {row['problem_id']!r} sample {row['sample_index']!r}"
    for name in ("sample_index", "natural_answer_tokens"):
        _check_integers(name, [row[name]], where)
    if not row["answer"].strip():
        raise ValueError(f"{where}: answer is empty; the forced answers cannot have been graded")
    if row["ended"] not in ENDED:
        raise ValueError(f"{where}: ended is {row['ended']!r}; it must be one of {ENDED}")
    for name in ("prompt_ids", "trace_ids", "step_ends", "forced_answer_tokens"):
        _check_integers(name, row[name], where)
        if not len(row[name]):
            raise ValueError(f"{where}: {name} is empty")
    _check_steps(row, where)
    _check_grades("natural_correct", [row["natural_correct"]], where)
    if row["natural_answer_ids"] is not None:
        _check_integers("natural_answer_ids", row["natural_answer_ids"], where)


def _check_steps(row: Mapping[str, Any], where: str) -> None:
    ends = row["step_ends"]
    for name in STEP_COLUMNS:
        if len(row[name]) != len(ends):
            raise ValueError(
                f"{where}: {name} has {len(row[name])} entries for {len(ends)} steps (step_ends)"
            )
    if ends[0] < 1 or any(b <= a for a, b in itertools.pairwise(ends)):
        raise ValueError(
            f"{where}: step_ends is {list(ends)}; it must be strictly increasing "
            "and start at 1 or more"
        )
    if ends[-1] != len(row["trace_ids"]):
        raise ValueError(
            f"{where}: step_ends ends at {ends[-1]} but trace_ids has {len(row['trace_ids'])} "
            "tokens; the last step is the trace's end"
        )
    if any(not isinstance(text, str) for text in row["forced_answers"]):
        raise TypeError(f"{where}: forced_answers holds something that is not a text")
    _check_grades("forced_correct", row["forced_correct"], where)
    if any(value is not None and not isinstance(value, bool) for value in row["matches_final"]):
        raise TypeError(f"{where}: matches_final holds something other than True, False, None")
    for name, low, high in (
        ("forced_logprob", -math.inf, 0.0),
        ("forced_entropy", 0.0, math.inf),
        ("forced_answer_entropy", 0.0, math.inf),
    ):
        for value in row[name]:
            if value is not None and not low <= value <= high:  # also refuses NaN
                raise ValueError(f"{where}: {name} holds {value}; it must lie in [{low}, {high}]")
    for count, ids in zip(row["forced_answer_tokens"], row["forced_answer_ids"], strict=True):
        if ids is None:
            continue
        _check_integers("forced_answer_ids", ids, where)
        if len(ids) != count:
            raise ValueError(
                f"{where}: forced_answer_ids has {len(ids)} ids where forced_answer_tokens "
                f"counts {count}"
            )
    for shares in row["option_probabilities"]:
        if shares is None:
            continue
        _check_grades("option_probabilities", shares, where)
        if None in shares or abs(math.fsum(shares) - 1) > 1e-3:
            raise ValueError(
                f"{where}: option_probabilities holds {shares}; they must be two or more and sum "
                "to 1"
            )
    for grade, reason in zip(row["forced_correct"], row["ungraded_reasons"], strict=True):
        if reason is not None and (grade is not None or not isinstance(reason, str) or not reason):
            raise ValueError(
                f"{where}: ungraded_reasons holds {reason!r} beside the grade {grade}; it must be "
                "a text beside null, or null"
            )


def _check_integers(name: str, values: Sequence[Any], where: str) -> None:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{where}: {name} holds {value!r}; it must hold integers")
        if not 0 <= value < 2**31:
            raise ValueError(f"{where}: {name} holds {value}; it must lie in 0 .. 2**31 - 1")


def _check_grades(name: str, values: Sequence[Any], where: str) -> None:
    for value in values:
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{where}: {name} holds {value!r}; it must hold numbers or None")
        if not 0.0 <= value <= 1.0:  # also refuses NaN
            raise ValueError(f"{where}: {name} holds {value}; it must lie in [0, 1]")


MATH_TASK: dict[str, Any] = {"name": "math"}
"""The settings of mathematics: the task of labels and policies that name none."""


@dataclass(frozen=True, kw_only=True)
class LabelSettings:
    """What a label run must share with another to be mixed with it: the manifest's `settings`.

    Attributes:
        base_model: name or path of the base that wrote the traces and the forced answers.
        base_revision: its revision; None where it has none (a folder).
        base_fingerprint: of its weights (`base_fingerprint` of the model files); None where they
            were not at hand.
        reasoning_format: the format's literals (`ReasoningFormat` as a dict).
        answer: "forced" (closing and box prefix are forced, also after a natural end) or "free"
            (only the closing).
        temperature: of the trace's sampling; forced answers are greedy.
        top_p: nucleus of the trace's sampling, in (0, 1].
        top_k: of the trace's sampling; 0 for none.
        seed: of the trace's sampling.
        samples_per_problem: traces sampled for each problem.
        max_new_tokens: the token cap of a trace.
        max_answer_tokens: the token cap of a forced answer.
        step_stride: label every k-th step, and always the last.
        imported_from: name of the file whose traces these are; "" where the base sampled them.
        task: how problems were asked, answered and graded (`problems.task.Task.settings`); labels
            without it are of mathematics.
        domains: of a mix of several runs' labels, the task of each by its domain's name, of which
            `task` is the first; empty for the labels of one run.
    """

    base_model: str
    base_revision: str | None = None
    base_fingerprint: str | None = None
    reasoning_format: dict[str, Any] = field(default_factory=dict)
    answer: Literal["forced", "free"] = "forced"
    temperature: float = 0.6
    top_p: float = 0.95
    top_k: int = 0
    seed: int = 0
    samples_per_problem: int = 1
    max_new_tokens: int = 15_000
    max_answer_tokens: int = 32
    step_stride: int = 1
    imported_from: str = ""
    task: dict[str, Any] = field(default_factory=lambda: dict(MATH_TASK))
    domains: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (isinstance(self.task, dict) and isinstance(self.task.get("name"), str)):
            raise ValueError(f"task is {self.task!r}; it must be settings with a name")
        if not self.base_model:
            raise ValueError("base_model is empty; give the base's name or path")
        if self.answer not in ("forced", "free"):
            raise ValueError(f"answer is {self.answer!r}; it must be 'forced' or 'free'")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature is {self.temperature!r}; it must be finite and >= 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p!r}; it must lie in (0, 1]")
        for name, value, least in (
            ("top_k", self.top_k, 0),
            ("seed", self.seed, 0),
            ("samples_per_problem", self.samples_per_problem, 1),
            ("max_new_tokens", self.max_new_tokens, 1),
            ("max_answer_tokens", self.max_answer_tokens, 1),
            ("step_stride", self.step_stride, 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} is {value!r}; it must be an integer")
            if value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON-ready values; mathematics is not named, nor a single domain."""
        values = dataclasses.asdict(self)
        if self.task == MATH_TASK:
            del values["task"]
        if not self.domains:
            del values["domains"]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LabelSettings:
        """The settings that `to_dict` wrote.

        Raises:
            ValueError: an unknown key (labels of a newer version, perhaps), or a missing one.
        """
        names = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(values) - names)
        missing = sorted(names - set(values) - {"task", "domains"})
        if unknown or missing:
            raise ValueError(
                f"label settings with unknown keys {unknown} and missing keys {missing}: "
                "were these labels written by another version of ospruner?"
            )
        return cls(**values)

    def save(self, path: str | Path) -> None:
        """Writes the settings as a JSON file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n", "utf-8")

    @classmethod
    def load(cls, path: str | Path) -> LabelSettings:
        """Reads what `save` wrote."""
        return cls.from_dict(json.loads(Path(path).read_text("utf-8")))

    def differences(self, other: LabelSettings) -> list[str]:
        """One line for each setting that differs, naming it and both values; [] where none does.

        An unknown fingerprint is no difference.
        """
        mine, theirs = dataclasses.asdict(self), dataclasses.asdict(other)
        if None in (self.base_fingerprint, other.base_fingerprint):
            del mine["base_fingerprint"]
        return [
            f"{name}: {mine[name]!r} here, {theirs[name]!r} there"
            for name in mine
            if mine[name] != theirs[name]
        ]


def split_of(problem_id: str, seed: int = 0, fractions: Mapping[str, float] | None = None) -> str:
    """The split a problem belongs to, by hash: stable when problems are added or reordered.

    Every trace of a problem falls in the same split.

    Args:
        problem_id: the problem.
        seed: another seed gives another partition.
        fractions: share of each split, in order, summing to one; by default train .8,
            validation .1, test .1.

    Raises:
        ValueError: the fractions are negative or do not sum to one.
    """
    shares = {"train": 0.8, "validation": 0.1, "test": 0.1} if fractions is None else fractions
    if any(share < 0 for share in shares.values()) or not math.isclose(sum(shares.values()), 1.0):
        raise ValueError(f"fractions is {dict(shares)}; shares must be >= 0 and sum to 1")
    digest = hashlib.blake2b(f"{seed}\x00{problem_id}".encode(), digest_size=8).digest()
    u = int.from_bytes(digest, "big") / 2**64
    reached = 0.0
    for name, share in shares.items():
        reached += share
        if u < reached:
            return name
    return [name for name, share in shares.items() if share > 0][-1]  # sum just below one
