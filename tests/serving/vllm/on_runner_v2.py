"""Lets vLLM take Triton's interpreter for Triton; imported before anything of vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import triton.backends
from triton.runtime.interpreter import InterpreterBuilder


class _Driver:
    """What vLLM asks before it takes Triton for usable; the interpreter needs no driver."""

    @staticmethod
    def is_active() -> bool:
        return True


triton.backends.backends["cpu"] = SimpleNamespace(driver=_Driver, compiler=None)

_load, _store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store


# Masks of some drafters are of integers, which the interpreter does not take.
def _masked_load(self: Any, ptrs: Any, mask: Any, *others: Any) -> Any:
    mask.data = mask.data.astype(bool)
    return _load(self, ptrs, mask, *others)


def _masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *others: Any) -> Any:
    mask.data = mask.data.astype(bool)
    return _store(self, ptrs, value, mask, *others)


InterpreterBuilder.create_masked_load = _masked_load
InterpreterBuilder.create_masked_store = _masked_store
