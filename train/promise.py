"""A policy's promise about accuracy, from labels of their own: `ospruner calibrate`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from modeling_ospruner.common.durable import replace_file
from modeling_ospruner.common.progress import Progress, silent
from modeling_ospruner.engines.opening import device_named, load_tokenizer
from modeling_ospruner.formats_ospruner import ReasoningFormat, TokenFormat
from ospruner.eval.calibration import Calibration, Candidate, calibrate, losses
from ospruner.eval.methods import PolicyUse, parse_policies, refuse_other_base
from ospruner.eval.replay import replay
from ospruner.eval.rules import parse_rule, replay_rule
from ospruner.eval.table import TraceTable
from ospruner.hub_cards.facts import PROVENANCE_FILE, read_provenance
from ospruner.hub_cards.render import read_policy_config, write_policy_card

from .from_labels import Labels, load_labels
from .replay_labels import stop_probabilities

__all__ = ["THRESHOLDS", "calibrate_policy", "calibrate_rule"]

THRESHOLDS = tuple(
    round(float(1 / (1 + np.exp(-logit))), 6) for logit in np.linspace(7.0, -4.0, 45)
)
"""Stop probabilities from careful (.999) to bold (.018), in even steps of the logit."""


def calibrate_policy(
    policy: str | Path,
    labels: str | Path,
    max_loss: float,
    confidence: float = 0.95,
    *,
    thresholds: Sequence[float] = THRESHOLDS,
    validation: str | Path | None = None,
    base: str | None = None,
    device: str | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> Calibration:
    """Finds the boldest threshold that keeps a promise, and stores it in the policy's folder.

    Args:
        policy: its folder; `config.json` and the card are written anew where a threshold passes.
        labels: folder or Hub id of labels; the policy was not trained on them.
        max_loss: the accuracy that may be lost against the full trace, as a share.
        confidence: how surely not more is lost.
        thresholds: to try, from careful to bold.
        validation: other labels, for a guess of the losses' variance; it affects what is saved,
            never whether the promise holds.
        base: the base, where it lies elsewhere than when it was labelled.
        device: on which it computes; None for the best.
        seed: of the order of problems.
        progress: called with phases "trunk" and "policies".

    Returns:
        What was found; `value` is None where no threshold keeps the promise, and nothing is stored.

    Raises:
        ValueError: no policy there or another base's, the labels it was trained on, labels of free
            answers or of the problems of `validation`, or thresholds that do not fall.
    """
    folder = Path(policy)
    read_policy_config(folder)
    _refuse_order(thresholds)
    ours = _calibration_labels(labels)
    use = parse_policies([f"{folder}@{thresholds[0]}"])[0]
    refuse_other_base(
        use,
        ours.settings.base_model,
        ours.settings.base_revision,
        ours.settings.reasoning_format,
        ours.settings.step_stride,
    )
    if read_provenance(folder).data_hash == ours.data_hash:
        raise ValueError(
            f"{labels} are the labels that {folder} was trained on: what it does there says "
            "nothing about new problems; calibrate on others"
        )
    table = TraceTable.from_dataset(ours.traces)
    candidates = _candidates(use, ours, table, thresholds, base, device, progress)
    variance = 0.06
    if validation is not None:
        theirs = load_labels(validation)
        other = TraceTable.from_dataset(theirs.traces)
        if shared := set(other.problem_ids) & set(table.problem_ids):
            raise ValueError(
                f"{len(shared)} problems, such as {min(shared)!r}, are in the labels and in the "
                "validation labels: the guess of the variance must come from other problems"
            )
        between = [thresholds[len(thresholds) // 2]]
        middle = _candidates(use, theirs, other, between, base, device, progress)
        variance = max(float(losses(other, middle[0].outcome).var()), 0.005)
    found = calibrate(table, candidates, max_loss, confidence, variance=variance, seed=seed)
    if found.value is not None:
        _store(folder, found, max_loss, confidence, ours.data_hash)
    return found


def calibrate_rule(
    family: str,
    values: Sequence[float],
    labels: str | Path,
    max_loss: float,
    confidence: float = 0.95,
    *,
    seed: int = 0,
) -> Calibration:
    """The boldest parameter of a rule without training that keeps a promise.

    Args:
        family: such as "budget", "entropy" or "agreement" (`eval.rules.parse_rule`).
        values: its parameter, from careful to bold, chosen without looking at the labels.
        labels: as in `calibrate_policy`.
        max_loss: as there.
        confidence: as there.
        seed: as there.

    Raises:
        ValueError: no such rule, a value that it does not take, or labels of free answers.
    """
    ours = _calibration_labels(labels)
    table = TraceTable.from_dataset(ours.traces)
    tokenizer = load_tokenizer(ours.settings.base_model, ours.settings.base_revision)
    fmt = TokenFormat.compile(ReasoningFormat.from_dict(ours.settings.reasoning_format), tokenizer)
    suffix_tokens = len(fmt.forced_suffix(ours.settings.answer))
    candidates = [
        Candidate(
            value,
            replay_rule(
                ours.traces,
                table,
                parse_rule(f"{family}:{value:g}").rule,
                suffix_tokens,
                lambda ids: str(tokenizer.decode(ids)),
            ),
        )
        for value in values
    ]
    return calibrate(table, candidates, max_loss, confidence, seed=seed)


def _calibration_labels(labels: str | Path) -> Labels:
    ours = load_labels(labels)
    if ours.settings.answer != "forced":
        raise ValueError(
            f"{labels} hold {ours.settings.answer} answers; a promise is about forced ones: label "
            "with --answer forced"
        )
    return ours


def _candidates(
    use: PolicyUse,
    labels: Labels,
    table: TraceTable,
    thresholds: Sequence[float],
    base: str | None,
    device: str | None,
    progress: Progress,
) -> list[Candidate]:
    place = device_named(device)
    probabilities = stop_probabilities([use], labels.traces, labels, base, None, place, progress)[0]
    return [
        Candidate(threshold, replay(table, probabilities, "threshold", threshold))
        for threshold in thresholds
    ]


def _refuse_order(thresholds: Sequence[float]) -> None:
    falls = all(one > other for one, other in pairwise(thresholds))
    if not thresholds or not falls or not 0 <= thresholds[-1] <= thresholds[0] <= 1:
        raise ValueError(
            f"thresholds is {list(thresholds)}; give numbers in [0, 1] from careful (high) to bold "
            "(low), each once"
        )


def _store(
    folder: Path, found: Calibration, max_loss: float, confidence: float, data_hash: str
) -> None:
    """Puts a promise into the policy's configuration, in the place of an earlier equal one."""
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    facts = asdict(found)
    stored = {name: facts[name] for name in ("loss", "tokens_saved", "problems", "test")}
    stored |= {"max_loss": max_loss, "confidence": confidence, "threshold": found.value}
    stored["data_hash"] = data_hash
    others = [
        one
        for one in config.get("calibrations") or []
        if (one["max_loss"], one["confidence"]) != (max_loss, confidence)
    ]
    config["calibrations"] = sorted([*others, stored], key=lambda one: one["max_loss"])
    replace_file(path, (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())
    if (folder / PROVENANCE_FILE).is_file():
        write_policy_card(folder, name=folder.name, license=None)
