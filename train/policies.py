"""Policies before and after they are trained: a fresh one for labels, and what is saved of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.formats_ospruner import ReasoningFormat
from modeling_ospruner.modeling_ospruner import WEIGHTS
from ospruner.eval.evaluation import Report, Rule, choose
from ospruner.eval.measured import Predicted
from ospruner.eval.methods import EVERY_PRICE, FULL, METHOD_NAMES, price_grid
from ospruner.eval.metrics import CHOSEN_BY
from ospruner.eval.replay import Outcome, replay, replay_full
from ospruner.eval.results import RESULTS_FILE, Results
from ospruner.eval.schema import MATH_TASK, LabelSettings
from ospruner.eval.table import TraceTable
from ospruner.provenance import file_hash, provenance

from .config import StopConfig
from .flashthink import Verifier
from .untrained import fresh_config, fresh_layers, untrained

Trainable = OSPrunerForCausalLM | Verifier

BASELINE_THRESHOLD = 0.9
"""A baseline's threshold until one is chosen on validation: the paper's most careful one."""
FEWEST_STEPS = 100
"""Optimiser steps below which a policy has hardly left its random start."""
LITTLE = 0.01
"""Accuracy that a careful price may lose."""
TRIVIAL = 0.01
"""A policy this near to one of the two trivial rules, in tokens, is as good as that rule."""
_SHOWN_EVERY = 5  # of a frontier's prices, among the results


@dataclass(frozen=True)
class SavedPolicy:
    """A policy, and what it does on the validation traces."""

    path: Path  # its folder
    method: str  # of `OSPrunerConfig`
    price: float  # of a token; 0 for the baselines; of a policy of every price its default
    accuracy: float  # on validation, in mode "sample" for OS-Pruner, at the default threshold else
    tokens: float  # mean thinking tokens there
    full_accuracy: float  # of the full traces
    full_tokens: float  # of the full traces
    warning: str  # what `warning_about` says of it; "" for nothing


def new_policy(
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: StopConfig,
    settings: LabelSettings,
    tasks: Sequence[Mapping[str, Any]] = (),
) -> Trainable:
    """The base with an untrained policy, bound to the labels' base and reasoning format.

    Its tail is in float32 whatever the base's dtype: steps of 1e-5 would be lost in bfloat16.

    Args:
        base: the model that wrote the traces, or with method "flashthink" the verifier.
        tokenizer: its own; saved beside the policy.
        config: method, tail and head, with the two ends of the prices for the head "price".
        settings: of the labels.
        tasks: of the parts of a mix.
    """
    model: Trainable
    tail: dict[str, Any] = {"num_policy_layers": config.layers, "tuning": config.tuning}
    ends: Any = config.prices if config.every_price else None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        if config.method == "flashthink":
            tail |= {"base_model_name_or_path": config.verifier}
            own = fresh_config(base, reasoning_format=settings.reasoning_format, **tail)
            policy = fresh_layers(base.eval(), config.layers, config.tuning)
            model = Verifier(base, policy, own, (settings.base_model, settings.base_revision))
        else:
            model = untrained(
                base,
                tokenizer,
                adapter_rank=config.adapter_rank,
                price_range=ends,
                reasoning_format=ReasoningFormat.from_dict(settings.reasoning_format),
                base_model_name_or_path=settings.base_model,
                base_revision=settings.base_revision,
                **tail,
            )
            model.eval()
            task = dict(settings.task)
            if others := [dict(one) for one in tasks if one != settings.task]:
                task["also"] = others  # of a mix: it was trained on these, too
            model.config.task = None if task == MATH_TASK else task
    model.config.step_stride = settings.step_stride
    model.config.method = config.method
    if config.method != "os-pruner":
        model.config.default_mode = "threshold"
        model.config.default_threshold = BASELINE_THRESHOLD
    if model.policy.tail is not None and not config.adapter_rank:  # these are float32 already
        model.policy.tail.float()
    return model


def replayed(model: Trainable, table: TraceTable, said: Predicted, price: float) -> Outcome:
    """What a policy comes to on traces, as it decides by default."""
    draws = model.config.default_mode == "sample"
    threshold = None if draws else model.config.default_threshold
    return replay(table, said.probabilities(price), threshold)


def save_policy(
    folder: Path,
    model: Trainable,
    price: float,
    said: Predicted,
    table: TraceTable,
    steps: int,
    details: Mapping[str, Any],
) -> SavedPolicy:
    """Saves a policy with its results on the validation traces, and its record.

    A policy of every price gets its default price here (`CHOSEN_BY`). The record is written last:
    it tells that the other files are whole.

    Args:
        folder: where to; files of an earlier policy in it are replaced.
        model: the policy.
        price: that it was trained for; 0 for a classifier, unused with the head "price".
        said: what it says on the validation traces.
        table: these traces.
        steps: optimiser steps that it took.
        details: what the record shall hold, JSON values: the settings, the labels' `data_hash`...
    """
    config, full, facts = model.config, replay_full(table), dict(details)
    frontier: dict[float, Outcome] = {}
    if config.prices is None:
        outcomes = {price: replayed(model, table, said, price)}
        method = METHOD_NAMES[config.method]
    else:
        method = EVERY_PRICE
        frontier = {one: replayed(model, table, said, one) for one in price_grid(config.prices)}
        prices = [Rule(method, one, k, "price", validation=(one,)) for k, one in frontier.items()]
        price = choose(prices, full, table.problem_index)[0].parameter or 0.0
        facts["price_chosen_by"] = CHOSEN_BY
        outcomes = {one: frontier[one] for one in sorted({*list(frontier)[::_SHOWN_EVERY], price})}
    config.price, outcome = price, outcomes[price]
    if warning := warning_about(table, outcome, price, steps, [*frontier.values()]):
        facts["warning"] = warning
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    rules = [Rule(method, one, k, "price") for k, one in outcomes.items()]
    if config.default_mode == "threshold":
        rules = [Rule(method, outcome, config.default_threshold, "threshold")]
    frame = Report([Rule(FULL, full), *rules], table.problem_index).frame
    frame["chosen"] = frame.index == 1 + list(outcomes).index(price)
    setting = (
        "replay by `ospruner train`, problems of the kind it was trained on, one training seed"
    )
    results = Results(dataset="validation traces", setting=setting, frame=frame)
    results.save(folder / RESULTS_FILE)
    provenance(
        folder,
        seed=facts["settings"]["seed"],
        base_model=config.base_model_name_or_path,
        base_revision=config.base_revision,
        data_hash=facts.pop("data_hash", None),
        details=facts,
        files={WEIGHTS: file_hash(folder / WEIGHTS)},
    )
    own, whole = (outcome.accuracy, outcome.mean_tokens), (full.accuracy, full.mean_tokens)
    return SavedPolicy(folder, config.method, price, *own, *whole, warning)


def warning_about(
    table: TraceTable, outcome: Outcome, price: float, steps: int, prices: Sequence[Outcome] = ()
) -> str:
    """What shows that a policy learned little, each with what to change; "" for nothing.

    Where thinking goes from E[L_1] (stop at the first step) to E[L_T] (never stop), a policy whose
    E[tokens] lies at either end is one of the two trivial rules.

    Args:
        table: traces on which it was tried.
        outcome: of the policy on them, at its own price.
        price: that; 0 for a classifier.
        steps: optimiser steps that it took.
        prices: outcomes at all prices, of a policy of every price.
    """
    first, full = float(table.lengths[:, 0].mean()), replay_full(table)
    near, tokens = TRIVIAL * (full.mean_tokens - first), outcome.mean_tokens
    never = tokens >= full.mean_tokens - near
    at_once = not never and tokens <= first + near
    lost = full.accuracy - outcome.accuracy
    worse = lost > price * (full.mean_tokens - tokens) > 0
    best = max((one.accuracy for one in prices), default=full.accuracy)
    said = {
        f"took {steps} optimiser steps, of at least {FEWEST_STEPS} that it needs: leave "
        "num_train_epochs out or raise it, or label more problems": steps < FEWEST_STEPS,
        "never stops: on the validation traces it equals the full trace and saves "
        f"{100 * max(0.0, 1 - tokens / full.mean_tokens):.1f} % of its tokens: train on higher "
        "prices, or on more labels": never,
        "always stops: on the validation traces at the first step, whatever stands there: train on "
        "lower prices, or on problems that need thinking": at_once,
        f"is worse than never stopping at its own price {price:g}: on the validation traces it "
        f"loses {100 * lost:.1f} points, and the tokens that it saves are worth fewer: generate "
        "with a lower price, or train on more labels": worse,
        "loses more than a point on the validation traces at every price: train on lower prices, "
        "or on more labels": best < full.accuracy - LITTLE,
    }
    return "; it ".join(text for text, holds in said.items() if holds)
