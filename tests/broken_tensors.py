"""How folders of models are broken, and each way in which a file can hold other tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Change = Callable[[Path], object]


def edit(group: str | None = None, **values: Any) -> Change:
    """Changes fields of a folder's configuration, or of a group of them; None takes one out."""

    def change(folder: Path) -> None:
        file = folder / "config.json"
        whole = json.loads(file.read_text("utf-8"))
        of = whole if group is None else whole[group]
        of.update(values)
        for name in [name for name, value in values.items() if group and value is None]:
            del of[name]
        file.write_text(json.dumps(whole), "utf-8")

    return change


def put(name: str, content: bytes) -> Change:
    """Writes a file of a folder anew."""
    return lambda folder: (folder / name).write_bytes(content)


def drop(name: str) -> Change:
    """Takes a file out of a folder."""
    return lambda folder: (folder / name).unlink()


def pickle_only(folder: Path) -> None:
    """Leaves a folder's weights under the name of a pickled file."""
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


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
    "shape": (_misshape, r"another shape or dtype: \['head.bias torch.float32 \(3,\) instead of"),
    "missing": (_missing, r"missing: \['head.weight'\]"),
    "unknown": (_unknown, r"unknown: \['extra'\]"),
    "integers": (_integers, r"head.weight torch.int32 \(1, \d+\) instead of \(1, "),
    "packed": (_packed, r"head.weight torch.float8_e4m3fn \(1, \d+\) instead of \(1, "),
    "NaN": (_nan, r"not finite: \['tail."),
    "infinite": (_infinite, r"not finite: \['tail."),
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
