"""Stands in for SGLang's CUDA kernels, which plain decoding on a CPU does not call."""

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*args: object, **kwargs: object) -> Any:
        raise RuntimeError(f"sgl_kernel.{name} needs CUDA")

    return refuse
