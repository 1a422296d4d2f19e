"""Policies before, while and after they are trained: a fresh one, its loss, its predictions."""

from __future__ import annotations

import dataclasses
import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.configuration_ospruner import PriceRange, price_logits, price_places
from modeling_ospruner.formats_ospruner import ReasoningFormat
from modeling_ospruner.loading_ospruner import WEIGHTS
from ospruner.durable import DamagedError
from ospruner.eval.intervals import Rule, summarise
from ospruner.eval.methods import EVERY_PRICE, FULL, METHOD_NAMES
from ospruner.eval.replay import Outcome, replay_full
from ospruner.eval.results import RESULTS_FILE, Results
from ospruner.eval.schema import MATH_TASK, LabelSettings
from ospruner.eval.table import TraceTable, classifier_targets
from ospruner.progress import Progress, silent
from ospruner.provenance import file_hash, provenance

from .flashthink import Verifier, tokens_read
from .objective import classification_loss, every_price_loss, objective_loss
from .processes import Processes
from .settings import Stage, TrainSettings
from .tail import step_outputs
from .traces import Batch, LabelledTraces, States, refuse_beyond_positions
from .trunk.batches import length_batches

__all__ = [
    "Predicted",
    "StageResult",
    "Trainable",
    "batch_loss",
    "fresh_policy",
    "loss_weight",
    "new_policy",
    "predict",
    "predict_outputs",
    "predict_with",
    "save_policy_folder",
    "warning_about",
]


Trainable = OSPrunerForCausalLM | Verifier
AnyTrainable = TypeVar("AnyTrainable", OSPrunerForCausalLM, Verifier)

BASELINE_THRESHOLD = 0.9
"""A baseline's threshold until one is chosen on validation: the paper's most careful one."""


@dataclass(frozen=True)
class StageResult:
    """A policy, and what it does on the validation traces.

    Attributes:
        name: of the stage.
        method: of `OSPrunerConfig`.
        price: lambda; 0 for the baselines; of a policy of every price its default.
        path: the policy's folder.
        probabilities_path: its stop probabilities (N, T) on the validation traces, a .npy file.
        probabilities_sha256: of that file; "" in processes that do not write it.
        accuracy: on validation, in mode "sample" for OS-Pruner, at `default_threshold` else.
        tokens: mean thinking tokens there.
        full_accuracy: of the full traces.
        full_tokens: of the full traces.
        warning: what `warning_about` says of it; "" for nothing.
    """

    name: str
    method: str
    price: float
    path: Path
    probabilities_path: Path
    probabilities_sha256: str
    accuracy: float
    tokens: float
    full_accuracy: float
    full_tokens: float
    warning: str

    def validation_probabilities(self) -> npt.NDArray[np.float32]:
        """Stop probabilities (N, T) on the validation traces.

        Raises:
            DamagedError: the file no longer holds what was written.
        """
        content = self.probabilities_path.read_bytes()
        if hashlib.sha256(content).hexdigest() != self.probabilities_sha256:
            raise DamagedError(
                f"{self.probabilities_path} is damaged (its SHA-256 is not that of the run's "
                "record): `predict` of the policy beside it gives the same again"
            )
        values: npt.NDArray[np.float32] = np.load(io.BytesIO(content), allow_pickle=False)
        return values

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values; paths relative to the run's folder, which may be moved."""
        return dataclasses.asdict(self) | {
            "path": self.path.name,
            "probabilities_path": self.probabilities_path.name,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], folder: Path) -> StageResult:
        """What `to_dict` gave, in the run's folder."""
        paths = {name: folder / values[name] for name in ("path", "probabilities_path")}
        return cls(**{**values, **paths})


