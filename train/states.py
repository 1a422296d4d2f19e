"""What a policy's tail reads of traces: the trunk's output, computed or kept.

The trunk (the frozen layers below the tail) gives the same in every epoch, so it runs once and its
output is kept: in memory, or in a folder, one safetensors file a trace. A file exists or not: it is
written beside its place and then moved there. The folder's name tells the base's weights and what
of its states is read, a file's name the trace; so no stale one is ever read, nothing needs a list,
and runs may share the folder.

A policy that is queries only reads the trunk's output at step ends alone, and the base's keys and
values in the last n layers everywhere; so these are kept, in their place.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from modeling_ospruner.configuration_ospruner import check_length
from modeling_ospruner.modeling_ospruner import fingerprint_of
from modeling_ospruner.policy_ospruner import LayerKeys
from ospruner.durable import room_needed
from ospruner.eval.table import IntArray
from ospruner.scoring import TrunkDone, TrunkReader

from .packing import pack, takes_packing
from .tail import no_scores

__all__ = ["HasTrunk", "KeptStates", "States", "form_of", "run_trunk", "stacked"]


class HasTrunk(Protocol):
    """What is asked of a model here; `OSPrunerForCausalLM` and `Verifier` have it."""

    base: Any
    config: Any
    policy: Any


@dataclass(frozen=True)
class States:
    """What a policy reads of B traces, without gradient, padded at the right.

    Attributes:
        hidden: (B, S, H) what enters the tail; for a policy that is queries only (B, T, H), at step
            ends.
        keys: for such a policy, keys and values (B, KV, S, D) of the base's last n layers.
    """

    hidden: Tensor
    keys: Sequence[LayerKeys] = ()

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.hidden.device

    def to(self, device: torch.device) -> States:
        """The same on a device."""
        keys = [LayerKeys(one.keys.to(device), one.values.to(device)) for one in self.keys]
        return States(self.hidden.to(device), keys)

    def of(self, b: int, tokens: int, steps: int) -> dict[str, Tensor]:
        """One trace's, without padding, by name; as copies on the CPU."""
        parts = {"hidden": self.hidden[b, : steps if self.keys else tokens]}
        for layer, one in enumerate(self.keys):
            parts[f"keys.{layer}"] = one.keys[b, :, :tokens]
            parts[f"values.{layer}"] = one.values[b, :, :tokens]
        return {name: part.to("cpu", copy=True).contiguous() for name, part in parts.items()}


def stacked(traces: Sequence[dict[str, Tensor]], device: torch.device) -> States:
    """The states of B traces from what `States.of` gave of each."""

    def padded(name: str, dim: int) -> Tensor:
        parts = [one[name].transpose(0, dim) for one in traces]
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True).to(device)

    layers = sum(name.startswith("keys.") for name in traces[0])
    keys = [
        LayerKeys(padded(f"keys.{n}", 1).transpose(1, 2), padded(f"values.{n}", 1).transpose(1, 2))
        for n in range(layers)
    ]
    return States(padded("hidden", 0), keys)


def form_of(model: HasTrunk) -> str:
    """Tells a base's weights, their dtype, and what of its states a policy reads."""
    what = (len(model.policy.layers), model.policy.queries, str(model.base.dtype))
    return hashlib.sha256(repr((weights_of(model.base), *what)).encode()).hexdigest()[:16]


@torch.no_grad()
def weights_of(base: Any) -> str:
    """What tells a causal LM's weights from others: of its files, or a few values of each."""
    if (found := fingerprint_of(base)) is not None:
        return found
    digest = hashlib.sha256()
    for name, parameter in base.named_parameters():
        flat = parameter.detach().flatten()
        some = flat[torch.linspace(0, len(flat) - 1, 4).long().to(flat.device)]
        digest.update(f"{name} {tuple(parameter.shape)} {some.tolist()}".encode())
    return digest.hexdigest()


@dataclass
class KeptStates:
    """The states of N traces, each by itself, in memory or in a folder.

    Attributes:
        form: of the states, see `form_of`.
        names: of the traces.
        folder: in whose folder `form` they are; None for in memory.
    """

    form: str
    names: Sequence[str]
    folder: Path | None = None
    _held: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    @property
    def held_bytes(self) -> int:
        """In memory."""
        return sum(part.nbytes for one in self._held.values() for part in one.values())

    def has(self, n: int) -> bool:
        """Whether those of a trace are there."""
        return n in self._held or (self.folder is not None and self._file(n).is_file())

    def read(self, n: int) -> dict[str, Tensor]:
        """Those of a trace."""
        return self._held[n] if self.folder is None else load_file(self._file(n))

    def write(self, n: int, states: dict[str, Tensor]) -> int:
        """Keeps those of a trace; returns their bytes.

        Raises:
            ValueError: the disk has no room.
        """
        if self.folder is None:
            self._held[n] = states
        else:
            file = self._file(n)
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_name(f".{file.name}.{os.getpid()}")
            with room_needed(file.parent):
                partial.write_bytes(save(states))
            partial.replace(file)
        return sum(part.nbytes for part in states.values())

    def _file(self, n: int) -> Path:
        assert self.folder is not None
        return self.folder / self.form / f"{self.names[n]}.safetensors"


@torch.no_grad()
def run_trunk(model: HasTrunk, texts: Sequence[IntArray], positions: Tensor) -> States:
    """Runs the base over texts, no further than the policy reads.

    They are packed where its layers and the device allow that.

    Args:
        model: base and policy.
        texts: B sequences of token ids.
        positions: (B, T) index of each step's last token.

    Raises:
        ValueError: a text is longer than the base's positions.
    """
    base, queries = model.base, model.policy.queries
    device = base.device
    packed = pack(texts) if takes_packing(base) and device.type != "cuda" else None
    # The masks that confine packed traces keep flash attention away, which CUDA has.
    if packed is None:
        ids = torch.nn.utils.rnn.pad_sequence(
            [torch.from_numpy(text) for text in texts], batch_first=True
        )
        places = torch.arange(ids.shape[1]).expand(ids.shape)
        guard = no_scores(base.get_decoder(), device)
    else:
        ids, places = packed.input_ids, packed.position_ids
        guard = no_scores(None, device)
    check_length(base.config, max(map(len, texts)), "the text")
    with guard, TrunkReader(base, len(model.policy.layers), queries) as reader:
        with suppress(TrunkDone):
            base.get_decoder()(
                input_ids=ids.to(device), position_ids=places.to(device), use_cache=False
            )
        hidden, keys = reader.hidden, list(reader.keys)
    positions = positions.to(device)
    if packed is None:
        return States(_at(hidden, positions), keys) if queries else States(hidden)
    if not queries:
        return States(packed.unpack(hidden))
    slots = packed.places.to(device).gather(1, positions)
    unpacked = [
        LayerKeys(packed.unpack_heads(one.keys), packed.unpack_heads(one.values)) for one in keys
    ]
    return States(hidden.flatten(0, 1)[slots], unpacked)


def _at(hidden: Tensor, positions: Tensor) -> Tensor:
    """(B, T, H) of (B, S, H)."""
    return hidden.gather(1, positions[..., None].expand(-1, -1, hidden.shape[-1]))
