"""What SGLang calls when it starts, whichever version it is and whatever it serves.

It calls `register` in each of its processes (entry point `sglang.srt.plugins`). Nothing of ours,
and nothing but the standard library, is imported before SGLang's version is known to be supported,
and nothing that goes wrong here reaches SGLang: this package may share an environment with any.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
from importlib.metadata import PackageNotFoundError, version

__all__ = ["SGLANG_VERSIONS", "UNTESTED", "check_version", "register"]

SGLANG_VERSIONS = ((0, 5, 23), (0, 5, 24))
"""From the first, below the second: SGLang's insides change with each release."""

UNTESTED = "OSPRUNER_UNTESTED_SGLANG"
"""The environment variable that, set to 1, lets any version pass."""

_PLUGIN = "ospruner.serving.sglang.hooks"


def register() -> None:
    """Tells this process's SGLang about policies, or warns that it cannot."""
    try:
        check_version()
        importlib.import_module(_PLUGIN).register()
    except Exception as error:  # noqa: BLE001 - SGLang must start, with policies or without
        logging.getLogger(__name__).warning("SGLang starts without stopping policies: %s", error)


def check_version(installed: str | None = None) -> None:
    """Refuses versions of SGLang that the plug-in was not made for, unless `UNTESTED` is 1.

    Args:
        installed: such as "0.5.23"; None for what is installed.

    Raises:
        ValueError: naming both.
    """
    found = _installed() if installed is None else installed
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:3])
    first, end = SGLANG_VERSIONS
    if not first <= numbers < end and os.environ.get(UNTESTED) != "1":
        raise ValueError(
            f"SGLang is {found}; the policy inside SGLang works with version {_text(first)}: pip "
            f"install sglang=={_text(first)}, or a newer ospruner; {UNTESTED}=1 in the environment "
            "tries it anyway"
        )


def _installed() -> str:
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "not installed"


def _text(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