def fresh_policy(
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: TrainSettings,
    label_settings: LabelSettings,
) -> Trainable:
    """What a run begins with: `new_policy`, or with method "flashthink" a verifier."""
    if settings.method != "flashthink":
        return new_policy(base, tokenizer, settings, label_settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        verifier = Verifier.untrained(base, settings, label_settings)
    return _prepared(verifier, settings)


def new_policy(
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: TrainSettings,
    label_settings: LabelSettings,
) -> OSPrunerForCausalLM:
    """The base with an untrained policy, bound to the labels' base and reasoning format.

    Its tail is in float32 whatever the base's dtype: steps of 1e-5 would be lost in bfloat16.

    Raises:
        ValueError: it is to try answers, and the labels' were not forced, or are of several tasks.
    """
    if settings.trial_every and (label_settings.answer != "forced" or label_settings.domains):
        what = (
            f"the domains {', '.join(label_settings.domains)}, each with answers of its own"
            if label_settings.domains
            else f"{label_settings.answer} answers"
        )
        raise ValueError(
            f"trial_every is {settings.trial_every}, but the labels hold {what}; trial answers are "
            "forced, of one task: train on labels of --answer-mode forced, one folder, or leave "
            "trial_every out"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = OSPrunerForCausalLM.untrained(
            base,
            tokenizer,
            num_policy_layers=settings.num_policy_layers,
            tuning=settings.tuning,
            init_bias=settings.init_bias,
            lora_rank=settings.lora_rank,
            price_range=settings.price_range or None,
            trial_every=settings.trial_every,
            trial_max_tokens=label_settings.max_answer_tokens,
            reasoning_format=ReasoningFormat.from_dict(label_settings.reasoning_format),
            base_model_name_or_path=label_settings.base_model,
            base_revision=label_settings.base_revision,
        )
    model.config.step_stride = label_settings.step_stride
    model.config.task = task_of(label_settings)
    domains = {name: {"task": dict(task)} for name, task in label_settings.domains.items()}
    model.config.domains = domains or None
    return _prepared(model.eval(), settings)


def task_of(label_settings: LabelSettings) -> dict[str, Any] | None:
    """The task that a policy pins: its labels', None for mathematics."""
    return None if label_settings.task == MATH_TASK else dict(label_settings.task)


def _prepared(model: AnyTrainable, settings: TrainSettings) -> AnyTrainable:
    model.config.method = settings.method
    if settings.method != "os-pruner":
        model.config.default_mode = "threshold"
        model.config.default_threshold = BASELINE_THRESHOLD
    if model.policy.tail is not None and settings.tuning != "lora":  # adapters are float32 already
        model.policy.tail.float()
    model.policy.eval()  # as when generating: whatever dropout the base has stays off
    return model


def batch_loss(
    method: str,
    logits: Tensor,
    batch: Batch,
    price: float | Sequence[float] | None,
    entropy_bonus: float = 0.0,
) -> Tensor:
    """The loss of one batch.

    Args:
        method: of `OSPrunerConfig`.
        logits: (B, T) stop logits at step ends, or (J, B, T) at each of J lambdas.
        batch: the labels.
        price: lambda, or J lambdas; only "os-pruner" has one.
        entropy_bonus: of the stopping time, in reward a nat; only "os-pruner" has one.
    """
    mask = batch.mask.to(logits.device)
    correct = batch.correct.to(logits.device)
    if method == "os-pruner":
        lengths = batch.lengths.to(logits.device)
        if isinstance(price, Sequence):
            return every_price_loss(logits, correct, lengths, price, mask, entropy_bonus)
        assert price is not None
        return objective_loss(logits, correct, lengths, price, mask, entropy_bonus)
    labels = (batch.correct.numpy(), batch.matches_final.numpy(), batch.mask.numpy())
    targets = torch.from_numpy(classifier_targets(method, *labels)).to(logits.device)
    return classification_loss(logits, targets, mask)


def loss_weight(method: str, part: Batch, batch: Batch) -> float:
    """What the loss of a part of a batch counts in that of the whole, both means.

    Means over traces for "os-pruner", over steps for the baselines.
    """
    if method == "os-pruner":
        return len(part.mask) / len(batch.mask)
    return float(part.mask.sum() / batch.mask.sum())


TRIVIAL = 0.01
"""A policy this near to one of the two trivial rules, in tokens, is as good as that rule."""


def warning_about(table: TraceTable, outcome: Outcome) -> str:
    """Says that a policy is one of the two trivial rules, "" where it is neither.

    Where thinking goes from E[L_1] (stop at the first step) to E[L_T] (never stop), the policy's
    E[tokens] lies at either end.

    Args:
        table: traces on which it was tried.
        outcome: of the policy on them.
    """
    first, full = float(table.lengths[:, 0].mean()), float(table.full_tokens.mean())
    if outcome.mean_tokens >= full - TRIVIAL * (full - first):
        saved = max(0.0, 1 - outcome.mean_tokens / full)
        return (
            "never stops: on the validation traces it equals the full trace and saves "
            f"{100 * saved:.1f} % of its tokens"
        )
    if outcome.mean_tokens <= first + TRIVIAL * (full - first):
        return "always stops: on the validation traces at the first step, whatever stands there"
    return ""


@dataclass(frozen=True)
class Predicted:
    """What a policy says at the step ends of N labelled traces of up to T steps.

    Attributes:
        outputs: (N, T, K) float32 of its head; 0 on padding.
        mask: (N, T) true on real steps.
        prices: that the policy knows; None with the head "fixed".
        price: its own lambda.
    """

    outputs: npt.NDArray[np.float32]
    mask: npt.NDArray[np.bool_]
    prices: PriceRange | None
    price: float

    def probabilities(self, price: float | None = None) -> npt.NDArray[np.float32]:
        """(N, T) stop probabilities, 0 on padding. Replay does not read the last step's.

        Args:
            price: the price of a token; None for the policy's own.

        Raises:
            ValueError: the policy does not know this price.
        """
        price = self.price if price is None else price
        outputs = torch.from_numpy(self.outputs)
        logits = outputs[..., 0]
        if self.prices is not None:
            self.prices.check("price", price)
            logits = price_logits(outputs, torch.tensor(self.prices.place(price)))
        found: npt.NDArray[np.float32] = torch.sigmoid(logits).numpy()
        return np.where(self.mask, found, np.float32(0.0))

    @cached_property
    def indifference(self) -> npt.NDArray[np.float64] | None:
        """(N, T) prices of indifference, `StopRecord.prices`; None with the head "fixed"."""
        if self.prices is None:
            return None
        places = price_places(torch.from_numpy(self.outputs)).numpy()
        return np.vectorize(self.prices.price_at, otypes=[np.float64])(places)


def predict(
    model: Trainable,
    dataset: Dataset | LabelledTraces,
    cache_limit_bytes: int = 2**31,
    price: float | None = None,
) -> npt.NDArray[np.float32]:
    """Stop probabilities at the step ends of labelled traces: one causal pass a trace.

    Args:
        model: as for `predict_outputs`.
        dataset: as there.
        cache_limit_bytes: as there.
        price: the price of a token; None for the policy's own. `predict_outputs` gives
            those of all prices at once.

    Returns:
        (N, T) probabilities, 0 on padding. Replay does not read the last step's.

    Raises:
        ValueError: a trace is longer than the base's positions, or see `Predicted`.
    """
    return predict_outputs(model, dataset, cache_limit_bytes).probabilities(price)


@torch.no_grad()
def predict_outputs(
    model: Trainable,
    dataset: Dataset | LabelledTraces,
    cache_limit_bytes: int = 2**31,
    progress: Progress = silent,
) -> Predicted:
    """What a policy says at the step ends of labelled traces: one causal pass a trace.

    Args:
        model: base and policy.
        dataset: N labelled traces of up to T steps, of this base. `LabelledTraces` keep the
            trunk's states for the next policy on the same base.
        cache_limit_bytes: largest size of the states kept in memory.
        progress: called with phase "trunk" while they are computed.

    Raises:
        ValueError: a trace is longer than the base's positions.
    """
    traces = LabelledTraces.from_dataset(dataset)
    refuse_beyond_positions(model.base, traces)
    if isinstance(dataset, LabelledTraces):
        traces.cache_states(model, cache_limit_bytes, progress)

    def outputs_of(states: States, positions: Tensor, trial_numbers: Tensor | None) -> Tensor:
        return step_outputs(model.policy, states, positions, trial_numbers=trial_numbers)

    return predict_with(outputs_of, model, traces, Processes())


@torch.no_grad()
def predict_with(
    outputs_of: Callable[[States, Tensor, Tensor | None], Tensor],
    model: Trainable,
    traces: LabelledTraces,
    processes: Processes,
) -> Predicted:
    """`predict_outputs`, by several processes, each of which takes some of the traces.

    Args:
        outputs_of: (B, T, K) from the trunk's states, positions (B, T) and, for a policy that tries
            answers, the numbers of their history (B, T, 11).
        model: whose trunk.
        traces: N labelled traces.
        processes: those that share the work; all get the result.
    """
    width = model.policy.head.out_features
    out = np.zeros((*traces.table.mask.shape, width), dtype=np.float32)
    for rows, new in processes.turns(list(length_batches(traces.token_lengths))):
        batch = traces.batch(rows)
        states = traces.states(model, rows)
        config, positions = model.config, batch.positions.to(states.device)
        numbers = traces.trial_numbers(rows, config.trial_every, config.trial_max_tokens)
        said = outputs_of(states, positions, numbers).float().cpu()  # (B, T, K)
        if new:
            out[rows, : said.shape[1]] = said.masked_fill(~batch.mask[..., None], 0.0).numpy()
    outputs = processes.sum(out.astype(np.float64)).astype(np.float32)
    prices, price = model.config.prices, model.config.price
    return Predicted(outputs, traces.table.mask, prices, price)


def save_policy_folder(
    folder: Path,
    model: Trainable,
    tensors: Mapping[str, Tensor],
    settings: TrainSettings,
    stage: Stage,
    facts: Mapping[str, Any],
    validation: LabelledTraces,
    outcomes: Mapping[float, Outcome],
) -> None:
    """Saves a policy with its record, its results on the validation traces, and a card.

    FlashThink's has no card: it is a baseline for replay, and is not published.

    Args:
        folder: where to.
        model: the policy.
        tensors: its policy's state dict, gathered from all processes.
        settings: of the run.
        stage: that ends here.
        facts: what else the record shall hold, JSON values; `data_hash` is that of the labels.
        validation: the validation traces.
        outcomes: of the policy on them, by lambda; one without the head "price".
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
        data_hash=facts.get("data_hash"),
        details={**facts, "settings": settings.to_dict()},
        files={WEIGHTS: file_hash(folder / WEIGHTS)},
    )
    if isinstance(model, Verifier):
        return
    table, config = validation.table, model.config
    full, method = replay_full(table), METHOD_NAMES[config.method]
    if config.head == "price":
        method = EVERY_PRICE
    uses = [
        Rule(method, outcome, config.default_threshold, "threshold")
        if config.default_mode == "threshold"
        else Rule(method, outcome, price, "λ")
        for price, outcome in outcomes.items()
    ]
    results = Results(
        dataset="validation traces",
        setting="replay by `ospruner train`, problems of the kind it was trained on, one training "
        "seed",
        results=summarise([Rule(FULL, full), *uses], full, table.problem_index),
        chosen=1 + list(outcomes).index(config.price),
    )
    results.save(folder / RESULTS_FILE)
