"""`ospruner serve --engine sglang`: SGLang's own server on a policy, with what it needs to stop."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from transformers import AutoTokenizer

from ospruner.optional import MissingPackageError

from ..checks import engine_options, served_policy
from ..requests import CONTROL, StopRequest
from ..start import SGLANG
from .custom_params import DEFAULTS_VARIABLE, check_tuning

PYTHON_VARIABLE = "OSPRUNER_SGLANG_PYTHON"
"""The environment variable that names the Python of SGLang's environment, where it is not ours."""

_OURS = ("--model-path", "--model")
_NO_PREFILL_GRAPHS = "--disable-prefill-cuda-graph"


def sglang_command(
    policy: str, defaults: Mapping[str, Any], arguments: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """The command of a server, and what its environment needs beside this one.

    As `vllm_command`.

    Raises:
        ValueError: no policy that SGLang takes, wrong defaults, or an argument that is set here.
        OSError: the policy is not found.
    """
    asked = StopRequest(defaults, "the server's defaults", server=True)
    if asked.control:
        raise ValueError(
            f"{CONTROL} is {asked.control}, but SGLang's /metrics has no counters of ours to "
            "compare groups by: leave --control out, or serve with vLLM (--engine vllm)"
        )
    options, config = engine_options(arguments), served_policy(policy, asked, arguments, _OURS)
    check_tuning(config)
    command = ["-m", "sglang.launch_server", "--model-path", policy]
    if _NO_PREFILL_GRAPHS not in arguments:
        command.append(_NO_PREFILL_GRAPHS)
    literals = config.reasoning_format or {}
    if literals.get("think_end") == "</think>" and not options.reasoning_parser:
        # Whatever the format's name: which of SGLang's two parsers, its chat template says.
        tokenizer = AutoTokenizer.from_pretrained(policy, revision=options.revision, config=config)
        switchable = "enable_thinking" in str(tokenizer.chat_template or "")
        command += ["--reasoning-parser", "qwen3" if switchable else "deepseek-r1"]
    environment = {DEFAULTS_VARIABLE: json.dumps(dict(defaults))}
    if allowed := os.environ.get("SGLANG_PLUGINS"):  # else SGLang loads all that there are
        environment["SGLANG_PLUGINS"] = ",".join(sorted({*allowed.split(","), "ospruner"}))
    return [*command, *arguments], environment


def serve_sglang(policy: str, defaults: Mapping[str, Any], arguments: Sequence[str]) -> NoReturn:
    """Becomes the server of `sglang_command`.

    Raises:
        ValueError: as `sglang_command`, or SGLang's version is not supported.
        MissingPackageError: SGLang is not installed here, and no other Python is named.
    """
    command, environment = sglang_command(policy, defaults, arguments)
    python = os.environ.get(PYTHON_VARIABLE)
    if not python:
        if importlib.util.find_spec("sglang") is None:
            raise MissingPackageError(
                "serving with SGLang needs the package sglang, which is not installed here. Its "
                "pins do not go together with ours: install it in an environment of its own, and "
                "this package there with `pip install --no-deps ospruner`; then run this command "
                f"there, or name its Python in {PYTHON_VARIABLE}"
            )
        SGLANG.check_version()
        python = sys.executable
    os.execve(python, [python, *command], {**os.environ, **environment})
