"""What `ospruner doctor` looks at in a policy's repository."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from modeling_ospruner.configuration_ospruner import OSPrunerConfig
from modeling_ospruner.formats_ospruner import ReasoningFormat
from modeling_ospruner.modeling_ospruner import WEIGHTS, check_base, empty_policy, read_tensors
from ospruner.hub_cards.staging import code_files

from .base import ABSENT, skeleton, thinking
from .findings import Diagnosis, Finding


def examine_policy(where: str, revision: str | None, report: Diagnosis) -> None:
    """Whether a policy's repository is whole, and fits the base that it pins.

    Args:
        where: a folder or Hub id.
        revision: of the policy.
        report: takes what is found.
    """
    found = report.sections[f"Policy {where}"] = []
    try:
        config = OSPrunerConfig.from_pretrained(where, revision=revision or "main")
    except (ValueError, TypeError) as error:
        found.append(Finding("configuration", str(error), "wrong", "mend or replace config.json"))
        return
    price, mode = f"{config.price:g} reward per thinking token", "a draw with the stop probability"
    if config.prices is not None:
        price = f"any from 0 to {config.prices.high:g}; where none is said, {price}"
    if config.default_mode != "sample":
        mode = f"the threshold {config.default_threshold:g}"
    found += [
        Finding("saved by", f"ospruner {config.ospruner_version or '(unknown version)'}"),
        Finding("method", f"{config.method}, tuning {config.tuning}"),
        Finding("price", price),
        Finding("decides by", mode),
        _pin(config.base_model_name_or_path, config.base_revision),
        _code(where, revision),
    ]
    base_where = config.base_model_name_or_path
    base_found = report.sections[f"Base {base_where}"] = []
    base_config, base = skeleton(base_where, config.base_revision, base_found)
    if base_config is not None:
        fits = Finding("fits the policy", "sizes and architecture are those it was made for")
        try:
            check_base(config, base_config, base_where)
        except ValueError as error:
            fits = Finding("fits the policy", str(error), "wrong", "pin the right base")
        base_found.append(fits)
    if base is not None and all(one.level != "wrong" for one in base_found):
        found.append(_tensors(where, revision, config, base))
    try:
        chosen = ReasoningFormat.from_dict(config.reasoning_format or {})
    except (ValueError, TypeError) as error:
        advice = "make the policy again from its labels"
        found.append(Finding("reasoning format", str(error), "wrong", advice))
        return
    report.sections["Thinking"] = list(thinking(where, revision, config, chosen, report))


def _pin(where: str, revision: str | None) -> Finding:
    if revision is not None:
        return Finding("base pinned", f"{where} at {revision}")
    if os.path.isdir(where):
        advice = "a folder has no revision: publish with a base on the Hub for others to load it"
        return Finding("base pinned", f"the folder {where}", "note", advice)
    advice = "set base_revision in config.json to the commit of the base that it was trained on"
    return Finding("base pinned", f"{where} at no revision", "wrong", advice)


def _code(where: str, revision: str | None) -> Finding:
    """Whether the repository's code is that of the installed package."""
    ours = code_files()
    theirs = {name: _file(where, name, revision) for name in ours}
    faults = [f"{name} is missing" for name, path in theirs.items() if path is None]
    faults += [
        f"{name} is not that of the installed package"
        for name, path in theirs.items()
        if path is not None and path.read_bytes() != ours[name].read_bytes()
    ]
    if not faults:
        return Finding("code", f"{len(ours)} files, those of the installed package")
    advice = "save or publish the policy again with this version, or install the one it came from"
    return Finding("code", "; ".join(faults), "wrong", advice)


def _tensors(
    where: str, revision: str | None, config: OSPrunerConfig, base: PreTrainedModel
) -> Finding:
    """Whether the file holds exactly the policy's tensors, and only finite numbers.

    Of a file on the Hub that was never downloaded, only the header is fetched.
    """
    said = "finite"
    try:
        policy = empty_policy(config, base)
        wanted = policy.stored_shapes(config.adapter_rank)
        if os.path.isdir(where) or _file(where, WEIGHTS, revision, local_files_only=True):
            arguments = {"revision": revision, "local_files_only": True}
            read_tensors(where, config, policy, arguments)
        else:
            said = "values not looked at (the file is on the Hub)"
            header = HfApi().parse_safetensors_file_metadata(where, WEIGHTS, revision=revision)
            found = {name: tuple(one.shape) for name, one in header.tensors.items()}
            if wrong := found.items() ^ {f"policy.{k}": v for k, v in wanted.items()}.items():
                raise ValueError(f"{WEIGHTS} does not hold this policy's tensors: {sorted(wrong)}")
    except (*ABSENT, ImportError, SafetensorError, ValueError) as error:
        advice = f"mend what is said, or copy {WEIGHTS} again: a policy is read from that file only"
        return Finding("tensors", " ".join(str(error).split()), "wrong", advice)
    value = f"{len(wanted)}, n={config.num_policy_layers}: none missing, {said}"
    return Finding("tensors", value)


def _file(where: str, name: str, revision: str | None, **options: Any) -> Path | None:
    try:
        path = cached_file(where, name, revision=revision, **options)
    except OSError:
        return None
    return None if path is None else Path(path)
