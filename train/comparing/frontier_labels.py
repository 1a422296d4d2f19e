"""Whole methods on stored labels: areas under frontiers, gaps closed, intervals, a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.formats_ospruner import ReasoningFormat, TokenFormat
from ospruner.engines.opening import device_named, load_tokenizer
from ospruner.eval.frontier.areas import Family, frontier_points, frontiers
from ospruner.eval.frontier.causal import Known, causal_family
from ospruner.eval.frontier.competitors import (
    Said,
    Split,
    Splits,
    drawn_family,
    learn_stop_family,
    rule_families,
    threshold_family,
)
from ospruner.eval.methods import (
    EVERY_PRICE,
    METHOD_NAMES,
    PolicyUse,
    parse_policies,
    refuse_other_base,
    refuse_other_trials,
)
from ospruner.eval.metrics import REPLICATES
from ospruner.eval.report.pictures import save_frontiers
from ospruner.eval.results import Results
from ospruner.eval.rules.families import FAMILIES, LEFT_OUT
from ospruner.eval.table import TraceTable
from ospruner.progress import Progress, silent

from ..fresh import Predicted, predict_outputs
from ..from_labels import Labels, load_labelled_base, load_labels
from ..traces import LabelledTraces

__all__ = ["RULES", "FrontierFound", "frontier_of_labels", "rules_named", "save_found"]

RULES = (*(name for name in FAMILIES if name != "step"), "learnstop")
"""The rules that `all` stands for."""


@dataclasses.dataclass(frozen=True, eq=False)
class FrontierFound:
    """What was found.

    Attributes:
        results: the numbers.
        families: the methods in the order of `results.frontiers`.
        validation: the traces on which rules were chosen.
        test: the traces on which they were measured.
    """

    results: Results
    families: list[Family]
    validation: TraceTable
    test: TraceTable


def rules_named(text: str) -> tuple[str, ...]:
    """The families that `--rules` names: "all", "none", or names with commas between them.

    Raises:
        ValueError: no such family.
    """
    if text in ("all", "none"):
        return RULES if text == "all" else ()
    names = tuple(name.partition(":")[0] for name in text.split(","))
    if unknown := [name for name in names if name not in (*FAMILIES, "learnstop")]:
        why = LEFT_OUT.get(unknown[0])
        raise ValueError(
            f"rule {unknown[0]!r} cannot be had: {why}"
            if why
            else f"rule {unknown[0]!r} is no family of rules; known are {', '.join(FAMILIES)}, "
            "learnstop, all, none"
        )
    return names


def frontier_of_labels(
    labels: str | Path,
    validation: str | Path,
    policies: Sequence[str] = (),
    rules: Sequence[str] = RULES,
    *,
    length_penalties: Sequence[float] = (5e-4, 2e-4, 1e-4),
    train: str | Path | None = None,
    base: str | None = None,
    force_base: str | None = None,
    estimate: bool = True,
    replicates: int = REPLICATES,
    seed: int = 0,
    device: str | None = None,
    states: str | Path | None = None,
    progress: Progress = silent,
) -> FrontierFound:
    """Compares whole methods: every choice on validation labels, every number on the others.

    Args:
        labels: folder or Hub id of the labels to measure on.
        validation: labels of other problems, made with the same settings.
        policies: folders or Hub ids; those of one method are its rules, and of one lambda its
            training seeds. A policy of every price stands for 31 rules.
        rules: families of rules without training (`FAMILIES`), and "learnstop".
        length_penalties: lambdas of the gaps.
        train: labels on which to fit LearnStop; None for the validation labels.
        base: the base, where it now lies elsewhere than when it was labelled.
        force_base: why another base may be taken.
        estimate: also fit what is possible without hindsight (`causal`).
        replicates: resamples.
        seed: of the resamples.
        device: where policies compute; None for the best there is.
        states: folder in which the trunk's states are kept, as for `train_from_labels`.
        progress: called with phases "trunk", "policies" and "thinking".

    Raises:
        ValueError: labels of other settings or of shared problems, a policy of another base, no
            method at all, or an unknown rule.
    """
    ours, chosen_on = load_labels(labels), load_labels(validation)
    _refuse_other_labels(ours, chosen_on)
    uses = _uses(policies)
    if not uses and not rules:
        raise ValueError("there is nothing to compare: give policies, or rules")
    for use in uses:
        refuse_other_base(
            use,
            ours.settings.base_model,
            ours.settings.base_revision,
            ours.settings.reasoning_format,
            ours.settings.step_stride,
        )
        refuse_other_trials(use, ours.settings)
    where = (base, None) if base else (ours.settings.base_model, ours.settings.base_revision)
    tokenizer = load_tokenizer(*where)
    model = None
    if uses or "just-enough" in rules:
        model, _ = load_labelled_base(base, ours, force_base, device_named(device))
    traces = [LabelledTraces.from_dataset(found.traces) for found in (chosen_on, ours)]
    if states is not None:
        for labelled in traces:
            labelled.keep_states(states)
    wanted = model if "just-enough" in rules else None
    splits = Splits(
        _split(chosen_on, traces[0], wanted, progress),
        _split(ours, traces[1], wanted, progress),
        _suffix_tokens(ours, tokenizer),
        lambda ids: str(tokenizer.decode(ids)),
    )
    families, said = _policy_families(uses, splits, traces, model, progress)
    free, left_out = rule_families(splits, [name for name in rules if name != "learnstop"])
    families += free
    if "learnstop" in rules:
        fit_on = None if train is None else load_labels(train)
        families.append(
            learn_stop_family(splits, None if fit_on is None else _split(fit_on, None, None))
        )
    if not families:
        raise ValueError(f"no method could be replayed: {left_out}")
    found = Results(
        dataset=Path(str(labels)).name,
        setting=f"replay of {len(ours.traces)} traces, rules chosen on {len(chosen_on.traces)}",
        about={"left_out": left_out, "label_settings": ours.settings.to_dict()},
    )
    tables = (splits.validation.table, splits.test.table)
    possible = [_possible(splits, said, length_penalties)] if estimate else []
    curves = frontiers(families, *tables, length_penalties, possible, replicates, seed)
    found = dataclasses.replace(found, frontiers=curves)
    return FrontierFound(found, [*families, *possible], *tables)


def _uses(policies: Sequence[str]) -> list[PolicyUse]:
    """The policies, OS-Pruner's first; those of every price at 31 of them."""
    if bad := [spec for spec in policies if "@" in spec]:
        raise ValueError(
            f"policy {bad[0]!r}: thresholds are tried here by themselves; give the folder alone"
        )
    uses = parse_policies(policies)
    if any(use.config.prices is not None for use in uses):
        uses = parse_policies(policies, ())
    for use in uses:
        if use.config.method == "flashthink":
            raise ValueError(
                f"{use.path} is a verifier, whose verdicts are not computed here: replay it with "
                "`ospruner eval replay`"
            )
    return sorted(uses, key=lambda use: use.config.method != "os-pruner")


