"""The processes that train together, through accelerate; usually there is one.

Every process holds all labels and goes through the same global batches, of which it takes every
so-many-th trace. The loss is normalised by the whole batch, so that the curve does not depend on
how many processes there are. Tails are copied to each process (DDP), or split over them with the
frozen trunk (FSDP2). Only the first process writes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from modeling_ospruner.configuration_ospruner import decoder_layers, is_quantised
from modeling_ospruner.policy_ospruner import StoppingPolicy
from ospruner.eval.table import FloatArray, IntArray

__all__ = ["Processes", "load_whole", "open_processes", "split_as", "whole"]

_HOST = "cpu"
TRACKERS = ("tensorboard", "wandb", "trackio")

Item = TypeVar("Item")


class Processes:
    """This process among those that train together.

    Attributes:
        rank: number of this process, from 0.
        size: how many there are.
        sharded: whether base and tails are split over them, a layer at a time.
        device: where this process computes; None leaves the base where it is.
        one_machine: whether all of them run on this machine, as torchrun says.

    Args:
        accelerator: accelerate's; None for one process that computes where the base lies.
        shard: split base and tails (FSDP2) instead of holding a copy of each everywhere. Also
            what `accelerate launch --use_fsdp` asks for.
    """

    def __init__(self, accelerator: Accelerator | None = None, shard: bool = False) -> None:
        self._accelerator = accelerator
        self.rank = 0 if accelerator is None else accelerator.process_index
        self.size = 1 if accelerator is None else accelerator.num_processes
        self.device = None if accelerator is None else accelerator.device
        self.one_machine = int(os.environ.get("LOCAL_WORLD_SIZE", self.size)) >= self.size
        asked = accelerator is not None and accelerator.distributed_type == DistributedType.FSDP
        self.sharded = (shard or asked) and self.size > 1

    @property
    def main(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    def share(self, rows: IntArray) -> IntArray:
        """This process's traces of a batch; one, which must count for nothing, where none is left.

        No process may sit out a batch: the others would wait for its part of the gradient.
        """
        mine = rows[self.rank :: self.size]
        return mine if len(mine) else rows[:1]

    def turns(self, items: Sequence[Item]) -> Iterator[tuple[Item, bool]]:
        """This process's items, as many as any other's, and whether each is new to all."""
        for start in range(0, len(items), self.size):
            number = start + self.rank
            yield items[min(number, len(items) - 1)], number < len(items)

    def sum(self, values: FloatArray) -> FloatArray:
        """The sum over the processes, in float64; of equal shapes."""
        if self.size == 1:
            return values
        total = torch.from_numpy(np.asarray(values, dtype=np.float64)).to(self.device)
        torch.distributed.all_reduce(total)
        summed: FloatArray = total.cpu().numpy()
        return summed

    def track(self, name: str, values: Mapping[str, float], step: int) -> None:
        """Tells the trackers, where there are any; a no-op in all processes but the first."""
        if self._accelerator is not None and self._accelerator.trackers:
            self._accelerator.log({f"{name}/{key}": v for key, v in values.items()}, step=step)

    def end(self) -> None:
        """Closes the trackers."""
        if self._accelerator is not None:
            self._accelerator.end_training()

    def wait(self) -> None:
        """Until all processes are here."""
        if self._accelerator is not None:
            self._accelerator.wait_for_everyone()

    def place_trunk(self, base: PreTrainedModel, policies: Sequence[StoppingPolicy]) -> None:
        """Splits a frozen base's trunk over the processes; its last layers, unused here, go.

        Where policies read their keys and values, they are used.

        Args:
            base: the causal LM.
            policies: the tails that are trained on it, not yet placed.
        """
        if not self.sharded:
            return
        num_policy_layers = 0 if policies[0].queries else len(policies[0].layers)
        layers = decoder_layers(base)
        trunk = len(layers) - num_policy_layers
        used = (base.get_input_embeddings(), *policies)
        for unused in (*layers[trunk:], base.get_output_embeddings()):
            if unused is not None:
                _move(unused, "meta", used)
        decoder = base.get_decoder()
        for layer in layers[:trunk]:
            fully_shard(layer, mesh=self._mesh())
        # What tails share with the decoder (those of adapters, the norm too) is split with them.
        others = {p for module in (*layers[trunk:], *policies) for p in module.parameters()}
        fully_shard(decoder, mesh=self._mesh(), ignored_params=others)

    def release(self, base: PreTrainedModel, policies: Sequence[StoppingPolicy]) -> None:
        """Moves a frozen base that is not needed any more from the device to the machine's memory.

        What these processes did not put there, what they have split, and packed weights stay.

        Args:
            base: the causal LM.
            policies: the tails that are trained on it; what they share with it stays.
        """
        if self.device is not None and not self.sharded and not is_quantised(base):
            _move(base, _HOST, policies)

    def place_tail(self, trained: nn.Module, layers: Sequence[nn.Module]) -> nn.Module:
        """What computes a tail's logits on all processes: as given, in DDP, or split (FSDP2).

        Args:
            trained: the module; its parameters are replaced where it is split.
            layers: its decoder layers.
        """
        if self.size == 1 or self._accelerator is None:
            return trained
        if not self.sharded:
            prepared: nn.Module = self._accelerator.prepare_model(trained)
            return prepared
        for layer in layers:
            fully_shard(layer, mesh=self._mesh())
        fully_shard(trained, mesh=self._mesh())
        return trained

    def adding(self, trained: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a batch's part; copies exchange gradients after the last.

        Args:
            trained: what `place_tail` gave.
            last: whether this is the batch's last part.
        """
        if last or not isinstance(trained, DistributedDataParallel):
            return nullcontext()
        return trained.no_sync()

    def _mesh(self) -> Any:
        assert self.device is not None
        return init_device_mesh(self.device.type, (self.size,))


