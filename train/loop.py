"""The training loop: one run anneals through the length penalties and saves a policy at each end.

For low lambdas training from scratch is stuck at "never stop"; starting moderately high and
lowering lambda in stages is not (the paper's section on progressive training). The trunk runs
without gradient, the tail with gradient in one causal pass a trace, whose outputs are read at the
step ends. The baselines go through the same loop with another loss.
"""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.reasoning_format import ReasoningFormat
from ospruner.eval.replay import replay
from ospruner.eval.schema import LabelSettings

from .baselines import classification_loss
from .fast_tail import step_logits
from .objective import objective_loss
from .packing import Batch, LabelledTraces, epoch_batches, length_batches
from .progress import Progress, silent
from .run_folder import RunFolder, labels_hash
from .settings import Stage, TrainSettings

__all__ = [
    "StageResult",
    "TrainingDivergedError",
    "batch_loss",
    "new_policy",
    "predict",
    "train",
]

MIN_TRACES = 8
BASELINE_THRESHOLD = 0.9
"""A baseline's threshold until one is chosen on validation: the paper's most careful one."""

SATURATED = 0.05
"""A stop probability outside [.05, .95] counts as saturated: little gradient gets through it."""


class TrainingDivergedError(RuntimeError):
    """The loss is no longer a finite number."""


@dataclass(frozen=True)
class StageResult:
    """A policy, and what it does on the validation traces.

    Attributes:
        name: of the stage.
        method: "os-pruner", "probe" or "convergence".
        length_penalty: lambda; 0 for the baselines.
        path: the policy's folder.
        probabilities_path: its stop probabilities (N, T) on the validation traces, a .npy file.
        accuracy: on validation, in mode "sample" for OS-Pruner, at `default_threshold` else.
        tokens: mean thinking tokens there.
        full_accuracy: of the full traces.
        full_tokens: of the full traces.
    """

    name: str
    method: str
    length_penalty: float
    path: Path
    probabilities_path: Path
    accuracy: float
    tokens: float
    full_accuracy: float
    full_tokens: float

    def validation_probabilities(self) -> npt.NDArray[np.float32]:
        """Stop probabilities (N, T) on the validation traces."""
        values: npt.NDArray[np.float32] = np.load(self.probabilities_path, allow_pickle=False)
        return values


def train(
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    train_set: Dataset | LabelledTraces,
    validation_set: Dataset | LabelledTraces,
    settings: TrainSettings,
    label_settings: LabelSettings,
    out_dir: str | Path,
    *,
    progress: Progress = silent,
) -> list[StageResult]:
    """Trains stopping policies on labelled traces; a killed run continues where it was.

    Traces cut at the token cap are left out of training (`LabelledTraces.table.capped` counts
    them; so does the log) and kept in validation.

    Args:
        base: the model that made the labels; it stays frozen.
        tokenizer: the base's; saved beside each policy.
        train_set: labelled traces. Pass `LabelledTraces` to several runs on one base, and the
            trunk runs once for all of them.
        validation_set: labelled traces of other problems.
        settings: method, schedule, optimiser.
        label_settings: how the labels were made; policies are bound to their base and format.
        out_dir: an empty folder, or that of an earlier run with the same settings and labels.
        progress: called with phases "trunk" (traces) and "train" (epochs' batches).

    Returns:
        A policy and its validation result for each stage, in order.

    Raises:
        ValueError: too few traces, labels that are all equal, a problem in both sets, or a folder
            that holds something else.
        TrainingDivergedError: the loss became NaN or infinite.
    """
    traces = LabelledTraces.from_dataset(train_set)
    validation = LabelledTraces.from_dataset(validation_set)
    rows = _usable_rows(traces, settings)
    _refuse_shared_problems(traces, validation)
    identity = {
        "settings": settings.to_dict(),
        "label_settings": label_settings.to_dict(),
        "train_labels": labels_hash(traces.table),
        "validation_labels": labels_hash(validation.table),
    }
    with RunFolder(out_dir, identity) as folder:
        model = new_policy(base, tokenizer, settings, label_settings)
        run = _Run(model, traces, rows, validation, settings, folder, progress)
        return run.go()


