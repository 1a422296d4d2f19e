"""What `ospruner doctor` looks at in a base; no weights are read."""

from __future__ import annotations

import os

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from rich.filesize import decimal
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from modeling_ospruner.configuration_ospruner import position_switch
from modeling_ospruner.formats_ospruner import ReasoningFormat, TokenFormat
from modeling_ospruner.policy_ospruner import StoppingPolicy
from ospruner.bases import check_decoder, empty_base
from ospruner.engines.transformers.rows import unsteady
from ospruner.formats import guess

from .description import boundary_ids, describe, faults
from .findings import Finding, Report, unreachable

Sections = dict[str, list[Finding]]

ABSENT = (OSError, HfHubHTTPError, OfflineModeIsEnabled)
"""What the Hub client raises where a repository, a file or the network is missing."""


def examine_base(
    where: str, revision: str | None, chosen: ReasoningFormat | None, report: Report
) -> Sections:
    """Whether a policy can be made for a base, how it thinks, and what that costs.

    Args:
        where: a folder or Hub id.
        revision: of the base.
        chosen: its format; None guesses it.
        report: takes the format's description.
    """
    found: list[Finding] = []
    sections = {f"Base {where}": found}
    config, base = skeleton(where, revision, found)
    if config is None:
        return sections
    found += [*_weight_files(where, revision), *_end_of_text(where, revision, config)]
    if base is not None:
        sections["Policy and memory"] = _sizes(base)
    sections["Thinking"] = thinking(where, revision, config, chosen, report)
    return sections


def skeleton(
    where: str, revision: str | None, found: list[Finding]
) -> tuple[PreTrainedConfig | None, PreTrainedModel | None]:
    """A base's configuration, and the base without weights; None for what cannot be had.

    Args:
        where: a folder or Hub id.
        revision: of the base.
        found: takes what was found.
    """
    try:
        literals, _ = PreTrainedConfig.get_config_dict(where, revision=revision)
        if not literals:
            raise OSError("it has no config.json")
    except (OSError, ValueError) as error:
        found.append(unreachable(where, revision, error))
        return None, None
    try:
        config = AutoConfig.from_pretrained(where, revision=revision)
    except (ValueError, KeyError) as error:
        advice = "upgrade transformers, or choose a base that it has built in"
        if "auto_map" in literals:
            advice = "it runs code of its own: read it, and load it with base_trust_remote_code"
        found.append(Finding("architecture", " ".join(str(error).split()), "wrong", advice))
        return None, None
    name = f"{type(config).__name__.removesuffix('Config')} ({config.model_type})"
    if vars(config).get("quantization_config") is not None:
        method = dict(literals["quantization_config"]).get("quant_method", "unknown method")
        advice = "the policy's copies are read dequantised from the checkpoint's last layers"
        found.append(Finding("quantised", str(method), "note", advice))
    try:
        base = empty_base(config)
        check_decoder(base)
        StoppingPolicy.empty(base, min(2, base.config.get_text_config().num_hidden_layers))
    except (ValueError, TypeError, AttributeError, NotImplementedError) as error:
        advice = "choose another base: no policy can be made for this one"
        found.append(Finding("architecture", f"{name}: {error}", "wrong", advice))
        return config, None
    layers = base.config.get_text_config().num_hidden_layers
    found.append(Finding("architecture", f"{name}, {layers} layers; its tail can be built"))
    if (switch := position_switch(config)) is not None:
        value = f"rope_type {switch[0]!r} changes them from {switch[1]} tokens on"
        advice = "keep texts with a policy shorter (max_new_tokens, --max-tokens); vLLM refuses it"
        found.append(Finding("positions", value, "note", advice))
    if (why := unsteady(base)) is not None:
        advice = "the same seed may give other labels, unless each row runs alone (--batch-size 1)"
        found.append(Finding("batches", why, "note", advice))
    return config, base


