"""The model that made labels: loaded, and refused where it is another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from modeling_ospruner.modeling_ospruner import fingerprint_of
from modeling_ospruner.policy_ospruner import is_quantised
from ospruner.engines.opening import known_revision, load_tokenizer
from ospruner.engines.transformers.engine import LIKELIHOOD_TOLERANCE, mean_logprob

from .labels.labelling import Labeller, problem_of
from .labels.loading import Labels

_COMPARED_TRACES = 4


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
    made_by, tokenizer = labels.settings, load_tokenizer(where, revision)
    if where != made_by.base_model and not (
        Path(where).is_dir() and _asks_alike(tokenizer, labels)
    ):
        raise _not_by(where, labels, "")
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        where, revision=revision, dtype="auto"
    )
    if not is_quantised(model):
        torch.nn.Module.to(model, device)
    found, theirs = fingerprint_of(model, revision), made_by.base_fingerprint
    if found is not None and theirs is not None:
        if found != theirs:
            said = f": its weights have the fingerprint {found}, theirs had {theirs}"
            raise _not_by(where, labels, said)
    elif made_by.base_revision is None or where != made_by.base_model:
        difference = _answers_difference(model, tokenizer, labels)
        if difference > LIKELIHOOD_TOLERANCE:
            raise _not_by(
                where,
                labels,
                ": it gives their forced answers log-probabilities that differ by "
                f"{difference:.2g} nats a token (tolerated: {LIKELIHOOD_TOLERANCE})",
            )
    return model, tokenizer


def labelled_tokenizer(base: str | None, labels: Labels) -> PreTrainedTokenizerBase:
    """The tokenizer of the model that made labels, where it now lies."""
    return load_tokenizer(*_place(base, labels))


def _place(base: str | None, labels: Labels) -> tuple[str, str | None]:
    """Where the base lies now, and at which revision."""
    moved = base is not None and Path(base).is_dir()
    return base or labels.settings.base_model, None if moved else labels.settings.base_revision


def _not_by(where: str, labels: Labels, said: str) -> ValueError:
    made_by = labels.settings
    return ValueError(
        f"the labels were made by {made_by.base_model!r} at revision {made_by.base_revision!r}, "
        f"not by {where!r}, and a policy is trained on the base that wrote its traces{said}. "
        "Leave out --base, give a local copy of that base, or label with this one"
    )


def _asks_alike(tokenizer: PreTrainedTokenizerBase, labels: Labels) -> bool:
    """Whether a copy of the base that lies elsewhere asks the first problem in the same tokens."""
    row = labels.traces[0]
    labeller = Labeller.of(tokenizer, labels.settings)
    return bool(labeller.prompt(problem_of(row)) == row["prompt_ids"])


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
