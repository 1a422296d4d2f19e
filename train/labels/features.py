"""A labelled trace: one row of a `datasets` dataset, its columns, their types, and a view of it.

Step i of a trace ends after L_i = `step_ends[i]` thinking tokens; there the answer
`forced_answers[i]` was forced and graded A_i = `forced_correct[i]`. The last step is the natural
end (or the token cap, `ended="cap"`), so that `step_ends[-1] == len(trace_ids)`. "Full" always
means the answer forced at the last step; the natural answer is kept beside it and never mixed in.
"""

import itertools
import math
import re
import reprlib
from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
from datasets import Features, List, Value


def columns_of(table: str) -> dict[str, tuple[Any, str]]:
    """Type and meaning of each column; "[]" is a list, and a line that is indented goes on."""
    found: dict[str, tuple[Any, str]] = {}
    for line in re.sub(r"\n +", " ", table).split("\n"):
        name, kind, meaning = line.split(None, 2)
        base, *lists = kind.split("[")
        found[name] = reduce(lambda inner, _: List(inner), lists, Value(base)), meaning
    return found


COLUMNS = columns_of(
    """\
problem_id            string    the problem; splits and intervals go by it
sample_index          int32     which of the problem's sampled traces this is, from 0
family                string    kind or difficulty of the problem; empty where there is none
problem               string    the problem's text
answer                string    the reference answer, as it would stand in a box
prompt_ids            int32[]   token ids of the prompt
trace_ids             int32[]   token ids of the thinking as generated: no prompt, no end marker,
                                nothing forced
step_ends             int32[]   L_i, the thinking tokens through each labelled step; the last is the
                                trace's length
forced_answers        string[]  per step: what stood in the box of the answer forced there; empty
                                where it never closed
forced_correct        float32[] A_i, per step: the forced answer's grade in [0, 1]; null where there
                                is no verdict
matches_final         bool[]    per step: equal to the answer forced at the last step; null where
                                there is no verdict
forced_answer_tokens  int32[]   per step: generated tokens of the forced answer, the closing one
                                included
forced_answer_ids     int32[][] per step: the forced answer's token ids as generated, after
                                everything that was forced
forced_logprob        float32[] per step: mean natural log-probability of the forced answer's tokens
                                at temperature 1 (among the question's options, where it is one of
                                these); null where it has none
forced_entropy        float32[] per step: entropy in nats over the 20 likeliest first tokens of the
                                forced answer, or over the question's options
forced_answer_entropy float32[] per step: the sum of the same over all tokens of the forced answer,
                                that of its end included; null in labels made before it was kept
option_probabilities  float32[][] per step: probability of each of the question's options in its
                                  order, among them alone; null where the answer was decoded
ungraded_reasons      string[]  per step: why there is no verdict (no answer, too long, unreadable,
                                time limit, ...); null where there is one
natural_answer        string    what stood in the last box after the trace's own end; empty where
                                none did
natural_correct       float32   its grade; null where there is no verdict
natural_answer_tokens int32     tokens after the trace's own end
natural_answer_ids    int32[]   token ids after the trace's own end marker
ended                 string    natural: the model ended its thinking; cap: it was cut at the token
                                cap"""
)
"""Type and meaning of each column."""

PREFIX_COLUMNS = columns_of(
    """\
trace                 int32     number of the trace's row in the default configuration, from 0
problem_id            string    as there
sample_index          int32     as there
family                string    as there
step                  int32     which labelled step of the trace, from 1
steps                 int32     labelled steps of the trace
end                   int32     L_i: the prefix is the trace's first so many thinking tokens
fraction              float32   the same as a share of the trace's tokens
forced_answer         string    what stood in the box of the answer forced here
correct               float32   A_i in [0, 1]; null where there is no verdict
matches_final         bool      equal to the answer forced at the trace's last step
answer_tokens         int32     generated tokens of the forced answer
logprob               float32   their mean natural log-probability
entropy               float32   in nats, over the 20 likeliest first tokens
ungraded_reason       string    why there is no verdict
ended                 string    how the trace ended: natural or cap"""
)
"""Type and meaning of the columns of the derived view with one row a labelled step."""

FEATURES = Features({name: kind for name, (kind, _) in COLUMNS.items()})
PREFIX_FEATURES = Features({name: kind for name, (kind, _) in PREFIX_COLUMNS.items()})

_COPIED = {  # column of a trace's list -> column of a prefix
    "step_ends": "end",
    "forced_answers": "forced_answer",
    "forced_correct": "correct",
    "matches_final": "matches_final",
    "forced_answer_tokens": "answer_tokens",
    "forced_logprob": "logprob",
    "forced_entropy": "entropy",
    "ungraded_reasons": "ungraded_reason",
}

