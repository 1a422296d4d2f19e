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

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from modeling_ospruner.modeling_ospruner import fingerprint_of
from modeling_ospruner.policy_ospruner import LayerKeys
from ospruner.durable import room_needed
from ospruner.eval.table import IntArray
from ospruner.scoring import reading

from .tail import no_scores


@dataclass(frozen=True)
class States:
    """What a policy reads of B traces, without gradient, padded at the right.

    Attributes:
        hidden: (B, S, H) what enters the tail, on the policy's device; for a policy that is queries
            only (B, T, H), at step ends.
        keys: for such a policy, keys and values (B, KV, S, D) of the base's last n layers.
    """

    hidden: Tensor
    keys: Sequence[LayerKeys] = ()

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
    """Tells a base's weights, their dtype, and what of its states a policy reads.

    Weights are known by the base's files, or by a few values of each.
    """
    base, policy = model.base, model.policy
    weights = fingerprint_of(base, model.config.base_revision)
    if weights is None:
        digest = hashlib.sha256()
        for name, parameter in base.named_parameters():
            flat = parameter.detach().flatten()
            some = flat[torch.linspace(0, len(flat) - 1, 4).long().to(flat.device)]
            digest.update(f"{name} {tuple(parameter.shape)} {some.tolist()}".encode())
        weights = digest.hexdigest()
    what = (weights, policy.copied, policy.queries, str(base.dtype))
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


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


def run_trunk(model: Any, texts: Sequence[IntArray], positions: Tensor) -> States:
    """Runs the base over B texts, no further than the policy reads; steps end at positions (B, T).

    Raises:
        ValueError: the base's positions change within such a text.
    """
    base = model.base
    ids = pad_sequence([torch.from_numpy(text) for text in texts], batch_first=True)  # (B, S)
    with no_scores(base.get_decoder(), base.device):
        hidden, keys = reading(model, ids.to(base.device))
    if model.policy.queries:
        rows = torch.arange(len(texts), device=hidden.device)[:, None]
        hidden = hidden[rows, positions.to(hidden.device)]  # (B, T, H)
    return States(hidden.to(model.policy.head.weight.device), keys)