def _weight_files(where: str, revision: str | None) -> list[Finding]:
    """Whether the weights are safetensors (no other file is read), and their size."""
    try:
        if os.path.isdir(where):
            sizes = {one.name: one.stat().st_size for one in os.scandir(where)}
        else:
            info = HfApi().model_info(where, revision=revision, files_metadata=True)
            sizes = {one.rfilename: one.size or 0 for one in info.siblings or ()}
    except ABSENT as error:
        return [Finding("weights", "could not be listed", "note", str(error).split("\n")[0])]
    safe = [name for name in sizes if name.endswith(".safetensors")]
    if safe:
        total = decimal(sum(sizes[name] for name in safe))
        return [
            Finding("weights", f"{total} in {len(safe)} safetensors file{'s'[: len(safe) - 1]}")
        ]
    pickled = [name for name in sizes if name.endswith((".bin", ".pt", ".pth"))]
    advice = "put the base's safetensors files there"
    if pickled:
        advice = "only safetensors are read: load the base and save it with save_pretrained"
    value = f"no safetensors, but {', '.join(pickled)}" if pickled else "no weights"
    return [Finding("weights", value, "wrong", advice)]


def _end_of_text(where: str, revision: str | None, config: PreTrainedConfig) -> list[Finding]:
    """Rows must be able to end by themselves: generate refuses a stop policy otherwise."""
    try:
        generation = GenerationConfig.from_pretrained(where, revision=revision or "main")
    except ABSENT:
        generation = GenerationConfig.from_model_config(config)
    eos = generation.eos_token_id
    if eos is None:
        advice = "set eos_token_id in generation_config.json: rows cannot end by themselves"
        return [Finding("ends a text", "no eos_token_id", "wrong", advice)]
    return [Finding("ends a text", f"eos_token_id {eos}")]


def _sizes(base: PreTrainedModel) -> list[Finding]:
    """Parameters and bytes of base and tail, queries only or layers."""
    dtype = base.dtype
    count = sum(parameter.numel() for parameter in base.parameters())
    found = [
        Finding(
            "base",
            f"{_count(count)} parameters, {decimal(count * dtype.itemsize)} in {_name(dtype)}",
        )
    ]
    for n in (1, 2):
        if n > base.config.get_text_config().num_hidden_layers:
            continue
        try:
            queries = _size(StoppingPolicy.empty(base, n, queries=True))
            found.append(Finding(f"queries, n={n}", f"{queries}, no cache"))
        except ValueError as error:
            advice = f"train with --layers {n} --tuning layers"
            found.append(Finding(f"queries, n={n}", str(error), "note", advice))
        found.append(Finding(f"tail, n={n}", _size(StoppingPolicy.empty(base, n))))
    return found


def _size(policy: StoppingPolicy) -> str:
    """A policy's parameters, and their bytes in two dtypes."""
    size = sum(p.numel() for p in policy.parameters())
    by_dtype = (
        f"{decimal(size * one.itemsize)} in {_name(one)}" for one in (torch.float32, torch.bfloat16)
    )
    return f"{_count(size)} parameters, {', '.join(by_dtype)}"


def thinking(
    where: str,
    revision: str | None,
    config: PreTrainedConfig,
    chosen: ReasoningFormat | None,
    report: Report,
) -> list[Finding]:
    """How the format was understood, and what of it does not fit the tokenizer.

    Args:
        where: the folder or Hub id of the tokenizer.
        revision: of it.
        config: the model's.
        chosen: the format; None guesses it.
        report: takes the format's description.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            where, revision=revision, config=config
        )
    except (*ABSENT, ValueError, KeyError) as error:
        advice = "put the base's tokenizer files there (tokenizer.json, tokenizer_config.json)"
        return [Finding("tokenizer", str(error).split("\n")[0], "wrong", advice)]
    try:
        fmt = TokenFormat.compile(chosen or guess(tokenizer), tokenizer)
    except ValueError as error:
        advice = (
            "name its format (--format deepseek-r1, qwen3, harmony, plain or a .json file), or put "
            "the reasoning model's own tokenizer files there"
        )
        return [Finding("format", str(error), "wrong", advice)]
    report.description = describe(fmt, tokenizer)
    found = [
        Finding("format", f"{fmt.format.name} ({'as given' if chosen else 'guessed'})"),
        Finding("boundaries", f"{len(boundary_ids(fmt)):,} tokens contain a blank line"),
    ]
    rows = config.get_text_config().vocab_size
    if len(tokenizer) > rows:
        found.append(
            Finding(
                "vocabulary",
                f"the tokenizer has {len(tokenizer):,} tokens, the model {rows:,}",
                "wrong",
                "use the tokenizer that the model was trained with",
            )
        )
    found += [
        Finding("fit", fault, "wrong", "see the description below")
        for fault in faults(fmt, tokenizer)
    ]
    return found


def _count(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