def _refuse_other_labels(ours: Labels, others: Labels) -> None:
    free = {"seed", "samples_per_problem"}
    lines = ours.settings.differences(others.settings)
    if differences := [line for line in lines if line.partition(":")[0] not in free]:
        raise ValueError(
            f"the validation labels were made otherwise ({'; '.join(differences)}): "
            "label both with the same settings"
        )
    if shared := set(ours.traces["problem_id"]) & set(others.traces["problem_id"]):
        raise ValueError(
            f"{len(shared)} problems, such as {min(shared)!r}, are in the labels and in the "
            "validation labels: what is chosen on a problem must not be measured on it"
        )


def _suffix_tokens(labels: Labels, tokenizer: PreTrainedTokenizerBase) -> int:
    literals = ReasoningFormat.from_dict(labels.settings.reasoning_format)
    fmt = TokenFormat.compile(literals, tokenizer)
    return len(fmt.forced_suffix(labels.settings.answer))


def _split(
    labels: Labels,
    traces: LabelledTraces | None,
    base: PreTrainedModel | None,
    progress: Progress = silent,
) -> Split:
    table = TraceTable.from_dataset(labels.traces) if traces is None else traces.table
    entropy = None
    if base is not None and traces is not None:
        entropy = traces.thinking_entropies(base, labels.traces, progress)
    return Split(labels.traces, table, entropy)


def _policy_families(
    uses: Sequence[PolicyUse],
    splits: Splits,
    traces: Sequence[LabelledTraces],
    base: PreTrainedModel | None,
    progress: Progress,
) -> tuple[list[Family], list[Said]]:
    """A family for each method of the policies, and what all of them say."""
    outputs: dict[str, list[Predicted]] = {}
    paths = list(dict.fromkeys(use.path for use in uses))
    for number, path in enumerate(paths):
        progress("policies", number, len(paths))
        assert base is not None  # loaded where there are policies
        model = OSPrunerForCausalLM.from_base(base, path)
        outputs[path] = [predict_outputs(model, split, progress=progress) for split in traces]
    # Of each method, for each lambda its seeds; a classifier has one entry, whatever its threshold.
    methods: dict[str, tuple[str, dict[float, dict[str, Said]]]] = {}
    for use in uses:
        price = use.price if use.config.method == "os-pruner" else 0.0
        name = METHOD_NAMES[use.config.method] if use.config.prices is None else EVERY_PRICE
        chosen_on, measured = (out.probabilities(use.asked_price) for out in outputs[use.path])
        said = Said(np.asarray(chosen_on, np.float64), np.asarray(measured, np.float64))
        _, of_method = methods.setdefault(name, (use.config.method, {}))
        of_method.setdefault(price, {})[use.path] = said
    families = []
    for name, (method, of_price) in methods.items():
        policies = [list(seeds.values()) for seeds in of_price.values()]
        if method == "os-pruner":
            families.append(drawn_family(name, splits, policies))
        else:
            families.append(threshold_family(method, splits, policies[0]))
    everything = [
        said for _, of in methods.values() for seeds in of.values() for said in seeds.values()
    ]
    return families, everything


def _possible(splits: Splits, said: Sequence[Said], length_penalties: Sequence[float]) -> Family:
    """The estimate of what is possible without hindsight, with what the policies say."""
    known = [
        Known.of_labels(split.dataset, split.table, [one[k] for one in said])
        for k, split in enumerate((splits.validation, splits.test))
    ]
    return causal_family(known[0], known[1], sorted(length_penalties))


def save_found(found: FrontierFound, out: Path) -> None:
    """Writes results and picture into a folder.

    Args:
        found: what `frontier_of_labels` gave.
        out: made where it is missing.
    """
    out.mkdir(parents=True, exist_ok=True)
    found.results.save(out / "frontier.json")
    save_frontiers(
        {
            family.name: frontier_points(family, found.validation, found.test)
            for family in found.families
        },
        out / "frontier.png",
        title=f"{found.results.dataset}: {found.results.setting}",
    )
