"""The labels of a run: which are held out, and which are refused."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
from datasets import Dataset

from ospruner.eval.problems.problem import shared_problems, text_key
from ospruner.eval.schema import LabelSettings
from ospruner.eval.table import BoolArray, IntArray, TraceTable

from .labels.loading import Labels
from .objective import classifier_targets

HELD_OUT_PROBLEMS = 500
"""Problems that the paper keeps out of training, to choose the price on."""
MIN_TRACES = 8
_BY_THE_MODEL = ("no answer", "too long")  # why an answer has no verdict, whatever grades it


def held_out_split(problems: Sequence[str], held_out: int | None, seed: int) -> BoolArray:
    """(N,) which of N traces are held out: all those of some problems, drawn with the seed.

    Args:
        problems: what tells them apart, of each trace.
        held_out: how many problems; None for 500 as in the paper, or a fifth of fewer than 2,500.
        seed: another seed chooses other problems.

    Raises:
        ValueError: no problem would be left on one side.
    """
    among = sorted(set(problems))
    count = min(HELD_OUT_PROBLEMS, len(among) // 5) if held_out is None else held_out
    if not 1 <= count < len(among):
        raise ValueError(
            f"held_out is {count}, of {len(among)} problems: at least one must be held out and "
            "one left to train on. Label more problems, or give a validation set"
        )
    return np.isin(problems, random.Random(seed).sample(among, count))


def split_labels(
    labels: Labels, others: Labels | None, held_out: int | None, seed: int, limit: int | None
) -> tuple[Dataset, Dataset]:
    """Training and validation traces.

    Args:
        labels: to train on.
        others: of other problems, to validate on; None to hold problems out of `labels`.
        held_out: how many problems of each domain; see `held_out_split`.
        seed: which problems.
        limit: only the first so many traces of each domain.

    Raises:
        ValueError: the others were made otherwise, or are of other domains.
    """
    traces = labels.traces
    ends = np.cumsum([len(one.traces) for one in (labels.parts or {"": labels}).values()])
    domains = [rows[:limit] for rows in np.split(np.arange(len(traces)), ends[:-1])]
    if others is None:
        ids = np.array([text_key(text) for text in traces["problem"]])
        held = [held_out_split(ids[rows].tolist(), held_out, seed) for rows in domains]
        pairs = list(zip(domains, held, strict=True))
        training = np.concatenate([rows[~one] for rows, one in pairs])
        return traces.select(training), traces.select(
            np.concatenate([rows[one] for rows, one in pairs])
        )
    if held_out is not None:
        raise ValueError(
            f"held_out is {held_out}, but with validation labels no problem is held out: leave one "
            "of them out"
        )
    if set(others.parts) != set(labels.parts):
        raise ValueError(
            f"the validation labels are of the domains {sorted(others.parts) or 'of one task'},"
            f" the training labels of {sorted(labels.parts) or 'one task'}: give labels of the "
            "same domains"
        )
    for name, part in (labels.parts or {"": labels}).items():
        _refuse_other_settings(part.settings, others.parts.get(name, others).settings)
    found = traces.select(np.concatenate(domains)), others.traces
    if shared := shared_problems(found[0]["problem"], found[1]["problem"]):
        raise ValueError(
            f"{len(shared)} problems are in both the training and the validation traces, such as "
            f"{shared[0]!r:.60}: split by problem"
        )
    return found


def _refuse_other_settings(ours: LabelSettings, theirs: LabelSettings) -> None:
    """Validation may be sampled with another seed, day, and more often; all else must agree."""
    if differences := ours.differences(theirs, ("seed", "samples_per_problem", "prompt_date")):
        raise ValueError(
            f"the validation labels were made otherwise than the training labels "
            f"({'; '.join(differences)}): label both with the same settings"
        )


def refuse_ungraded(traces: Dataset, bound: float) -> None:
    """Refuses labels of a grader that was broken, or cannot read these answers."""
    reasons = Counter(why for row in traces["ungraded_reasons"] for why in row)
    steps = reasons.total()
    failed = {why: n for why, n in reasons.items() if why is not None and why not in _BY_THE_MODEL}
    share = sum(failed.values()) / steps
    if share > bound:
        counts = ", ".join(f"{why}: {n}" for why, n in sorted(failed.items()))
        raise ValueError(
            f"{share:.1%} of the {steps} forced answers could not be graded ({counts}), and at most"
            f" {bound:.1%} may be: they would be trained on as wrong. Grade them again (`ospruner "
            "labels regrade FOLDER`, which tests the grader first), or raise max_ungraded"
        )


def usable_rows(table: TraceTable, method: str) -> IntArray:
    """The traces that are trained on: those that ended by themselves.

    Raises:
        ValueError: too few of them, or labels that are all equal.
    """
    rows = np.flatnonzero(~table.capped)
    if len(rows) < MIN_TRACES:
        raise ValueError(
            f"there are {len(rows)} training traces that ended naturally "
            f"({int(table.capped.sum())} were cut at the cap); training needs at least "
            f"{MIN_TRACES}: label more problems"
        )
    targets = classifier_targets(method, table.correct, table.matches_final, table.mask)
    name = "forced_correct" if targets is table.correct else "matches_final"
    values = targets[rows][table.mask[rows]]
    if (values == values[0]).all():
        raise ValueError(
            f"{name} makes the label {values[0]:g} at every step of all {len(rows)} training "
            "traces: there is nothing to learn from labels that are all equal (check the grading, "
            "or choose problems that the base sometimes solves)"
        )
    return rows