LATER_COLUMNS = ("forced_answer_entropy", "option_probabilities")  # nulls where labels are older
# Lists with one entry a labelled step, and those of them in which no step is null.
_OF_STEPS = ("step_ends", *(name for name, (_, text) in COLUMNS.items() if "per step" in text))
_WHOLE_STEPS = ("step_ends", "forced_answers", "forced_answer_tokens")
_NULLABLE = ("natural_correct", "natural_answer_ids")  # as a whole
_ENDED = ("natural", "cap")
_RANGES: dict[str, tuple[float, float]] = {
    **{name: (0, math.inf) for name, (kind, _) in COLUMNS.items() if "int32" in repr(kind)},
    **dict.fromkeys(("forced_correct", "natural_correct", "option_probabilities"), (0.0, 1.0)),
    **dict.fromkeys(("forced_entropy", "forced_answer_entropy"), (0.0, math.inf)),
    "forced_logprob": (-math.inf, 0.0),
}


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
    where = f"trace {row['problem_id']!r} sample {row['sample_index']!r}"
    for column in FEATURES.arrow_schema:
        kind = f"{column.type} ({COLUMNS[column.name][1].partition(':')[0]})"
        what = f"{where}: {column.name} is {reprlib.repr(row[column.name])}; it must be {kind}"
        try:
            found = pa.array([row[column.name]], column.type)
        except (OverflowError, ValueError, TypeError) as error:
            raise TypeError(f"{what}: {error}") from error
        if found.null_count and column.name not in _NULLABLE:
            raise TypeError(what)
    if fault := next(_faults(row), None):
        raise ValueError(f"{where}: {fault}")


def _flat(value: Any) -> Iterator[Any]:
    """A column's values that are not null, out of their lists."""
    if isinstance(value, list | tuple):
        yield from itertools.chain.from_iterable(map(_flat, value))
    elif value is not None:
        yield value


def _faults(row: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong between and within the columns of a row, whose types are right."""
    ends = row["step_ends"]
    if not row["problem_id"]:
        yield "problem_id is empty; splits and intervals go by it"
    if not row["answer"].strip():
        yield "answer is empty; the forced answers cannot have been graded"
    if row["ended"] not in _ENDED:
        yield f"ended is {row['ended']!r}; it must be one of {_ENDED}"
    for name in ("prompt_ids", "trace_ids", "step_ends"):
        if not len(row[name]):
            yield f"{name} is empty"
    for name in _OF_STEPS:
        if len(row[name]) != len(ends):
            yield f"{name} has {len(row[name])} entries for {len(ends)} steps (step_ends)"
        if name in _WHOLE_STEPS and None in row[name]:
            yield f"{name} holds None"
    for name, (low, high) in _RANGES.items():
        for value in _flat(row[name]):
            if isinstance(low, int) and not isinstance(value, int):  # Arrow would cut a fraction
                yield f"{name} holds {value}; it must hold integers"
            if not low <= value <= high:  # also refuses NaN
                yield f"{name} holds {value}; it must lie in [{low:g}, {high:g}]"
    if ends[0] < 1 or any(b <= a for a, b in itertools.pairwise(ends)):
        yield f"step_ends is {list(ends)}; it must be strictly increasing and start at 1 or more"
    if ends[-1] != len(row["trace_ids"]):
        yield (
            f"step_ends ends at {ends[-1]} but trace_ids has {len(row['trace_ids'])} tokens; the "
            "last step is the trace's end"
        )
    for count, ids in zip(row["forced_answer_tokens"], row["forced_answer_ids"], strict=True):
        if ids is not None and len(ids) != count:
            yield f"forced_answer_ids has {len(ids)} ids where forced_answer_tokens counts {count}"
    for shares in row["option_probabilities"]:
        if shares is not None and (None in shares or abs(math.fsum(shares) - 1) > 1e-3):
            yield f"option_probabilities holds {shares}; they must be two or more and sum to 1"
    for grade, reason in zip(row["forced_correct"], row["ungraded_reasons"], strict=True):
        if reason is not None and (grade is not None or not reason):
            yield (
                f"ungraded_reasons holds {reason!r} beside the grade {grade}; it must be a text "
                "beside null, or null"
            )


def prefix_rows(traces: pa.Table, first: int = 0) -> pa.Table:
    """The view of traces of which the first has this number in the whole data set.

    Pointers and grades, never tokens, which would be quadratic.
    """
    own = ("problem_id", "sample_index", "family", "ended")
    rows = [
        {
            "trace": number,
            **{name: trace[name] for name in own},
            "step": step + 1,
            "steps": len(trace["step_ends"]),
            "fraction": end / trace["step_ends"][-1],
            **{new: trace[old][step] for old, new in _COPIED.items()},
        }
        for number, trace in enumerate(traces.select([*own, *_COPIED]).to_pylist(), start=first)
        for step, end in enumerate(trace["step_ends"])
    ]
    return pa.Table.from_pylist(rows, PREFIX_FEATURES.arrow_schema)
