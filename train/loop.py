"""The training loop: one run anneals through the length penalties and saves a policy at each end.

For low lambdas training from scratch is stuck at "never stop"; starting moderately high and
lowering lambda in stages is not (the paper's section on progressive training). The trunk runs
without gradient, the tail with gradient in one causal pass a trace, whose outputs are read at the
step ends. The baselines go through the same loop with another loss.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from modeling_ospruner.configuration_ospruner import PriceRange
from modeling_ospruner.policy_ospruner import StoppingPolicy, add_adapters
from ospruner.eval.report.pictures import save_dynamics
from ospruner.eval.schema import LabelSettings
from ospruner.eval.table import classifier_targets
from ospruner.eval.text import penalty_name
from ospruner.progress import Progress, silent

from .fresh import StageResult, fresh_policy
from .processes import Processes
from .run import Run, TrainingDivergedError
from .run_folder import RunFolder, labels_hash
from .settings import TrainSettings
from .tail import no_denormals
from .traces import LabelledTraces, refuse_beyond_positions
from .trunk.kept import key_shapes

__all__ = [
    "MemoryNeed",
    "StageResult",
    "TrainingDivergedError",
    "is_out_of_memory",
    "memory_need",
    "print_stages",
    "refuse_shared_problems",
    "refuse_unlike_targets",
    "train",
    "train_together",
    "usable_rows",
]


MIN_TRACES = 8


def usable_rows(traces: LabelledTraces, settings: TrainSettings) -> npt.NDArray[np.int64]:
    """The traces that are trained on: those that ended by themselves.

    Raises:
        ValueError: too few of them, or labels that are all equal.
    """
    table = traces.table
    rows = np.flatnonzero(~table.capped)
    if len(rows) < max(MIN_TRACES, settings.batch_size):
        raise ValueError(
            f"there are {len(rows)} training traces that ended naturally "
            f"({int(table.capped.sum())} were cut at the cap); training needs at least "
            f"{MIN_TRACES}, and batch_size ({settings.batch_size}): label more problems"
        )
    mask = table.mask[rows]
    targets = classifier_targets(settings.method, table.correct, table.matches_final, table.mask)
    name = "forced_correct" if targets is table.correct else "matches_final"
    values = targets[rows][mask]
    if (values == values[0]).all():
        raise ValueError(
            f"{name} makes the label {values[0]:g} at every step of all {len(rows)} training "
            "traces: there is nothing to learn from labels that are all equal (check the grading, "
            "or choose problems that the base sometimes solves)"
        )
    return rows


def refuse_shared_problems(train: LabelledTraces, validation: LabelledTraces) -> None:
    """Raises a ValueError where training and validation share a problem."""
    shared = set(train.table.problem_ids) & set(validation.table.problem_ids)
    if shared:
        raise ValueError(
            f"{len(shared)} problems are in both the training and the validation traces, such as "
            f"{min(shared)!r}: split by problem (ospruner.eval.schema.split_of)"
        )


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch could not allocate memory; on the CPU that is a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def refuse_unlike_targets(targets: Sequence[TrainSettings], out_dirs: Sequence[object]) -> None:
    """Raises a ValueError where targets cannot be trained on the same batches and states."""
    if not targets or len(targets) != len(out_dirs) or len(set(out_dirs)) < len(out_dirs):
        raise ValueError(
            f"{len(targets)} targets for the folders {[str(f) for f in out_dirs]}: give at least "
            "one target, and each a folder of its own"
        )
    shared = ("batch_size", "micro_batch_tokens", "seed", "num_policy_layers", "tuning")
    for name in (*shared, "cache_limit_bytes"):
        values = {vars(settings)[name] for settings in targets}
        if len(values) > 1:
            raise ValueError(
                f"targets trained together must share {name}; they have {sorted(values)}"
            )


def print_stages(
    stages: Sequence[StageResult], console: Console, json_file: Path | None = None
) -> None:
    """Prints a table of the stages, draws each run's dynamics, and writes JSON where asked.

    Args:
        stages: results of one run.
        console: where to print.
        json_file: a list of `StageResult.to_dict`.
    """
    full = stages[0]
    table = Table(title="On the validation traces")
    headings = ["policy", "λ", "accuracy %", "thinking tokens", "reduction %"]
    if any(stage.warning for stage in stages):
        headings.append("warning")
    for heading in headings:
        table.add_column(heading)
    table.add_row(
        "full trace", "", f"{100 * full.full_accuracy:.1f}", f"{full.full_tokens:.0f}", "0.0"
    )
    for stage in stages:
        penalty = penalty_name(stage.price) if stage.method == "os-pruner" else ""
        reduction = 1 - stage.tokens / stage.full_tokens
        table.add_row(
            stage.name,
            penalty,
            f"{100 * stage.accuracy:.1f}",
            f"{stage.tokens:.0f}",
            f"{100 * reduction:.1f}",
            *([stage.warning.partition(":")[0]] if len(headings) > 5 else []),
        )
    console.print(table)
    for stage in stages:
        if stage.warning:
            console.print(f"[yellow]Warning:[/yellow] {stage.name} {stage.warning}.")
    for folder in dict.fromkeys(stage.path.parent for stage in stages):
        console.print(f"Policies: {folder}", soft_wrap=True)
    for folder in dict.fromkeys(s.path.parent for s in stages if s.method == "os-pruner"):
        save_dynamics(folder, [folder / "dynamics.png"], title="On the validation traces")
        console.print(f"Dynamics: {folder / 'dynamics.png'}", soft_wrap=True)
    if json_file is not None:
        json_file.write_text(json.dumps([s.to_dict() for s in stages], indent=2) + "\n", "utf-8")


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
    processes: Processes | None = None,
) -> list[StageResult]:
    """Trains stopping policies on labelled traces; a killed run continues where it was.

    Traces cut at the token cap are left out of training (`LabelledTraces.table.capped` counts
    them; so does the log) and kept in validation.

    Args:
        base: the model that made the labels; it stays frozen.
        tokenizer: the base's; saved beside each policy.
        train_set: labelled traces. Pass `LabelledTraces` to several runs on one base, and the
            trunk runs once for all of them; `keep_states` lets other processes share it, too.
        validation_set: labelled traces of other problems.
        settings: method, schedule, optimiser.
        label_settings: how the labels were made; policies are bound to their base and format.
        out_dir: an empty folder, or that of an earlier run with the same settings and labels.
        progress: called with phases "trunk" (traces) and "train" (epochs' batches).
        processes: those that train together; None for this one alone.

    Returns:
        A policy and its validation result for each stage, in order.

    Raises:
        ValueError: too few traces, labels that are all equal, a problem in both sets, a trace
            beyond the base's positions, or a folder that holds something else.
        TrainingDivergedError: the loss, a gradient or a weight became NaN or infinite; the batch
            is kept.
        MemoryError: memory ran out; it says what to lower.
    """
    (stages,) = train_together(
        base,
        tokenizer,
        train_set,
        validation_set,
        [settings],
        label_settings,
        [out_dir],
        progress=progress,
        processes=processes,
    )
    return stages


def train_together(
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    train_set: Dataset | LabelledTraces,
    validation_set: Dataset | LabelledTraces,
    targets: Sequence[TrainSettings],
    label_settings: LabelSettings,
    out_dirs: Sequence[str | Path],
    *,
    facts: Mapping[str, Any] | None = None,
    progress: Progress = silent,
    processes: Processes | None = None,
) -> list[list[StageResult]]:
    """Trains several targets on one pass of the trunk; each is as if it were trained alone.

    The targets go through the same batches in step, and each keeps its own policy, optimiser and
    folder, so that a killed run continues, or goes on alone with `train`. The trunk's states of a
    batch are computed once for all of them.

    Args:
        base: as for `train`.
        tokenizer: as for `train`.
        train_set: as for `train`.
        validation_set: as for `train`.
        targets: settings that share batch size, seed, layers and cache limit.
        label_settings: as for `train`.
        out_dirs: a folder for each target.
        facts: what else each policy's record shall hold, JSON values; see `save_policy_folder`.
        progress: as for `train`; the notes name the target.
        processes: as for `train`.

    Returns:
        For each target what `train` returns.

    Raises:
        ValueError: as for `train`, targets that cannot share batches, several of adapters in
            processes that split the base, or adapters on packed weights that pass no gradient.
        TrainingDivergedError: as for `train`, of one of them.
        MemoryError: memory ran out.
    """
    refuse_unlike_targets(targets, out_dirs)
    traces = LabelledTraces.from_dataset(train_set)
    validation = LabelledTraces.from_dataset(validation_set)
    rows = [usable_rows(traces, settings) for settings in targets]
    refuse_shared_problems(traces, validation)
    for labelled in (traces, validation):
        refuse_beyond_positions(base, labelled)
    if "lora" in {settings.tuning for settings in targets}:
        _refuse_weights_without_gradient(base)
    shared = {
        "label_settings": label_settings.to_dict(),
        "train_labels": labels_hash(traces.table),
        "validation_labels": labels_hash(validation.table),
    }
    together = processes or Processes()
    if traces.states_folder is not None and not together.one_machine:
        raise ValueError(
            f"states are kept in {traces.states_folder} by the processes of one machine, and "
            f"{together.size} train together on several: leave the folder out"
        )
    if together.sharded and len(targets) > 1 and targets[0].tuning == "lora":
        raise ValueError(
            f"{len(targets)} targets of adapters share the base's own layers, which can be split "
            "for one alone: leave out --shard (adapters are small), or train them without --multi"
        )
    with no_denormals(), ExitStack() as stack:
        folders = []
        for settings, out_dir in zip(targets, out_dirs, strict=True):
            identity = {"settings": _what_is_trained(settings), **shared}
            folders.append(stack.enter_context(RunFolder(out_dir, identity, together.main)))
        try:
            if together.device is not None and not together.sharded:
                base.to(together.device)
            models = [fresh_policy(base, tokenizer, one, label_settings) for one in targets]
            together.place_trunk(base, [model.policy for model in models])
            together.wait()  # until the first process has claimed the folders
            runs = [
                Run(model, traces, mine, validation, settings, folder, progress, together, facts)
                for model, mine, settings, folder in zip(
                    models, rows, targets, folders, strict=True
                )
            ]
            _drive(runs)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise MemoryError(_what_to_lower(targets, traces)) from error
    return [run.results for run in runs]


def _refuse_weights_without_gradient(base: PreTrainedModel) -> None:
    """Adapters get their gradient through the base's own layers, copies through layers unpacked."""
    quantizer = vars(base).get("hf_quantizer")
    if quantizer is not None and not quantizer.is_trainable:
        raise ValueError(
            f"tuning is 'lora', but the packed weights of this {type(base).__name__} "
            f"({type(quantizer.quantization_config).__name__}) pass no gradient on to the adapters "
            "below them: train copies (tuning layers, attention or head), or give `train` the base "
            "loaded unpacked; its adapters may then be used on the packed one"
        )


def _what_to_lower(targets: Sequence[TrainSettings], traces: LabelledTraces) -> str:
    settings = targets[0]
    return (
        f"out of memory with {len(targets)} target(s), micro_batch_tokens "
        f"{settings.micro_batch_tokens}, traces of up to {int(traces.token_lengths.max())} tokens "
        f"and cache_limit_bytes {settings.cache_limit_bytes}: lower micro_batch_tokens first (a "
        "trace is never cut), then cache_limit_bytes (0 computes the trunk anew for each batch), "
        "num_policy_layers, or the targets trained together; gradient_checkpointing and "
        "tuning='lora' need less, too. The run goes on from its last checkpoint"
    )


def _drive(runs: Sequence[Run]) -> None:
    """Lets the runs go on in step; one that was resumed from further back catches up first."""
    works = [run.work() for run in runs]
    wanted = {i: parts for i, work in enumerate(works) if (parts := next(work, None)) is not None}
    while wanted:
        behind = min(runs[i].steps for i in wanted)
        together = [i for i in wanted if runs[i].steps == behind]
        states = runs[together[0]].states_of(wanted[together[0]])
        if len(together) > 1:
            states = cache(states)
        for i in together:
            try:
                wanted[i] = works[i].send(states)
            except StopIteration:
                del wanted[i]


def _what_is_trained(settings: TrainSettings) -> dict[str, Any]:
    """The settings without those that a run may be continued with other values of."""
    free = {"cache_limit_bytes", "checkpoint_every", "micro_batch_tokens"}
    free |= {"gradient_checkpointing", "validate_every"}
    return {name: value for name, value in settings.to_dict().items() if name not in free}


if __name__ == "__main__":  # accelerate launch -m ospruner.train.loop: the command `ospruner train`
    sys.argv.insert(1, "train")
    entry_points(group="console_scripts")["ospruner"].load()()


_FLOAT32 = 4


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that targets trained together hold, activations not counted.

    Attributes:
        targets: how many.
        base_bytes: the frozen base, once for all.
        tail_bytes: the float32 weights of one target's tail and head.
        optimizer_bytes: AdamW's two moments for what one target trains, and the mean of its weights
            where they are averaged.
        gradient_bytes: of the one target that is taking its step.
        states_bytes: the trunk's states of all traces, where they are kept in memory.
        disk_bytes: of those that are kept in a folder instead (`LabelledTraces.keep_states`).
    """

    targets: int
    base_bytes: int
    tail_bytes: int
    optimizer_bytes: int
    gradient_bytes: int
    states_bytes: int
    disk_bytes: int

    @property
    def total_bytes(self) -> int:
        """Everything."""
        own = self.targets * (self.tail_bytes + self.optimizer_bytes)
        return self.base_bytes + own + self.gradient_bytes + self.states_bytes

    def __str__(self) -> str:
        own = self.targets * (self.tail_bytes + self.optimizer_bytes)
        return (
            f"{self.targets} target(s) will hold {_size(self.total_bytes)} besides activations: "
            f"base {_size(self.base_bytes)}, tails with AdamW's state {self.targets} x "
            f"({_size(self.tail_bytes)} + {_size(self.optimizer_bytes)}) = {_size(own)}, gradients "
            f"of one {_size(self.gradient_bytes)}, trunk's states {_size(self.states_bytes)}"
            + (f"; on disk {_size(self.disk_bytes)} of them" if self.disk_bytes else "")
        )


def memory_need(
    base: PreTrainedModel,
    targets: Sequence[TrainSettings],
    train_set: LabelledTraces,
    validation_set: LabelledTraces,
) -> MemoryNeed:
    """What `train_together` will hold; nothing is allocated to find out.

    Args:
        base: the model.
        targets: settings that share what `train_together` asks of them.
        train_set: traces to train on.
        validation_set: traces to validate on.
    """
    settings = targets[0]
    policy = StoppingPolicy.empty(
        base,
        settings.num_policy_layers,
        PriceRange(*settings.price_range) if settings.price_range else None,
        settings.tuning == "queries",
        settings.trial_every > 0,
    )
    if settings.tuning == "lora" and policy.tail is not None:
        add_adapters(policy.tail, settings.lora_rank)
    own = policy.own_names()
    policy.set_trainable(settings.tuning)
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    states = disk = 0
    shapes = key_shapes(base, len(policy.layers)) if policy.queries else []
    for traces in (train_set, validation_set):
        size = traces.states_bytes(base, shapes)
        if traces.states_folder is not None:
            disk += size
        elif states + size <= settings.cache_limit_bytes:
            states += size
    return MemoryNeed(
        targets=len(targets),
        base_bytes=base.get_memory_footprint(),
        tail_bytes=_FLOAT32 * sum(p.numel() for n, p in policy.named_parameters() if n in own),
        optimizer_bytes=(2 + bool(settings.swa_share)) * _FLOAT32 * trained,
        gradient_bytes=_FLOAT32 * trained,
        states_bytes=states,
        disk_bytes=disk,
    )


def _size(count: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count / 2**10:.1f} KiB"
