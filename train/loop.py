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
from ospruner.eval.replay import Outcome, replay
from ospruner.eval.schema import LabelSettings

from .checks import is_out_of_memory, refuse_shared_problems, usable_rows
from .fast_tail import step_logits
from .packing import LabelledTraces, epoch_batches
from .policies import StageResult, batch_loss, new_policy, predict
from .policy_folder import save_policy_folder
from .progress import Progress, silent
from .run_folder import RunFolder, labels_hash
from .settings import Stage, TrainSettings

__all__ = [
    "StageResult",
    "TrainingDivergedError",
    "batch_loss",
    "predict",
    "train",
]

SATURATED = 0.05
"""A stop probability outside [.05, .95] counts as saturated: little gradient gets through it."""


class TrainingDivergedError(FloatingPointError):
    """The loss is no longer a finite number."""


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
        TrainingDivergedError: the loss became NaN or infinite; the batch is kept.
        MemoryError: memory ran out; it says what to lower.
    """
    traces = LabelledTraces.from_dataset(train_set)
    validation = LabelledTraces.from_dataset(validation_set)
    rows = usable_rows(traces, settings)
    refuse_shared_problems(traces, validation)
    identity = {
        "settings": _what_is_trained(settings),
        "label_settings": label_settings.to_dict(),
        "train_labels": labels_hash(traces.table),
        "validation_labels": labels_hash(validation.table),
    }
    with RunFolder(out_dir, identity) as folder:
        model = new_policy(base, tokenizer, settings, label_settings)
        run = _Run(model, traces, rows, validation, settings, folder, progress)
        try:
            return run.go()
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise MemoryError(
                f"out of memory with batch_size {settings.batch_size}, traces of up to "
                f"{int(traces.token_lengths[rows].max())} tokens and cache_limit_bytes "
                f"{settings.cache_limit_bytes}: lower batch_size first, then cache_limit_bytes "
                "(0 computes the trunk anew for each batch) or num_policy_layers. The run goes on "
                f"from its last checkpoint in {folder.path}"
            ) from error


def _what_is_trained(settings: TrainSettings) -> dict[str, Any]:
    """The settings without those that a run may be continued with other values of."""
    free = {"cache_limit_bytes", "checkpoint_every", "validate_every"}
    return {name: value for name, value in settings.to_dict().items() if name not in free}


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
        self.facts = {"labels": labels_hash(traces.table), "training_traces": len(rows)}
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
            self._set_learning_rates(stage, self.epoch + self.batch / len(batches))
            loss = self._step(stage, batches[self.batch])
            self.batch += 1
            self.steps += 1
            self.progress(
                "train", number * len(batches) + self.batch, total, f"{stage.name} loss {loss:.3f}"
            )
            if self._due(self.settings.validate_every):
                outcome = self._validate()[1]
                place = {"steps": self.steps, "length_penalty": stage.length_penalty}
                found = {"accuracy": outcome.accuracy, "tokens": outcome.mean_tokens}
                self.folder.log({"dynamics": place | found})
            if self._due(self.settings.checkpoint_every):
                self._checkpoint()
        entry = {"stage": stage.name, "length_penalty": stage.length_penalty, "epoch": self.epoch}
        seconds = round(time.monotonic() - started, 3)
        self.folder.log(entry | self.tally.entry() | {"steps": self.steps, "seconds": seconds})
        self.tally = _Tally()
        self.epoch += 1
        self.batch = 0
        self._checkpoint()

    def _due(self, every: int) -> bool:
        return bool(every) and self.steps % every == 0

    def _set_learning_rates(self, stage: Stage, epochs_done: float) -> None:
        """Linear fall within the stage; a function of the position alone, so resuming is exact."""
        left = 1.0 - epochs_done / stage.epochs
        end = self.settings.final_learning_rate_share
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * (end + (1.0 - end) * left)

    def _step(self, stage: Stage, rows: npt.NDArray[np.int64]) -> float:
        batch = self.traces.batch(rows)
        hidden = self.traces.states(self.model, rows)  # (B, S, H)
        logits = step_logits(self.model.policy, hidden, batch.positions.to(hidden.device))  # (B, T)
        loss = batch_loss(self.settings.method, logits, batch, stage.length_penalty)
        value = loss.item()
        if not math.isfinite(value):
            kept = self.folder.save_batch(rows, batch, logits)
            raise TrainingDivergedError(
                f"the loss is {value} in stage {stage.name}, epoch {self.epoch}, batch "
                f"{self.batch} (traces {rows.tolist()}, kept with their logits in {kept}): lower "
                f"learning_rate ({self.settings.learning_rate:g}), or check the base's weights for "
                f"NaN. The last checkpoint in {self.folder.path} is from before"
            )
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.tally.add(value, logits.detach().cpu(), batch.mask)
        return value

    def _finish_stage(self, stage: Stage) -> None:
        config = self.model.config
        config.length_penalty = stage.length_penalty
        probabilities, outcome = self._validate()
        table = self.validation.table
        path = self.folder.save_policy(
            stage.name,
            lambda to: save_policy_folder(
                to, self.model, self.settings, stage, self.facts, table, outcome
            ),
        )
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
        self.folder.log({"validation": result.to_dict()})
        self.epoch = 0
        self._checkpoint()

    def _validate(self) -> tuple[npt.NDArray[np.float32], Outcome]:
        """Stop probabilities (N, T) on the validation traces, and what they come to."""
        # What fits in memory was kept before the first step.
        probabilities = predict(self.model, self.validation, cache_limit_bytes=0)
        config, table = self.model.config, self.validation.table
        if config.default_mode == "sample":
            return probabilities, replay(table, probabilities)
        threshold = config.default_threshold
        return probabilities, replay(table, probabilities, "threshold", threshold)

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
                "results": [result.to_dict() for result in self.results],
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
            StageResult.from_dict(result, self.folder.path) for result in state["results"]
        ]
        self.epoch, self.batch, self.steps = state["epoch"], state["batch"], state["steps"]
        self.tally = _Tally(**state["tally"])


def _optimizer(model: OSPrunerForCausalLM, settings: TrainSettings) -> torch.optim.AdamW:
    head = {id(p) for p in model.policy.head.parameters()}
    trained = [p for p in model.policy.parameters() if p.requires_grad]
    layers = [p for p in trained if id(p) not in head]
    groups: list[dict[str, Any]] = [
        {
            "params": [p for p in trained if id(p) in head],
            "initial_lr": settings.head_learning_rate or settings.learning_rate,
        }
    ]
    if layers:
        groups.append({"params": layers, "initial_lr": settings.learning_rate})
    return torch.optim.AdamW(
        [group | {"lr": group["initial_lr"]} for group in groups],
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )
