"""What `ospruner doctor` looks at in a base; no weights are read."""

from __future__ import annotations

import os
from collections.abc import Iterator

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
from ospruner.engines.transformers.choosing import unsteady
from ospruner.formats import check_blanks, guess

from .description import boundary_ids, describe, faults
from .findings import Diagnosis, Finding, unreachable

ABSENT = (OSError, HfHubHTTPError, OfflineModeIsEnabled)
"""What the Hub client raises where a repository, a file or the network is missing."""


def examine_base(
    where: str, revision: str | None, chosen: ReasoningFormat | None, report: Diagnosis
) -> None:
    """Whether a policy can be made for a base, and how it thinks.

    Args:
        where: a folder or Hub id.
        revision: of the base.
        chosen: its format; None guesses it.
        report: takes what is found.
    """
    found = report.sections[f"Base {where}"] = []
    config, _ = skeleton(where, revision, found)
    if config is None:
        return
    found += [_weight_files(where, revision), _end_of_text(where, revision, config)]
    report.sections["Thinking"] = list(thinking(where, revision, config, chosen, report))


def skeleton(
    where: str, revision: str | None, found: list[Finding]
) -> tuple[PreTrainedConfig | None, PreTrainedModel | None]:
    """A base's configuration, and the base without weights; None for what cannot be had.

    `found` takes what was found.
    """
    try:
        literals, _ = PreTrainedConfig.get_config_dict(where, revision=revision)
        if not (literals and isinstance(literals, dict)):
            raise OSError("it has no config.json that holds an object")
    except (OSError, ValueError) as error:
        found.append(unreachable(where, revision, error))
        return None, None
    try:
        config = AutoConfig.from_pretrained(where, revision=revision)
    except (ValueError, KeyError) as error:
        advice = "upgrade transformers, or choose a base that it has built in"
        if "auto_map" in literals:
            advice = "it runs code of its own: read it, load it yourself, and use from_base"
        found.append(Finding("architecture", " ".join(str(error).split()), "wrong", advice))
        return None, None
    name = f"{type(config).__name__.removesuffix('Config')} ({config.model_type})"
    if vars(config).get("quantization_config") is not None:
        method = dict(literals["quantization_config"]).get("quant_method", "unknown method")
        advice = "the policy's copies are read dequantised from the checkpoint's last layers"
        found.append(Finding("quantised", str(method), "note", advice))
    try:
        base = empty_base(config)
        layers = base.config.get_text_config().num_hidden_layers
        check_decoder(base)
        StoppingPolicy(base, min(2, layers))
    except (ValueError, TypeError, AttributeError, NotImplementedError) as error:
        advice = "choose another base: no policy can be made for this one"
        found.append(Finding("architecture", f"{name}: {error}", "wrong", advice))
        return config, None
    found.append(Finding("architecture", f"{name}, {layers} layers; its tail can be built"))
    try:
        StoppingPolicy(base, min(2, layers), queries=True)
    except ValueError as error:
        found.append(Finding("queries", str(error), "note", "train with --tuning layers"))
    if (switch := position_switch(config)) is not None:
        value = f"rope_type {switch[0]!r} changes them from {switch[1]} tokens on"
        advice = "keep texts with a policy shorter (max_new_tokens); vLLM refuses it"
        found.append(Finding("positions", value, "note", advice))
    if (why := unsteady(base)) is not None:
        advice = "the same seed may give other labels, unless rows run alone (--set batch_size=1)"
        found.append(Finding("batches", why, "note", advice))
    return config, base


def _weight_files(where: str, revision: str | None) -> Finding:
    """Whether the weights are safetensors (no other file is read), and their size."""
    try:
        if os.path.isdir(where):
            sizes = {one.name: one.stat().st_size for one in os.scandir(where)}
        else:
            info = HfApi().model_info(where, revision=revision, files_metadata=True)
            sizes = {one.rfilename: one.size or 0 for one in info.siblings or ()}
    except ABSENT as error:
        return Finding("weights", "could not be listed", "note", str(error).split("\n")[0])
    safe = [size for name, size in sizes.items() if name.endswith(".safetensors")]
    if safe:
        return Finding("weights", f"{decimal(sum(safe))}, safetensors files: {len(safe)}")
    pickled = ", ".join(name for name in sizes if name.endswith((".bin", ".pt", ".pth")))
    if not pickled:
        return Finding("weights", "no weights", "wrong", "put the base's safetensors files there")
    advice = "only safetensors are read: load the base and save it with save_pretrained"
    return Finding("weights", f"no safetensors, but {pickled}", "wrong", advice)


def _end_of_text(where: str, revision: str | None, config: PreTrainedConfig) -> Finding:
    """Rows must be able to end by themselves: generate refuses a stop policy otherwise."""
    try:
        generation = GenerationConfig.from_pretrained(where, revision=revision or "main")
    except ABSENT:
        generation = GenerationConfig.from_model_config(config)
    if generation.eos_token_id is None:
        advice = "set eos_token_id in generation_config.json: rows cannot end by themselves"
        return Finding("ends a text", "no eos_token_id", "wrong", advice)
    return Finding("ends a text", f"eos_token_id {generation.eos_token_id}")


def thinking(
    where: str,
    revision: str | None,
    config: PreTrainedConfig,
    chosen: ReasoningFormat | None,
    report: Diagnosis,
) -> Iterator[Finding]:
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
        yield Finding("tokenizer", str(error).split("\n")[0], "wrong", advice)
        return
    try:
        fmt = TokenFormat.compile(chosen or guess(tokenizer), tokenizer)
        check_blanks(tokenizer)
    except ValueError as error:
        advice = (
            "name its format (--format deepseek-r1, qwen3, harmony, plain or a .json file), or put "
            "the reasoning model's own tokenizer files there"
        )
        yield Finding("format", str(error), "wrong", advice)
        return
    report.description = describe(fmt, tokenizer)
    yield Finding("format", f"{fmt.format.name} ({'as given' if chosen else 'guessed'})")
    yield Finding("boundaries", f"{len(boundary_ids(fmt)):,} tokens contain a blank line")
    rows = config.get_text_config().vocab_size
    if len(tokenizer) > rows:
        value = f"the tokenizer has {len(tokenizer):,} tokens, the model {rows:,}"
        yield Finding("vocabulary", value, "wrong", "use the tokenizer that the model learned with")
    for fault in faults(fmt, tokenizer):
        yield Finding("fit", fault, "wrong", "see the description below")
