"""The policy inside vLLM: what vLLM calls when it starts, and what it refuses.

`ospruner.serving.start` calls `register` in each of vLLM's processes, also where it serves
something else: nothing is imported here that vLLM has not imported by then. The model is in
`model.py`, the logits processor in `processor.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from ..start import VLLM

__all__ = ["ARCHITECTURE", "PROCESSOR", "WORKER_EXTENSION", "parser_of", "register"]

ARCHITECTURE = "OSPrunerForCausalLM"
PROCESSOR = f"{__name__}:StopProcessor"
"""What `--logits-processors` of a server is given."""

WORKER_EXTENSION = f"{__name__}.StopRecords"
"""What `--worker-extension-cls` is given, where requests' records are to be read."""

# What `--reasoning-parser` is given: where a marker ends the thinking, and for Harmony, GPT-OSS's.
PARSER, HARMONY_PARSER = "ospruner", "ospruner_harmony"

_MODULES = {"OSPrunerVLLM": "model", "StopProcessor": "processor", "StopRecords": "processor"}


def parser_of(literals: Mapping[str, Any]) -> str | None:
    """The reasoning parser of what a policy's format holds, whatever its name.

    None where all of a reply is its content.
    """
    if not literals.get("think_end"):
        return None
    return HARMONY_PARSER if "<|channel|>" in literals["closing"] else PARSER


def register() -> None:
    """Tells this process's vLLM, and its transformers, about policies."""
    from vllm import ModelRegistry
    from vllm.reasoning import ReasoningParserManager

    importlib.import_module("modeling_ospruner")  # registers the configuration
    ModelRegistry.register_model(ARCHITECTURE, f"{__name__}:OSPrunerVLLM")
    for name, parser in (
        (PARSER, "ThinkingParser"),
        (HARMONY_PARSER, "HarmonyThinkingParser"),
    ):
        ReasoningParserManager.register_lazy_module(name, f"{__package__}.parser", parser)


def __getattr__(name: str) -> Any:
    """The model and the processor, imported once the version is known to be supported."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    VLLM.check_version()
    return getattr(importlib.import_module(f".{_MODULES[name]}", __package__), name)
