"""Each way in which a policy's file can hold something else than the policy's tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def _misshape(tensors: Tensors) -> None:
    tensors["policy.head.bias"] = torch.zeros(3)


def _missing(tensors: Tensors) -> None:
    del tensors["policy.head.weight"]


def _unknown(tensors: Tensors) -> None:
    tensors["policy.extra"] = torch.zeros(1)


def _integers(tensors: Tensors) -> None:
    tensors["policy.head.weight"] = tensors["policy.head.weight"].to(torch.int32)


def _packed(tensors: Tensors) -> None:
    """Without its scales, an 8-bit weight means nothing."""
    tensors["policy.head.weight"] = tensors["policy.head.weight"].to(torch.float8_e4m3fn)


def _nan(tensors: Tensors) -> None:
    tensors[max(tensors)].view(-1)[-1] = torch.nan


def _infinite(tensors: Tensors) -> None:
    tensors[max(tensors)].view(-1)[0] = -torch.inf


BROKEN: dict[str, tuple[Callable[[Tensors], None], str]] = {
    "shape": (_misshape, r"another shape or dtype: \['policy.head.bias F32 \(3,\) instead of flo"),
    "missing": (_missing, r"missing: \['policy.head.weight'\]"),
    "unknown": (_unknown, r"unknown: \['policy.extra'\]"),
    "integers": (_integers, r"policy.head.weight I32 \(1, \d+\) instead of floats \(1, "),
    "packed": (_packed, r"policy.head.weight F8_E4M3 \(1, \d+\) instead of floats \(1, "),
    "NaN": (_nan, r"holds NaN or infinite values in \['policy.tail"),
    "infinite": (_infinite, r"holds NaN or infinite values in \['policy.tail"),
}
"""By name: how to break a policy's tensors, and what is said of it."""


def break_tensors(folder: Path, how: str) -> str:
    """Breaks the file in a policy's folder; what is said of it, as a pattern."""
    change, said = BROKEN[how]
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return said