def new_policy(
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: TrainSettings,
    label_settings: LabelSettings,
) -> OSPrunerForCausalLM:
    """The base with an untrained policy, bound to the labels' base and reasoning format."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = OSPrunerForCausalLM.from_base(
            base,
            tokenizer,
            num_policy_layers=settings.num_policy_layers,
            tuning=settings.tuning,
            init_bias=settings.init_bias,
            reasoning_format=ReasoningFormat.from_dict(label_settings.reasoning_format),
            base_model_name_or_path=label_settings.base_model,
            base_revision=label_settings.base_revision,
        )
    model.config.method = settings.method
    if settings.method != "os-pruner":
        model.config.default_mode = "threshold"
        model.config.default_threshold = BASELINE_THRESHOLD
    return model.eval()  # as when generating: whatever dropout the base has stays off


def batch_loss(method: str, logits: Tensor, batch: Batch, length_penalty: float) -> Tensor:
    """The loss of one batch.

    Args:
        method: "os-pruner", "probe" or "convergence".
        logits: (B, T) stop logits at step ends.
        batch: the labels.
        length_penalty: lambda; only "os-pruner" has one.
    """
    mask = batch.mask.to(logits.device)
    correct = batch.correct.to(logits.device)
    if method == "os-pruner":
        lengths = batch.lengths.to(logits.device)
        return objective_loss(logits, correct, lengths, length_penalty, mask)
    targets = correct if method == "probe" else batch.matches_final.to(logits.device)
    return classification_loss(logits, targets, mask)


@torch.no_grad()
def predict(
    model: OSPrunerForCausalLM, dataset: Dataset | LabelledTraces
) -> npt.NDArray[np.float32]:
    """Stop probabilities at the step ends of labelled traces: one causal pass a trace.

    Args:
        model: base and policy.
        dataset: N labelled traces of up to T steps, of this base.

    Returns:
        (N, T) probabilities, 0 on padding. Replay does not read the last step's.
    """
    traces = LabelledTraces.from_dataset(dataset)
    out = np.zeros(traces.table.mask.shape, dtype=np.float32)
    for rows in length_batches(traces.token_lengths):
        batch = traces.batch(rows)
        hidden = traces.states(model, rows)  # (B, S, H)
        logits = step_logits(model.policy, hidden, batch.positions.to(hidden.device))  # (B, T)
        probabilities = torch.sigmoid(logits.float()).cpu().masked_fill(~batch.mask, 0.0)
        out[rows, : probabilities.shape[1]] = probabilities.numpy()
    return out


@dataclass
class _Tally:
    """Sums over an epoch's batches, for the log."""

    traces: int = 0
    loss: float = 0.0
    choices: int = 0
    logit: float = 0.0
    saturated: int = 0

    def add(self, loss: float, logits: Tensor, mask: Tensor) -> None:
        """Takes one batch; the last step of a trace is no choice and not counted."""
        x = logits[:, :-1][mask[:, 1:]]
        pi = torch.sigmoid(x)
        self.traces += len(mask)
        self.loss += loss * len(mask)
        self.choices += x.numel()
        self.logit += float(x.sum())
        self.saturated += int(((pi < SATURATED) | (pi > 1 - SATURATED)).sum())

    def entry(self) -> dict[str, float]:
        """Means over the epoch."""
        return {
            "loss": self.loss / self.traces,
            "mean_stop_logit": self.logit / max(self.choices, 1),
            "saturated_share": self.saturated / max(self.choices, 1),
        }


