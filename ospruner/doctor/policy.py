"""What `ospruner doctor` looks at in a policy's repository."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from safetensors import SafetensorError
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

import modeling_ospruner
from modeling_ospruner.configuration_ospruner import OSPrunerConfig
from modeling_ospruner.custom_generate_ospruner import CUSTOM_GENERATE
from modeling_ospruner.formats_ospruner import ReasoningFormat
from modeling_ospruner.modeling_ospruner import (
    FLAT_FILES,
    WEIGHTS,
    check_base,
    empty_policy,
    read_tensors,
)

from .base import ABSENT, Sections, skeleton, thinking
from .findings import Finding, Report


def examine_policy(where: str, revision: str | None, report: Report) -> Sections:
    """Whether a policy's repository is whole, and fits the base that it pins.

    Args:
        where: a folder or Hub id.
        revision: of the policy.
        report: takes the format's description.
    """
    found: list[Finding] = []
    sections = {f"Policy {where}": found}
    try:
        config = OSPrunerConfig.from_pretrained(where, revision=revision or "main")
    except (ValueError, TypeError) as error:
        found.append(Finding("configuration", str(error), "wrong", "mend or replace config.json"))
        return sections
    found += [
        Finding("saved by", f"ospruner {config.ospruner_version or '(unknown version)'}"),
        Finding("method", f"{config.method}, tuning {config.tuning}"),
        Finding("lambda", _lambda(config)),
        Finding("decides by", _mode(config)),
        _pin(config),
    ]
    found += _code(where, revision)
    base_found: list[Finding] = []
    base_where = config.base_model_name_or_path
    base_config, base = skeleton(base_where, config.base_revision, base_found)
    if base_config is not None:
        base_found.append(_fits(config, base_config, base_where))
    if base is not None and all(one.level != "wrong" for one in base_found):
        found.append(_tensors(where, revision, config, base))
    sections[f"Base {base_where}"] = base_found
    try:
        chosen = ReasoningFormat.from_dict(config.reasoning_format or {})
    except (ValueError, TypeError) as error:
        advice = "make the policy again from its labels"
        found.append(Finding("reasoning format", str(error), "wrong", advice))
        return sections
    sections["Thinking"] = thinking(where, revision, config, chosen, report)
    return sections


def _lambda(config: OSPrunerConfig) -> str:
    own = f"{config.price:g} reward per thinking token"
    if config.prices is None:
        return own
    return f"one policy of every price from 0 to {config.prices.high:g}; where none is said, {own}"


def _mode(config: OSPrunerConfig) -> str:
    if config.default_mode == "sample":
        return "a draw with the stop probability"
    return f"the threshold {config.default_threshold:g}"


def _pin(config: OSPrunerConfig) -> Finding:
    where, revision = config.base_model_name_or_path, config.base_revision
    if revision is not None:
        return Finding("base pinned", f"{where} at {revision}")
    if os.path.isdir(where):
        advice = "a folder has no revision: publish with a base on the Hub for others to load it"
        return Finding("base pinned", f"the folder {where}", "note", advice)
    advice = "set base_revision in config.json to the commit of the base that it was trained on"
    return Finding("base pinned", f"{where} at no revision", "wrong", advice)


def _fits(config: OSPrunerConfig, base_config: PreTrainedConfig, where: str) -> Finding:
    try:
        check_base(config, base_config, where)
    except ValueError as error:
        return Finding("fits the policy", str(error), "wrong", "pin the right base")
    return Finding("fits the policy", "sizes and architecture are those it was made for")


def _code(where: str, revision: str | None) -> list[Finding]:
    """Whether the repository's code is that of the installed package."""
    here = Path(modeling_ospruner.__file__).parent
    ours = {name: here / name for name in FLAT_FILES}
    ours[CUSTOM_GENERATE] = here / "custom_generate_ospruner.py"
    missing, differing = [], []
    for name, path in ours.items():
        theirs = _file(where, name, revision)
        if theirs is None:
            missing.append(name)
        elif theirs.read_bytes() != path.read_bytes():
            differing.append(name)
    if not missing and not differing:
        return [Finding("code", f"{len(ours)} files, those of the installed package")]
    told = [f"missing: {', '.join(missing)}"] if missing else []
    told += [f"not those of the installed package: {', '.join(differing)}"] if differing else []
    advice = "save or publish the policy again with this version, or install the one it came from"
    return [Finding("code", "; ".join(told), "wrong", advice)]


def _tensors(
    where: str, revision: str | None, config: OSPrunerConfig, base: PreTrainedModel
) -> Finding:
    """Whether the file holds exactly the policy's tensors, and only finite numbers.

    Of a file on the Hub that was never downloaded, only the header is fetched.
    """
    said = "finite"
    try:
        policy = empty_policy(config, base)
        if os.path.isdir(where) or _file(where, WEIGHTS, revision, local_files_only=True):
            arguments = {"revision": revision, "local_files_only": True}
            read_tensors(where, config, policy, arguments)
        else:
            said = "values not looked at (the file is on the Hub)"
            header = HfApi().parse_safetensors_file_metadata(where, WEIGHTS, revision=revision)
            found = {name: tuple(one.shape) for name, one in header.tensors.items()}
            wanted = policy.stored_shapes(config.adapter_rank)
            if wrong := found.items() ^ {f"policy.{k}": v for k, v in wanted.items()}.items():
                raise ValueError(f"{WEIGHTS} does not hold this policy's tensors: {sorted(wrong)}")
    except (*ABSENT, ImportError, SafetensorError, ValueError) as error:
        advice = f"mend what is said, or copy {WEIGHTS} again: a policy is read from that file only"
        return Finding("tensors", " ".join(str(error).split()), "wrong", advice)
    count = len(policy.stored_shapes(config.adapter_rank))
    return Finding("tensors", f"{count}, n={config.num_policy_layers}: none missing, {said}")


def _file(where: str, name: str, revision: str | None, **options: Any) -> Path | None:
    try:
        path = cached_file(where, name, revision=revision, **options)
    except OSError:
        return None
    return None if path is None else Path(path)
