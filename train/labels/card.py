"""The card of a label folder, and the view that it offers beside the traces.

`datasets` knows a local folder by its last name and its card's configurations, not by its data:
the hash of the data in each of them makes it read what is on the disk now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
from datasets import Features
from huggingface_hub import DatasetCardData

from ospruner.eval.results import markdown_table

from .features import COLUMNS, columns_of

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

PREFIX_FEATURES = Features({name: kind for name, (kind, _) in PREFIX_COLUMNS.items()})

_TEXT = """
# Labelled traces

One row is one reasoning trace with the answer forced, and graded, at the end of each of its steps.
`load_dataset(FOLDER)` gives the traces; `load_dataset(FOLDER, "prefixes")` one row a labelled step,
derived from them: pointers and grades, no tokens. Settings, counts and token costs stand in
`manifest.json`.
"""


def card_configs(splits: Mapping[str, Mapping[str, tuple[Sequence[str], str]]]) -> list[Any]:
    """The `configs` of a card's YAML.

    Args:
        splits: by configuration ("default", "prefixes") and split: the files, and a hash of them.
    """
    return [
        {
            "config_name": name,
            "description": " ".join(f"{split}: {hashed}" for split, (_, hashed) in found.items()),
            **({"default": True} if name == "default" else {}),
            "data_files": [
                {"split": split, "path": list(files)} for split, (files, _) in found.items()
            ],
        }
        for name, found in splits.items()
    ]


def folder_card(files: Mapping[str, tuple[Sequence[str], str]]) -> str:
    """The README of a label folder: what `load_dataset` reads, and what each column holds.

    Args:
        files: by configuration its files and a hash of them; one without files is left out.
    """
    configs = card_configs({name: {"train": found} for name, found in files.items() if found[0]})
    head = DatasetCardData(configs=configs).to_yaml() if configs else ""
    parts = [f"---\n{head}\n---{_TEXT.rstrip()}"]
    for title, columns in (("Columns", COLUMNS), ("Columns of `prefixes`", PREFIX_COLUMNS)):
        rows = [[f"`{name}`", f"`{kind}`", what] for name, (kind, what) in columns.items()]
        parts += [f"## {title}", markdown_table(["column", "type", "what it holds"], rows)]
    return "\n\n".join(parts) + "\n"


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


def prefix_rows(traces: pa.Table, first: int = 0) -> pa.Table:
    """One row for each labelled step: pointers and grades, never tokens, which would be quadratic.

    Args:
        traces: labelled ones.
        first: number of the first of them in the whole data set.
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