class _Run:
    """One run: what is trained, and how far it is."""

    def __init__(
        self,
        model: OSPrunerForCausalLM,
        traces: LabelledTraces,
        rows: npt.NDArray[np.int64],
        validation: LabelledTraces,
        settings: TrainSettings,
        folder: RunFolder,
        progress: Progress,
    ) -> None:
        self.model = model
        self.traces = traces
        self.rows = rows
        self.validation = validation
        self.settings = settings
        self.folder = folder
        self.progress = progress
        self.parameters = [p for p in model.policy.parameters() if p.requires_grad]
        self.optimizer = _optimizer(model, settings)
        self.results: list[StageResult] = []
        self.epoch = 0  # of the stage
        self.batch = 0  # of the epoch
        self.steps = 0  # of the run
        self.tally = _Tally()

    def go(self) -> list[StageResult]:
        """Trains what is left of the run."""
        self._restore()
        stages = self.settings.stages
        if len(self.results) < len(stages):
            limit = self.settings.cache_limit_bytes
            held = self.traces.cache_states(self.model, limit, self.progress)
            held += self.validation.cache_states(self.model, limit - held, self.progress)
            if self.steps == 0:
                self.folder.log(self._header(held))
        for stage in stages[len(self.results) :]:
            while self.epoch < stage.epochs:
                self._run_epoch(stage)
            self._finish_stage(stage)
        return self.results

    def _run_epoch(self, stage: Stage) -> None:
        started = time.monotonic()
        number = sum(s.epochs for s in self.settings.stages[: len(self.results)]) + self.epoch
        batches = epoch_batches(
            self.traces.token_lengths,
            self.rows,
            self.settings.batch_size,
            self.settings.seed,
            number,
        )
        total = self.settings.total_epochs * len(batches)
        while self.batch < len(batches):
            loss = self._step(stage, batches[self.batch])
            self.batch += 1
            self.steps += 1
            self.progress(
                "train", number * len(batches) + self.batch, total, f"{stage.name} loss {loss:.3f}"
            )
            every = self.settings.checkpoint_every
            if every and self.steps % every == 0:
                self._checkpoint()
        entry = {"stage": stage.name, "length_penalty": stage.length_penalty, "epoch": self.epoch}
        seconds = round(time.monotonic() - started, 3)
        self.folder.log(entry | self.tally.entry() | {"steps": self.steps, "seconds": seconds})
        self.tally = _Tally()
        self.epoch += 1
        self.batch = 0
        self._checkpoint()

    def _step(self, stage: Stage, rows: npt.NDArray[np.int64]) -> float:
        batch = self.traces.batch(rows)
        hidden = self.traces.states(self.model, rows)  # (B, S, H)
        logits = step_logits(self.model.policy, hidden, batch.positions.to(hidden.device))  # (B, T)
        loss = batch_loss(self.settings.method, logits, batch, stage.length_penalty)
        value = loss.item()
        if not math.isfinite(value):
            raise TrainingDivergedError(
                f"the loss is {value} in stage {stage.name}, epoch {self.epoch}, batch "
                f"{self.batch} (traces {rows.tolist()}): lower learning_rate "
                f"({self.settings.learning_rate:g}), or check the base's weights for NaN. "
                f"The last checkpoint in {self.folder.path} is from before"
            )
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.tally.add(value, logits.detach().cpu(), batch.mask)
        return value

    def _finish_stage(self, stage: Stage) -> None:
        config = self.model.config
        config.length_penalty = stage.length_penalty
        path = self.folder.save_policy(stage.name, self.model.save_pretrained)
        probabilities = predict(self.model, self.validation)
        table = self.validation.table
        if config.default_mode == "sample":
            outcome = replay(table, probabilities)
        else:
            outcome = replay(table, probabilities, "threshold", config.default_threshold)
        result = StageResult(
            name=stage.name,
            method=self.settings.method,
            length_penalty=stage.length_penalty,
            path=path,
            probabilities_path=self.folder.save_array(f"{stage.name}.validation", probabilities),
            accuracy=outcome.accuracy,
            tokens=outcome.mean_tokens,
            full_accuracy=float(table.full_correct.mean()),
            full_tokens=float(table.full_tokens.mean()),
        )
        self.results.append(result)
        self.folder.log({"validation": _plain(result)})
        self.epoch = 0
        self._checkpoint()

    def _header(self, cached_bytes: int) -> dict[str, Any]:
        return {
            "traces": len(self.rows),
            "capped_traces_dropped": len(self.traces) - len(self.rows),
            "ungraded_steps": int(self.traces.table.ungraded[self.rows].sum()),
            "trunk_states_bytes": cached_bytes,
            "trainable_parameters": sum(p.numel() for p in self.parameters),
        }

    def _checkpoint(self) -> None:
        # No draw is made while training: batches follow from seed and epoch, dropout is off.
        self.folder.save_checkpoint(
            {
                "policy": self.model.policy.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "results": [_plain(result) for result in self.results],
                "epoch": self.epoch,
                "batch": self.batch,
                "steps": self.steps,
                "tally": dataclasses.asdict(self.tally),
            }
        )

    def _restore(self) -> None:
        state = self.folder.load_checkpoint()
        if state is None:
            return
        self.model.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.results = [
            StageResult(
                **result
                | {
                    "path": self.folder.path / result["path"],
                    "probabilities_path": self.folder.path / result["probabilities_path"],
                }
            )
            for result in state["results"]
        ]
        self.epoch, self.batch, self.steps = state["epoch"], state["batch"], state["steps"]
        self.tally = _Tally(**state["tally"])


