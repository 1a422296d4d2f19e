"""`ospruner serve`: an engine's own server on a policy, with the defaults that a newcomer wants."""

import json
import os
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, NoReturn

from transformers import AutoTokenizer

from modeling_ospruner.configuration_ospruner import OSPrunerConfig, check_choice
from modeling_ospruner.stopping_ospruner import StopPolicyConfig
from ospruner import provenance

from .requests import CONTROL, DEFAULTS, StopRequest
from .sglang.stopper import DEFAULTS_VARIABLE
from .sglang.tapped import check_tuning
from .start import PYTHON_VARIABLE, SGLANG, VLLM

_OURS = ("--model", "--model-path", "--additional-config")


def serve(
    engine: str, policy: str, defaults: Mapping[str, Any], arguments: Sequence[str]
) -> NoReturn:
    """Becomes the server of an engine, "vllm" or "sglang"; what it serves is printed.

    Args:
        engine: whose server it is.
        policy: its folder or Hub id.
        defaults: of requests, by their keys.
        arguments: the engine's own, such as `--port 8000`.

    Raises:
        ValueError: another engine, no policy that it takes, wrong defaults, or an argument that is
            set here; its version is not supported, or it is not installed; or on a CPU vLLM would
            ask for more memory than is free.
        OSError: the policy is not found.
    """
    check_choice("ospruner serve", "--engine", engine, ("vllm", "sglang"))
    python = sys.executable
    if engine == "vllm":
        command, environment = vllm_command(policy, defaults, arguments)
        VLLM.check_version()
        check_memory(engine_options(arguments))
        # The engine counts in a process of its own; files in a fresh folder bring it to /metrics.
        environment["PROMETHEUS_MULTIPROC_DIR"] = tempfile.mkdtemp(prefix="ospruner-metrics-")
    else:
        command, environment = sglang_command(policy, defaults, arguments)
        if named := os.environ.get(PYTHON_VARIABLE):
            python = named
        else:
            SGLANG.check_version()
    os.execve(python, [python, *command], {**os.environ, **environment})


def vllm_command(
    policy: str, defaults: Mapping[str, Any], arguments: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """What Python is given to serve with vLLM, and what its environment needs beside this one."""
    served_policy(policy, StopRequest(defaults, "the server's defaults", server=True), arguments)
    command = ["-m", "vllm.entrypoints.openai.api_server", "--model", policy]
    command += ["--additional-config", json.dumps({DEFAULTS: dict(defaults)}), *arguments]
    # All that vLLM would load anyway, and our route, which it loads only where it is named.
    if (allowed := os.environ.get("VLLM_PLUGINS")) is not None:
        plugins = set(filter(None, allowed.split(",")))
    else:
        groups = {one for one in entry_points().groups if one.startswith("vllm.")}
        groups.discard("vllm.endpoint_plugins")
        plugins = {one.name for group in groups for one in entry_points(group=group)}
    return command, {"VLLM_PLUGINS": ",".join(sorted(plugins | {"ospruner", "ospruner_stops"}))}


def sglang_command(
    policy: str, defaults: Mapping[str, Any], arguments: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """The same with SGLang."""
    asked = StopRequest(defaults, "the server's defaults", server=True)
    if asked.control:
        raise ValueError(
            f"{CONTROL} is {asked.control}, but SGLang's /metrics has no counters of ours to "
            "compare groups by: leave --control out, or serve with vLLM (--engine vllm)"
        )
    options, config = engine_options(arguments), served_policy(policy, asked, arguments)
    check_tuning(config)
    command = ["-m", "sglang.launch_server", "--model-path", policy]
    command += {"--disable-prefill-cuda-graph"}.difference(arguments)
    end = (config.reasoning_format or {}).get("think_end")
    if end == "</think>" and not options.reasoning_parser:
        # Whatever the format's name: which of SGLang's two parsers, its chat template says.
        tokenizer = AutoTokenizer.from_pretrained(policy, revision=options.revision, config=config)
        switchable = "enable_thinking" in str(tokenizer.chat_template or "")
        command += ["--reasoning-parser", "qwen3" if switchable else "deepseek-r1"]
    environment = {DEFAULTS_VARIABLE: json.dumps(dict(defaults))}
    if allowed := os.environ.get("SGLANG_PLUGINS"):  # else SGLang loads all that there are
        environment["SGLANG_PLUGINS"] = ",".join(sorted({*allowed.split(","), "ospruner"}))
    return [*command, *arguments], environment


def served_policy(policy: str, asked: StopRequest, arguments: Sequence[str]) -> OSPrunerConfig:
    """The configuration of a policy that is to be served; what that is, is printed.

    What the policy promises is put into `asked`, the server's defaults.
    """
    if given := [one for one in arguments if one.partition("=")[0] in _OURS]:
        raise ValueError(f"{', '.join(given)}: `ospruner serve` sets it by itself; leave it out")
    provenance.check_policy_place(policy)
    revision = engine_options(arguments).revision
    config: OSPrunerConfig = OSPrunerConfig.from_pretrained(policy, revision=revision)
    asked.settle(config)
    settings = StopPolicyConfig(**asked.fields).with_defaults(config)
    how = "by draws" if settings.mode == "sample" else f"from probability {settings.threshold:g} on"
    promises = [
        f"at most {one['max_loss']:.3g} of accuracy lost, with confidence {one['confidence']:g}"
        for one in config.calibrations or []
    ]
    print(
        f"Serving {policy} on {config.base_model_name_or_path}: "
        f"{'stops' if asked.on else 'stops those who ask,'} {how}, at price {settings.price:g} of "
        f"a token by default; promises: {'; '.join(promises) or 'none'}",
        flush=True,
    )
    return config


def engine_options(arguments: Sequence[str]) -> Namespace:
    """What an engine's own arguments say that we need to know."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--revision", default="main")
    parser.add_argument("--reasoning-parser")
    parser.add_argument("--gpu-memory-utilization", type=float)
    parser.add_argument("--kv-cache-memory-bytes")
    return parser.parse_known_args(arguments)[0]


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
