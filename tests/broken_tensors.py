"""How folders of models are broken, and each way in which a file can hold other tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Change = Callable[[Path], object]


def edit(group: str | None = None, **values: Any) -> Change:
    """Changes fields of a folder's configuration, or of a group of them."""

    def change(folder: Path) -> None:
        file = folder / "config.json"
        whole = json.loads(file.read_text("utf-8"))
        (whole if group is None else whole[group]).update(values)
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


HEAD, NORM = "policy.head.weight", "policy.tail.norm.weight"


def _with_last(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: torch.cat([tensor[:-1], torch.tensor([value])])


BROKEN: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor] | None, str]] = {
    "shape": ("policy.head.bias", lambda _: torch.zeros(3), r"shape or dtype: \['head.bias torch"),
    "missing": (HEAD, None, r"missing: \['head.weight'\]"),
    "unknown": ("policy.extra", lambda new: new, r"unknown: \['extra'\]"),
    "integers": (HEAD, torch.Tensor.int, r"head.weight torch.int32 \(1, \d+\) instead of \(1, "),
    # Without its scales, an 8-bit weight means nothing.
    "packed": (
        HEAD,
        lambda tensor: tensor.to(torch.float8_e4m3fn),
        r"head.weight torch.float8_e4m3fn \(1, \d+\) instead of \(1, ",
    ),
    "NaN": (NORM, _with_last(math.nan), r"not finite: \['tail."),
    "infinite": (NORM, _with_last(-math.inf), r"not finite: \['tail."),
}
"""By name: a policy's tensor, what becomes of it (None: it is left out), and what is said of it."""


def break_tensors(folder: Path, how: str) -> str:
    """Breaks the file in a policy's folder; what is said of it, as a pattern."""
    name, change, said = BROKEN[how]
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensor = tensors.pop(name, torch.zeros(1))
    save_file(tensors if change is None else {**tensors, name: change(tensor)}, path)
    return said