def _plain(result: StageResult) -> dict[str, Any]:
    """A result as JSON-ready values; paths relative to the run's folder, which may be moved."""
    return dataclasses.asdict(result) | {
        "path": result.path.name,
        "probabilities_path": result.probabilities_path.name,
    }


def _optimizer(model: OSPrunerForCausalLM, settings: TrainSettings) -> torch.optim.AdamW:
    head = {id(p) for p in model.policy.head.parameters()}
    trained = [p for p in model.policy.parameters() if p.requires_grad]
    layers = [p for p in trained if id(p) not in head]
    groups: list[dict[str, Any]] = [
        {
            "params": [p for p in trained if id(p) in head],
            "lr": settings.head_learning_rate or settings.learning_rate,
        }
    ]
    if layers:
        groups.append({"params": layers, "lr": settings.learning_rate})
    return torch.optim.AdamW(
        groups,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def _usable_rows(traces: LabelledTraces, settings: TrainSettings) -> npt.NDArray[np.int64]:
    """The traces that are trained on: those that ended by themselves."""
    table = traces.table
    rows = np.flatnonzero(~table.capped)
    if len(rows) < max(MIN_TRACES, settings.batch_size):
        raise ValueError(
            f"there are {len(rows)} training traces that ended naturally "
            f"({int(table.capped.sum())} were cut at the cap); training needs at least "
            f"{MIN_TRACES}, and batch_size ({settings.batch_size}): label more problems"
        )
    mask = table.mask[rows]
    convergence = settings.method == "convergence"
    name = "matches_final" if convergence else "forced_correct"
    values = (table.matches_final if convergence else table.correct)[rows][mask]
    if (values == values[0]).all():
        raise ValueError(
            f"{name} is {values[0]} at every step of all {len(rows)} training traces: there is "
            "nothing to learn from labels that are all equal (check the grading, or choose "
            "problems that the base sometimes solves)"
        )
    return rows


def _refuse_shared_problems(train: LabelledTraces, validation: LabelledTraces) -> None:
    shared = set(train.table.problem_ids) & set(validation.table.problem_ids)
    if shared:
        raise ValueError(
            f"{len(shared)} problems are in both the training and the validation traces, such as "
            f"{min(shared)!r}: split by problem (ospruner.eval.schema.split_of)"
        )