def open_processes(
    out_dir: str | Path, tracker: str | None = None, shard: bool = False
) -> Processes:
    """The processes that `accelerate launch` started, or this one alone, on its best device.

    Args:
        out_dir: the run's folder; trackers that write files write them to `.tracked` in it.
        tracker: one of `TRACKERS`.
        shard: as for `Processes`.

    Raises:
        ValueError: an unknown tracker, or one whose package is missing.
    """
    if tracker is not None and tracker not in TRACKERS:
        raise ValueError(f"tracker is {tracker!r}; it must be one of {', '.join(TRACKERS)}")
    if tracker is not None and tracker not in map(str, get_available_trackers()):
        raise ValueError(f"tracker is {tracker!r}, but it is not installed: pip install {tracker}")
    accelerator = Accelerator(log_with=tracker, project_dir=str(Path(out_dir) / ".tracked"))
    if tracker is not None:
        accelerator.init_trackers("ospruner")
    return Processes(accelerator, shard)


def _move(module: nn.Module, device: str, used: Sequence[nn.Module]) -> None:
    """Moves a module's parameters, but for those that it shares with others; to "meta": frees them.

    Parameters that parts of the module share with each other stay shared.
    """
    now = {parameter: parameter for other in used for parameter in other.parameters()}
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if parameter not in now:
                now[parameter] = nn.Parameter(parameter.data.to(device), requires_grad=False)
            part.register_parameter(name, now[parameter])


def whole(values: Any) -> Any:
    """The same nested containers with every split tensor gathered; all processes must call it."""
    if isinstance(values, DTensor):
        return values.full_tensor()
    if isinstance(values, dict):
        return {name: whole(value) for name, value in values.items()}
    if isinstance(values, list):
        return [whole(value) for value in values]
    return values


def load_whole(module: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads what `whole` gathered, from however many processes, into a module and its optimiser.

    Args:
        module: whole or split.
        optimizer: over its parameters.
        state: "policy" and "optimizer", their state dicts.
    """
    own = module.state_dict()
    policy = {name: split_as(value, own[name]) for name, value in state["policy"].items()}
    unexpected = module.load_state_dict(policy, strict=False).unexpected_keys
    assert not unexpected, unexpected
    stored = state["optimizer"]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    stored["state"] = {
        number: {
            name: split_as(value, parameters[number]) if value.ndim else value
            for name, value in entry.items()
        }
        for number, entry in stored["state"].items()
    }
    optimizer.load_state_dict(stored)


def split_as(value: Tensor, like: Tensor) -> Tensor:
    """Splits a tensor as another is."""
    if not isinstance(like, DTensor):
        return value
    mesh = like.device_mesh
    return distribute_tensor(value.to(mesh.device_type), mesh, like.placements)
