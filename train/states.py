"""What a policy's tail reads of traces: the trunk's output, computed or kept.

The trunk (the frozen layers below the tail) gives the same in every epoch, so it runs once and its
output is kept: in memory, or in a folder, one safetensors file a trace. A file exists or not: it is
written beside its place and then moved there. The folder's name tells the base's weights and what
of its states is read, a file's name the trace; so no stale one is ever read, nothing needs a list,
and runs may share the folder.

A policy that is queries only reads the trunk's output at step ends alone, and the base's keys and
values in the last n layers everywhere; so these are kept, in their place.

A model here is whatever has a `base` and a `policy`: `OSPrunerForCausalLM`, or a `Verifier`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from modeling_ospruner.configuration_ospruner import check_length
from modeling_ospruner.modeling_ospruner import fingerprint_of
from modeling_ospruner.policy_ospruner import LayerKeys
from ospruner.durable import room_needed
from ospruner.eval.table import IntArray
from ospruner.scoring import TrunkDone, TrunkReader

from .batches import pack, takes_packing
from .tail import no_scores


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

    def padded(name: str, dim: int = 1) -> Tensor:
        parts = [one[name].transpose(0, dim) for one in traces]
        return pad_sequence(parts, batch_first=True).transpose(1, 1 + dim).to(device)

    layers = sum(name.startswith("keys.") for name in traces[0])
    keys = [LayerKeys(padded(f"keys.{n}"), padded(f"values.{n}")) for n in range(layers)]
    return States(padded("hidden", 0), keys)


def form_of(model: Any) -> str:
    """Tells a base's weights, their dtype, and what of its states a policy reads."""
    what = (model.policy.copied, model.policy.queries, str(model.base.dtype))
    return hashlib.sha256(
        repr((_weights_of(model.base, model.config.base_revision), *what)).encode()
    ).hexdigest()[:16]


@torch.no_grad()
def _weights_of(base: Any, revision: str | None) -> str:
    """What tells a causal LM's weights from others: of its files, or a few values of each."""
    if (found := fingerprint_of(base, revision)) is not None:
        return found
    digest = hashlib.sha256()
    for name, parameter in base.named_parameters():
        flat = parameter.detach().flatten()
        some = flat[torch.linspace(0, len(flat) - 1, 4).long().to(flat.device)]
        digest.update(f"{name} {tuple(parameter.shape)} {some.tolist()}".encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class StateFiles:
    """The states of traces by their names, each in a file; as a dictionary holds them in memory."""

    folder: Path

    def __contains__(self, name: str) -> bool:
        return self._file(name).is_file()

    def __getitem__(self, name: str) -> dict[str, Tensor]:
        return load_file(self._file(name))

    def __setitem__(self, name: str, states: dict[str, Tensor]) -> None:
        file = self._file(name)
        partial = file.with_name(f".{file.name}.{os.getpid()}")
        self.folder.mkdir(parents=True, exist_ok=True)
        with room_needed(self.folder):
            partial.write_bytes(save(states))
            partial.replace(file)

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"


@torch.no_grad()
def run_trunk(model: Any, texts: Sequence[IntArray], positions: Tensor) -> States:
    """Runs the base over texts, no further than the policy reads.

    They are packed where its layers and the device allow that.

    Args:
        model: base and policy.
        texts: B sequences of token ids.
        positions: (B, T) index of each step's last token.

    Raises:
        ValueError: the base's positions change within such a text.
    """
    base, queries = model.base, model.policy.queries
    check_length(base.config, max(map(len, texts)), "the text")
    # The masks that confine packed traces keep causal attention away: of CUDA's it is most, of a
    # CPU's half, which is a tenth of a pass where traces are about as long as each other.
    lengths = list(map(len, texts))
    padded = len(lengths) * max(lengths) > 1.1 * sum(lengths)
    together = padded and takes_packing(base) and base.device.type != "cuda"
    packed, decoder = pack(texts, together), base.get_decoder()
    ids, places = packed.input_ids.to(base.device), packed.position_ids.to(base.device)
    reading = TrunkReader(base, model.policy)
    with no_scores(decoder, base.device), reading as reader:
        with suppress(TrunkDone):
            decoder(input_ids=ids, position_ids=places, use_cache=False)
        hidden, keys = reader.hidden, list(reader.keys)
    if queries:
        slots = packed.places.gather(1, positions).to(hidden.device)
        hidden = hidden.flatten(0, 1)[slots]  # (B, T, H)
    elif together:
        hidden = packed.unpack(hidden)
    if together:
        keys = [
            LayerKeys(packed.unpack_heads(one.keys), packed.unpack_heads(one.values))
            for one in keys
        ]
    return States(hidden, keys)
