"""Policies and rules on stored labels: what `ospruner eval replay` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.reasoning_format import ReasoningFormat, TokenFormat
from ospruner.eval.evaluation import Evaluation, trace_hash
from ospruner.eval.limits import (
    best_fixed_budget,
    best_fixed_step,
    hindsight_oracle,
    hindsight_oracle_no_loss,
)
from ospruner.eval.picture import FULL, ORACLE
from ospruner.eval.policies import PolicyUse, parse_policies, refuse_other_base
from ospruner.eval.replay import replay, replay_budget, replay_full, replay_step
from ospruner.eval.results import Rule
from ospruner.eval.rules import parse_rule, replay_rule
from ospruner.eval.schema import LabelSettings
from ospruner.eval.table import TraceTable
from ospruner.eval.viewer import trace_views

from .flashthink_replay import replay_verifiers
from .from_labels import Labels, load_labels
from .packing import LabelledTraces
from .policies import predict
from .progress import Progress, silent

__all__ = ["replay_labels"]


def replay_labels(
    labels: str | Path,
    policies: Sequence[str] = (),
    rules: Sequence[str] = (),
    *,
    base: str | None = None,
    validation: str | Path | None = None,
    model: str | None = None,
    benchmark: str | None = None,
    limit: int | None = None,
    viewed: int = 40,
    progress: Progress = silent,
) -> Evaluation:
    """Replays policies and rules on labelled traces; nothing is generated.

    Args:
        labels: folder or Hub id of the labelled traces.
        policies: see `eval.policies.parse_policies`.
        rules: see `eval.rules.parse_rule`.
        base: the model, where it now lies elsewhere than when it was labelled.
        validation: other labels of the same settings, on which the best fixed budget and step are
            chosen; None leaves these two limits out.
        model: what tables call the base; None for the last part of its name.
        benchmark: what tables call the problems; None for the labels' own name.
        limit: only the first so many traces.
        viewed: how many traces to keep for the report's viewer.
        progress: called with phases "trunk" (traces) and "policies".

    Raises:
        ValueError: labels without grades, a policy for another base or format, validation labels
            of other settings, or a bad rule.
    """
    ours = load_labels(labels)
    traces = ours.traces
    if limit is not None:
        if limit < 1:
            raise ValueError(f"limit is {limit}; it must be at least 1")
        traces = traces.take(min(limit, len(traces)))
    table = TraceTable.from_dataset(traces)
    named = [parse_rule(text) for text in rules]
    uses = parse_policies(policies)
    judges = [use for use in uses if use.config.method == "flashthink"]
    uses = [use for use in uses if use.config.method != "flashthink"]
    for use in uses:
        refuse_other_base(
            use,
            ours.settings.base_model,
            ours.settings.base_revision,
            ours.settings.reasoning_format,
        )
    probabilities = _probabilities(uses, traces, ours.settings, base, progress)
    found = [Rule(FULL, replay_full(table))]
    for use, pi in zip(uses, probabilities, strict=True):
        outcome = replay(table, pi, use.mode, use.threshold)
        found.append(Rule(use.method, outcome, use.parameter, use.parameter_name))
    tokenizer = AutoTokenizer.from_pretrained(
        base or ours.settings.base_model,
        revision=None if base else ours.settings.base_revision,
    )
    fmt = TokenFormat.compile(ReasoningFormat.from_dict(ours.settings.reasoning_format), tokenizer)
    suffix_tokens = len(fmt.forced_suffix(ours.settings.answer))
    judged = replay_verifiers(judges, traces, table, tokenizer, ours.settings, progress)
    found += judged[0]
    probabilities += judged[1]

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids))

    for rule in named:
        outcome = replay_rule(traces, table, rule.rule, suffix_tokens, decode)
        found.append(Rule(rule.method, outcome, rule.parameter, rule.parameter_name))
    settings: dict[str, Any] = {
        "model": model or Path(ours.settings.base_model).name,
        "benchmark": benchmark or Path(str(labels)).name,
        "answer": ours.settings.answer,
        "mode": "replay",
        "labels": trace_hash(table),
        "label_settings": ours.settings.to_dict(),
    }
    return Evaluation.of_table(
        table,
        settings,
        found,
        _limits(table, ours, validation),
        trace_views(traces, table, found, dict(enumerate(probabilities, 1)), tokenizer, viewed),
    )


def _limits(table: TraceTable, ours: Labels, validation: str | Path | None) -> list[Rule]:
    limits = [
        Rule(ORACLE, hindsight_oracle(table)),
        Rule(f"{ORACLE}, no loss", hindsight_oracle_no_loss(table)),
    ]
    if validation is None:
        return limits
    theirs = load_labels(validation)
    free = {"seed", "samples_per_problem"}
    lines = ours.settings.differences(theirs.settings)
    if differences := [line for line in lines if line.partition(":")[0] not in free]:
        raise ValueError(
            f"the validation labels were made otherwise ({'; '.join(differences)}): "
            "label both with the same settings"
        )
    chosen_on = TraceTable.from_dataset(theirs.traces)
    if shared := set(chosen_on.problem_ids) & set(table.problem_ids):
        raise ValueError(
            f"{len(shared)} problems, such as {min(shared)!r}, are in the labels and in the "
            "validation labels: what is chosen on a problem must not be measured on it"
        )
    budget, step = best_fixed_budget(chosen_on, "aes"), best_fixed_step(chosen_on, "aes")
    return [
        Rule("best fixed budget", replay_budget(table, budget), float(budget), "tokens"),
        Rule("best fixed step", replay_step(table, step), float(step), "step"),
        *limits,
    ]


def _probabilities(
    uses: Sequence[PolicyUse],
    traces: Dataset,
    settings: LabelSettings,
    base: str | None,
    progress: Progress,
) -> list[npt.NDArray[np.float32]]:
    """Stop probabilities (N, T) for each use; a policy used at several thresholds runs once."""
    if not uses:
        return []
    where = base or settings.base_model
    model = AutoModelForCausalLM.from_pretrained(
        where, revision=None if base else settings.base_revision, dtype="auto"
    )
    labelled = LabelledTraces.from_dataset(traces)
    by_path: dict[str, npt.NDArray[np.float32]] = {}
    paths = list(dict.fromkeys(use.path for use in uses))
    for number, path in enumerate(paths):
        progress("policies", number, len(paths))
        by_path[path] = predict(OSPrunerForCausalLM.from_base(model, path), labelled)
    progress("policies", len(paths), len(paths))
    return [by_path[use.path] for use in uses]
