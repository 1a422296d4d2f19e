"""What a run will hold in memory, said before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from modeling_ospruner.policy_ospruner import StoppingPolicy, add_adapters

from .settings import TrainSettings
from .trunk import LabelledTraces

__all__ = ["MemoryNeed", "memory_need"]

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
        disk_bytes: those that are kept in files instead.
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
    policy = StoppingPolicy.empty(base, settings.num_policy_layers)
    if settings.tuning == "lora" and policy.tail is not None:
        add_adapters(policy.tail, settings.lora_rank)
    own = policy.own_names()
    policy.set_trainable(settings.tuning)
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    states = disk = 0
    for traces in (train_set, validation_set):
        size = traces.states_bytes(base)
        fits = states + size <= settings.cache_limit_bytes
        states += size if fits else 0
        disk += size if settings.cache_on_disk and not fits else 0
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
