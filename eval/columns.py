"""The columns of a labelled trace: their types, what each holds, and which came later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
from datasets import Features, List, Value

__all__ = [
    "ADDED",
    "COLUMNS",
    "FEATURES",
    "PREFIX_COLUMNS",
    "PREFIX_FEATURES",
    "STEP_COLUMNS",
    "completed",
    "with_added_columns",
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
        "per step: mean natural log-probability of the forced answer's tokens at temperature 1; "
        "null where it has none",
    ),
    "forced_entropy": (
        List(Value("float32")),
        "per step: entropy in nats over the 20 likeliest first tokens of the forced answer",
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
    "ungraded_reasons",
)
"""Lists with one entry a labelled step."""

ADDED = (
    "forced_answer_ids",
    "forced_logprob",
    "forced_entropy",
    "ungraded_reasons",
    "natural_answer_ids",
)
"""Columns that the first label folders lack; they are null there, entry by entry."""


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


def completed(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of an earlier version with null in the columns of `ADDED` that it lacks."""
    nulls = [None] * len(row["step_ends"])
    empty = {name: nulls if name in STEP_COLUMNS else None for name in ADDED}
    return {**empty, **row}


def with_added_columns(table: pa.Table) -> pa.Table:
    """A table of labelled traces in today's columns: those of `ADDED` that it lacks are null.

    Every list per step keeps one entry a step.
    """
    steps = table.column("step_ends").combine_chunks()
    for name in ADDED:
        if name in table.column_names:
            continue
        kind = FEATURES.arrow_schema.field(name).type
        if name in STEP_COLUMNS:
            nulls = pa.nulls(len(steps.flatten()), kind.value_type)
            lengths = steps.value_lengths().to_numpy(zero_copy_only=False)
            offsets = pa.array([0, *lengths.cumsum().tolist()], pa.int32())
            column = pa.ListArray.from_arrays(offsets, nulls, type=kind)
        else:
            column = pa.nulls(len(table), kind)
        table = table.append_column(name, column)
    return table.select(list(FEATURES))
