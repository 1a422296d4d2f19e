"""A trained policy's folder: what publishing needs is written when the policy is saved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ospruner.eval.replay import Outcome
from ospruner.hub_cards.facts import provenance
from ospruner.hub_cards.render import write_policy_card
from ospruner.hub_cards.results import Measurement, ResultsTable

from .flashthink import Verifier, tokens_read
from .packing import LabelledTraces
from .policies import Trainable
from .settings import Stage, TrainSettings

__all__ = ["save_policy_folder"]


def save_policy_folder(
    folder: Path,
    model: Trainable,
    tensors: Mapping[str, Tensor],
    settings: TrainSettings,
    stage: Stage,
    facts: Mapping[str, Any],
    validation: LabelledTraces,
    outcome: Outcome,
) -> None:
    """Saves a policy with its record, its results on the validation traces, and a card.

    FlashThink's has no card: it is a baseline for replay, and is not published.

    Args:
        folder: where to.
        model: the policy.
        tensors: its policy's state dict, gathered from all processes.
        settings: of the run.
        stage: that ends here.
        facts: what else the record shall hold, JSON values.
        validation: the validation traces.
        outcome: of the policy on them.
    """
    named = {f"policy.{name}": tensor for name, tensor in tensors.items()}
    if isinstance(model, Verifier):
        read = tokens_read(validation)
        tokens = float(read.max(axis=1).sum() / validation.table.num_steps.sum())
        costs = {"tokens_per_step": tokens, "seconds_per_step": facts["seconds_per_step"]}
        model.save(folder, named, costs)
    else:
        model.save_pretrained(folder, state_dict=named)
    provenance(
        folder,
        seed=settings.seed,
        base_model=model.config.base_model_name_or_path,
        base_revision=model.config.base_revision,
        details={**facts, "settings": settings.to_dict()},
    )
    if isinstance(model, Verifier):
        return
    table = validation.table
    rows = [
        ["full trace", table.full_correct.mean(), table.full_tokens.mean()],
        [stage.name, outcome.accuracy, outcome.mean_tokens],
    ]
    results = ResultsTable(
        f"Replay on {len(table)} validation traces of {len(table.problem_ids)} problems "
        "of the kind it was trained on; one training seed, no intervals. Printed by `ospruner "
        "train`.",
        ["method", "accuracy %", "thinking tokens"],
        [[name, f"{100 * accuracy:.1f}", f"{tokens:.0f}"] for name, accuracy, tokens in rows],
        [
            Measurement("validation traces", "validation", "accuracy", 100 * outcome.accuracy),
            Measurement("validation traces", "validation", "thinking tokens", outcome.mean_tokens),
        ],
    )
    write_policy_card(folder, name=stage.name, license=None, results=results)
