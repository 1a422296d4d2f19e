"""Policies and rules on stored labels: what `ospruner eval replay` and `calibrate` do."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.configuration_ospruner import MODES, PriceRange, check_choice
from modeling_ospruner.formats_ospruner import ReasoningFormat, TokenFormat
from ospruner.durable import replace_file
from ospruner.engines.opening import device_named, load_tokenizer
from ospruner.eval.arithmetic import ModelWork
from ospruner.eval.calibration import Calibration, Candidate, calibrate, losses
from ospruner.eval.compute import Compute
from ospruner.eval.intervals import Rule, pool_seeds
from ospruner.eval.limits import (
    best_fixed_budget,
    best_fixed_step,
    hindsight_oracle,
    hindsight_oracle_no_loss,
)
from ospruner.eval.methods import (
    FULL,
    ORACLE,
    PolicyUse,
    parse_policies,
    refuse_other_base,
    refuse_other_trials,
)
from ospruner.eval.online.evaluation import Evaluation, trace_hash
from ospruner.eval.problems.registry import open_task
from ospruner.eval.replay import replay, replay_full, windowed
from ospruner.eval.report.viewer import PricesShown, trace_views
from ospruner.eval.rules.families import parse_rule
from ospruner.eval.rules.replayed import replay_rule
from ospruner.eval.schema import LabelSettings
from ospruner.eval.stopping import stop_distribution_from_probabilities, threshold_stop
from ospruner.eval.table import TraceTable
from ospruner.progress import Progress, silent
from ospruner.provenance import read_provenance
from ospruner.serving.traffic import distribution

from .flashthink import Verifier, tokens_read, verifier_traces
from .fresh import Predicted, predict, predict_outputs
from .from_labels import Labels, forced_base, load_labelled_base, load_labels
from .traces import LabelledTraces

__all__ = [
    "THRESHOLDS",
    "calibrate_policy",
    "calibrate_rule",
    "predictions",
    "replay_labels",
    "replay_verifiers",
]


THRESHOLDS = tuple(
    round(float(1 / (1 + np.exp(-logit))), 6) for logit in np.linspace(7.0, -4.0, 45)
)
"""Stop probabilities from careful (.999) to bold (.018), in even steps of the logit."""


PRICE_THRESHOLD = 0.5
"""The stop probability at which a policy of every price is indifferent."""


def replay_verifiers(
    uses: Sequence[PolicyUse],
    traces: Dataset,
    table: TraceTable,
    base_tokenizer: PreTrainedTokenizerBase,
    settings: LabelSettings,
    progress: Progress,
    device: torch.device,
) -> tuple[list[Rule], list[npt.NDArray[np.float32]]]:
    """Each use of a verifier as a rule; all that it read until it stopped is charged as compute.

    Args:
        uses: verifiers with their thresholds; one used at several runs once.
        traces: the labelled traces.
        table: the same as arrays, charged or not.
        base_tokenizer: of the model that wrote them.
        settings: how they were labelled.
        progress: called with phase "verifiers".
        device: where they compute.

    Returns:
        The rules, and the probabilities (N, T) that each goes by.
    """
    rules: list[Rule] = []
    probabilities = []
    for number, path in enumerate(paths := list(dict.fromkeys(use.path for use in uses))):
        progress("verifiers", number, len(paths))
        verifier = Verifier.load(path, settings)
        tokenizer = AutoTokenizer.from_pretrained(verifier.config.base_model_name_or_path)
        limit = verifier.base.config.get_text_config().max_position_embeddings
        judged = verifier_traces(traces, base_tokenizer, tokenizer, limit)
        for module in (verifier.base, verifier.policy):
            torch.nn.Module.to(module, device)
        pi, read = predict(verifier, judged), _read(judged)  # (N, T)
        costs = dataclasses.replace(table, answer_tokens=read)
        paid = table
        if table.flops is not None:
            work = ModelWork.of_config(verifier.base.config)
            paid = dataclasses.replace(table, flops=table.flops + work.read(0, read))
        for use in (use for use in uses if use.path == path):
            seen = windowed(paid, pi, use.window, use.by)
            outcome = replay(paid, seen, use.mode, use.threshold)
            # What replay expects of a column of costs is what the stops come to in it.
            probes = replay(costs, seen, use.mode, use.threshold).answer_tokens
            outcome = dataclasses.replace(outcome, probe_tokens=probes)
            rules.append(Rule(use.method, outcome, use.parameter, use.parameter_name))
            probabilities.append(pi)
        progress("verifiers", number + 1, len(paths))
    return rules, probabilities


def _read(judged: LabelledTraces) -> npt.NDArray[np.int64]:
    """(N, T) tokens that the verifier has read where a trace stops at each step.

    At its natural end a trace needs no verdict: the verifier has read to the step before.
    """
    table, read = judged.table, tokens_read(judged)
    rows = np.arange(len(table))
    read[rows, table.last] = np.where(table.last > 0, read[rows, table.last - 1], 0)
    return read


def replay_labels(
    labels: str | Path,
    policies: Sequence[str] = (),
    rules: Sequence[str] = (),
    *,
    length_penalties: Sequence[float] | None = None,
    domain: str | None = None,
    base: str | None = None,
    force_base: str | None = None,
    across_tasks: bool = False,
    validation: str | Path | None = None,
    model: str | None = None,
    benchmark: str | None = None,
    limit: int | None = None,
    viewed: int = 40,
    device: str | None = None,
    states: str | Path | None = None,
    progress: Progress = silent,
) -> Evaluation:
    """Replays policies and rules on labelled traces; nothing is generated.

    Args:
        labels: folder or Hub id of the labelled traces.
        policies: see `eval.methods.parse_policies`; training seeds of one method and parameter are
            pooled.
        rules: see `eval.rules.families.parse_rule`.
        length_penalties: prices of a token for policies of every price, () for 31 of their range:
            the tail runs once for all; None for their default.
        domain: take the prices that these policies chose for this domain.
        base: the model, where it now lies elsewhere than when it was labelled.
        force_base: why policies of another base, or another base, may be taken; kept with the
            results.
        across_tasks: take policies that were trained on another task, to see how far they carry.
        validation: other labels of the same settings, on which the best fixed budget and step are
            chosen; None leaves these two limits out.
        model: what tables call the base; None for the last part of its name.
        benchmark: what tables call the problems; None for the labels' own name.
        limit: only the first so many traces.
        viewed: how many traces to keep for the report's viewer.
        device: where policies and verifiers compute; None for the best there is.
        states: folder in which the trunk's states are kept, as for `train_from_labels`.
        progress: called with phases "trunk" (traces), "policies" and "thinking".

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
    same = open_task(ours.settings.task).same
    named = [parse_rule(text, same) for text in rules]
    uses = parse_policies(policies, length_penalties, domain)
    judges = [use for use in uses if use.config.method == "flashthink"]
    uses = [use for use in uses if use.config.method != "flashthink"]
    for use in uses:
        refuse_other_base(
            use,
            *(
                (ours.settings.base_model, ours.settings.base_revision)
                if force_base is None
                else (use.config.base_model_name_or_path, use.config.base_revision)
            ),
            ours.settings.reasoning_format,
            ours.settings.step_stride,
            None if across_tasks else ours.settings.task,
        )
    place = device_named(device)
    said = predictions(uses, traces, ours, base, force_base, place, states, progress)
    where = (base, None) if base else (ours.settings.base_model, ours.settings.base_revision)
    tokenizer = load_tokenizer(*where)
    fmt = TokenFormat.compile(ReasoningFormat.from_dict(ours.settings.reasoning_format), tokenizer)
    suffix_tokens = len(fmt.forced_suffix(ours.settings.answer))
    work = ModelWork.of_config(AutoConfig.from_pretrained(where[0], revision=where[1]))
    compute = Compute.of_labels(traces, work, suffix_tokens)
    table = compute.charge(table)
    probabilities = []
    shown: dict[int, PricesShown] = {}
    found = [Rule(FULL, replay_full(table))]
    for use in uses:
        pi = said[use.path].probabilities(use.asked_price)
        prices = said[use.path].indifference
        if prices is not None and use.config.prices is not None:
            shown[len(found)] = PricesShown(prices, use.price, use.config.prices)
        probabilities.append(pi)
        paid = compute.charge_tail(
            table, use.config.num_policy_layers, use.config.tuning == "queries"
        )
        paid, trials = compute.charge_trials(paid, use.config.trial_every)
        seen = windowed(paid, pi, use.window, use.by)
        outcome = replay(paid, seen, use.mode, use.threshold)
        # What replay expects of a column of costs is what the stops come to in it.
        probes = replay(trials, seen, use.mode, use.threshold).answer_tokens
        outcome = dataclasses.replace(outcome, probe_tokens=probes)
        found.append(Rule(use.method, outcome, use.parameter, use.parameter_name))
    judged = replay_verifiers(judges, traces, table, tokenizer, ours.settings, progress, place)
    found += judged[0]
    probabilities += judged[1]

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids))

    entropies = None
    if any("thinking_entropy" in rule.rule.asks for rule in named):
        model_of_base, _ = load_labelled_base(base, ours, force_base, place)
        entropies = _kept(traces, states).thinking_entropies(model_of_base, traces, progress)
    for rule in named:
        outcome = replay_rule(traces, table, rule.rule, suffix_tokens, decode, compute, entropies)
        found.append(Rule(rule.method, outcome, rule.parameter, rule.parameter_name))
    found, numbers = pool_seeds(found)
    # What each rule goes by; the first rule, the full trace, goes by nothing.
    went_by = {
        place: np.mean([probabilities[k - 1] for k in of_rule], axis=0)
        for place, of_rule in enumerate(numbers)
        if 0 < of_rule[0] <= len(probabilities)
    }
    shown = {place: shown[k[0]] for place, k in enumerate(numbers) if k[0] in shown}
    settings: dict[str, Any] = {
        "model": model or Path(ours.settings.base_model).name,
        "benchmark": benchmark or Path(str(labels)).name,
        "answer": ours.settings.answer,
        "mode": "replay",
        "labels": trace_hash(table),
        "label_settings": ours.settings.to_dict(),
    }
    if force_base is not None:
        settings["forced_base"] = forced_base(force_base, ours.settings)
    return Evaluation.of_table(
        table,
        settings,
        found,
        _limits(table, ours, validation),
        trace_views(traces, table, found, went_by, tokenizer, viewed, shown),
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
    return [best_fixed_budget(chosen_on, table), best_fixed_step(chosen_on, table), *limits]


def predictions(
    uses: Sequence[PolicyUse],
    traces: Dataset,
    ours: Labels,
    base: str | None,
    force_base: str | None,
    device: torch.device,
    states: str | Path | None,
    progress: Progress,
) -> dict[str, Predicted]:
    """What each policy says, by its path: it runs once for all thresholds and prices.

    Raises:
        ValueError: see `refuse_other_trials`.
    """
    if not uses:
        return {}
    for use in uses:
        refuse_other_trials(use, ours.settings)
    model, _ = load_labelled_base(base, ours, force_base, device)
    labelled = _kept(traces, states)
    by_path: dict[str, Predicted] = {}
    paths = list(dict.fromkeys(use.path for use in uses))
    for number, path in enumerate(paths):
        progress("policies", number, len(paths))
        policy = OSPrunerForCausalLM.from_base(model, path)
        by_path[path] = predict_outputs(policy, labelled, progress=progress)
    progress("policies", len(paths), len(paths))
    return by_path


def _kept(traces: Dataset, states: str | Path | None) -> LabelledTraces:
    labelled = LabelledTraces.from_dataset(traces)
    if states is not None:
        labelled.keep_states(states)
    return labelled


def calibrate_policy(
    policy: str | Path,
    labels: str | Path,
    max_loss: float,
    confidence: float = 0.95,
    *,
    mode: Literal["threshold", "sample"] = "threshold",
    values: Sequence[float] | None = None,
    validation: str | Path | None = None,
    base: str | None = None,
    device: str | None = None,
    states: str | Path | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> Calibration:
    """Finds the boldest setting that keeps a promise, and stores it in the policy's folder.

    The setting is the threshold of a policy of one lambda, or the price of a policy of every price.
    This one then stops where the stop probability is one half or more, that is, where the price of
    indifference is no higher; in mode "sample" it draws, and the losses tested are replay's
    expectations over its draws.

    Args:
        policy: its folder; `config.json` and the card are written anew where a setting passes.
        labels: folder or Hub id of labels; the policy was not trained on them.
        max_loss: the accuracy that may be lost against the full trace, as a share.
        confidence: how surely not more is lost.
        mode: in which the policy is to stop.
        values: to try, from careful to bold: thresholds falling, or prices rising. None:
            `THRESHOLDS`, or 31 prices of the policy's range.
        validation: other labels, for a guess of the losses' variance; it affects what is saved,
            never whether the promise holds.
        base: the base, where it lies elsewhere than when it was labelled.
        device: on which it computes; None for the best.
        states: folder in which the trunk's states are kept, as for `train_from_labels`.
        seed: of the order of problems.
        progress: called with phases "trunk" and "policies".

    Returns:
        What was found; `value` is None where no setting keeps the promise, and nothing is stored.

    Raises:
        ValueError: no policy there or another base's, the labels it was trained on, labels of free
            answers or of the problems of `validation`, settings in another order, or mode "sample"
            of a policy of one lambda.
    """
    check_choice("calibrate", "mode", mode, MODES)
    folder = Path(policy)
    ours = _calibration_labels(labels)
    use = parse_policies([f"{folder}@{PRICE_THRESHOLD}"])[0]
    known = use.config.prices
    if mode == "sample" and known is None:
        raise ValueError(
            f"mode is 'sample', but {folder} is a policy of one lambda, whose draws have no "
            "setting to calibrate: leave it out (a threshold is found), or train one of every "
            "price (ospruner train --head price)"
        )
    if values is None:
        values = THRESHOLDS if known is None else known.grid()
    _refuse_order(values, known)
    refuse_other_base(
        use,
        ours.settings.base_model,
        ours.settings.base_revision,
        ours.settings.reasoning_format,
        ours.settings.step_stride,
        ours.settings.task,
    )
    sentences = [
        literals.get("wind_down", "")
        for literals in (use.config.reasoning_format or {}, ours.settings.reasoning_format)
    ]
    if sentences[0] != sentences[1]:
        raise ValueError(
            f"{folder} stops with wind_down {sentences[0]!r}, the answers of {labels} were forced "
            f"after {sentences[1]!r}: a promise holds for the policy's own; label with it"
        )
    record = read_provenance(folder)
    trained_on = {record.data_hash, *record.details.get("domains", {}).values()}
    if ours.data_hash in trained_on:
        raise ValueError(
            f"{labels} are the labels that {folder} was trained on: what it does there says "
            "nothing about new problems; calibrate on others"
        )
    table = TraceTable.from_dataset(ours.traces)
    place = device_named(device)

    def replayed(
        labels: Labels, table: TraceTable, values: Sequence[float]
    ) -> tuple[Predicted, list[Candidate]]:
        said = predictions([use], labels.traces, labels, base, None, place, states, progress)[
            use.path
        ]
        return said, [
            Candidate(value, replay(table, *_setting(said, value, mode))) for value in values
        ]

    said, candidates = replayed(ours, table, values)
    variance = 0.06
    if validation is not None:
        theirs = load_labels(validation)
        other = TraceTable.from_dataset(theirs.traces)
        if shared := set(other.problem_ids) & set(table.problem_ids):
            raise ValueError(
                f"{len(shared)} problems, such as {min(shared)!r}, are in the labels and in the "
                "validation labels: the guess of the variance must come from other problems"
            )
        between = [values[len(values) // 2]]
        _, middle = replayed(theirs, other, between)
        variance = max(float(losses(other, middle[0].outcome).var()), 0.005)
    found = calibrate(table, candidates, max_loss, confidence, variance=variance, seed=seed)
    if found.value is not None:
        pi, _, threshold = _setting(said, found.value, mode)
        setting = {
            "max_loss": max_loss,
            "confidence": confidence,
            "mode": mode,
            "threshold": threshold,
            "price": None if known is None else found.value,
            "data_hash": ours.data_hash,
            "traffic": _traffic(table, said, pi, threshold),
        }
        _store(folder, found, setting)
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
        family: such as "budget", "entropy" or "agreement" (`eval.rules.families.parse_rule`).
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
                parse_rule(f"{family}:{value:g}", open_task(ours.settings.task).same).rule,
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
    if open_task(ours.settings.task).labels_expect:
        raise ValueError(
            f"{labels} hold probabilities of right answers, and a promise is about answers that "
            "are right or wrong: label anew with --task choice:labels=letter"
        )
    return ours


def _setting(
    said: Predicted, value: float, mode: Literal["threshold", "sample"]
) -> tuple[npt.NDArray[np.float32], Literal["threshold", "sample"], float | None]:
    """What `replay` takes for a value: stop probabilities, the mode, and its threshold."""
    if said.prices is None:
        return said.probabilities(), mode, value
    return said.probabilities(value), mode, PRICE_THRESHOLD if mode == "threshold" else None


def _traffic(
    table: TraceTable, said: Predicted, pi: npt.NDArray[np.float32], threshold: float | None
) -> dict[str, Any]:
    """How the calibration's traces are distributed, for `ospruner doctor drift`."""
    mask, values = torch.from_numpy(table.mask), torch.from_numpy(pi.astype(np.float64))
    if threshold is None:
        weights = stop_distribution_from_probabilities(values, mask).numpy()
    else:
        stops = threshold_stop(values, threshold, mask).numpy()
        weights = np.eye(table.mask.shape[1])[stops]
    first = said.probabilities() if said.indifference is None else said.indifference
    decided = first[table.num_steps > 1, 0].astype(np.float64)
    real = weights > 0
    return {
        "problems": len(table.problem_ids),
        "thinking_tokens": distribution(table.lengths[real].astype(np.float64), weights[real]),
        "first_step": distribution(decided, np.ones(len(decided))),
    }


def _refuse_order(values: Sequence[float], known: PriceRange | None) -> None:
    if known is not None:
        for value in values:
            known.check("calibrate", value)
        if not values or any(one >= other for one, other in pairwise(values)):
            raise ValueError(
                f"values is {list(values)}; give prices of a token from careful (low) to bold "
                "(high), each once"
            )
        return
    thresholds = values
    falls = all(one > other for one, other in pairwise(thresholds))
    if not thresholds or not falls or not 0 <= thresholds[-1] <= thresholds[0] <= 1:
        raise ValueError(
            f"thresholds is {list(thresholds)}; give numbers in [0, 1] from careful (high) to bold "
            "(low), each once"
        )


def _store(folder: Path, found: Calibration, setting: Mapping[str, Any]) -> None:
    """Puts a promise into the policy's configuration, in the place of an earlier equal one."""
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    facts = dataclasses.asdict(found)
    stored = {name: facts[name] for name in ("loss", "tokens_saved", "problems", "test")}
    stored |= setting
    others = [
        one
        for one in config.get("calibrations") or []
        if any(one[name] != setting[name] for name in ("max_loss", "confidence"))
    ]
    config["calibrations"] = sorted([*others, stored], key=lambda one: one["max_loss"])
    replace_file(path, (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())
