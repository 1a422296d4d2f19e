"""The labels of a run, and the model that made them: what is held out, and what is refused."""

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from modeling_ospruner.modeling_ospruner import fingerprint_of
from modeling_ospruner.policy_ospruner import is_quantised
from ospruner.bases import dtype_on
from ospruner.engines.opening import known_revision, load_tokenizer
from ospruner.engines.transformers.engine import LIKELIHOOD_TOLERANCE, mean_logprob
from ospruner.eval.problems.problem import shared_problems, text_key
from ospruner.eval.schema import OF_SAMPLING, LabelSettings
from ospruner.eval.table import BoolArray, IntArray, TraceTable

from .config import StopConfig
from .labels.labelling import Labeller, problem_of
from .labels.loading import Labels
from .objective import classifier_targets

HELD_OUT_PROBLEMS = 500
"""Problems that the paper keeps out of training, to choose the price on."""
MIN_TRACES = 8
_COMPARED_TRACES = 4
_NOT_THE_GRADER = (None, "no answer", "too long")  # a verdict, or why nothing could give one


def held_out_split(problems: Sequence[str], held_out: int | None, seed: int) -> BoolArray:
    """(N,) which of N traces are held out: all those of some problems, drawn with the seed.

    Args:
        problems: what tells them apart, of each trace.
        held_out: how many problems; None for 500 as in the paper, or a fifth of fewer than 2,500.
        seed: another seed chooses other problems.
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
    labels: Labels, others: Labels | None, config: StopConfig
) -> tuple[Dataset, Dataset]:
    """Training and validation traces: of each domain the first `limit` ones of the labels.

    Args:
        labels: to train on.
        others: of other problems, to validate on; None to hold problems of each domain out of
            `labels`.
        config: of the run.

    Raises:
        ValueError: the others were made otherwise, or are of other domains.
    """
    traces, parts = labels.traces, labels.parts or {"": labels}
    ends = np.cumsum([len(one.traces) for one in parts.values()])
    domains = [rows[: config.limit] for rows in np.split(np.arange(len(traces)), ends[:-1])]
    rows = np.concatenate(domains)
    if others is None:
        ids = np.array([text_key(text) for text in traces["problem"]])
        held = [held_out_split(ids[one].tolist(), config.held_out, config.seed) for one in domains]
        out = np.concatenate(held)
        return traces.select(rows[~out]), traces.select(rows[out])
    if config.held_out is not None:
        raise ValueError(
            f"held_out is {config.held_out}, but with validation labels no problem is held out: "
            "leave one of them out"
        )
    if set(others.parts) != set(labels.parts):
        raise ValueError(
            f"the validation labels are of the domains {sorted(others.parts) or 'of one task'},"
            f" the training labels of {sorted(labels.parts) or 'one task'}: give labels of the "
            "same domains"
        )
    for name, part in parts.items():
        theirs = others.parts.get(name, others).settings
        if differences := part.settings.differences(theirs, OF_SAMPLING):
            raise ValueError(
                f"the validation labels were made otherwise than the training labels "
                f"({'; '.join(differences)}): label both with the same settings"
            )
    ours = traces.select(rows)
    if shared := shared_problems(ours["problem"], others.traces["problem"]):
        raise ValueError(
            f"{len(shared)} problems are in both the training and the validation traces, such as "
            f"{shared[0]!r:.60}: split by problem"
        )
    return ours, others.traces


def refuse_ungraded(traces: Dataset, bound: float) -> None:
    """Refuses labels of a grader that was broken, or cannot read these answers."""
    reasons = Counter(why for row in traces["ungraded_reasons"] for why in row)
    steps = reasons.total()
    failed = {why: reasons[why] for why in reasons if why not in _NOT_THE_GRADER}
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


def load_labelled_base(
    base: str | None, labels: Labels, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model that made labels, and its tokenizer.

    Args:
        base: where it lies now; None for where it lay then.
        labels: the labels.
        device: where to put it; a quantised one stays where it was loaded to.

    Raises:
        ValueError: it is a policy, or another base (both are named): it asks in other tokens, its
            weights have another fingerprint or, where that is unknown, it finds the labels' forced
            answers more or less likely than their base did.
    """
    where, revision = place_of(base, labels)
    known_revision(where, revision)  # refuses a policy
    made_by, tokenizer = labels.settings, load_tokenizer(where, revision)
    elsewhere = where != made_by.base_model
    if elsewhere:  # a copy asks the first problem in the same tokens
        row, labeller = labels.traces[0], Labeller.of(tokenizer, made_by)
        if not Path(where).is_dir() or labeller.prompt(problem_of(row)) != row["prompt_ids"]:
            raise _not_by(where, made_by)
    dtype = dtype_on(device, where, revision)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        where, revision=revision, dtype=dtype
    )
    if not is_quantised(model):
        torch.nn.Module.to(model, device)
    found, theirs = fingerprint_of(model, revision), made_by.base_fingerprint
    if found is not None and theirs is not None:
        if found != theirs:
            said = f": its weights have the fingerprint {found}, theirs had {theirs}"
            raise _not_by(where, made_by, said)
    elif elsewhere or made_by.base_revision is None:
        difference = _answers_difference(model, tokenizer, labels)
        if difference > LIKELIHOOD_TOLERANCE:
            said = (
                ": it gives their forced answers log-probabilities that differ by "
                f"{difference:.2g} nats a token (tolerated: {LIKELIHOOD_TOLERANCE})"
            )
            raise _not_by(where, made_by, said)
    return model, tokenizer


def place_of(base: str | None, labels: Labels) -> tuple[str, str | None]:
    """Where the base lies now, and at which revision."""
    moved = base is not None and Path(base).is_dir()
    return base or labels.settings.base_model, None if moved else labels.settings.base_revision


def _not_by(where: str, made_by: LabelSettings, said: str = "") -> ValueError:
    return ValueError(
        f"the labels were made by {made_by.base_model!r} at revision {made_by.base_revision!r}, "
        f"not by {where!r}, and a policy is trained on the base that wrote its traces{said}. "
        "Leave out --base, give a local copy of that base, or label with this one"
    )


def _answers_difference(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, labels: Labels
) -> float:
    """Median difference, in nats a token, from the stored likelihood of forced answers.

    Of all steps of the shortest traces; 0 where the labels store none.
    """
    labeller = Labeller.of(tokenizer, labels.settings)
    suffix = labeller.fmt.forced_suffix(labels.settings.answer)
    shortest = np.argsort([len(ids) for ids in labels.traces["trace_ids"]])[:_COMPARED_TRACES]
    names = ("step_ends", "forced_answer_ids", "forced_logprob", "option_probabilities")
    differences = []
    for row in labels.traces.select(shortest):
        for end, answer, stored, shares in zip(*(row[name] for name in names), strict=True):
            if not answer or stored is None:
                continue
            ids = [*row["prompt_ids"], *row["trace_ids"][:end], *suffix]
            among = None if shares is None else labeller.options(problem_of(row))
            differences.append(abs(mean_logprob(model, ids, answer, among) - stored))
    return float(np.median(differences)) if differences else 0.0
