"""Lets vLLM take Triton's interpreter for Triton; imported before anything of vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import triton.backends


class _Driver:
    """What vLLM asks before it takes Triton for usable; the interpreter needs no driver."""

    @staticmethod
    def is_active() -> bool:
        return True


triton.backends.backends["cpu"] = SimpleNamespace(driver=_Driver, compiler=None)
