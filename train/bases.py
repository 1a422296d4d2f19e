"""The model that made labels: loaded, and refused where it is another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from modeling_ospruner.formats_ospruner import ReasoningFormat, TokenFormat
from modeling_ospruner.modeling_ospruner import fingerprint_of
from modeling_ospruner.policy_ospruner import is_quantised
from ospruner.engines.opening import known_revision, load_tokenizer
from ospruner.engines.transformers.engine import LIKELIHOOD_TOLERANCE, mean_logprob
from ospruner.eval.problems.problem import Problem

from .label_sets import Labels
from .labels.rows import Labeller

__all__ = ["labelled_tokenizer", "load_labelled_base"]


def load_labelled_base(
    base: str | None, labels: Labels, device: str | torch.device = "cpu"
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
    where, revision = _place(base, labels)
    known_revision(where, revision)  # refuses a policy
    tokenizer = labelled_tokenizer(base, labels)
    _refuse_other_base(where, tokenizer, labels)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        where, revision=revision, dtype="auto"
    )
    found, theirs = fingerprint_of(model), labels.settings.base_fingerprint
    if not is_quantised(model):
        torch.nn.Module.to(model, device)
    if found == theirs is not None:
        return model, tokenizer
    if found is not None and theirs is not None:
        raise ValueError(
            f"{_not_by(where, labels)}: its weights have the fingerprint {found}, theirs had "
            f"{theirs}. {_INSTEAD}"
        )
    pinned = labels.settings.base_revision is not None and where == labels.settings.base_model
    difference = 0.0 if pinned else _answers_difference(model, tokenizer, labels)
    if difference > LIKELIHOOD_TOLERANCE:
        raise ValueError(
            f"{_not_by(where, labels)}: it gives their forced answers log-probabilities that differ"
            f" by {difference:.2g} nats a token (tolerated: {LIKELIHOOD_TOLERANCE}). {_INSTEAD}"
        )
    return model, tokenizer


_COMPARED_TRACES = 4
_INSTEAD = "Leave out --base, give a local copy of that base, or label with this one"


def _not_by(where: str, labels: Labels) -> str:
    made_by = labels.settings
    return (
        f"the labels were made by {made_by.base_model!r} at revision {made_by.base_revision!r}, "
        f"not by {where!r}, and a policy is trained on the base that wrote its traces"
    )


def _answers_difference(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, labels: Labels
) -> float:
    """Median difference, in nats a token, from the stored likelihood of forced answers.

    Of all steps of the shortest traces; 0 where the labels store none.
    """
    fmt = TokenFormat.compile(
        ReasoningFormat.from_dict(labels.settings.reasoning_format), tokenizer
    )
    suffix = fmt.forced_suffix(labels.settings.answer)
    shortest = np.argsort([len(ids) for ids in labels.traces["trace_ids"]])[:_COMPARED_TRACES]
    differences = []
    for row in labels.traces.select(shortest):
        names = ("step_ends", "forced_answer_ids", "forced_logprob", "option_probabilities")
        problem = Problem(row["problem_id"], row["problem"], row["answer"], row["family"])
        for end, answer, stored, shares in zip(*(row[name] for name in names), strict=True):
            if not answer or stored is None:
                continue
            ids = [*row["prompt_ids"], *row["trace_ids"][:end], *suffix]
            among = None
            if shares is not None:
                among = Labeller(tokenizer, fmt, labels.settings).options(problem)
            differences.append(abs(mean_logprob(model, ids, answer, among) - stored))
    return float(np.median(differences)) if differences else 0.0


def labelled_tokenizer(base: str | None, labels: Labels) -> PreTrainedTokenizerBase:
    """The tokenizer of the model that made labels, where it now lies."""
    where, revision = _place(base, labels)
    return load_tokenizer(where, revision)


def _place(base: str | None, labels: Labels) -> tuple[str, str | None]:
    """Where the base lies now, and at which revision."""
    moved = base is not None and Path(base).is_dir()
    return base or labels.settings.base_model, None if moved else labels.settings.base_revision


def _refuse_other_base(where: str, tokenizer: PreTrainedTokenizerBase, labels: Labels) -> None:
    """A copy of the base may lie elsewhere; it must ask the first problem in the same tokens."""
    made_by = labels.settings.base_model
    if where == made_by:
        return
    row = labels.traces[0]
    problem = Problem(row["problem_id"], row["problem"], row["answer"], row["family"])
    reasoning_format = ReasoningFormat.from_dict(labels.settings.reasoning_format)
    fmt = TokenFormat.compile(reasoning_format, tokenizer)
    asked = Labeller(tokenizer, fmt, labels.settings).prompt(problem)
    if not Path(where).is_dir() or asked != row["prompt_ids"]:
        raise ValueError(f"{_not_by(where, labels)}. {_INSTEAD}")
