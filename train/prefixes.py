"""The derived view of labels with one row a labelled step: pointers and grades, never tokens.

The tokens of all prefixes would be quadratic in a trace's length; a row points to its trace, whose
first `end` thinking tokens are the prefix.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from datasets import Dataset

from ospruner.eval.columns import PREFIX_FEATURES

from .durable import sync_file, sync_folder
from .label_folder import data_shards, read_shard

__all__ = ["prefix_rows", "write_prefixes"]

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


def prefix_rows(traces: Dataset, first: int = 0) -> Dataset:
    """One row for each labelled step of the given traces.

    Args:
        traces: labelled traces, in the columns of today.
        first: number of the first of them in the whole dataset.
    """
    rows = []
    columns = ["problem_id", "sample_index", "family", "ended", *_COPIED]
    for number, trace in enumerate(traces.select_columns(columns), start=first):
        steps = len(trace["step_ends"])
        for step in range(steps):
            rows.append(
                {
                    "trace": number,
                    "problem_id": trace["problem_id"],
                    "sample_index": trace["sample_index"],
                    "family": trace["family"],
                    "step": step + 1,
                    "steps": steps,
                    "fraction": trace["step_ends"][step] / trace["step_ends"][-1],
                    "ended": trace["ended"],
                    **{new: trace[old][step] for old, new in _COPIED.items()},
                }
            )
    return Dataset.from_list(rows, features=PREFIX_FEATURES)


def write_prefixes(folder: Path) -> None:
    """Writes the view of every shard of a label folder that has none yet."""
    (folder / "prefixes").mkdir(exist_ok=True)
    first = 0
    for shard in data_shards(folder):
        path = folder / "prefixes" / shard.name
        if path.exists():
            first += pq.read_metadata(shard).num_rows
            continue
        traces = read_shard(shard)
        table: pa.Table = prefix_rows(traces, first).data.table
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            pq.write_table(table, file)
            sync_file(file)
        partial.replace(path)
        first += len(traces)
    sync_folder(folder / "prefixes")
